"""`hpcrun ckpt export` and `import`: saves out of their run, and states from elsewhere into one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.ckpt_show import (
    choose_saved_step,
    find_run_or_directory,
    print_json,
    refuse_while_running,
    show_progress,
)
from hpcrun.specs.sha256sums import SHA256SUMS_FILE
from hpcrun.units import render_bytes

if TYPE_CHECKING:
    from hpcrun.runtime.export import ExportSummary
    from hpcrun.runtime.importing import ImportSummary
    from hpcrun.specs.job import JobSpec
    from hpcrun.specs.load import ResolvedJob
    from hpcrun.specs.rundir import RunDir
    from hpcrun.specs.saves import SavedCheckpoint

_FORMATS = ("hf", "dcp", "hpcrun")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)

_Json = Annotated[bool, typer.Option("--json", help="one JSON object")]


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run, or the directory of a script's saves")],
    out: Annotated[Path, typer.Option("--out", help="directory to make; must not exist or be empty")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="hf|dcp|hpcrun",
            help="hf: weights for transformers; dcp: all for torch.distributed.checkpoint; hpcrun: a copy",
        ),
    ] = "hf",
    step: Annotated[int | None, typer.Option(help="which saved step; default the newest")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="of hf: float32, bfloat16, float16, float64, or source (as the imported weights had it);"
            " default as saved",
        ),
    ] = None,
    shard_size: Annotated[str | None, typer.Option(help="of hf: most bytes of a file; default 5GB")] = None,
    as_json: _Json = False,
) -> None:
    """Write a saved step in another form, every byte of it proved; the run stays as it is."""
    from hpcrun.errors import UsageError

    _check_form(form, dtype=dtype, shard_size=shard_size)
    most = _parse_size(shard_size or "5GB")
    found, saved = find_run_or_directory(run), choose_saved_step(run, step)
    if form == "hf" and not found.spec.exists():
        raise UsageError(
            f"{found.path}: has no job, so nobody knows the model of these saves; use --format dcp or hpcrun"
        )
    total, exported, left_out = sum(saved.file_bytes), None, list[str]()
    with show_progress(f"step {saved.step}", total) as show:
        if form == "hf":
            from hpcrun.runtime.export import export_hf

            exported = export_hf(found, saved, out, dtype=dtype, shard_bytes=most, progress=show)
        elif form == "dcp":
            from hpcrun.runtime.export import export_dcp

            left_out = export_dcp(found, saved, out, progress=show)
        else:
            left_out = _export_hpcrun(found, saved, out, show)
    files = sorted(path for path in out.iterdir() if path.is_file())
    size = sum(path.stat().st_size for path in files)
    if as_json:
        told: dict[str, Any] = {"run": found.id, "step": saved.step, "format": form, "path": str(out)}
        told |= {"files": [path.name for path in files], "size_bytes": size, "left_out": left_out}
        print_json(told | _import_report(exported))
        return
    print(f"step {saved.step} written to {out} ({form}, {len(files)} files, {render_bytes(size)})")
    if exported is not None:
        _print_import_report(
            exported, f"to check a copy: cd {shlex.quote(str(out))} && sha256sum -c {SHA256SUMS_FILE}"
        )
    if left_out:
        print(f"left out of its spec.yaml, being no part of the state: {', '.join(left_out)}")


def _check_form(form: str, **only_hf: str | None) -> None:
    from hpcrun.errors import UsageError

    if form not in _FORMATS:
        raise UsageError(f"--format {form}: not known; use {', '.join(_FORMATS)}")
    for name, value in only_hf.items():
        if value is not None and form != "hf":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: is of --format hf; {form} keeps all as it was saved")


def import_state(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="directory of an export, of torch's or hf's")
    ],
    run: Annotated[str | None, typer.Option("--run", help="a run that is over, or has not begun")] = None,
    name: Annotated[str | None, typer.Option("--name", help="make a new run of this name")] = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="job file of the new run; default the one in SOURCE")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="the step that the state is of, where SOURCE does not say it")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="of hf: allow rounding to this type, the one the run keeps"),
    ] = None,
    is_over: Annotated[
        bool, typer.Option("--is-over", help="the run is over, though that cannot be seen from here")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Make a state from elsewhere the newest save of a run; `train --resume` goes on from it.

    SOURCE is what `ckpt export` wrote (hpcrun, dcp), a distributed checkpoint of torch's with the same
    names, or a Hugging Face directory, whose weights become step 0; its tokenizer and other small files are
    kept for exports. Files are held against a SHA256SUMS beside them. Of the job in SOURCE only what
    describes the state is taken (model, data, layout, optimization); nothing that it says is run.
    """
    from hpcrun.checkpoint.restore.exchange import check_import_source
    from hpcrun.errors import UsageError
    from hpcrun.runtime import importing

    if (run is None) == (name is None):
        raise UsageError("give either --run RUN, or --name NAME for a new run")
    if run is not None and job is not None:
        raise UsageError("--job: is of a new run; --run has its own job")
    check_import_source(source)
    kind, left_out = importing.detect_source_format(source), list[str]()
    read = _make_reader(source, kind, step, dtype)
    if run is not None:
        found = find_run_or_directory(run, use="act")
        refuse_while_running(found, "import", believe=is_over)
        done = read(found.checkpoints, _load_target_job(found, kind))
    else:
        resolved, left_out = _make_new_job(source, name or "", job)
        found, done = _import_into_new_run(resolved, lambda place: read(place, resolved.spec))
    saved = done.saved
    if as_json:
        said = {"run": found.id, "format": kind, "step": saved.step, "samples": saved.position}
        more = {"path": str(saved.path), "left_out": left_out, "hashes_checked": done.is_hashed}
        print_json(said | more | _import_report(done))
        return
    _print_left_out(source, left_out)
    _print_import_report(
        done, "" if done.is_hashed else f"{source} has no {SHA256SUMS_FILE}: headers and sizes were checked"
    )
    print(f"step {saved.step} ({kind}) is now {saved.path}")
    goes_on = f"hpcrun train --resume {found.id}" if found.spec.exists() else "Checkpointer.load"
    print(f"{goes_on} goes on from it")


