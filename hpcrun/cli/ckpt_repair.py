"""`hpcrun ckpt repair`: make damaged checkpoints whole again from other copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.options import AnyStep, AsJson, DryRun, Endpoint, IsOver, SavesRun, Url
from hpcrun.cli.output import note, print_json, show_progress
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.units import format_bytes

if TYPE_CHECKING:
    from hpcrun.checkpoint.restore.repair import RepairReport


def repair(
    run: SavesRun,
    step: AnyStep = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="DIR", help="Another copy of the checkpoint; may be repeated."),
    ] = None,
    url: Url = None,
    endpoint: Endpoint = None,
    dry_run: DryRun = False,
    is_over: IsOver = False,
    as_json: AsJson = False,
) -> None:
    """Repair damaged checkpoints from other copies, chunk by chunk.

    Reads every byte of the checkpoints, and of what was set aside as damaged. Missing chunks are taken from
    what was set aside, from memory and disks of nodes as far as this machine can read them, from the object
    store, and from --from; what no copy has whole is rebuilt from parity. Exits with 1 if damage remains.
    """
    from contextlib import ExitStack

    from hpcrun.checkpoint.restore.repair import find_repair_candidates
    from hpcrun.checkpoint.restore.run_repair import RunRepair
    from hpcrun.runs.checkpoint_access import find_run_or_directory, require_finished

    run_dir = find_run_or_directory(run, use="plan" if dry_run else "act")
    if not dry_run:
        require_finished(run_dir, "repair", assume_over=is_over)
    for directory in others or ():
        if not directory.is_dir():
            raise UsageError(f"--from {directory}: is not a directory; give one with files of a checkpoint")
    candidates = find_repair_candidates(run_dir.checkpoints, step)
    if step is not None and not candidates:
        raise UsageError(f"{run}: has no save of step {step}, whole or damaged; see `hpcrun ckpt ls {run}`")
    reports: list[RepairReport] = []
    with ExitStack() as stack:
        work = RunRepair(run_dir, others or (), url, endpoint, stack)
        if work.unknown_store is not None:
            note(f"copies in the object store are unknown: {work.unknown_store}")
        for path in candidates:
            size = sum(file.stat().st_size for file in path.glob("data-*.bin"))
            with show_progress(path.name, size) as show:
                report = work.repair(path, dry_run, show)
            reports += [report] if report is not None else []
    if as_json:
        print_json(dry_run=dry_run, looked_at=len(candidates), repairs=[_as_json(each) for each in reports])
    else:
        _print_repairs(reports, len(candidates), dry_run)
    if any(report.problem for report in reports):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_repairs(reports: list[RepairReport], candidates: int, dry_run: bool) -> None:
    for report in reports:
        if report.problem:
            print(f"{report.path}: cannot be repaired: {report.problem}")
        else:
            to = report.repaired or f"step {report.step}"
            print(f"{report.path}: {'can be repaired' if dry_run else 'repaired'} as {to}")
        for part, source in report.mended:
            print(f"  {part}: {source}")
        for part in report.missing:
            print(f"  {part}: nowhere whole")
        if report.taken and not report.problem:
            print(
                f"  {', '.join(f'{format_bytes(size)} from {name}' for name, size in report.taken.items())}"
            )
    print(f"{candidates - len(reports)} of {candidates} saves are whole as they are")


def _as_json(report: RepairReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "step": report.step,
        "generation": report.generation,
        "problem": report.problem,
        "repaired": str(report.repaired) if report.repaired else None,
        "mended": [{"what": part, "from": source} for part, source in report.mended],
        "missing": report.missing,
        "taken_bytes": dict(report.taken),
    }
