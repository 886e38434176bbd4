"""`hpcrun ckpt export` and `import`: checkpoints in other formats, and states from elsewhere into a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.options import AsJson, IsOver, SavesRun, Step, parse_name
from hpcrun.cli.output import print_json, show_progress
from hpcrun.errors import UsageError
from hpcrun.specs.sha256sums import SHA256SUMS_FILE
from hpcrun.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hpcrun.runtime.export import ExportSummary
    from hpcrun.runtime.importing import ImportSummary
    from hpcrun.specs.job import JobSpec
    from hpcrun.specs.load import ResolvedJob
    from hpcrun.specs.rundir import RunDir
    from hpcrun.specs.saves import SavedCheckpoint

_FORMATS = ("hf", "dcp", "hpcrun")


_Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="hf|dcp|hpcrun",
        help="hf: weights for transformers; dcp: the whole state for torch.distributed.checkpoint;"
        " hpcrun: a copy.",
    ),
]
_ExportDtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="With hf: float32, bfloat16, float16, float64, or source (that of the imported weights);"
        " default: as saved.",
    ),
]
_ShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="With hf: maximum size of a file; default: 5GB.")
]


def export(
    run: SavesRun,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to make; may exist empty.")],
    form: _Format = "hf",
    step: Step = None,
    dtype: _ExportDtype = None,
    shard_size: _ShardSize = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format, verifying every byte."""
    from hpcrun.runs.checkpoint_access import choose_checkpoint, find_run_or_directory

    parse_name(form, "--format", _FORMATS)
    for option, value in (("--dtype", dtype), ("--shard-size", shard_size)):
        if value is not None and form != "hf":
            raise UsageError(f"{option}: is of --format hf; {form} keeps all as it was saved")
    shard_bytes = parse_bytes(shard_size or "5GB", "--shard-size")
    run_dir = find_run_or_directory(run)
    saved = choose_checkpoint(run_dir, step)
    summary, left_out = _write_export(run_dir, saved, out, form, dtype, shard_bytes)
    files = sorted(path for path in out.iterdir() if path.is_file())
    size = sum(path.stat().st_size for path in files)
    if as_json:
        print_json(
            run=run_dir.id,
            step=saved.step,
            format=form,
            path=str(out),
            files=[path.name for path in files],
            size_bytes=size,
            left_out=left_out,
            **_import_report(summary),
        )
        return
    print(f"step {saved.step} written to {out} ({form}, {len(files)} files, {format_bytes(size)})")
    if summary is not None:
        print(f"to check a copy: cd {shlex.quote(str(out))} && sha256sum -c {SHA256SUMS_FILE}")
        _print_import_report(summary)
    if left_out:
        print(f"left out of its spec.yaml, being no part of the state: {', '.join(left_out)}")


def _write_export(
    run: RunDir, saved: SavedCheckpoint, out: Path, form: str, dtype: str | None, shard_bytes: int
) -> tuple[ExportSummary | None, list[str]]:
    """Write the files; the summary of hf, and the keys of the job that were left out."""
    if form == "hf" and not run.spec.exists():
        raise UsageError(
            f"{run.path}: has no job, so the model of these saves is unknown; use --format dcp or hpcrun"
        )
    with show_progress(f"step {saved.step}", sum(saved.file_bytes)) as show:
        if form == "hpcrun":
            from hpcrun.checkpoint.restore.exchange import export_generation

            return None, export_generation(run, saved, out, show)
        from hpcrun.runtime.export import export_dcp, export_hf

        if form == "dcp":
            return None, export_dcp(run, saved, out, progress=show)
        return export_hf(run, saved, out, dtype=dtype, shard_bytes=shard_bytes, progress=show), []


_ImportRun = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Run that is over, or has not started.")
]
_ImportJob = Annotated[
    Path | None,
    typer.Option("--job", metavar="JOB", help="Job file of the new run; default: the one in SOURCE."),
]
_ImportStep = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Step of the state, if SOURCE does not say it.")
]
_ImportDtype = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="With hf: allow rounding to this type, the one the run keeps."),
]


