"""Whether a job goes back into the queue: why its attempt ended, how often before, and what it got done."""

from __future__ import annotations

import signal
from typing import Any, Literal

from hpcrun.errors import EXIT_RANKS_DIED
from hpcrun.launch.course import Outcome
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import saved_steps

Cause = Literal["time_limit", "preemption", "crash"]
_LATE_S = 120.0
"""Slurm sends the signal up to a minute early, and saving takes its time."""


def cause_of(outcome: Outcome, grace_s: float, seconds_left: float | None) -> Cause | None:
    """Why another attempt has to go on with the run; None when none has: it is done, or was told to stop."""
    if outcome.status == "saved" and outcome.stop == signal.SIGUSR2:
        near = seconds_left is None or seconds_left <= grace_s + _LATE_S
        return "time_limit" if near else "preemption"
    if outcome.status == "failed" and outcome.exit_code == EXIT_RANKS_DIED and outcome.stop is None:
        return "crash"
    return None


def refusal(run: RunDir, spec: JobSpec, cause: Cause, progress: int | None) -> str | None:
    """Why the job must not be queued again for this cause, or None when it may.

    `progress`: steps that were won by this attempt, None where nobody counts them.
    """
    retries = spec.retries
    if retries is None:
        return "the job has no retry: block, and a command is not known to go on where it stopped"
    if progress is not None and progress <= 0:
        return "there was no progress since the last attempt"
    budget, used = getattr(retries, cause), requeues(run, cause)
    if budget is not None and used >= budget:
        return f"retry.{cause} allows {budget}, and {used} have been used"
    return None


def requeues(run: RunDir, cause: Cause) -> int:
    """How often the job was queued again for this cause."""
    return sum(record.get("requeued") == cause for record in outcomes(run))


def outcomes(run: RunDir) -> list[dict[str, Any]]:
    """How the attempts of a run have ended, oldest first; those that left no word are missing."""
    records = (read_json(attempt.outcome) for attempt in run.attempts())
    return [record for record in records if isinstance(record, dict)]


def saved_step(run: RunDir) -> int:
    """The step that a new attempt would go on from."""
    steps = saved_steps(run.checkpoints)
    return steps[-1].step if steps else 0
