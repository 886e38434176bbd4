"""`hpcrun ckpt`: list a run's checkpoints, inspect, verify, compare, repair, delete and move them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.ckpt_exchange import export, import_state
from hpcrun.cli.ckpt_objects import download, upload, verify_object_copies
from hpcrun.cli.ckpt_plan import plan
from hpcrun.cli.ckpt_repair import repair
from hpcrun.cli.options import AnyStep, AsJson, DryRun, Endpoint, SavesRun, Step, Url, make_app
from hpcrun.cli.output import note, print_json, show_progress
from hpcrun.errors import EXIT_CHECK_FAILED
from hpcrun.units import format_bytes

if TYPE_CHECKING:
    from hpcrun.checkpoint.verify import VerifyResult
    from hpcrun.specs.rundir import RunDir
    from hpcrun.specs.saves import SavedCheckpoint

app = make_app("List checkpoints, inspect, verify, compare, repair, delete, export and import them.")


@app.command("ls")
def list_steps(run: SavesRun, url: Url = None, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """List a run's checkpoints and their copies in an object store."""
    from contextlib import ExitStack

    from hpcrun.checkpoint.listing import describe_checkpoint, list_checkpoints
    from hpcrun.checkpoint.objects.run_store import open_run_copies
    from hpcrun.runs.checkpoint_access import find_run_or_directory

    run_dir = find_run_or_directory(run)
    steps, damaged = list_checkpoints(run_dir.checkpoints)
    with ExitStack() as stack:
        stored = open_run_copies(run_dir, url, endpoint, stack)
    steps += [describe_checkpoint(copy.saved, copy.problem, path=copy.url) for copy in stored.copies]
    steps.sort(key=lambda step: step["step"])
    damaged += [{"path": copy.url, "problem": copy.problem} for copy in stored.broken]
    if stored.unknown is not None:
        note(f"copies in the object store are unknown: {stored.unknown}")
    if as_json:
        print_json(steps=steps, damaged=damaged, copies_unknown=stored.unknown)
        return
    for step in steps:
        print(_format_step(step))
    for entry in damaged:
        state = "left" if "/left-" in entry["path"] else "damaged"
        print(f"{state}  {entry['path']}  {entry['problem']}")
    if not steps and not damaged:
        note(f"no saved step in {run_dir.checkpoints}")


def _format_step(step: dict[str, Any]) -> str:
    size = format_bytes(step["size_bytes"])
    ranks = f"{step['world_size']} rank{'s' * (step['world_size'] != 1)}"
    facts = (f"step {step['step']}", f"{step['samples']} samples", size, step["tier"], ranks, step["state"])
    return "  ".join((*facts, step["path"], *(step[key] for key in ("standing", "problem") if step[key])))


@app.command()
def inspect(run: SavesRun, step: Step = None, as_json: AsJson = False) -> None:
    """Show the tensors and files of a checkpoint."""
    from hpcrun.checkpoint.format import data_file_name
    from hpcrun.checkpoint.generation import GenerationReader
    from hpcrun.checkpoint.listing import describe_checkpoint

    saved = _choose(run, step)
    with GenerationReader(saved) as generation:
        manifest = generation.manifest
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "size_bytes": tensor.size_bytes,
            "chunks": len(tensor.chunks),
            "files": sorted({data_file_name(manifest.parts[place.part].file) for _, place in tensor.chunks}),
        }
        for name, tensor in manifest.tensors.items()
    ]
    files: list[dict[str, Any]] = [
        {"name": data_file_name(number), "size_bytes": size} for number, size in enumerate(saved.file_bytes)
    ]
    if as_json:
        print_json(**describe_checkpoint(saved, None), files=files, tensors=tensors)
        return
    print(f"{saved.path}: step {saved.step}, generation {saved.generation}, structure {saved.structure}")
    for file in files:
        print(f"{file['name']}  {format_bytes(file['size_bytes'])}")
    for tensor in tensors:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        chunks = f"{tensor['chunks']} chunk{'s' * (tensor['chunks'] != 1)}"
        size, places = format_bytes(tensor["size_bytes"]), ", ".join(tensor["files"])
        print("  ".join((tensor["name"], tensor["dtype"], shape, size, chunks, places)))


