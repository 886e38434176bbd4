"""Where the wall time of a run goes: events and metric records in, in order, and every second in one bucket.

The counters for Prometheus are this account as the records come, by the wall clock. The ledger is the same
account at the end of the files, by a better clock, with what only hindsight tells: which steps were lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hpcrun.errors import EXIT_NOT_A_NUMBER, EXIT_RANKS_DIED
from hpcrun.specs.events.attempt import (
    ExitEvent,
    HangEvent,
    LauncherEndedEvent,
    LaunchEvent,
    ProcessesEndedEvent,
    RankEndedEvent,
    RankFailedEvent,
    RanksConnectedEvent,
    ResultEvent,
)
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.supervisor import FaultEvent, NodeLostEvent, RelaunchEvent, RequeueEvent
from hpcrun.specs.metrics import (
    EvalMetric,
    Metric,
    RestoreMetric,
    SaveMetric,
    StartMetric,
    StepMetric,
    WeightsMetric,
)

BUCKETS = (
    *("productive", "recompute", "queued", "start", "restore", "checkpoint", "eval"),
    *("detection", "recovery", "shutdown", "stopped", "other"),
)
"""`recompute`: steps that are done again; the ledger has the steps that were thrown away as lost instead."""
_CALM_STATES = ("done", "saved", "interrupted")
_WITHIN_ATTEMPT = (
    *(RanksConnectedEvent, RankEndedEvent, RankFailedEvent, LauncherEndedEvent, NodeLostEvent, HangEvent),
    *(ResultEvent, ProcessesEndedEvent, ExitEvent),
)
PROGRESS_METRICS = (StartMetric, StepMetric, EvalMetric, SaveMetric, RestoreMetric, WeightsMetric)
"""What takes time of training; other lines tell of what goes on in the background."""


@dataclass
class Fault:
    """What took an attempt down, by what was seen of it."""

    attempt: int
    at: float
    """When it was seen first."""
    cause: str = ""
    """Empty until it is known: the supervisor names it after the attempt's end."""
    kind: str = "unknown"
    nodes: tuple[str, ...] = ()
    rank: int | None = None
    message: str = ""
    detection_s: float = 0.0
    """From the last sign of progress until it was seen."""
    recovery_s: float | None = None
    """From then to the first step beyond all earlier ones."""
    is_abandoned: bool = False
    """Whether a person came between it and the next attempt."""


