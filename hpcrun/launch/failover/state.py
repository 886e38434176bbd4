"""What a supervisor knows that continues the run of another one; fencing of the other one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hpcrun.errors import EXIT_DONE, EXIT_RANKS_DIED, EXIT_SAVED
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.attempt_monitor import AttemptOutcome, OutcomeStatus
from hpcrun.runs.lease import (
    LEADER_TIMEOUT_S,
    claim_epoch,
    epoch_claim_time,
    has_active_leader,
    leader_fingerprint,
    newest_epoch,
)
from hpcrun.runs.run_lock import lock_run, read_supervisor_record, take_over_run_lock
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.events.log import EventWriter, read_events
from hpcrun.specs.events.supervisor import FailoverEvent, NodeLostEvent, RelaunchEvent, SignalEvent
from hpcrun.specs.metrics import StepMetric, read_metrics
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt, RunDir

_POLL_S = 1.0
_FENCED_RANKS_S = LEADER_TIMEOUT_S + 4.0
"""Time that the ranks of a fenced supervisor may need to end."""
_LEASE_STALE_S = 8 * LEADER_TIMEOUT_S
"""A lease that stands still this long has no supervisor and no successor."""


@dataclass(frozen=True)
class FailoverState:
    """The epoch of the new supervisor, and the host of the former one."""

    epoch: int | None
    """None if all ranks are on one host: nobody else could lead there."""
    former: str
    killed_by: str = ""
    """The signal that killed the former supervisor on this same, healthy host; empty after a failover."""

    @property
    def is_in_place(self) -> bool:
        """Whether the new supervisor runs below the batch shell, as the former did."""
        return bool(self.killed_by)

    @property
    def elsewhere(self) -> int | None:
        """The epoch, if the new supervisor does not run below the batch shell."""
        return None if self.is_in_place else self.epoch

    @property
    def missing(self) -> str:
        """The node that was lost with the former supervisor."""
        return "" if self.is_in_place else self.former

    def last_attempt(self, run: RunDir, lost: Sequence[NodeLost]) -> AttemptOutcome | None:
        """The outcome of the attempt that the former supervisor could not finish; None if there is none.

        Also writes the events that it did not write, so that the run's records are complete.
        """
        attempts = run.attempts()
        if not attempts or attempts[-1].outcome.exists():
            return None
        attempt = attempts[-1]
        step = _last_step(attempt)
        result = read_json(attempt.result)
        if isinstance(result, dict) and result.get("attempt") == attempt.number:
            is_saved = result.get("status") == "saved"
            status: OutcomeStatus = "saved" if is_saved else "done"
            at = "" if step is None else f" at step {step}"
            code = EXIT_SAVED if is_saved else EXIT_DONE
            outcome = AttemptOutcome(run, attempt.number, status, code, f"{status}{at}", step, result)
        elif self.is_in_place and not lost:
            message = f"the supervisor on {self.former} was killed by {self.killed_by}"
            stop = signal.SIGTERM if _was_asked_to_stop(attempt) else None
            message += "; it was asked to save and stop" if stop else ""
            outcome = AttemptOutcome(
                run,
                attempt.number,
                "failed",
                EXIT_RANKS_DIED,
                message,
                step,
                stop=stop,
                kind="infrastructure",
                leaderless=True,
            )
        else:
            names = tuple(node_lost.node for node_lost in lost) or (self.former,)
            why = lost[0].why if lost else "its supervisor did not answer any more"
            message = f"node {names[0]} is lost: {why}; log: {run.agent_logs / f'{names[0]}.log'}"
            stop = signal.SIGTERM if _was_asked_to_stop(attempt) else None
            message += "; it was asked to save and stop" if stop else ""
            outcome = AttemptOutcome(
                run, attempt.number, "failed", EXIT_RANKS_DIED, message, step, stop=stop, lost=names
            )
        self._tell(run, outcome, lost)
        return outcome

    def _tell(self, run: RunDir, outcome: AttemptOutcome, lost: Sequence[NodeLost]) -> None:
        claimed = None if self.epoch is None else epoch_claim_time(run, self.epoch)
        failover = FailoverEvent(self.former, os.uname().nodename, self.epoch, claimed, self.killed_by)
        losses = [NodeLostEvent(node_lost.node, node_lost.why) for node_lost in lost] if outcome.lost else []
        writer = EventWriter(run.events)
        for event in (failover, *losses, outcome.as_event()):
            writer.append(event, outcome.attempt)
        writer.close()


@contextmanager
def own_run(run: RunDir, allocation: Allocation | None, note: Callable[[str], None]) -> Iterator[None]:
    """Own a run inside the block; RunOwnedError if another supervisor does.

    A supervisor of the same job from before a requeue may still live on a node that Slurm cannot reach: it is
    fenced by a newer epoch, and its ranks end.
    """
    former = read_supervisor_record(run)
    is_ours = allocation is not None and former.get("slurm_job") == allocation.job
    if not (
        allocation
        and is_ours
        and (former.get("restarts") or 0) < allocation.restarts
        and has_active_leader(run)
    ):
        with lock_run(run):
            yield
        return
    note(f"the supervisor on {former.get('host')}, from before the job was queued again, lives; it is fenced")
    while not claim_epoch(run, newest_epoch(run) + 1):
        pass
    time.sleep(_FENCED_RANKS_S)
    with take_over_run_lock(run):
        yield


def read_left_out_nodes(run: RunDir) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes that the newest allocation has lost, and those excluded for faults."""
    attempt, goes_on = 0, True
    lost: set[str] = set()
    out: set[str] = set()
    for record in read_events(run.events):
        if record.attempt > attempt:
            if not goes_on:  # in another allocation
                lost, out = set(), set()
            attempt, goes_on = record.attempt, False
        match record.event:
            case NodeLostEvent(node=node):
                lost.add(node)
            case RelaunchEvent(excluded=excluded):
                goes_on, out = True, set(excluded)
    return frozenset(out & lost), frozenset(out - lost)


def _was_asked_to_stop(attempt: Attempt) -> bool:
    """Whether the run was asked to stop since the attempt began.

    A request names the newest attempt at that time: time stamps of two hosts cannot be compared.
    """
    wish = read_json(attempt.run.wish)
    own = [record.event for record in read_events(attempt.run.events) if record.attempt == attempt.number]
    if any(isinstance(event, SignalEvent) and event.signal in ("SIGTERM", "SIGINT") for event in own):
        return True
    return isinstance(wish, dict) and wish.get("attempt") == attempt.number


def _last_step(attempt: Attempt) -> int | None:
    steps = [
        record.metric.step
        for record in read_metrics(attempt.run)
        if record.attempt == attempt.number and isinstance(record.metric, StepMetric)
    ]
    return steps[-1] if steps else None


def await_run_end(run: RunDir, is_told_to_end: Callable[[], bool]) -> None:
    """Wait until the run has ended, nobody leads it any more, or the job is to end."""
    sign, since = "", time.monotonic()
    while run.read_exit() is None and time.monotonic() - since < _LEASE_STALE_S and not is_told_to_end():
        with suppress(OSError):
            seen = leader_fingerprint(run)
            if seen != sign:
                sign, since = seen, time.monotonic()
        time.sleep(_POLL_S)
