"""One attempt of a run on a line of its own: events and metric records placed by one clock, in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

from hpcrun.runs.time_account import PROGRESS_METRICS
from hpcrun.specs.events.attempt import (
    ExitEvent,
    HangEvent,
    LaunchEvent,
    ProcessesEndedEvent,
    RankEndedEvent,
    RankFailedEvent,
    RanksConnectedEvent,
    ResultEvent,
)
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.log import EventRecord
from hpcrun.specs.events.supervisor import NodeLostEvent
from hpcrun.specs.metrics import Metric, MetricRecord, StartMetric, StepMetric

_CLOCK_TOLERANCE_S = 0.5
"""A wall clock that drifts by more than this against the monotonic one has been set."""
LINE_DELAY_S = 1e-3
"""So long after its moment a line may be stamped: it comes before the events of that time."""


class _ClockSegment(NamedTuple):
    """From `first` to `last` on the attempt's line, wall time is that place + offset."""

    first: float
    last: float
    offset: float


class AttemptTimeline:
    """One attempt, from its launch (0) to its end (`length`), in seconds."""

    def __init__(
        self,
        number: int,
        events: Sequence[EventRecord],
        lines: Sequence[MetricRecord],
        now: float | None = None,
    ) -> None:
        self.number, self._now = number, now
        launch = next((n for n, record in enumerate(events) if isinstance(record.event, LaunchEvent)), 0)
        self.before = [record.event for record in events[:launch]]
        """What happened for this attempt before its launch."""
        own_events = events[launch:]
        self.has_launch = bool(own_events) and isinstance(own_events[0].event, LaunchEvent)
        self.events = [record.event for record in events]
        self._places = _event_offsets(own_events)
        self._events = list(zip(self._places, (record.event for record in own_events), strict=True))
        self.begin = own_events[0].time if own_events else lines[0].time - lines[0].metric.busy_s
        """By the wall clock."""
        self._clocks = _clock_segments(own_events, self._places) or [_ClockSegment(0.0, 0.0, self.begin)]
        self._lines = self._place_lines([line for line in lines if isinstance(line.metric, PROGRESS_METRICS)])
        self.saved_step = max((line.metric.step for line in lines if line.metric.is_durable_save), default=0)
        """The newest step that got into the run directory."""
        self.start = _first_step(self._lines)
        """The step after which this attempt went on; None where it did not come that far."""
        exits = [event for _, event in self._events if isinstance(event, ExitEvent)]
        end = self._place_of(ExitEvent, ProcessesEndedEvent)
        self.is_over = end is not None
        is_done = bool(exits) and exits[0].status in ("done", "saved")
        self.is_good = is_done or self._place_of(ResultEvent) is not None
        last = self._places[-1] if self._places else 0.0
        self.length = max([last, *(place for place, _ in self._lines)]) if end is None else end
        self.end = self.length + self._clocks[-1].offset
        """By the wall clock, as it went then."""

    def records(self) -> list[tuple[float, Event | Metric]]:
        """Everything from the launch on, in order, with its place on the line."""
        both: list[tuple[float, Event | Metric]] = [*self._lines, *self._events]
        return sorted(both, key=lambda entry: entry[0] - LINE_DELAY_S * isinstance(entry[1], Metric))

    def place_of_time(self, now: float) -> float:
        """Where a later moment of the wall clock is."""
        return max(self.length, now - self._clocks[-1].offset)

    def _place_of(self, *kinds: type[Event]) -> float | None:
        """Where the first event of a kind is, of the first kind that there is."""
        places = (next((at for at, event in self._events if isinstance(event, kind)), None) for kind in kinds)
        return next((place for place in places if place is not None), None)

    def _place_lines(self, lines: Sequence[MetricRecord]) -> list[tuple[float, Metric]]:
        placed: list[tuple[float, Metric]] = []
        at, ahead = 0.0, self._clock_lead([line.time for line in lines])
        for line in lines:
            at = self._place(line.time - ahead, at)
            placed.append((at, line.metric))
        return placed

    def _clock_lead(self, stamps: Sequence[float]) -> float:
        """By how much at least the clock of rank 0's host is ahead of the supervisor's, or (negative) behind.

        No line is from before the ranks connected, or from after their end: by so much they are moved, and
        no more.
        """
        if not self._events or not stamps or len(self._clocks) != 1:
            return 0.0
        offset = self._clocks[0].offset
        failures = (
            at
            for at, event in self._events
            if isinstance(event, RankFailedEvent | NodeLostEvent | HangEvent)
            or (isinstance(event, RankEndedEvent) and event.wait_status != 0)
        )
        end = self._place_of(ResultEvent)
        end = next(failures, self._place_of(ExitEvent, ProcessesEndedEvent)) if end is None else end
        if end is None and self._now is not None:
            end = self._now - offset
        behind = (self._place_of(RanksConnectedEvent) or 0.0) - (min(stamps) - offset)
        ahead = -math.inf if end is None else max(stamps) - offset - end
        if ahead > _CLOCK_TOLERANCE_S:
            return ahead
        return -behind if behind > _CLOCK_TOLERANCE_S else 0.0

    def _place(self, time: float, previous: float) -> float:
        """Where a wall time is, not before the previous one; with a clock that was set, near events."""
        for index, clock in enumerate(self._clocks):
            at = time - clock.offset
            low = max(previous, self._clocks[index - 1].last if index else 0.0)
            high = self._clocks[index + 1].first if index + 1 < len(self._clocks) else math.inf
            if low - _CLOCK_TOLERANCE_S <= at <= high + _CLOCK_TOLERANCE_S:
                return max(at, previous)
        return max(time - self._clocks[-1].offset, previous)