def _make_reader(
    source: Path, kind: str, step: int | None, dtype: str | None
) -> Callable[[Path, JobSpec | None], ImportSummary]:
    """What makes the state in a directory a save, given where to and of which job."""
    from hpcrun.errors import UsageError
    from hpcrun.runtime import importing

    if dtype is not None and kind != "hf":
        raise UsageError(f"--dtype: is for weights of Hugging Face; a state of {kind} keeps its types")
    action: Callable[..., ImportSummary] = getattr(importing, f"import_{kind}")
    more = {"dtype": dtype} if kind == "hf" else {}
    total = sum(path.stat().st_size for path in source.iterdir() if path.is_file())

    def read(checkpoints: Path, job: JobSpec | None) -> ImportSummary:
        with show_progress(str(source), total) as show:
            return action(source, checkpoints, job, step, show, **more)

    return read


def _import_report(done: ExportSummary | ImportSummary | None) -> dict[str, Any]:
    """What was cast, what came along and what is worth a word, for a program to read."""
    if done is None or done.carried is None:
        return {}
    carried = {key: value for key, value in asdict(done.carried).items() if key != "source"}
    return {
        "casts": [asdict(cast) for cast in done.casts],
        "base_model": done.carried.source,
        "carried": carried,
        "notes": list(done.notes),
    }


def _print_import_report(done: ExportSummary | ImportSummary, hashes: str) -> None:
    if hashes:
        print(hashes)
    for cast in done.casts:
        print(cast)
    carried = done.carried
    if carried is not None and carried.source is None:
        print(f"without {' and '.join(carried.absent)}: training did not begin with a Hugging Face directory")
    elif carried is not None:
        parts = [f"from {carried.source}: {', '.join(carried.files) or 'no files besides the weights'}"]
        parts += [f"not there: {', '.join(carried.absent)}"] if carried.absent else []
        parts += [f"left there: {', '.join(carried.left)}"] if carried.left else []
        print("; ".join(parts))
    for note in done.notes:
        print(f"note: {note}")


def _print_left_out(source: Path, keys: list[str]) -> None:
    if keys:
        print(f"left out of the job in {source}, being no part of the state: {', '.join(keys)}")
        print("set what you need of it in a job file of your own, and give that with --job")


def _import_into_new_run(
    resolved: ResolvedJob, read: Callable[[Path], ImportSummary]
) -> tuple[RunDir, ImportSummary]:
    """A run that holds nothing but the imported save; none at all where the import fails."""
    from dataclasses import replace

    from hpcrun.specs.load import render_job
    from hpcrun.specs.records import write_atomically
    from hpcrun.specs.run_lookup import new_run

    with new_run(resolved.spec.name) as made:
        done = read(made.checkpoints)
        write_atomically(made.spec, render_job(resolved.spec))
    saved = replace(done.saved, path=made.checkpoints / done.saved.path.name)
    return made, replace(done, saved=saved)


def _make_new_job(source: Path, name: str, job: Path | None) -> tuple[ResolvedJob, list[str]]:
    """The job of the new run, and what was left out of it: one's own is taken whole, another's is not."""
    from hpcrun.errors import UsageError
    from hpcrun.specs.load import load_job, load_portable_job

    path = job or source / "spec.yaml"
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file; give the job of the new run with --job JOB.yaml"
            if job is None
            else f"--job {path}: no such file"
        )
    return (load_job(path, [f"name={name}"]), []) if job is not None else load_portable_job(path, name)


def _load_target_job(run: RunDir, kind: str) -> JobSpec | None:
    """The job that the state has to fit; a script's own directory has none, and takes what a script saved."""
    from hpcrun.errors import UsageError
    from hpcrun.specs.identity import RunIdentity
    from hpcrun.specs.load import load_run_job

    if run.spec.exists():
        return load_run_job(run).spec
    if kind != "hpcrun":
        raise UsageError(f"{run.path}: has no job that says what {kind} is to become; only saves go there")
    if not run.job.exists():
        run.identify(RunIdentity.new(run.path))
    return None


def _export_hpcrun(run: RunDir, saved: SavedCheckpoint, out: Path, show: Callable[[int], None]) -> list[str]:
    from hpcrun.checkpoint.restore.exchange import atomic_directory, copy_generation_out
    from hpcrun.specs.base_model import copy_base_model
    from hpcrun.specs.load import render_portable_job
    from hpcrun.specs.records import write_atomically

    with atomic_directory(out) as aside, copy_base_model(run.path, aside):
        copy_generation_out(saved, aside, show)
        if not run.spec.exists():
            return []
        text, left_out = render_portable_job(run.spec)
        write_atomically(aside / "spec.yaml", text)
    return left_out


def _parse_size(text: str) -> int:
    """5GB, 500MB, 2GiB: bytes, by thousands unless there is an i."""
    from hpcrun.errors import UsageError

    found = _SIZE.fullmatch(text.strip())
    size = 0
    if found:
        power = " kmgt".index(found[2].lower() or " ")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if size < 1:
        raise UsageError(f"--shard-size {text}: is no size; write 5GB or 500MB")
    return size
