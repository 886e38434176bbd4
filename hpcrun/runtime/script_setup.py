"""Where a script's saves belong, how its ranks agree, and what holds for them: before the first save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrun.errors import UsageError
from hpcrun.specs.checkpoint import CheckpointSpec, check_checkpoint
from hpcrun.specs.load import load_run_job
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, WORKER_SOCKET_VARIABLE
from hpcrun.specs.rundir import RunDir


def read_run_checkpoint_options(run: RunDir, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the job of this very run says of saves, but for its memory where it has none; else nothing."""
    if str(run.path) != environ.get(RUN_DIR_VARIABLE) or not run.spec.exists():
        return {}
    section = load_run_job(run).spec.checkpoint
    # When to save is the script's own affair.
    return section.model_dump(mode="json", exclude={"every"} if section.memory else {"every", "memory"})


def build_checkpoint_spec(values: Mapping[str, Any], options: Mapping[str, Any]) -> CheckpointSpec:
    """The `checkpoint` section that these values make; UsageError where one of them is wrong."""
    try:
        spec = CheckpointSpec.model_validate({**values, **options})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = ", ".join(CheckpointSpec.model_fields)
        raise UsageError(f"Checkpointer: {where}: {first['msg']}; options: {known}") from None
    for wrong in check_checkpoint(spec):
        raise UsageError(f"Checkpointer: {wrong.key.removeprefix('checkpoint.')}: {wrong.text}")
    return spec


def resolve_run_directory(directory: str | Path | None, environ: Mapping[str, str]) -> tuple[RunDir, bool]:
    """The directory as a run's, and whether an agent's worker is there that writes to just that one."""
    told = environ.get(RUN_DIR_VARIABLE)
    own = RunDir(Path(told)) if told else None
    if directory is None:
        if own is None:
            raise UsageError("Checkpointer: a directory is needed outside a run of hpcrun")
        run = own
    else:
        run = RunDir(Path(directory).resolve())
    return run, own is not None and own.path == run.path and WORKER_SOCKET_VARIABLE in environ


def find_own_attempt(run: RunDir, environ: Mapping[str, str]) -> int | None:
    """The attempt of the run that has started this process, if the directory is that run's; else None."""
    is_own = str(run.path) == environ.get(RUN_DIR_VARIABLE)
    return int(environ.get(ATTEMPT_VARIABLE) or 1) if is_own else None
