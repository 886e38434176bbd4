"""`hpcrun ckpt`: what a run has saved, whether it is whole, and taking it elsewhere."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli import ckpt_plan
from hpcrun.cli.ckpt_exchange import export, import_state
from hpcrun.cli.ckpt_objects import Endpoint, Url, download, find_object_copies, upload, verify_object_copies
from hpcrun.cli.ckpt_repair import repair
from hpcrun.cli.ckpt_show import checkpoint_directory as _checkpoints
from hpcrun.cli.ckpt_show import choose_saved_step as _choose
from hpcrun.cli.ckpt_show import find_run_or_directory
from hpcrun.cli.ckpt_show import print_json as _print_json
from hpcrun.cli.ckpt_show import show_progress as _progress
from hpcrun.units import render_bytes

if TYPE_CHECKING:
    from hpcrun.checkpoint.generation import GenerationReader
    from hpcrun.specs.saves import SavedCheckpoint

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at saved steps, prove and repair them, clean up, take them elsewhere and back.",
)
app.command()(repair)
app.command()(export)
app.command("import")(import_state)
app.command()(upload)
app.command()(download)
app.command("plan")(ckpt_plan.plan)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="run, or the directory of a script's saves")]
_Json = Annotated[bool, typer.Option("--json", help="one JSON object")]
_Step = Annotated[int | None, typer.Option(help="which saved step; default the newest")]


@app.command("ls")
def list_steps(run: _Run, url: Url = None, endpoint: Endpoint = None, as_json: _Json = False) -> None:
    """List the saved steps of a run and their copies in an object store, and whether all is there."""
    from hpcrun.checkpoint.commit import DAMAGED_PREFIX, LEFT_PREFIX, find_save_problem
    from hpcrun.specs.saves import read_saved_checkpoints, sort_checkpoints

    checkpoints = _checkpoints(run)
    found, unreadable = read_saved_checkpoints(checkpoints)
    sorted_saves = sort_checkpoints(checkpoints, found)
    standing = {one.path: "left: of a branch that is not gone on from" for one in sorted_saves.left}
    standing |= {
        one.path: f"of another run ({one.run_id})" if one.run_id else "of no known run"
        for one in sorted_saves.strangers
    }
    steps = [_as_json(one, find_save_problem(one)) | {"standing": standing.get(one.path)} for one in found]
    damaged = [{"path": str(one.path), "problem": one.problem} for one in unreadable]
    damaged += [
        {"path": str(path), "problem": "set aside when a restart found it damaged"}
        for path in sorted(checkpoints.glob(f"{DAMAGED_PREFIX}*"))
    ]
    damaged += [
        {"path": str(path), "problem": "set aside when another save of that step took its place"}
        for path in sorted(checkpoints.glob(f"{LEFT_PREFIX}*"))
    ]
    copies, broken, unknown = find_object_copies(run, url, endpoint)
    more: dict[str, Any] = {"standing": None}
    steps += [_as_json(copy.saved, copy.problem) | more | {"path": copy.url} for copy in copies]
    steps.sort(key=lambda one: one["step"])
    damaged += [{"path": one.url, "problem": one.problem} for one in broken]
    if unknown is not None:
        print(f"copies in the object store are not known: {unknown}", file=sys.stderr)
    if as_json:
        _print_json({"steps": steps, "damaged": damaged, "copies_unknown": unknown})
        return
    for one in steps:
        size = render_bytes(one["size_bytes"])
        ranks = f"{one['world_size']} rank{'s' * (one['world_size'] != 1)}"
        facts = (f"step {one['step']}", f"{one['samples']} samples", size, one["level"], ranks, one["state"])
        words = "".join(f"  {one[key]}" for key in ("standing", "problem") if one[key])
        print("  ".join((*facts, one["path"])) + words)
    for bad in damaged:
        what = "left" if "/left-" in bad["path"] else "damaged"
        print(f"{what}  {bad['path']}  {bad['problem']}")
    if not steps and not damaged:
        print(f"no saved step in {checkpoints}", file=sys.stderr)


@app.command()
def inspect(run: _Run, step: _Step = None, as_json: _Json = False) -> None:
    """Show what a saved step holds: tensors with type, shape, size and files."""
    from hpcrun.checkpoint.format import data_file_name
    from hpcrun.checkpoint.generation import GenerationReader

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
        {"name": data_file_name(n), "size_bytes": size} for n, size in enumerate(saved.file_bytes)
    ]
    if as_json:
        _print_json({**_as_json(saved, None), "files": files, "tensors": tensors})
        return
    print(f"{saved.path}: step {saved.step}, generation {saved.generation}, structure {saved.structure}")
    for one in files:
        print(f"{one['name']}  {render_bytes(one['size_bytes'])}")
    for tensor in tensors:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        pieces = f"{tensor['chunks']} chunk{'s' * (tensor['chunks'] != 1)}"
        where = ", ".join(tensor["files"])
        facts = (tensor["name"], tensor["dtype"], shape, render_bytes(tensor["size_bytes"]), pieces, where)
        print("  ".join(facts))


@app.command()
def verify(
    run: _Run,
    step: Annotated[int | None, typer.Option(help="which saved step; default all")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="parts read at a time; default: as many as processors")
    ] = None,
    in_store: Annotated[bool, typer.Option("--object", help="of the copies in the object store")] = False,
    url: Url = None,
    endpoint: Endpoint = None,
    as_json: _Json = False,
) -> None:
    """Read every byte of the saved steps and compare it with its hash; exit code 1 for any damage.

    Of one damaged step it also says whether an older one is whole.
    """
    from hpcrun.errors import EXIT_CHECK_FAILED
    from hpcrun.specs.saves import read_saved_checkpoints

    if in_store or url is not None:
        verify_object_copies(run, step, url, endpoint, as_json)
        return
    found, unreadable = read_saved_checkpoints(_checkpoints(run))
    wanted = found if step is None else [_choose(run, step)]
    results = [_verify_step(saved, jobs) for saved in reversed(wanted)]
    results += [
        {"step": None, "path": str(one.path), "state": "damaged", "damages": [one.problem]}
        for one in unreadable
        if step is None
    ]
    if step is not None and results[0]["state"] == "damaged":
        for older in reversed([saved for saved in found if saved.step < step]):
            results.append(_verify_step(older, jobs))
            if results[-1]["state"] == "whole":
                break
    bad = [one for one in results if one["state"] == "damaged"]
    whole = [one["step"] for one in results if one["state"] == "whole"]
    if as_json:
        _print_json({"saves": results, "newest_whole_step": max(whole, default=None)})
    else:
        _print_verified(results, bad, whole)
    if bad:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_verified(results: list[dict[str, Any]], bad: list[dict[str, Any]], whole: list[int]) -> None:
    for one in results:
        name = f"step {one['step']}" if one["step"] is not None else one["path"]
        print(f"{name}: {one['state']}")
        for damage in one["damages"]:
            print(f"  {damage}")
    if bad and whole:
        print(f"newest whole save: step {max(whole)}; train --resume goes on from there")
    elif bad:
        print("no save was found whole")
    elif not results:
        print("no saved step")


@app.command()
def diff(
    run: _Run,
    step: Annotated[int, typer.Argument(help="a saved step of RUN")],
    other: Annotated[int, typer.Argument(metavar="STEP2", help="the step to compare it with")],
    of: Annotated[str | None, typer.Option("--of", metavar="RUN2", help="STEP2 is of this run")] = None,
    as_json: _Json = False,
) -> None:
    """Compare two saved steps: which tensors differ, and by how much at most; exit code 1 if any does."""
    from dataclasses import asdict

    from hpcrun.checkpoint.compare import compare_generations
    from hpcrun.checkpoint.generation import GenerationReader
    from hpcrun.errors import EXIT_CHECK_FAILED

    pair = [_choose(run, step), _choose(of or run, other)]
    with GenerationReader(pair[0]) as first, GenerationReader(pair[1]) as second:
        same = len(first.manifest.tensors)
        with _progress(f"step {step} and {other}", _raw_bytes(first)) as show:
            found = list(compare_generations(first, second, show))
    if as_json:
        told = [asdict(one) for one in found]
        for entry in told:  # JSON has no word for what is no finite number
            if entry["largest"] is not None and not math.isfinite(entry["largest"]):
                entry["largest"] = str(entry["largest"])
        _print_json({"paths": [str(one.path) for one in pair], "differences": told})
    else:
        for one in found:
            largest = "unknown" if one.largest is None else f"{one.largest:.6g}"
            by = f", largest difference {largest}" if one.what == "values" else ""
            by += f", {one.count} elements" if one.count is not None else ""
            print(f"{one.name}: {one.what} differ{by}" if one.what == "values" else f"{one.name}: {one.what}")
        print(f"{len(found)} of {same} tensors differ" if found else f"all {same} tensors are equal")
    if found:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command()
def gc(
    run: _Run,
    keep: Annotated[int | None, typer.Option(min=1, help="newest saves kept; default as in the job")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=0, help="keep steps that are a multiple of it; default as in the job")
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option(
            "--damaged",
            help="also what was set aside, or is damaged as far as is seen without reading data",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be removed")] = False,
    as_json: _Json = False,
) -> None:
    """Remove what broken saves have left, and saves that the job no longer wants to keep.

    The newest whole saves stay, those of the steps that the job keeps for good, what a symbolic link beside
    them points at, and what a running job may be writing.
    """
    import contextlib

    from hpcrun.checkpoint.commit import delete_generation, find_garbage
    from hpcrun.checkpoint.writer_lease import find_live_writer
    from hpcrun.runs.run_state import read_run_states
    from hpcrun.specs.checkpoint import CheckpointSpec
    from hpcrun.specs.load import load_run_job

    found = find_run_or_directory(run, use="plan" if dry_run else "act")
    if found.spec.exists():
        in_flight = not read_run_states([found])[0].is_over
    else:
        in_flight = find_live_writer(found.checkpoints) is not None
    if keep is None or keep_every is None:
        # What a script wants to keep nobody knows: what it has kept so far stays.
        rule = load_run_job(found).spec.checkpoint if found.spec.exists() else CheckpointSpec(keep=1 << 30)
        keep = rule.keep if keep is None else keep
        keep_every = rule.keep_every if keep_every is None else keep_every
    garbage, kept = find_garbage(
        found.checkpoints, keep, in_flight=in_flight, damaged=damaged, keep_every=keep_every
    )
    for one in garbage if not dry_run else ():
        # The run itself may have been quicker.
        with contextlib.suppress(FileNotFoundError):
            delete_generation(one.path)
    if as_json:
        removed = [{"path": str(o.path), "why": o.why, "size_bytes": o.size_bytes} for o in garbage]
        left = [{"path": str(one.path), "why": one.why} for one in kept]
        _print_json({"dry_run": dry_run, "removed": removed, "kept": left})
        return
    verb = "would remove" if dry_run else "removed"
    for one in garbage:
        print(f"{verb} {one.path}  {render_bytes(one.size_bytes)}  {one.why}")
    for other in kept:
        print(f"kept {other.path}  {other.why}")
    print(f"{verb} {len(garbage)} items, {render_bytes(sum(one.size_bytes for one in garbage))}")


def _as_json(saved: SavedCheckpoint, problem: str | None) -> dict[str, Any]:
    from hpcrun.specs.saves import SAVE_FORMAT_VERSION

    return {
        "step": saved.step,
        "samples": saved.position,
        "world_size": saved.world_size,
        "attempt": saved.attempt,
        "format_version": SAVE_FORMAT_VERSION,
        "generation": saved.generation,
        "structure": saved.structure,
        "level": saved.level,
        "written": saved.written,
        "size_bytes": sum(saved.file_bytes) + saved.manifest_bytes,
        "state": "damaged" if problem else "complete",
        "problem": problem,
        "path": str(saved.path),
    }


def _verify_step(saved: SavedCheckpoint, jobs: int | None) -> dict[str, Any]:
    """One saved step, read from the first to the last byte."""
    from hpcrun.checkpoint.format import DamagedError
    from hpcrun.checkpoint.generation import GenerationReader
    from hpcrun.checkpoint.verify import default_verify_jobs, find_generation_damages

    result: dict[str, Any] = {"step": saved.step, "path": str(saved.path), "damages": []}
    try:
        with (
            GenerationReader(saved) as generation,
            _progress(f"step {saved.step}", _raw_bytes(generation)) as show,
        ):
            result["damages"] = find_generation_damages(generation, jobs or default_verify_jobs(), show)
    except (DamagedError, OSError) as error:
        result["damages"] = [str(error)]
    return result | {"state": "damaged" if result["damages"] else "whole"}


def _raw_bytes(generation: GenerationReader) -> int:
    return sum(tensor.size_bytes for tensor in generation.manifest.tensors.values())