def build_timelines(
    events: Iterable[EventRecord], metrics: Iterable[MetricRecord], now: float | None = None
) -> list[AttemptTimeline]:
    """The attempts that the lines of both files tell of, in order.

    `now`, by the clock of the events, where the last of them goes on.
    """
    own_events: dict[int, list[EventRecord]] = {}
    own_lines: dict[int, list[MetricRecord]] = {}
    for event in events:
        own_events.setdefault(event.attempt, []).append(event)
    for line in metrics:
        own_lines.setdefault(line.attempt, []).append(line)
    numbers = sorted(own_events.keys() | own_lines.keys())
    timelines = [
        AttemptTimeline(
            number,
            _sort_events(own_events.get(number, [])),
            own_lines.get(number, []),
            now if number == numbers[-1] else None,
        )
        for number in numbers
    ]
    return [timeline for timeline in timelines if timeline.events or timeline.start is not None]


def _first_step(lines: Sequence[tuple[float, Metric]]) -> int | None:
    for _, metric in lines:
        if isinstance(metric, StartMetric | StepMetric):
            return metric.step - isinstance(metric, StepMetric)
    return None


def _sort_events(events: list[EventRecord]) -> list[EventRecord]:
    """In the order in which they happened, where one monotonic clock tells."""
    if len({record.stamp.host for record in events}) == 1:
        return sorted(events, key=lambda record: record.stamp.monotonic)
    return events


def _event_offsets(events: Sequence[EventRecord]) -> list[float]:
    """The seconds of each event since the first one, never going back."""
    places = [0.0] if events else []
    for before, after in pairwise(events):
        passed = after.stamp.monotonic - before.stamp.monotonic
        if before.stamp.host != after.stamp.host or passed < 0:
            passed = after.time - before.time
        places.append(places[-1] + max(0.0, passed))
    return places


def _clock_segments(events: Sequence[EventRecord], places: Sequence[float]) -> list[_ClockSegment]:
    clocks: list[_ClockSegment] = []
    for event, place in zip(events, places, strict=True):
        offset = event.time - place
        if clocks and abs(clocks[-1].offset - offset) < _CLOCK_TOLERANCE_S:
            clocks[-1] = clocks[-1]._replace(last=place)
        else:
            clocks.append(_ClockSegment(place, place, offset))
    return clocks


def is_valid_count(value: Any) -> TypeGuard[int]:
    """Whether a stored value can be a step, a rank, an attempt, an offset."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
