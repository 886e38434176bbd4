"""`hpcrun tune policy`: settings that measurements on this cluster support, with their times."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.options import AsJson, DryRun, make_app
from hpcrun.cli.output import note, print_json, print_lines, read_file
from hpcrun.errors import UsageError
from hpcrun.local_identity import user_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrun.tuning.policy.entry import BenchmarkRun
    from hpcrun.tuning.policy.policy import PolicyRowSpec

app = make_app(
    "Record measurements of settings on this cluster. The profile's network.policy names the policy file."
)

_FROM_OUTPUTS = "default: from the outputs."


@app.command(context_settings={"ignore_unknown_options": True})
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Policy file; made if missing.")],
    outputs: Annotated[
        list[str],
        typer.Argument(
            metavar="--with RUN... --without RUN...",
            help="Outputs of nccl-tests, in the order of the runs, which alternated.",
        ),
    ],
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="Settings of the runs of --with.")
    ],
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"Number of nodes; {_FROM_OUTPUTS}")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="R", help=f"Ranks per node; {_FROM_OUTPUTS}")
    ] = None,
    nccl: Annotated[
        str | None, typer.Option(metavar="X", help=f"NCCL release that ran; {_FROM_OUTPUTS}")
    ] = None,
    collective: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Collective, such as all_reduce; {_FROM_OUTPUTS}")
    ] = None,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who measured; default: you.")] = None,
    when: Annotated[str | None, typer.Option(metavar="DAY", help="Day; default: today.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Add a row: measured times with settings and without them.

    The times are kept, and the gain is computed from them. Example: hpcrun tune policy add policy.yaml
    --set NCCL_IB_QPS_PER_CONNECTION=4 --with on-*.txt --without off-*.txt
    """
    from hpcrun.tuning.policy.entry import StatedConditions, append_policy_row, make_policy_row

    with_files, without_files = _split_sides(outputs)
    stated = StatedConditions(
        _parse_assignments(settings),
        when or time.strftime("%Y-%m-%d"),
        by or user_name(),
        nodes,
        ranks_per_node,
        nccl,
        collective,
    )
    runs = _read_runs(with_files), _read_runs(without_files)
    row = make_policy_row(*runs, stated)
    _print_unchecked([*runs[0], *runs[1]])
    if not dry_run:
        rows = append_policy_row(file, row)
        note(f"row {len(rows)} of {file}")
    if as_json:
        print_json(file=str(file), row=_row_json(row))
    else:
        print_lines(_format_row(row))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Policy file.")],
    as_json: AsJson = False,
) -> None:
    """Show the rows of a policy, their gains, and what they support."""
    from hpcrun.tuning.policy.policy import load_policy

    rows = load_policy(file)
    if as_json:
        print_json(file=str(file), rows=[_row_json(row) for row in rows])
        return
    for number, row in enumerate(rows, 1):
        print_lines([f"row {number}", *(f"  {line}" for line in _format_row(row))])
    if not rows:
        print("it has no rows")


def _split_sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files after --with and after --without."""
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
    assignments: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not value:
            raise UsageError(f"--set {word}: write NAME=VALUE")
        if assignments.setdefault(name, value) != value:
            raise UsageError(f"--set {word}: {name} is {assignments[name]} already")
    return assignments


def _read_runs(names: Sequence[str]) -> list[BenchmarkRun]:
    from hpcrun.tuning.policy.entry import BenchmarkRun
    from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests

    return [BenchmarkRun(os.fspath(name), parse_nccl_tests(read_file(Path(name)))) for name in names]


def _print_unchecked(runs: Sequence[BenchmarkRun]) -> None:
    names = [run.name for run in runs if run.found.unchecked]
    if names:
        note(
            f"{len(names)} outputs, such as {names[0]}, do not tell whether results were right; their row"
            " supports nothing: run nccl-tests with -c 1"
        )
    for run in runs:
        if rows := run.found.not_read:
            note(f"{run.name}: {len(rows)} rows could not be read in full; the first is: {rows[0]}")


def _format_row(row: PolicyRowSpec) -> list[str]:
    from hpcrun.tuning.policy.policy import measured_gains

    least, most = row.nodes
    nodes = str(least) if least == most else f"{least} to {most}"
    where = f"{nodes} nodes x {row.ranks_per_node} ranks, NCCL {row.nccl}, {row.when} by {row.by}"
    verdict = _format_verdict(row)
    last = f"supports nothing: {verdict}" if verdict else f"supports {row.assignments} for such jobs"
    return [f"{row.assignments}  {where}", *(f"{gain.says:13} {gain}" for gain in measured_gains(row)), last]


def _format_verdict(row: PolicyRowSpec) -> str:
    from hpcrun.tuning.policy.policy import lint_objections, why_inconclusive
    from hpcrun.tuning.registry.registry import parse_version

    return why_inconclusive(row) or lint_objections(row, parse_version(row.nccl))


def _row_json(row: PolicyRowSpec) -> dict[str, Any]:
    from hpcrun.tuning.policy.policy import measured_gains

    verdict = _format_verdict(row)
    plain = row.model_dump(mode="json", by_alias=True, exclude={"measured"})
    return plain | {
        "measured": [gain.as_json() for gain in measured_gains(row)],
        "is_supported": not verdict,
        "why_not": verdict,
    }