@dataclass
class TimeAccount:
    """The buckets, and what has to be remembered to go on; plain values, so that it can be stored."""

    state: str = "waiting"
    attempt: int = 0
    buckets: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    faults: list[Fault] = field(default_factory=list)
    counted_to: float | None = None
    """All time up to here is in a bucket, but for the slack."""
    slack_s: float = 0.0
    """Time before the newest line that it did not take itself; a line that comes right after may claim it."""
    last: float = 0.0
    """When the newest record of this attempt was written."""
    gap: str = "stopped"
    """The bucket of the time between two attempts."""
    job: str | None = None
    """The batch job of the newest attempt, `none` without one; None before the first."""
    reached: int = 0
    is_connected: bool = False
    has_lines: bool = False
    has_stepped: bool = False
    is_good: bool = False
    is_over: bool = True
    ended_at: float | None = None
    """When the processes of this attempt were ended."""
    seen_fault: Fault | None = None
    """The first sign of a failure in this attempt, until the fault is on the list."""
    orderly_end: Fault | None = None
    """A rank that ended in order: a sign only if the attempt turns out to have failed."""
    cleanup_s: float = 0.0
    """The time of recovery of this attempt: where nobody goes on, it was its shutdown."""

    def start_attempt(self, attempt: int, now: float, job: str = "") -> None:
        """Count the time until an attempt begins; `job`: empty where its launch is not on record."""
        if not self.is_over:
            self._end_without_exit(self.last, is_over=True)
        self._list_fault()
        if self.gap == "stopped" and self.job is not None:
            self.gap = _gap_bucket(self.job, job, is_over=self.is_over)
        if self.gap == "stopped":
            for fault in self.faults:
                fault.is_abandoned = True
        self._count_until(now, self.gap)
        self.state, self.attempt, self.gap, self.job, self.last = "starting", attempt, "stopped", job, now
        self.is_connected = self.has_lines = self.has_stepped = self.is_good = self.is_over = False
        self.ended_at, self.orderly_end, self.cleanup_s = None, None, 0.0

    def take_event(self, event: Event, attempt: int, now: float) -> None:
        """Count the time until an event; one that says nothing about time ends nothing."""
        if attempt < self.attempt:
            return
        if attempt > self.attempt and isinstance(event, _WITHIN_ATTEMPT):
            self.start_attempt(attempt, now)
        match event:
            case LaunchEvent(job=job):
                self.start_attempt(attempt, now, "none" if job is None else str(job))
            case RanksConnectedEvent() if not self.is_connected:
                self._count_until(now, "start")
                self.is_connected, self.state = True, "running"
            case RankEndedEvent(rank=rank, node=node, wait_status=status):
                self._see_failure(Fault(attempt, now, nodes=(node,), rank=rank), is_orderly=status == 0)
            case RankFailedEvent(rank=rank):
                self._see_failure(Fault(attempt, now, rank=rank))
            case LauncherEndedEvent(wait_status=status):
                self._see_failure(Fault(attempt, now), is_orderly=status == 0)
            case NodeLostEvent(node=node, why=why):
                self._see_failure(Fault(attempt, now, "node lost", nodes=(node,), message=why))
            case HangEvent(message=message):
                self._see_failure(Fault(attempt, now, "hang", message=message))
            case ResultEvent():
                self._count_until(now, "shutdown" if self.has_lines else "other")
                self.is_good = True
            case ProcessesEndedEvent():
                self.ended_at = now if self.ended_at is None else self.ended_at
            case ExitEvent():
                self._exit(event, attempt, now)
            case FaultEvent():
                self._name_fault(event, attempt, now)
            case RelaunchEvent() | RequeueEvent():
                self._list_fault()
                self.gap = "recovery" if isinstance(event, RelaunchEvent) else "queued"
                self._count_until(now, self.gap)
                self.is_over = True
        self.last = max(self.last, now)

    def take_metric(self, metric: Metric, attempt: int, now: float) -> float:
        """Count the time until a line was written; returns the part of it that the line took itself."""
        if not isinstance(metric, PROGRESS_METRICS):
            return 0.0
        busy_s = metric.busy_s
        if attempt > self.attempt:  # its launch is not in the file
            self.start_attempt(attempt, now - busy_s)
        if not self.is_connected:
            # Rank 0 may be heard of before the supervisor has seen that all ranks have connected.
            self._count_until(now - busy_s, "start")
            self.is_connected, self.state = True, "running"
        if not isinstance(metric, SaveMetric | EvalMetric):
            self._count_slack()
        passed = self._advance(now)
        own_s = min(busy_s, passed + self.slack_s)
        self.slack_s += passed - own_s
        match metric:
            case StepMetric(step=step):
                self.buckets["productive" if step > self.reached else "recompute"] += own_s
                if not self.has_stepped:
                    self._count_slack()
                self.has_stepped = True
                self._reach(step, now)
            case SaveMetric():
                self.buckets["checkpoint"] += own_s
            case EvalMetric():
                self.buckets["eval"] += own_s
            case _:
                self.slack_s += own_s
                self._count_slack()
        self.has_lines, self.last = True, max(self.last, now)
        return own_s

    def finish(self, now: float | None) -> None:
        """Count what is left: until now, where the run continues; without it the newest attempt is over."""
        if not self.attempt:
            return
        if self.is_over:
            self._list_fault()
            failed = any(fault.attempt == self.attempt for fault in self.faults)
            bucket = self.gap if self.gap != "stopped" else "recovery" if failed else "other"
            self._count_until(self.last if now is None else now, bucket)
        else:
            self._end_without_exit(self.last if now is None else now, is_over=now is None)
        if now is None:
            self.buckets["recovery"] -= self.cleanup_s
            self.buckets["shutdown"] += self.cleanup_s

    def _advance(self, now: float) -> float:
        """How much time has passed; records that come late are of time that was counted."""
        before = now if self.counted_to is None else self.counted_to
        self.counted_to = max(before, now)
        return self.counted_to - before

    def _count_until(self, now: float, bucket: str) -> float:
        self._count_slack()
        passed = self._advance(now)
        self.buckets[bucket] += passed
        return passed

    def _count_slack(self) -> None:
        self.buckets["other" if self.has_stepped else "restore"] += self.slack_s
        self.slack_s = 0.0

    def _reach(self, step: int, now: float) -> None:
        if step <= self.reached:
            return
        self.reached = step
        for fault in self.faults:
            if fault.recovery_s is None and not fault.is_abandoned and fault.attempt != self.attempt:
                fault.recovery_s = max(0.0, now - fault.at)

    def _see_failure(self, fault: Fault, *, is_orderly: bool = False) -> None:
        """The time before it is counted at the attempt's end, which says whether it was a failure."""
        if self.is_good or self.is_over:
            return
        if is_orderly:
            self.orderly_end = self.orderly_end or fault
        else:
            self.seen_fault = self.seen_fault or fault

    def _exit(self, event: ExitEvent, attempt: int, now: float) -> None:
        self.state = event.status if event.status in _CALM_STATES else "failed"
        if self.is_good or event.status in _CALM_STATES:
            self.is_good, self.seen_fault = True, None
            self._count_until(now, self._calm_bucket())
        elif not self.is_over:
            at = now if self.ended_at is None else self.ended_at
            fault = self.seen_fault or self.orderly_end or Fault(attempt, at, self._unseen_cause())
            if event.exit_code == EXIT_NOT_A_NUMBER:
                fault = replace(fault, cause="not a number")
            self._count_failure(replace(fault, message=fault.message or event.message), now)
            # Of ranks that died the supervisor says more in a moment.
            if event.exit_code != EXIT_RANKS_DIED:
                self._list_fault()
                self.state = "failed"
        self.is_over = True

    def _end_without_exit(self, now: float, *, is_over: bool) -> None:
        """Count an attempt of which no end is told: it goes on, or its supervisor was lost."""
        has_ended = self.ended_at is not None
        if self.seen_fault is None and has_ended and not self.is_good:
            self.seen_fault = self.orderly_end or Fault(
                self.attempt, self.ended_at or now, self._unseen_cause()
            )
        if self.seen_fault is not None and not self.is_good:
            self._count_failure(self.seen_fault, now)
        else:
            is_restoring = self.is_connected and self.reached and not self.has_stepped
            bucket = "restore" if is_restoring else "other" if self.is_connected else "start"
            self._count_until(now, "shutdown" if self.is_good else bucket)
            if is_over and not self.is_good:
                self.seen_fault = Fault(self.attempt, now, "supervisor lost")
        self._list_fault()
        self.is_over = is_over and has_ended

    def _count_failure(self, fault: Fault, now: float) -> None:
        """Count the time until the fault was seen, and from then on."""
        detection_s = 0.0
        if self.is_connected:
            detection_s = self._count_until(min(fault.at, now), "detection")
        else:
            self._count_until(min(fault.at, now), "start")
        self.cleanup_s += self._count_until(now, "recovery")
        self.seen_fault = replace(fault, detection_s=detection_s)

    def _name_fault(self, event: FaultEvent, attempt: int, now: float) -> None:
        """The supervisor names the fault; details that it leaves out are those of what was seen first."""
        if self.is_over:
            self.cleanup_s += self._count_until(now, "recovery")
        elif self.seen_fault is None:
            self.seen_fault = Fault(attempt, now)
        listed = self.faults[-1] if self.faults and self.faults[-1].attempt == attempt else None
        fault = self.seen_fault or listed or Fault(attempt, now)
        fault.cause = fault.cause if fault is listed else event.cause
        fault.kind, fault.nodes = event.kind, event.nodes or fault.nodes
        fault.rank = fault.rank if event.rank is None else event.rank
        fault.message = event.message or fault.message
        if self.is_over and fault is not listed:
            self.seen_fault = fault
            self._list_fault()

    def _list_fault(self) -> None:
        fault, self.seen_fault = self.seen_fault, None
        if fault is not None:
            fault.cause = fault.cause or "crash"
            self.faults.append(fault)
            self.state = "fault"

    def _calm_bucket(self) -> str:
        if self.has_lines or self.is_good:
            return "shutdown"
        return "other" if self.is_connected else "start"

    def _unseen_cause(self) -> str:
        return "hang" if self.is_connected else "not started"


def _gap_bucket(before: str, after: str, *, is_over: bool) -> str:
    """The bucket of the time between attempts of these jobs, where no event says what came between.

    Slurm queues the same job again; another job, or none, is somebody's. `is_over`: the first told its end.
    """
    if before and after:
        return "queued" if before == after != "none" else "stopped"
    # An attempt that ended without a word was most likely lost with its node.
    return "stopped" if is_over or after == "none" else "queued"
