"""The job of the run that a state from elsewhere is imported into."""

from __future__ import annotations

from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.specs.identity import RunIdentity
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import ResolvedJob, load_job, load_portable_job, load_run_job
from hpcrun.specs.rundir import RunDir


def resolve_import_job(source: Path, name: str, job: Path | None) -> tuple[ResolvedJob, list[str]]:
    """The job of a new run, and the keys left out of it; only a `job` of the user is taken whole."""
    path = job or source / "spec.yaml"
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file; give the job of the new run with --job JOB.yaml"
            if job is None
            else f"--job {path}: no such file"
        )
    return (load_job(path, [f"name={name}"]), []) if job is not None else load_portable_job(path, name)


def load_target_job(run: RunDir, kind: str) -> JobSpec | None:
    """The job that a state of this kind has to fit; None for a script's directory, which takes saves only."""
    if run.spec.exists():
        return load_run_job(run).spec
    if kind != "hpcrun":
        raise UsageError(f"{run.path}: has no job that says what {kind} is to become; only saves go there")
    if not run.job.exists():
        run.identify(RunIdentity.new(run.path))
    return None
