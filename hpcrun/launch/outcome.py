"""The end of a run under a supervisor: how the last attempt ended, and whether the job is queued again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hpcrun.errors import EXIT_DO_NOT_RESTART, EXIT_SITE, SiteError
from hpcrun.launch import recovery
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.final_save import effective_grace_s
from hpcrun.launch.requeue_exclusion import apply_requeue_exclusion, build_requeue_exclusion
from hpcrun.launch.run_context import RunContext
from hpcrun.runs.lease import LeaderEventWriter
from hpcrun.slurm.allocation import batch_identity
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.supervisor import RequeueEvent
from hpcrun.specs.io_retry import retry_while_full
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import Attempt, RunDir


class OutcomeRecorder:
    """Writes down how attempts and the run end; FencedError where another supervisor leads."""

    def __init__(
        self, spec: JobSpec, site: RunContext, note: Callable[[str], None], verify: Callable[[], None]
    ) -> None:
        self._spec, self._context, self._note, self._verify = spec, site, note, verify

    def event(self, attempt: Attempt, event: Event) -> None:
        """Write an event, before an attempt begins or after it is over."""
        events = LeaderEventWriter(attempt.run.events, self._verify)
        events.append(event, attempt.number)
        events.close()

    def attempt(self, outcome: AttemptOutcome, **after: str | None) -> None:
        """How an attempt has ended, and what came after it."""
        record = {"status": outcome.status, "exit_code": outcome.exit_code, "message": outcome.message}
        outcome_fields = {"step": outcome.step, "requeued": None, "relaunched": None, "ended": time.time()}
        with suppress(OSError):
            retry_while_full(lambda: write_json(outcome.files.outcome, record | outcome_fields | after))

    def close(self, outcome: AttemptOutcome, progress: int | None, refused: str = "") -> AttemptOutcome:
        """Record how the last attempt ended, and queue the job again where that is called for.

        `progress`: see recovery.why_no_retry. `refused` says why the run does not go on in this allocation.
        """
        fate = (
            self._context.allocation.disposition() if self._context.allocation and outcome.stop else "running"
        )
        if fate == "queued again":
            # A preemption, or somebody's `scontrol requeue`: the run is not over.
            self.attempt(outcome, requeued="preemption")
            self.event(outcome.files, RequeueEvent("preemption"))
            return outcome
        if fate == "time limit" and outcome.status != "saved":
            outcome = replace(outcome, status="failed", message=f"reached its time limit; {outcome.message}")
        if recovery.REPEATED_FAILURE in refused:
            outcome = replace(outcome, exit_code=EXIT_DO_NOT_RESTART)
        cause, why_not = self._queue_again(outcome, progress)
        self.attempt(outcome, requeued=cause)
        if cause is not None:
            self.event(outcome.files, RequeueEvent(cause))
            return outcome
        self._verify()
        why_not = why_not or (refused if outcome.attempt > 1 else "")
        message = f"{outcome.message}; not tried again: {why_not}" if why_not else outcome.message
        record_run_exit(
            outcome.run, outcome.status, outcome.exit_code, message, outcome.attempt, outcome.step
        )
        return replace(outcome, message=message)

    def _queue_again(
        self, outcome: AttemptOutcome, progress: int | None
    ) -> tuple[recovery.RestartCause | None, str]:
        """The cause for which the job was queued again, or why it was not, where one might expect it."""
        allocation, spec = self._context.allocation, self._spec
        if allocation is None or not self._context.is_batch or outcome.exit_code == EXIT_DO_NOT_RESTART:
            return None, ""
        cause = recovery.restart_cause(
            outcome, effective_grace_s(outcome.run, spec), allocation.seconds_left()
        )
        if cause is None or (cause in recovery.FAULT_CAUSES and spec.retries is None):
            return None, ""
        refused = recovery.why_no_retry(outcome.run, spec, cause, outcome, progress, in_place=False)
        # Where the ranks have not even started, Slurm would give the same nodes again.
        ill = outcome.lost if outcome.exit_code == EXIT_SITE else ()
        self._verify()
        if refused is None:
            away = build_requeue_exclusion(allocation, ill, spec.resources.all_nodes) if ill else ""
            try:
                allocation.requeue()
            except SiteError as error:
                refused = str(error)
        if refused is not None:
            return None, refused
        self._note(f"{cause.replace('_', ' ')}: queued again as job {allocation.id}")
        if away:
            self._note(apply_requeue_exclusion(allocation, away))
        return cause, ""


def record_run_exit(
    run: RunDir,
    status: str,
    exit_code: int,
    message: str,
    attempt: int | None = None,
    step: int | None = None,
) -> None:
    """Write how a run has ended."""
    record = {"status": status, "exit_code": exit_code, "message": message, "attempt": attempt, "step": step}
    record |= batch_identity(os.environ)
    # Where even this cannot be written, the message on the terminal says so.
    with suppress(OSError):
        retry_while_full(lambda: write_json(run.exit, record | {"ended": time.time()}))
