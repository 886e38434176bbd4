"""`hpcrun ckpt repair`: damaged saves made whole again from other copies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.ckpt_objects import Endpoint, Url, open_object_copies
from hpcrun.cli.ckpt_show import find_run_or_directory, print_json, refuse_while_running, show_progress
from hpcrun.units import render_bytes

if TYPE_CHECKING:
    from contextlib import ExitStack

    from hpcrun.checkpoint.levels import InventoryEntry
    from hpcrun.checkpoint.restore.repair import RepairReport
    from hpcrun.checkpoint.restore.sources import GenerationCopy
    from hpcrun.specs.rundir import RunDir


def repair(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run directory, run id, or its unique beginning")],
    step: Annotated[int | None, typer.Option(help="which saved step; default all")] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--from", help="another copy of the save (an export, a backup); may be given again"),
    ] = None,
    url: Url = None,
    endpoint: Endpoint = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what could be repaired")] = False,
    is_over: Annotated[
        bool, typer.Option("--is-over", help="the run is over, though that cannot be seen from here")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Make damaged saves whole again, chunk by chunk, from whatever copies there are.

    Looks at every byte of the saves, and of what was set aside as damaged. Whatever proves right is taken:
    from what was set aside, what nodes keep on disks and in memory that this machine sees, the object store,
    and --from; what is nowhere whole is made again from parity, as far as that is seen here. Exit code 1
    where something stays damaged.
    """
    from contextlib import ExitStack

    from hpcrun.checkpoint.restore.repair import find_repair_candidates
    from hpcrun.checkpoint.restore.sources import DirectoryCopy, NodeCopy
    from hpcrun.errors import EXIT_CHECK_FAILED, UsageError

    found = find_run_or_directory(run, use="plan" if dry_run else "act")
    if not dry_run:
        refuse_while_running(found, "repair", believe=is_over)
    for directory in others or ():
        if not directory.is_dir():
            raise UsageError(f"--from {directory}: is no directory; give one with the files of a save")
    wanted = find_repair_candidates(found.checkpoints, step)
    if step is not None and not wanted:
        raise UsageError(f"{run}: has no save of step {step}, whole or damaged; see `hpcrun ckpt ls {run}`")
    repairs: list[RepairReport] = []
    with ExitStack() as stack:
        held = read_inventory(found)
        copies: list[GenerationCopy] = [DirectoryCopy(directory) for directory in others or ()]
        copies += [NodeCopy(one) for one in held]
        copies += open_stored_copies(found, url, endpoint, stack)
        for path in wanted:
            one = _repair(path, copies, held, stack, dry_run)
            if one is not None:
                repairs.append(one)
    if as_json:
        print_json(
            {"dry_run": dry_run, "looked_at": len(wanted), "repairs": [_as_json(one) for one in repairs]}
        )
    else:
        _print_repairs(repairs, len(wanted), dry_run)
    if any(one.problem for one in repairs):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _repair(
    path: Path, copies: list[GenerationCopy], held: list[InventoryEntry], stack: ExitStack, dry_run: bool
) -> RepairReport | None:
    """Repair a save from its copies; where that is not enough also from what parity makes again."""
    from hpcrun.checkpoint.restore.repair import repair_generation

    stamps = [one.stamp for one in held]
    with show_progress(path.name, _size(path)) as show:
        one = repair_generation(path, copies, stamps, dry_run=dry_run, progress=show)
        if one is not None and one.missing and (made := rebuild_from_parity(held, one, stack)):
            one = repair_generation(path, [*copies, *made], stamps, dry_run=dry_run, progress=show)
    return one


def read_inventory(run: RunDir) -> list[InventoryEntry]:
    """What nodes keep of a run's generations, as far as it can be read from here."""
    from hpcrun.checkpoint.restore.outside_copies import find_local_inventory
    from hpcrun.specs.load import load_run_job

    local = load_run_job(run).spec.checkpoint.local if run.spec.exists() else None
    return find_local_inventory(run.run_id, local)


def rebuild_from_parity(
    held: list[InventoryEntry], wanted: RepairReport, stack: ExitStack
) -> list[GenerationCopy]:
    """What parity in the memory of nodes makes again of a save; the files last until the stack is closed."""
    import tempfile

    from hpcrun.checkpoint.restore.outside_copies import rebuild_parts_locally
    from hpcrun.checkpoint.restore.sources import NodeCopy

    if wanted.generation is None or not any(one.parity for one in held):
        return []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcrun-repair-")))
    return [NodeCopy(one) for one in rebuild_parts_locally(held, wanted.path, wanted.generation, folder)]


def open_stored_copies(
    run: RunDir, url: str | None, endpoint: str | None, stack: ExitStack
) -> list[GenerationCopy]:
    """The copies in the object store that the job names, or `url`; open until the stack is."""
    from hpcrun.checkpoint.restore.outside_copies import ObjectStoreCopy

    found, unknown = open_object_copies(run, url, endpoint, stack)
    if unknown is not None:
        print(f"copies in the object store are not known: {unknown}", file=sys.stderr)
    return [ObjectStoreCopy(store, copy) for store, copy in found]


def _print_repairs(repairs: list[RepairReport], looked_at: int, dry_run: bool) -> None:
    for one in repairs:
        if one.problem:
            print(f"{one.path}: cannot be repaired: {one.problem}")
        else:
            to = one.repaired or f"step {one.step}"
            print(f"{one.path}: {'can be repaired' if dry_run else 'repaired'} as {to}")
        for what, source in one.mended:
            print(f"  {what}: {source}")
        for what in one.missing:
            print(f"  {what}: nowhere whole")
        if one.taken and not one.problem:
            told = ", ".join(f"{render_bytes(size)} from {name}" for name, size in one.taken.items())
            print(f"  {told}")
    print(f"{looked_at - len(repairs)} of {looked_at} saves are whole as they are")


def _as_json(one: RepairReport) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "step": one.step,
        "generation": one.generation,
        "problem": one.problem,
        "repaired": str(one.repaired) if one.repaired else None,
        "mended": [{"what": what, "from": source} for what, source in one.mended],
        "missing": one.missing,
        "taken_bytes": dict(one.taken),
    }


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.glob("data-*.bin"))
