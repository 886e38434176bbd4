"""Recovery after a supervisor was killed on its host: continue here, or leave the run to another node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcrun import process
from hpcrun.checkpoint.flush.arena import SHM, locate_arena, remove_arena_folder
from hpcrun.errors import EXIT_RANKS_DIED
from hpcrun.launch import recovery
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.failover.guardian import SupervisorCrash
from hpcrun.launch.failover.state import FailoverState, await_run_end
from hpcrun.launch.outcome import OutcomeRecorder
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.runs.lease import claim_epoch, epoch_owner, newest_epoch
from hpcrun.runs.run_lock import clean_up_leftovers, read_supervisor_record
from hpcrun.slurm.allocation import batch_identity
from hpcrun.specs.job import JobSpec
from hpcrun.specs.rundir import RunDir


class LocalRecovery:
    """Decides how a run continues whose supervisor was killed on this host."""

    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        site: RunContext,
        crash: SupervisorCrash,
        inbox: SignalQueue,
        note: Callable[[str], None],
    ) -> None:
        self._run, self._spec, self._context, self._crash = run, spec, site, crash
        self._signal_queue, self._note = inbox, note
        self._host = os.uname().nodename
        self._is_told_to_end = False

    def decide(self) -> FailoverState | AttemptOutcome | None:
        """A state to continue from; an outcome if it has ended or went to another node; None: start anew.

        If another node leads the run or is about to, this waits for it: Slurm ends the job with this process.
        """
        if (ended := self._ended()) is not None:
            return ended
        epoch = self._own_epoch()
        self._clear_up(has_agents=epoch is not None)
        if epoch is None:
            return self._give_up() if self._crash.is_last else self._on_this_host()
        if self._crash.is_last or newest_epoch(self._run) > epoch or not claim_epoch(self._run, epoch + 1):
            return self._leave_to_others()
        return FailoverState(epoch + 1, self._host, self._crash.signal_name)

    def _ended(self) -> AttemptOutcome | None:
        """The outcome if the run has ended meanwhile; the record of an earlier job does not count."""
        record = self._run.read_exit()
        if record is None:
            return None
        if not self._is_of_this_start(record):
            self._run.exit.unlink()
            return None
        status, code, message = record["status"], record["exit_code"], record["message"]
        return AttemptOutcome(self._run, record["attempt"] or 0, status, code, message, record["step"])

    def _is_of_this_start(self, record: dict[str, Any]) -> bool:
        """Whether an exit record is of this start of the job; another host may have written it."""
        identity = batch_identity(os.environ)
        if identity:
            return identity.items() <= record.items()
        # Without a Slurm job only this host writes it.
        return bool(record["ended"] >= self._crash.began)

    def _own_epoch(self) -> int | None:
        """The newest epoch claimed by a supervisor of this job on this host; None if there is none."""
        for epoch in range(newest_epoch(self._run), 0, -1):
            maker = epoch_owner(self._run, epoch)
            if maker is not None and maker[0] == self._host and maker[1] in self._crash.pids:
                return epoch
        return None

    def _on_this_host(self) -> FailoverState | None:
        record = read_supervisor_record(self._run)
        is_ours = record.get("host") == self._host and record.get("pid") in self._crash.pids
        return FailoverState(None, self._host, self._crash.signal_name) if is_ours else None

    def _clear_up(self, *, has_agents: bool) -> None:
        """End what the former supervisor left below the guardian, except the agents' Slurm steps."""
        if os.getppid() != self._crash.parent:
            return
        below = [child for child in process.descendants(self._crash.parent) if child.pid != os.getpid()]
        if has_agents:
            words = dict(process.command_lines())
            below = [child for child in below if "_beside" in words.get(child, ())]
        process.kill_processes(below)

    def _leave_to_others(self) -> AttemptOutcome:
        """The agents start another supervisor: wait until the run has ended or nobody leads it."""
        self._note(f"the run is left to its other nodes: {self._describe_crashes()}")
        while True:
            await_run_end(self._run, self._is_job_ending)
            if (ended := self._ended()) is not None:
                return ended
            if self._is_told_to_end or claim_epoch(self._run, newest_epoch(self._run) + 1):
                return self._give_up()

    def _is_job_ending(self) -> bool:
        allocation = self._context.allocation
        if self._signal_queue.read():
            self._is_told_to_end = allocation is None or allocation.disposition() != "running"
        return self._is_told_to_end

    def _describe_crashes(self) -> str:
        return f"{self._crash.in_a_row} supervisors in a row were killed on {self._host}"

    def _give_up(self) -> AttemptOutcome:
        """Nobody leads the run: record its end here, or requeue the job if it asks for that."""
        run, spec = self._run, self._spec
        clean_up_leftovers(run)
        remove_arena_folder(locate_arena(SHM, run.run_id, self._host))
        attempts = run.attempts()
        outcome = FailoverState(None, self._host, self._crash.signal_name).last_attempt(run, ())
        if outcome is None:
            number = attempts[-1].number if attempts else 0
            outcome = AttemptOutcome(run, number, "failed", EXIT_RANKS_DIED, "", None, leaderless=True)
        if outcome.leaderless:
            outcome = replace(outcome, message=self._describe_crashes())
        if self._is_told_to_end:
            outcome = replace(outcome, stop=signal.SIGTERM)
        before = [
            outcome_record.get("step") or 0
            for outcome_record in recovery.read_outcomes(run)
            if outcome_record.get("requeued")
        ]
        progress = None if spec.command else recovery.newest_saved_step(run) - max(before, default=0)
        return OutcomeRecorder(spec, self._context, self._note, lambda: None).close(outcome, progress)
