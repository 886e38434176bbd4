"""From a job file to what can be launched: the one place that composes spec, plan and what they need."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcrun.checkpoint.policy.capacity import find_storage_problems
from hpcrun.data.corpus import inspect_corpus
from hpcrun.errors import SiteError, SpecError, UsageError
from hpcrun.specs.hf_directory import read_hf_layout, why_precision_is_lost
from hpcrun.specs.hf_quantised import why_quantised
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import ResolvedJob, load_job, load_run_job
from hpcrun.specs.plan import Plan
from hpcrun.specs.run_lookup import runs_root
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import resumable_checkpoints
from hpcrun.specs.secrets import check_secret_files
from hpcrun.submission.launch_checks import check_run_root

# What a spec.yaml has fixed and a new layout must derive again, unless it is given with the layout.
_FOLLOWS_LAYOUT = {
    "parallel.microbatches": ("parallel.", "train.mbs", "train.gbs"),
    "parallel.virtual_stages": ("parallel.pp", "parallel.schedule"),
    "parallel.zero": ("parallel.dp_shard",),
}


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready to be launched, as a new run or as the next attempt of an old one."""

    spec: JobSpec
    plan: Plan | None
    """None for a command."""
    resume: RunDir | None = None

    @property
    def training_plan(self) -> Plan:
        """The plan of a job that we train ourselves."""
        assert self.plan is not None
        return self.plan

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.spec.ranks

    def describe(self) -> str:
        """Its layout in one line."""
        if self.plan is not None:
            return self.plan.describe()
        count = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{count} of {shlex.join(self.spec.command or [])}"


def prepare_job(
    job: Path | None,
    overrides: Sequence[str] = (),
    *,
    resume: RunDir | None = None,
    until: Literal["plan", "launch"] = "launch",
    world_size: int | None = None,
    command: Sequence[str] | None = None,
) -> PreparedJob:
    """Resolve a job file, or the job of a run to be resumed; up to `launch` also check what it needs.

    `command` replaces the job's own. `world_size` is the number of ranks, if another launcher has started
    them. UsageError (SpecError) for mistakes in the job or its data, SiteError for what the machine lacks.
    """
    if resume is not None:
        resolved = _load_resumed_job(resume, overrides)
    elif job is not None or command is not None:
        resolved = load_job(job, overrides, command=command)
    else:
        raise UsageError("no job file given; write `hpcrun train JOB.yaml`, or --resume RUN")
    if resolved.spec.sweep is not None:
        raise resolved.mistake("sweep", "makes several runs; submit them with `hpcrun submit`")
    prepared = PreparedJob(resolved.spec, resolved.plan, resume)
    if world_size not in (None, prepared.ranks):
        ranks, degrees = prepared.ranks, prepared.spec.degrees
        takes = f"{degrees} takes {ranks} ranks" if ranks > 1 else "takes 1 rank"
        text = f"{takes}, but this world has {world_size}; change a degree, or start {ranks}"
        raise resolved.mistake("parallel", text)
    if until == "launch":
        _check_secrets(resolved)
    if until == "launch" and resolved.plan is not None:
        check_job_inputs(resolved, resume)
        _check_storage(prepared)
    return prepared


def _load_resumed_job(run: RunDir, overrides: Sequence[str]) -> ResolvedJob:
    given = {text.partition("=")[0] for text in overrides}
    released = [
        f"{key}=null"
        for key, causes in _FOLLOWS_LAYOUT.items()
        if key not in given and any(name.startswith(cause) for name in given for cause in causes)
    ]
    resolved = load_run_job(run, [*released, *overrides])
    ended, steps = run.read_exit() or {}, resolved.spec.train.steps
    step = ended.get("step")
    if ended.get("status") == "done" and isinstance(step, int) and step >= steps:
        raise UsageError(
            f"{run.id} is done ({step} of {steps} steps); to go on, give it more:"
            f" --resume {run.id} train.steps={step * 2}"
        )
    return resolved


def _check_secrets(resolved: ResolvedJob) -> None:
    problems = check_secret_files(resolved.spec.secrets)
    if problems:
        raise SpecError(
            [replace(problem, where=resolved.document.where(problem.key)) for problem in problems]
        )


def check_job_inputs(resolved: ResolvedJob, resume: RunDir | None = None) -> None:
    """Whether data and weights are there and fit the model; SpecError with the key where they do not.

    What a container holds cannot be seen from outside.
    """
    if resolved.spec.container is not None:
        return
    _check_data(resolved)
    _check_weights(resolved, resume)


def _check_data(resolved: ResolvedJob) -> None:
    model, data = resolved.spec.model, resolved.spec.data
    assert model is not None
    assert data is not None
    try:
        corpus = inspect_corpus(data)
    except UsageError as error:
        key = "data.text" if data.tokens is None else "data.tokens"
        raise resolved.mistake(key, str(error)) from None
    if corpus.vocab is not None and corpus.vocab > model.vocab:
        source = data.text or data.tokens
        text = f"{model.vocab} is less than the {corpus.vocab} of {source}; use {corpus.vocab} or more"
        raise resolved.mistake("model.vocab", text)


def _check_weights(resolved: ResolvedJob, resume: RunDir | None) -> None:
    assert resolved.spec.model is not None
    weights = resolved.spec.model.weights
    # A run that has saved before starts from its save.
    if weights is None or (resume is not None and any(resume.checkpoints.glob("*"))):
        return
    directory, wrong = Path(weights), None
    kept = resolved.spec.train.kept_dtype
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            raise NotADirectoryError
        wrong = why_quantised(directory) or why_precision_is_lost(read_hf_layout(directory), kept)
    except (FileNotFoundError, NotADirectoryError):
        wrong = f"{weights} is not a directory; give one with safetensors"
    except UsageError as error:
        wrong = str(error)
    except OSError as error:
        wrong = f"{error.filename}: cannot be read: {error.strerror}; give a directory with safetensors"
    if wrong:
        raise resolved.mistake("model.weights", wrong)


def _check_storage(prepared: PreparedJob) -> None:
    """Check that a run directory can be made, and that its saves fit."""
    resume = prepared.resume
    if resume is None:
        check_run_root(runs_root())
    held = len(resumable_checkpoints(resume.checkpoints)) if resume else None
    place = resume.path if resume else runs_root()
    for finding in find_storage_problems([(prepared.spec, prepared.plan)], place, held=held):
        if finding.level == "refused":
            raise SiteError(finding.text)
