"""`hpcrun fabric nodes` and `drain-request`: what your runs saw nodes do, and what to tell the admin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.errors import UsageError
from hpcrun.files import write_output
from hpcrun.local_identity import user_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcrun.health.lemon_nodes import LemonScore

SCHEMA_VERSION = 1

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show_lemon_nodes(
    top: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many, worst first.")] = 20,
    forget: Annotated[
        str | None,
        typer.Option(metavar="NODES", help="Forget what was seen of these nodes so far, such as n[03-04]."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """What your runs saw nodes do, worst first, and which are avoided for it.

    Lost nodes, failed checks before an attempt, ranks that died or hung there first, slow ones. What was seen
    counts half after three days; from a score of 1 on a node goes into --exclude of what you submit.
    """
    import time

    now = time.time()
    if forget is not None:
        _forget(forget, now)
        return
    scores = _load_scores(now)
    shown = dict(list(scores.items())[:top])
    if as_json:
        listed = [{"node": node, **found.as_json()} for node, found in shown.items()]
        _print_json({"nodes": listed, "more": len(scores) - len(shown)})
        return
    for node, found in shown.items():
        print(_format_score(node, found))
        last = found.seen[0]
        print(f"    {_format_time(last.time)}  run {last.run}: {last.evidence or last.cause}")
        if last.log:
            print(f"    log: {last.log}")
    if len(scores) > len(shown):
        print(f"{len(scores) - len(shown)} more; see --top")
    if not scores:
        print("your runs have seen nothing against any node")


def write_drain_request(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODES]...", help="Nodes, such as n[03-04]; default: those that are avoided."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the text into a file.")] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Also post it as JSON to the URL in a file that only you may read, or in standard input (-);"
            " https only.",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """A text that asks the admin to drain nodes: what was seen there, when, in which jobs, and the logs."""
    import time

    from hpcrun.health.drain_request import build_drain_request, post_webhook, read_webhook_url

    url = None if webhook is None else read_webhook_url(webhook)
    now = time.time()
    request = build_drain_request(_choose_scores(_load_scores(now), nodes), user_name(), now)
    if out is not None:
        try:
            write_output(out, request["text"])
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be written: {error.strerror}; name another file") from None
        typer.echo(f"hpcrun: written to {out}", err=True)
    if as_json:
        _print_json(request)
    elif out is None:
        print(request["text"], end="")
    if url is not None:
        post_webhook(url, {"schema_version": SCHEMA_VERSION, **request})
        typer.echo("hpcrun: the webhook has taken it", err=True)


def _forget(listed: str, now: float) -> None:
    from hpcrun.health.lemon_nodes import forget_node_faults, node_fault_file
    from hpcrun.hostlist import expand_hosts
    from hpcrun.specs.badnodes import bad_node_files, load_bad_nodes

    named = expand_hosts(listed, "--forget")
    known = _load_scores(now)
    strange = [node for node in named if node not in known]
    if strange or not named:
        raise UsageError(
            f"--forget {listed}: nothing was seen of {', '.join(strange) or 'no node'}; seen were:"
            f" {', '.join(known) or 'none'}"
        )
    forget_node_faults(node_fault_file(), named, now)
    print(node_fault_file())
    listed_as_bad = load_bad_nodes(bad_node_files().values()).active(now)
    for node in named:
        if node in listed_as_bad:
            told = f"{node} stays in a list of bad nodes ({listed_as_bad[node]}); see `hpcrun fabric avoid`"
            typer.echo(f"hpcrun: {told}", err=True)


def _load_scores(now: float) -> dict[str, LemonScore]:
    """Of all nodes that something counts against; damaged lines are told."""
    from hpcrun.health.lemon_nodes import load_node_faults, node_fault_file, score_nodes

    found = load_node_faults(node_fault_file())
    for line in found.notes:
        typer.echo(f"hpcrun: {line}", err=True)
    return score_nodes(found.entries, now)


def _choose_scores(scores: Mapping[str, LemonScore], words: list[str] | None) -> dict[str, LemonScore]:
    from hpcrun.hostlist import expand_hosts

    if not words:
        avoided = {node: found for node, found in scores.items() if found.until is not None}
        if not avoided:
            raise UsageError(
                "no node is avoided for what your runs saw; name nodes, see `hpcrun fabric nodes`"
            )
        return avoided
    named = dict.fromkeys(node for word in words for node in expand_hosts(word, "NODES"))
    strange = [node for node in named if node not in scores]
    if strange:
        known = ", ".join(scores) or "none"
        raise UsageError(f"{', '.join(strange)}: nothing was seen there; seen were: {known}")
    return {node: scores[node] for node in named}


def _format_score(node: str, found: LemonScore) -> str:
    causes = ", ".join(f"{cause} {count}x" for cause, count in found.causes.items())
    until = "not avoided" if found.until is None else f"avoided until {_format_time(found.until)}"
    return f"{node}  score {found.score:.2f}  {until}  {causes}"


def _format_time(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
