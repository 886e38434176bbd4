"""The supervisor that comes after one that was killed alone, on its host: goes on, or leaves it to others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcrun import process
from hpcrun.checkpoint.flush.arena import SHM, arena_folder, remove_folder
from hpcrun.errors import EXIT_RANKS_DIED
from hpcrun.launch import recovery
from hpcrun.launch.attempt_monitor import Outcome
from hpcrun.launch.failover.state import Succession, stand_back
from hpcrun.launch.outcome import Register
from hpcrun.launch.run_context import Site
from hpcrun.launch.signal_queue import Inbox
from hpcrun.launch.supervisor_restart import Fall
from hpcrun.runs.lease import claim, claimed_by, newest_epoch
from hpcrun.runs.run_lock import supervisor_of, sweep_leftovers
from hpcrun.slurm.allocation import batch_identity
from hpcrun.specs.job import JobSpec
from hpcrun.specs.rundir import RunDir


class ComeBack:
    """A run whose supervisor was killed here, and what there is to go on with."""

    def __init__(
        self, run: RunDir, spec: JobSpec, site: Site, fall: Fall, inbox: Inbox, note: Callable[[str], None]
    ) -> None:
        self._run, self._spec, self._site, self._fall = run, spec, site, fall
        self._inbox, self._note = inbox, note
        self._host = os.uname().nodename
        self._is_told_to_end = False

    def decide(self) -> Succession | Outcome | None:
        """How to go on with it; None: as if nobody had begun. Its outcome, where it is not ours any more.

        Where others lead it, or are to, they are waited for: with us, Slurm would end the job.
        """
        if (ended := self._ended()) is not None:
            return ended
        epoch = self._own_epoch()
        self._clear_up(has_agents=epoch is not None)
        if epoch is None:
            return self._give_up() if self._fall.is_last else self._on_this_host()
        if self._fall.is_last or newest_epoch(self._run) > epoch or not claim(self._run, epoch + 1):
            return self._leave_it()
        return Succession(epoch + 1, self._host, self._fall.signal_name)

    def _ended(self) -> Outcome | None:
        """How the run has ended meanwhile; what stands there from an earlier job does not count."""
        record = self._run.read_exit()
        if record is None:
            return None
        if not self._is_of_this_start(record):
            self._run.exit.unlink()
            return None
        status, code, message = record["status"], record["exit_code"], record["message"]
        return Outcome(self._run, record["attempt"] or 0, status, code, message, record["step"])

    def _is_of_this_start(self, record: dict[str, Any]) -> bool:
        """Whether an end was written since this start of the job; it may be of another host."""
        told = batch_identity(os.environ)
        if told:
            return told.items() <= record.items()
        # Without a job nobody but this host writes it.
        return bool(record["ended"] >= self._fall.began)

    def _own_epoch(self) -> int | None:
        """The newest epoch that a supervisor of this job has made here; None where none came so far."""
        for epoch in range(newest_epoch(self._run), 0, -1):
            maker = claimed_by(self._run, epoch)
            if maker is not None and maker[0] == self._host and maker[1] in self._fall.pids:
                return epoch
        return None

    def _on_this_host(self) -> Succession | None:
        known = supervisor_of(self._run)
        is_ours = known.get("host") == self._host and known.get("pid") in self._fall.pids
        return Succession(None, self._host, self._fall.signal_name) if is_ours else None

    def _clear_up(self, *, has_agents: bool) -> None:
        """End what the former supervisor has left below its parent; the steps of agents go on."""
        if os.getppid() != self._fall.parent:
            return
        below = [one for one in process.descendants(self._fall.parent) if one.pid != os.getpid()]
        if has_agents:
            words = dict(process.command_lines())
            below = [one for one in below if "_beside" in words.get(one, ())]
        process.kill_all(below)

    def _leave_it(self) -> Outcome:
        """The agents look for another supervisor: wait until the run has ended, or nobody leads it."""
        self._note(f"the run is left to its other nodes: {self._in_words()}")
        while True:
            stand_back(self._run, self._is_job_ending)
            if (ended := self._ended()) is not None:
                return ended
            if self._is_told_to_end or claim(self._run, newest_epoch(self._run) + 1):
                return self._give_up()

    def _is_job_ending(self) -> bool:
        allocation = self._site.allocation
        if self._inbox.read():
            self._is_told_to_end = allocation is None or allocation.fate() != "running"
        return self._is_told_to_end

    def _in_words(self) -> str:
        return f"{self._fall.in_a_row} supervisors in a row were killed on {self._host}"

    def _give_up(self) -> Outcome:
        """Nobody leads the run: its end is written down here, or the job queued again, as it wants it."""
        run, spec = self._run, self._spec
        sweep_leftovers(run)
        remove_folder(arena_folder(SHM, run.run_id, self._host))
        attempts = run.attempts()
        outcome = Succession(None, self._host, self._fall.signal_name).last_attempt(run, ())
        if outcome is None:
            number = attempts[-1].number if attempts else 0
            outcome = Outcome(run, number, "failed", EXIT_RANKS_DIED, "", None, leaderless=True)
        if outcome.leaderless:
            outcome = replace(outcome, message=self._in_words())
        if self._is_told_to_end:
            outcome = replace(outcome, stop=signal.SIGTERM)
        before = [one.get("step") or 0 for one in recovery.outcomes(run) if one.get("requeued")]
        progress = None if spec.command else recovery.saved_step(run) - max(before, default=0)
        return Register(spec, self._site, self._note, lambda: None).close(outcome, progress)
