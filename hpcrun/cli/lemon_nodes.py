"""`hpcrun fabric nodes` and `drain-request`: faults that your runs saw on nodes, and a request to drain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson
from hpcrun.cli.output import SCHEMA_VERSION, note, print_json, write_file
from hpcrun.errors import UsageError
from hpcrun.local_identity import user_name

if TYPE_CHECKING:
    from hpcrun.health.lemon_nodes import LemonScore


def show_lemon_nodes(
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most this many.")] = 20,
    forget: Annotated[
        str | None,
        typer.Option(metavar="NODES", help="Forget the faults of these nodes so far, such as n[03-04]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the faults that your runs saw on nodes, worst first.

    Lost nodes, failed preflight checks, ranks that died or hung there first, slow ranks. A fault counts half
    after three days; from a score of 1 on a node is excluded from the jobs that you submit.
    """
    now = time.time()
    if forget is not None:
        _forget(forget, now)
        return
    scores = _load_scores(now)
    shown = dict(list(scores.items())[:top])
    hidden = len(scores) - len(shown)
    if as_json:
        print_json(nodes=[{"node": node, **score.as_json()} for node, score in shown.items()], more=hidden)
        return
    for node, score in shown.items():
        causes = ", ".join(f"{cause} {count}x" for cause, count in score.causes.items())
        until = "not avoided" if score.until is None else f"avoided until {_format_time(score.until)}"
        print(f"{node}  score {score.score:.2f}  {until}  {causes}")
        last = score.seen[0]
        print(f"    {_format_time(last.time)}  run {last.run}: {last.evidence or last.cause}")
        if last.log:
            print(f"    log: {last.log}")
    if hidden:
        print(f"{hidden} more; see --top")
    if not scores:
        print("your runs have seen nothing against any node")


def write_drain_request(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NODES]...", help="Nodes, such as n[03-04]; default: avoided ones."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the text into a file.")] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Also post it as JSON to the https URL in a file that only you may read, or on stdin (-).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a request to drain nodes, for the admin.

    It says what was seen there, when, in which jobs, and where the logs are.
    """
    from hpcrun.health.drain_request import build_drain_request, post_webhook, read_webhook_url
    from hpcrun.health.lemon_nodes import select_scores

    url = None if webhook is None else read_webhook_url(webhook)
    now = time.time()
    request = build_drain_request(select_scores(_load_scores(now), nodes or ()), user_name(), now)
    if out is not None:
        write_file(out, request["text"], "--out FILE writes elsewhere")
        note(f"written to {out}")
    if as_json:
        print_json(**request)
    elif out is None:
        print(request["text"], end="")
    if url is not None:
        post_webhook(url, {"schema_version": SCHEMA_VERSION, **request})
        note("the webhook has accepted it")


def _forget(nodes: str, now: float) -> None:
    from hpcrun.health.lemon_nodes import forget_node_faults, node_fault_file
    from hpcrun.hostlist import expand_hosts
    from hpcrun.specs.badnodes import bad_node_files, load_bad_nodes

    named, seen = expand_hosts(nodes, "--forget"), _load_scores(now)
    unseen = [node for node in named if node not in seen]
    if unseen or not named:
        raise UsageError(
            f"--forget {nodes}: nothing was seen of {', '.join(unseen) or 'no node'}; seen were:"
            f" {', '.join(seen) or 'none'}"
        )
    forget_node_faults(node_fault_file(), named, now)
    print(node_fault_file())
    bad = load_bad_nodes(bad_node_files().values()).active(now)
    for node in named:
        if node in bad:
            note(f"{node} stays in a list of bad nodes ({bad[node]}); see `hpcrun fabric avoid`")


def _load_scores(now: float) -> dict[str, LemonScore]:
    """The scores of all nodes with faults; damaged lines are noted."""
    from hpcrun.health.lemon_nodes import load_node_faults, node_fault_file, score_nodes

    history = load_node_faults(node_fault_file())
    for line in history.notes:
        note(line)
    return score_nodes(history.entries, now)


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
