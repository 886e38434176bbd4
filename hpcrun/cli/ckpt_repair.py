"""`hpcrun ckpt repair`: damaged saves made whole again from other copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.ckpt_show import amount, print_json, progress, refuse_while_running

if TYPE_CHECKING:
    from hpcrun.checkpoint.repair import Repair


def repair(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run directory, run id, or its unique beginning")],
    step: Annotated[int | None, typer.Option(help="which saved step; default all")] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--from", help="another copy of the save (an export, a backup); may be given again"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what could be repaired")] = False,
    is_over: Annotated[
        bool, typer.Option("--is-over", help="the run is over, though that cannot be seen from here")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Make damaged saves whole again, chunk by chunk, from whatever copies there are.

    Looks at every byte of the saves, and of what was set aside as damaged. Chunks are taken from other
    copies where their hashes prove them right. Exit code 1 where something stays damaged.
    """
    from hpcrun.checkpoint.copies import Copy, DirectoryCopy
    from hpcrun.checkpoint.repair import damaged_generations
    from hpcrun.checkpoint.repair import repair as repair_generation
    from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
    from hpcrun.specs.rundir import find_run

    found = find_run(run)
    if not dry_run:
        refuse_while_running(found, "repair", believe=is_over)
    for directory in others or ():
        if not directory.is_dir():
            raise UsageError(f"--from {directory}: is no directory; give one with the files of a save")
    copies: list[Copy] = [DirectoryCopy(directory) for directory in others or ()]
    wanted = damaged_generations(found.checkpoints, step)
    if step is not None and not wanted:
        raise UsageError(f"{run}: has no save of step {step}, whole or damaged; see `hpcrun ckpt ls {run}`")
    repairs: list[Repair] = []
    for path in wanted:
        with progress(path.name, _size(path)) as show:
            one = repair_generation(path, copies, dry_run=dry_run, progress=show)
        if one is not None:
            repairs.append(one)
    if as_json:
        print_json(
            {"dry_run": dry_run, "looked_at": len(wanted), "repairs": [_as_json(one) for one in repairs]}
        )
    else:
        _print(repairs, len(wanted), dry_run)
    if any(one.problem for one in repairs):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print(repairs: list[Repair], looked_at: int, dry_run: bool) -> None:
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
            told = ", ".join(f"{amount(size)} from {name}" for name, size in one.taken.items())
            print(f"  {told}")
    print(f"{looked_at - len(repairs)} of {looked_at} saves are whole as they are")


def _as_json(one: Repair) -> dict[str, Any]:
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