@app.command()
def verify(
    run: SavesRun,
    step: AnyStep = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Parts to read at a time; default: processors.")
    ] = None,
    in_store: Annotated[
        bool, typer.Option("--object", help="Verify the copies in the object store.")
    ] = False,
    url: Url = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of checkpoints and compare it with its hash.

    Exits with 1 for any damage. If the checkpoint of --step is damaged, older ones are read until one is
    whole.
    """
    from hpcrun.runs.checkpoint_access import find_run_or_directory

    run_dir = find_run_or_directory(run)
    in_store = in_store or url is not None
    results = (
        verify_object_copies(run_dir, step, url, endpoint)
        if in_store
        else _verify_directory(run_dir, step, jobs)
    )
    damaged = [result for result in results if result.state == "damaged"]
    newest = max((result.step or 0 for result in results if result.state == "whole"), default=None)
    if as_json:
        print_json(saves=[result.as_json() for result in results], newest_whole_step=newest)
    else:
        for result in results:
            name = result.path if in_store or result.step is None else f"step {result.step}"
            print(f"{name}: {result.state}")
            for damage in result.damages:
                print(f"  {damage}")
        if not results:
            print("no copy" if in_store else "no saved step")
        elif damaged and not in_store:
            print(
                "no save was found whole"
                if newest is None
                else f"newest whole save: step {newest}; train --resume resumes from there"
            )
    if damaged:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _verify_directory(run: RunDir, step: int | None, jobs: int | None) -> list[VerifyResult]:
    """Verify all checkpoints, newest first; or one, and older ones until one is whole."""
    from hpcrun.checkpoint.verify import VerifyResult, verify_checkpoint
    from hpcrun.runs.checkpoint_access import choose_checkpoint
    from hpcrun.specs.saves import read_saved_checkpoints

    saves, unreadable = read_saved_checkpoints(run.checkpoints)
    chosen = saves if step is None else [choose_checkpoint(run, step)]
    older = [] if step is None else [saved for saved in saves if saved.step < step]
    results: list[VerifyResult] = []
    for saved in [*reversed(chosen), *reversed(older)]:
        if saved in older and results[-1].state != "damaged":
            break
        with show_progress(f"step {saved.step}", sum(saved.file_bytes)) as show:
            results.append(verify_checkpoint(saved, jobs, show))
    if step is None:
        results += [VerifyResult.of(None, save.path, [save.problem]) for save in unreadable]
    return results


@app.command()
def diff(
    run: SavesRun,
    step: Annotated[int, typer.Argument(metavar="STEP", help="Step of RUN.")],
    other: Annotated[int, typer.Argument(metavar="STEP2", help="Step to compare it with.")],
    of: Annotated[str | None, typer.Option("--of", metavar="RUN2", help="Take STEP2 from this run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the tensors of two checkpoints.

    Prints which differ, and by how much at most. Exits with 1 if any differs.
    """
    from dataclasses import asdict

    from hpcrun.checkpoint.compare import compare_generations
    from hpcrun.checkpoint.generation import GenerationReader

    pair = [_choose(run, step), _choose(of or run, other)]
    with GenerationReader(pair[0]) as first, GenerationReader(pair[1]) as second:
        tensors = first.manifest.tensors
        with show_progress(f"step {step} and {other}", sum(t.size_bytes for t in tensors.values())) as show:
            differences = list(compare_generations(first, second, show))
    if as_json:
        records = [asdict(difference) for difference in differences]
        for record in records:  # JSON has no infinity
            if record["largest"] is not None and not math.isfinite(record["largest"]):
                record["largest"] = str(record["largest"])
        print_json(paths=[str(saved.path) for saved in pair], differences=records)
    else:
        for difference in differences:
            largest = "unknown" if difference.largest is None else f"{difference.largest:.6g}"
            amount = f" differ, largest difference {largest}" if difference.what == "values" else ""
            if difference.what == "values" and difference.count is not None:
                amount += f", {difference.count} elements"
            print(f"{difference.name}: {difference.what}{amount}")
        count = len(tensors)
        print(
            f"{len(differences)} of {count} tensors differ"
            if differences
            else f"all {count} tensors are equal"
        )
    if differences:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command()
def gc(
    run: SavesRun,
    keep: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Newest to keep; default: the job's.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Keep multiples of N steps; default: the job's.")
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option("--damaged", help="Also delete what was set aside or is visibly damaged."),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints that the job does not keep.

    Remains of interrupted saves are deleted as well. Kept are the newest whole checkpoints, those of steps
    that the job keeps for good, targets of symbolic links in the same directory, and what a running job may
    be writing.
    """
    from contextlib import suppress

    from hpcrun.checkpoint.commit import delete_generation, find_garbage
    from hpcrun.runs.checkpoint_access import find_run_or_directory, is_writing_checkpoints
    from hpcrun.specs.checkpoint import CheckpointSpec
    from hpcrun.specs.load import load_run_job

    run_dir = find_run_or_directory(run, use="plan" if dry_run else "act")
    in_flight = is_writing_checkpoints(run_dir)
    if keep is None or keep_every is None:
        # What a script keeps is unknown: all of it stays.
        is_run = run_dir.spec.exists()
        rule = load_run_job(run_dir).spec.checkpoint if is_run else CheckpointSpec(keep=1 << 30)
        keep = rule.keep if keep is None else keep
        keep_every = rule.keep_every if keep_every is None else keep_every
    garbage, kept = find_garbage(
        run_dir.checkpoints, keep, in_flight=in_flight, damaged=damaged, keep_every=keep_every
    )
    for item in garbage if not dry_run else ():
        # The run itself may have been quicker.
        with suppress(FileNotFoundError):
            delete_generation(item.path)
    if as_json:
        removed = [{"path": str(it.path), "why": it.why, "size_bytes": it.size_bytes} for it in garbage]
        left = [{"path": str(item.path), "why": item.why} for item in kept]
        print_json(dry_run=dry_run, removed=removed, kept=left)
        return
    verb = "would remove" if dry_run else "removed"
    for item in garbage:
        print(f"{verb} {item.path}  {format_bytes(item.size_bytes)}  {item.why}")
    for other in kept:
        print(f"kept {other.path}  {other.why}")
    print(f"{verb} {len(garbage)} items, {format_bytes(sum(item.size_bytes for item in garbage))}")


def _choose(run: str, step: int | None) -> SavedCheckpoint:
    from hpcrun.runs.checkpoint_access import choose_checkpoint, find_run_or_directory

    return choose_checkpoint(find_run_or_directory(run), step)


for _verb in (repair, export, upload, download, plan):
    app.command()(_verb)
app.command("import")(import_state)
