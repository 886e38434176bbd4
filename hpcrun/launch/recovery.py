"""What comes after an attempt: nothing, another one in the same allocation, or the job back in the queue."""

from __future__ import annotations

import re
import signal
from typing import Any, Literal

from hpcrun.errors import EXIT_RANKS_DIED, EXIT_SITE
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import resumable_checkpoints

RestartCause = Literal["time_limit", "preemption", "crash", "hang", "node", "straggler", "supervisor lost"]
FAULT_CAUSES: tuple[RestartCause, ...] = ("crash", "hang", "node", "straggler", "supervisor lost")
"""Those that another attempt in the same allocation may overcome."""
_NODE_CAUSES: tuple[RestartCause, ...] = ("node", "supervisor lost")
"""Those that have one budget, `retry.node`."""
_SIGNAL_SLACK_S = 120.0
"""Slurm sends the signal up to a minute early, and saving takes its time."""
_MAX_BACKOFF_S = 60.0
REPEATED_FAILURE = "it failed twice in the same way, without progress"
# What differs between two failures that are one and the same.
# The time was shorter at the second try: who has come by then, and where they wait, is chance.
_NO_WORLD = re.compile(r"^.* did not (?:meet|start) within .*", re.DOTALL)
_VARYING_PARTS = re.compile(r"^rank \d+ on node \S+|\(pid \d+\)|; log: \S+|/attempts/\d+/|\b\d+(?:\.\d+)?\b")


def restart_cause(
    outcome: AttemptOutcome, grace_s: float = 0.0, seconds_left: float | None = None
) -> RestartCause | None:
    """Why another attempt has to go on with the run; None when none has: it is done, or was told to stop."""
    if outcome.status == "saved" and outcome.stop == signal.SIGUSR2:
        near = seconds_left is None or seconds_left <= grace_s + _SIGNAL_SLACK_S
        return "time_limit" if near else "preemption"
    if outcome.status == "saved" and outcome.stop is None and outcome.suspects:
        return "straggler"
    if outcome.status == "failed" and outcome.exit_code == EXIT_RANKS_DIED and outcome.stop is None:
        if outcome.leaderless:
            return "supervisor lost"
        return "hang" if outcome.hung else "node" if outcome.lost else "crash"
    if outcome.status == "failed" and outcome.exit_code == EXIT_SITE and outcome.lost:
        return "node"  # nothing was started: the preflight has left too few nodes
    return None


def why_no_retry(
    run: RunDir,
    spec: JobSpec,
    cause: RestartCause,
    outcome: AttemptOutcome,
    progress: int | None,
    *,
    in_place: bool,
) -> str | None:
    """Why there is to be no other attempt for this cause, or None when there may be one.

    `progress`: steps that were saved by this attempt, None where nobody counts them. A job goes back into the
    queue with progress alone; in its own allocation it may fail without any, but not twice in the same way.
    A lost node is not the job's fault.
    """
    retries = spec.retries
    if retries is None:
        return "the job has no retry: block, and a command is not known to resume where it stopped"
    if in_place and run.attempt(outcome.attempt).restore_failure.exists():
        # Not the job's fault, and it comes to an end: what cannot be loaded twice is not tried again.
        return None
    if cause in ("crash", "hang") and not progress and is_repeated_failure(run, outcome):
        return REPEATED_FAILURE
    if not in_place and cause != "node" and progress is not None and progress <= 0:
        return "there was no progress since the last attempt"
    # A slow node is replaced for as long as there are spares. What kills a supervisor is its node's doing.
    causes = _NODE_CAUSES if cause in _NODE_CAUSES else (cause,)
    key = causes[0]
    budget, used = getattr(retries, key, None), sum(count_restarts(run, cause) for cause in causes)
    if budget is not None and used >= budget:
        return f"retry.{key} allows {budget}, and {used} have been used"
    return None


def backoff_s(fruitless: int) -> float:
    """How long to wait before another attempt, after so many in a row that saved nothing; at first none.

    What fails at once would use up its budget in a minute, and trouble the cluster all the while.
    """
    return 0.0 if fruitless < 2 else min(_MAX_BACKOFF_S, 2.0 * 4.0 ** (fruitless - 2))


def count_restarts(run: RunDir, cause: RestartCause) -> int:
    """How often there was another attempt for this cause; one that could not load its state is none."""
    return sum(
        cause in (record.get("requeued"), record.get("relaunched"))
        and not run.attempt(record["attempt"]).restore_failure.exists()
        for record in read_outcomes(run)
    )


def is_repeated_failure(run: RunDir, outcome: AttemptOutcome) -> bool:
    """Whether the attempt before has failed in the very same way."""
    before = [record for record in read_outcomes(run) if record.get("attempt") == outcome.attempt - 1]
    return bool(before) and failure_signature(before[0].get("message", "")) == failure_signature(
        outcome.message
    )


def failure_signature(message: str) -> str:
    """What two failures have in common that are one and the same."""
    return _VARYING_PARTS.sub("", _NO_WORLD.sub("the ranks did not meet", message))


def read_outcomes(run: RunDir) -> list[dict[str, Any]]:
    """How the attempts of a run have ended, oldest first; those that left no word are missing."""
    records = []
    for attempt in run.attempts():
        record = read_json(attempt.outcome)
        if isinstance(record, dict):
            records.append({"attempt": attempt.number, **record})
    return records


def newest_saved_step(run: RunDir) -> int:
    """The step that a new attempt would go on from."""
    steps = resumable_checkpoints(run.checkpoints)
    return steps[-1].step if steps else 0
