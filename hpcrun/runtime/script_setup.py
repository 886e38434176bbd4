"""Resolves the directory and options of a script's saves from its arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrun.errors import UsageError
from hpcrun.specs.checkpoint import CheckpointSpec, check_checkpoint
from hpcrun.specs.load import load_run_job
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, WORKER_SOCKET_VARIABLE
from hpcrun.specs.rundir import RunDir


@dataclass(frozen=True)
class ScriptRun:
    """The directory of a script's saves, and what this process has to do with it."""

    run: RunDir
    attempt: int | None
    """The attempt that started this process, if the directory is its run's."""
    has_agent: bool
    """Whether an agent's checkpoint worker writes to the directory."""
    options: dict[str, Any]
    """The checkpoint section of the run's own job, if the directory is its; memory 0 is left out."""


def find_script_run(directory: str | Path | None, environ: Mapping[str, str]) -> ScriptRun:
    """Find the run directory; by default that of the run that started this process."""
    own_path = environ.get(RUN_DIR_VARIABLE)
    if directory is None and not own_path:
        raise UsageError("Checkpointer: a directory is needed outside a run of hpcrun")
    run = RunDir(Path(directory).resolve() if directory is not None else Path(own_path or ""))
    if not own_path or run.path != Path(own_path):
        return ScriptRun(run, None, has_agent=False, options={})
    options: dict[str, Any] = {}
    if run.spec.exists():
        section = load_run_job(run).spec.checkpoint
        # The script decides when to save.
        excluded = {"every"} if section.memory else {"every", "memory"}
        options = section.model_dump(mode="json", exclude=excluded)
    return ScriptRun(run, int(environ.get(ATTEMPT_VARIABLE) or 1), WORKER_SOCKET_VARIABLE in environ, options)


def build_checkpoint_spec(values: Mapping[str, Any], options: Mapping[str, Any]) -> CheckpointSpec:
    """Build a `checkpoint` section of these values; UsageError where one is wrong."""
    try:
        spec = CheckpointSpec.model_validate({**values, **options})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        options_text = ", ".join(CheckpointSpec.model_fields)
        raise UsageError(f"Checkpointer: {where}: {first['msg']}; options: {options_text}") from None
    for wrong in check_checkpoint(spec):
        raise UsageError(f"Checkpointer: {wrong.key.removeprefix('checkpoint.')}: {wrong.text}")
    return spec