def import_state(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Directory of `ckpt export`, torch or Hugging Face."),
    ],
    run: _ImportRun = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of a new run.")] = None,
    job: _ImportJob = None,
    step: _ImportStep = None,
    dtype: _ImportDtype = None,
    is_over: IsOver = False,
    as_json: AsJson = False,
) -> None:
    """Import a state as the newest checkpoint of a run.

    `train --resume` continues from it. SOURCE is a directory written by `ckpt export` (hpcrun, dcp), a
    distributed checkpoint of torch with the same names, or a Hugging Face directory, whose weights become
    step 0; its tokenizer and other small files are kept for exports. Files are compared with SHA256SUMS if
    there is one. Of the job in SOURCE only what describes the state is used (model, data, layout,
    optimization); nothing in it is executed.
    """
    from hpcrun.checkpoint.restore.exchange import check_import_source
    from hpcrun.checkpoint.restore.import_target import load_target_job, resolve_import_job
    from hpcrun.runs.checkpoint_access import find_run_or_directory, require_finished
    from hpcrun.runtime import importing

    if (run is None) == (name is None):
        raise UsageError("give either --run RUN, or --name NAME for a new run")
    if run is not None and job is not None:
        raise UsageError("--job: is of a new run; --run has its own job")
    check_import_source(source)
    kind, left_out = importing.detect_source_format(source), list[str]()
    read = _make_reader(source, kind, step, dtype)
    if run is not None:
        target = find_run_or_directory(run, use="act")
        require_finished(target, "import", assume_over=is_over)
        summary = read(target.checkpoints, load_target_job(target, kind))
    else:
        resolved, left_out = resolve_import_job(source, name or "", job)
        target, summary = _import_into_new_run(resolved, read)
    saved = summary.saved
    if as_json:
        print_json(
            run=target.id,
            format=kind,
            step=saved.step,
            samples=saved.position,
            path=str(saved.path),
            left_out=left_out,
            hashes_checked=summary.is_hashed,
            **_import_report(summary),
        )
        return
    _print_import(source, target, kind, summary, left_out)


_Reader = Callable[[Path, "JobSpec | None"], "ImportSummary"]


def _make_reader(source: Path, kind: str, step: int | None, dtype: str | None) -> _Reader:
    """The function that imports the state in a directory into checkpoints of a job."""
    from hpcrun.runtime import importing

    if dtype is not None and kind != "hf":
        raise UsageError(f"--dtype: is for weights of Hugging Face; a state of {kind} keeps its types")
    import_format: Callable[..., ImportSummary] = getattr(importing, f"import_{kind}")
    options = {"dtype": dtype} if kind == "hf" else {}
    total = sum(path.stat().st_size for path in source.iterdir() if path.is_file())

    def read(checkpoints: Path, job: JobSpec | None) -> ImportSummary:
        with show_progress(str(source), total) as show:
            return import_format(source, checkpoints, job, step, show, **options)

    return read


def _print_import(
    source: Path, run: RunDir, kind: str, summary: ImportSummary, left_out: Sequence[str]
) -> None:
    if left_out:
        print(f"left out of the job in {source}, being no part of the state: {', '.join(left_out)}")
        print("set what you need of it in a job file of your own, and give that with --job")
    if not summary.is_hashed:
        print(f"{source} has no {SHA256SUMS_FILE}: headers and sizes were checked")
    _print_import_report(summary)
    print(f"step {summary.saved.step} ({kind}) is now {summary.saved.path}")
    resume = f"hpcrun train --resume {run.id}" if run.spec.exists() else "Checkpointer.load"
    print(f"{resume} continues from it")


def _import_report(summary: ExportSummary | ImportSummary | None) -> dict[str, Any]:
    """Casts, carried files and notes, for a program to read."""
    if summary is None or summary.carried is None:
        return {}
    carried = {key: value for key, value in asdict(summary.carried).items() if key != "source"}
    return {
        "casts": [asdict(cast) for cast in summary.casts],
        "base_model": summary.carried.source,
        "carried": carried,
        "notes": list(summary.notes),
    }


def _print_import_report(summary: ExportSummary | ImportSummary) -> None:
    for cast in summary.casts:
        print(cast)
    carried = summary.carried
    if carried is not None and carried.source is None:
        print(f"without {' and '.join(carried.absent)}: training did not begin with a Hugging Face directory")
    elif carried is not None:
        parts = [f"from {carried.source}: {', '.join(carried.files) or 'no files besides the weights'}"]
        parts += [f"not there: {', '.join(carried.absent)}"] if carried.absent else []
        parts += [f"left there: {', '.join(carried.left)}"] if carried.left else []
        print("; ".join(parts))
    for line in summary.notes:
        print(f"note: {line}")


def _import_into_new_run(resolved: ResolvedJob, read: _Reader) -> tuple[RunDir, ImportSummary]:
    """A run that holds only the imported checkpoint; no run where the import fails."""
    from dataclasses import replace

    from hpcrun.specs.load import render_job
    from hpcrun.specs.records import write_atomically
    from hpcrun.specs.run_lookup import new_run

    with new_run(resolved.spec.name) as run:
        summary = read(run.checkpoints, resolved.spec)
        write_atomically(run.spec, render_job(resolved.spec))
    saved = replace(summary.saved, path=run.checkpoints / summary.saved.path.name)
    return run, replace(summary, saved=saved)
