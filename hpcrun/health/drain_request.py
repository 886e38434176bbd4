"""A request to the admin to drain nodes: a text to send, and the same as JSON for a webhook."""

from __future__ import annotations

import ipaddress
import json
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from hpcrun.errors import SiteError, SpecError, UsageError
from hpcrun.health.lemon_nodes import LemonScore
from hpcrun.hostlist import fold_hosts
from hpcrun.specs.secrets import read_secrets

_POST_S = 10.0
_MAX_FAULTS_SHOWN = 20
_SHOWN_FIELDS = ("time", "cause", "run", "job", "attempt", "evidence", "log")
_MAX_URL_LENGTH = 8192


def build_drain_request(scores: Mapping[str, LemonScore], by: str, now: float) -> dict[str, Any]:
    """Return the evidence against these nodes as plain values; `text` holds it for people."""
    nodes = [
        {
            "node": node,
            "score": round(score.score, 3),
            "causes": dict(score.causes),
            "seen": [
                {name: getattr(fault, name) for name in _SHOWN_FIELDS}
                for fault in score.seen[:_MAX_FAULTS_SHOWN]
            ],
        }
        for node, score in scores.items()
    ]
    text = render_drain_request(scores, by, now)
    return {"by": by, "time": now, "command": drain_command(scores), "nodes": nodes, "text": text}


def drain_command(scores: Mapping[str, LemonScore]) -> str:
    """What an admin would type."""
    causes = dict.fromkeys(cause for score in scores.values() for cause in score.causes)
    words = [f"NodeName={fold_hosts(scores)}", "State=DRAIN", f"Reason=hpcrun: {', '.join(causes)}"]
    return shlex.join(["scontrol", "update", *words])


def render_drain_request(scores: Mapping[str, LemonScore], by: str, now: float) -> str:
    """The text of the request."""
    them = "it" if len(scores) == 1 else "them"
    lines = [
        f"Please look at {fold_hosts(scores)}, and drain {them} if you agree.",
        f"Runs of {by} saw the following there (times of {time.strftime('%Z', time.localtime(now))}).",
    ]
    for node, score in scores.items():
        causes = ", ".join(f"{cause} {count}x" for cause, count in score.causes.items())
        lines += ["", f"{node}: {causes}"]
        for fault in score.seen[:_MAX_FAULTS_SHOWN]:
            job = f", job {fault.job}" if fault.job is not None else ""
            lines.append(
                f"  {_format_time(fault.time)}  {fault.cause}  run {fault.run}{job}, attempt {fault.attempt}"
            )
            lines += [f"    {fault.evidence}"] if fault.evidence else []
            lines += [f"    log: {fault.log}"] if fault.log else []
        rest = len(score.seen) - _MAX_FAULTS_SHOWN
        lines += [f"  and {rest} more before"] if rest > 0 else []
    return "\n".join([*lines, "", f"    {drain_command(scores)}", ""])


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def read_webhook_url(where: str) -> str:
    """The URL in a private file, or with - in standard input; UsageError for one in the command itself.

    A command line is shown to every user of the machine, and the URLs of chat services hold a secret.
    """
    if "://" in where:
        raise UsageError(
            "--webhook: a URL in a command is shown to every user of this machine; write it into a file that"
            " only you may read (chmod 600), and give --webhook FILE, or - for standard input"
        )
    if where == "-":
        url = sys.stdin.readline(_MAX_URL_LENGTH).strip()
    else:
        try:
            url = read_secrets({"webhook": where})["webhook"].strip()
        except SpecError as error:
            text = error.problems[0].text
            raise UsageError(f"--webhook: {text}") from None
    check_webhook_url(url)
    return url


def check_webhook_url(url: str) -> str:
    """The host of a webhook; UsageError for what would send the request in the clear, or is not a URL."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise UsageError("--webhook: is not a URL; write https://HOST/PATH") from None
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))):
        raise UsageError("--webhook: must be https://HOST/PATH (http:// to this machine alone)")
    return host


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _NoRedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the user has not agreed to its target."""

    def redirect_request(self, *args: Any, **named: Any) -> None:
        """Nowhere."""


def post_webhook(url: str, content: Mapping[str, Any]) -> None:
    """Post JSON to a webhook; SiteError says in one line why it was not accepted.

    The error does not contain the URL: those of chat services hold a secret.
    """
    host = check_webhook_url(url)
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    handlers: list[Any] = [_NoRedirectHandler()]
    if _is_loopback(host):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.build_opener(*handlers).open(request, timeout=_POST_S):
            return
    except urllib.error.HTTPError as error:
        words = f"{error.code} {error.reason}"
        error.close()
    except urllib.error.URLError as error:
        words = str(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        words = str(error) or type(error).__name__
    raise SiteError(f"the webhook at {host} did not take it: {words}; --out FILE keeps the text")
