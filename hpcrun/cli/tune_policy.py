"""`hpcrun tune policy`: the settings that measurements on this cluster support, with their times."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.errors import UsageError
from hpcrun.local_identity import user_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrun.tuning.policy.entry import BenchmarkRun
    from hpcrun.tuning.policy.policy import PolicyRowSpec

SCHEMA_VERSION = 1
app = typer.Typer(
    no_args_is_help=True,
    help="Which settings measurements on this cluster support; network.policy of the profile names the file.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(context_settings={"ignore_unknown_options": True})
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The policy; made where there is none.")],
    outputs: Annotated[
        list[str],
        typer.Argument(
            metavar="--with RUN... --without RUN...",
            help="What nccl-tests printed, in the order of the runs, which alternated.",
        ),
    ],
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="What the runs of --with had set.")
    ],
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: as the outputs tell.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="R", help="Default: as the outputs tell.")
    ] = None,
    nccl: Annotated[
        str | None, typer.Option(metavar="X", help="The release that ran; default: as the outputs tell.")
    ] = None,
    collective: Annotated[
        str | None, typer.Option(metavar="NAME", help="Such as all_reduce; default: as the outputs tell.")
    ] = None,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who has measured; default: you.")] = None,
    when: Annotated[str | None, typer.Option(metavar="DAY", help="Default: today.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the row would support; no more.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Add what runs with settings and runs without say; the times are kept, the gain is computed from them.

    hpcrun tune policy add policy.yaml --set NCCL_IB_QPS_PER_CONNECTION=4 --with on-*.txt --without off-*.txt
    """
    from hpcrun.tuning.policy.entry import StatedConditions, append_policy_row, make_policy_row

    ours, theirs = _split_sides(outputs)
    stated = StatedConditions(
        _parse_assignments(settings),
        when or time.strftime("%Y-%m-%d"),
        by or user_name(),
        nodes,
        ranks_per_node,
        nccl,
        collective,
    )
    runs = _read_runs(ours), _read_runs(theirs)
    row = make_policy_row(*runs, stated)
    _print_unchecked([*runs[0], *runs[1]])
    if not dry_run:
        rows = append_policy_row(file, row)
        typer.echo(f"hpcrun: row {len(rows)} of {file}", err=True)
    if as_json:
        _print_json({"file": str(file), "row": _row_json(row)})
    else:
        print("\n".join(_format_row(row)))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The policy.")],
    as_json: _Json = False,
) -> None:
    """The rows of a policy, what each of their times says, and what they support."""
    from hpcrun.tuning.policy.policy import load_policy

    rows = load_policy(file)
    if as_json:
        _print_json({"file": str(file), "rows": [_row_json(row) for row in rows]})
        return
    for number, row in enumerate(rows, 1):
        print("\n".join([f"row {number}", *(f"  {line}" for line in _format_row(row))]))
    if not rows:
        print("it has no rows")


def _split_sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files behind --with and behind --without."""
    sides: dict[str, list[str]] = {"--with": [], "--without": []}
    side: list[str] | None = None
    for word in words:
        option, _, rest = word.partition("=")
        if option in sides:
            side = sides[option]
            side += [rest] if rest else []
        elif word.startswith("-") or side is None:
            raise UsageError(f"{word}: write FILE.yaml --set NAME=VALUE --with RUN... --without RUN...")
        else:
            side.append(word)
    return sides["--with"], sides["--without"]


def _parse_assignments(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not value:
            raise UsageError(f"--set {word}: write NAME=VALUE")
        if found.setdefault(name, value) != value:
            raise UsageError(f"--set {word}: {name} is {found[name]} already")
    return found


def _read_runs(names: Sequence[str]) -> list[BenchmarkRun]:
    from hpcrun.tuning.policy.entry import BenchmarkRun
    from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests

    runs = []
    for name in names:
        try:
            text = Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
        runs.append(BenchmarkRun(os.fspath(name), parse_nccl_tests(text)))
    return runs


def _print_unchecked(runs: Sequence[BenchmarkRun]) -> None:
    names = [run.name for run in runs if run.found.unchecked]
    if names:
        told = f"{len(names)} outputs, such as {names[0]}, do not tell whether results were right"
        told += "; their row supports nothing: run nccl-tests with -c 1"
        typer.echo(f"hpcrun: {told}", err=True)
    for run in runs:
        if rows := run.found.not_read:
            told = f"{run.name}: {len(rows)} rows could not be read in full; the first is: {rows[0]}"
            typer.echo(f"hpcrun: {told}", err=True)


def _format_row(row: PolicyRowSpec) -> list[str]:
    from hpcrun.tuning.policy.policy import measured_gains

    least, most = row.nodes
    told = str(least) if least == most else f"{least} to {most}"
    where = f"{told} nodes x {row.ranks_per_node} ranks, NCCL {row.nccl}, {row.when} by {row.by}"
    verdict = _format_verdict(row)
    last = f"supports nothing: {verdict}" if verdict else f"supports {row.assignments} for such jobs"
    return [f"{row.assignments}  {where}", *(f"{one.says:13} {one}" for one in measured_gains(row)), last]


def _format_verdict(row: PolicyRowSpec) -> str:
    from hpcrun.tuning.policy.policy import lint_objections, why_inconclusive
    from hpcrun.tuning.registry.registry import parse_version

    return why_inconclusive(row) or lint_objections(row, parse_version(row.nccl))


def _row_json(row: PolicyRowSpec) -> dict[str, Any]:
    from hpcrun.tuning.policy.policy import measured_gains

    verdict = _format_verdict(row)
    plain = row.model_dump(mode="json", by_alias=True, exclude={"measured"})
    return plain | {
        "measured": [one.as_json() for one in measured_gains(row)],
        "is_supported": not verdict,
        "why_not": verdict,
    }


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
