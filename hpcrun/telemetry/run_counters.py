"""Counters of a run: its time account as the records come, and what else Prometheus shows; they never shrink.

A counter must not go back, so every second is judged once: a step that was never done before is productive,
one that is done again is recompute. The time since the newest record is not yet counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.runs.checkpoint_stats import CheckpointStats
from hpcrun.runs.time_account import BUCKETS, TimeAccount
from hpcrun.runs.timeline import LINE_DELAY_S, is_valid_count
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.log import EventRecord, open_events
from hpcrun.specs.events.supervisor import RelaunchEvent, RequeueEvent
from hpcrun.specs.metrics import MetricReader, MetricRecord, StepMetric
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import WrongValue, parse_typed

STEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TELEMETRY_STATES = (
    *("waiting", "starting", "running", "fault", "requeued"),
    *("done", "saved", "failed", "interrupted", "lost"),
)
_PIECE_BYTES = 4 << 20


@dataclass
class RunCounters(TimeAccount):
    """The counters, and what has to be remembered to go on counting; dumps to JSON and reads back."""

    step: int | None = None
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    """How many steps took up to each bound, and longer than all; each step in one of them."""
    steps_s: float = 0.0
    tokens: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    """By CAUSE/LEVEL: level is allocation or requeue."""
    saved_step: int | None = None
    saved_at: float | None = None
    excluded: int = 0
    saves: CheckpointStats = field(default_factory=CheckpointStats)
    """By tier."""

    @property
    def productive_s(self) -> float:
        """The time of steps that were never done before."""
        return self.buckets["productive"]

    @property
    def badput_s(self) -> dict[str, float]:
        """The other buckets."""
        return {name: seconds for name, seconds in self.buckets.items() if name != "productive"}

    @property
    def fault_counts(self) -> dict[str, int]:
        """How many faults of each cause."""
        return dict(Counter(fault.cause for fault in self.faults))

    @property
    def detection_s(self) -> float:
        """Of all faults together."""
        return sum(fault.detection_s for fault in self.faults)

    @property
    def recoveries_s(self) -> list[float]:
        """Of each fault that was recovered from."""
        return [fault.recovery_s for fault in self.faults if fault.recovery_s is not None]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def take(self, events: Iterable[EventRecord], metrics: Iterable[MetricRecord]) -> None:
        """Count further records of both files."""
        records: list[EventRecord | MetricRecord] = [*events, *metrics]
        for record in sorted(records, key=_record_order):
            if isinstance(record, EventRecord):
                self.take_event(record.event, record.attempt, record.time)
            else:
                self._take_line(record)

    def take_event(self, event: Event, attempt: int, now: float) -> None:
        """Count the time until an event, and what else it says."""
        super().take_event(event, attempt, now)
        match event:
            case RelaunchEvent(excluded=excluded):
                cause = self.faults[-1].cause if self.faults else "unknown"
                self._count_restart(f"{cause}/allocation")
                self.excluded = len(excluded)
            case RequeueEvent(cause=cause):
                self._count_restart(f"{cause}/requeue")
                self.state, self.excluded = "requeued", 0

    def _count_restart(self, key: str) -> None:
        self.restarts[key] = self.restarts.get(key, 0) + 1

    def _take_line(self, record: MetricRecord) -> None:
        metric = record.metric
        self.saves.take(record)
        if metric.is_durable_save:
            self.saved_step, self.saved_at = metric.step, record.time
        self.take_metric(metric, record.attempt, record.time)
        if isinstance(metric, StepMetric):
            self.step = metric.step
            self.step_counts[bisect_left(STEP_BOUNDS_S, metric.step_time_s)] += 1
            self.steps_s += metric.step_time_s
            self.tokens += round(metric.tokens_per_s * metric.step_time_s)


class RunCountersReader:
    """Keeps the counters of a run, reading only what is new; its state goes on where an earlier one stood."""

    def __init__(self, run: RunDir, state: Any = None) -> None:
        self.run = run
        state = state if isinstance(state, dict) else {}
        counters = _parse_run_counters(state.get("tally"))
        offsets = [state.get(name) for name in ("events", "metrics")] if counters else [0, 0]
        first, second = (offset if is_valid_count(offset) else 0 for offset in offsets)
        self.tally = counters or RunCounters()
        self._events, self._metrics = open_events(run.events, first), MetricReader(run, second)

    def read(self) -> RunCounters:
        """The counters with all that has been written until now."""
        events = self._events.read()
        # In pieces: the steps of a long run do not have to fit into memory.
        while lines := self._next_lines():
            last = _record_order(lines[-1])
            self.tally.take([record for record in events if _record_order(record) <= last], lines)
            events = [record for record in events if _record_order(record) > last]
        self.tally.take(events, ())
        return self.tally

    def _next_lines(self) -> list[MetricRecord]:
        """The next whole lines, or none when all are read."""
        while True:
            before = self._metrics.offset
            lines = self._metrics.read(_PIECE_BYTES)
            if lines or self._metrics.offset == before:
                return lines

    def as_json(self) -> dict[str, Any]:
        """What another one needs to go on from here."""
        return {
            "events": self._events.offset,
            "metrics": self._metrics.offset,
            "tally": self.tally.as_json(),
        }


def _parse_run_counters(stored: Any) -> RunCounters | None:
    """Counters that were stored; None where they are damaged, or of another version."""
    try:
        counters = parse_typed(RunCounters, stored)
    except WrongValue:
        return None
    is_whole = len(counters.step_counts) == len(STEP_BOUNDS_S) + 1 and counters.buckets.keys() == set(BUCKETS)
    return counters if is_whole else None


def _record_order(record: EventRecord | MetricRecord) -> tuple[int, float]:
    # Attempts first: a clock may be set between two of them.
    delay_s = LINE_DELAY_S if isinstance(record, MetricRecord) else 0.0
    return record.attempt, record.time - delay_s
