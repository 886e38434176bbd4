"""One attempt of a run on a line of its own, its events and metrics by one clock, and cut into buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from hpcrun.runs.save_text import is_durable_save

_CLOCK_TOLERANCE_S = 0.5
"""A wall clock that drifts by more than this against the monotonic one has been set."""
_MAX_TIME_S = 1e11
"""No time stamp is further from 1970 than this: what says so is damaged."""
_FAULT_EVENTS = ("fault", "hang", "node_lost", "rank_failed", "rank_ended", "launcher_ended")

_BACKGROUND_KINDS = (
    "stored",
    "save_failed",
    "save_skipped",
    "save_unchanged",
    "save_stalled",
    "save_interval",
    "flush",
)
"""Lines of what goes on beside the run, and takes none of its time."""

_ATTEMPT_BUCKETS = (
    *("productive", "lost", "start", "restore", "checkpoint", "eval"),
    *("detection", "recovery", "shutdown", "other"),
)
"""The buckets of the ledger that an attempt's own time can be in."""

Record = Mapping[str, Any]


@dataclass
class TimedMetricRecord:
    """A line of metrics.jsonl, where it stands on its attempt's line."""

    kind: str
    step: int
    seconds: float
    at: float
    is_lost: bool = False

    @property
    def begin(self) -> float:
        """Where the work began that the line tells of."""
        return self.at - self.seconds


class _ClockSegment(NamedTuple):
    """From `first` to `last` on the attempt's line, wall time is that place + offset."""

    first: float
    last: float
    offset: float


class AttemptTimeline:
    """One attempt, from its launch (0) to its end (`length`), in seconds."""

    def __init__(
        self, number: int, events: Sequence[Record], lines: Sequence[Record], now: float | None = None
    ) -> None:
        self.number, self._now = number, now
        names = [event.get("event") for event in events]
        launch = names.index("launch") if "launch" in names else 0
        self._before, self._events = events[:launch], events[launch:]
        self.job = launch_job_id(self._events[0]) if self._events else ""
        self._places = _event_offsets(self._events)
        self._clocks = _clock_segments(self._events, self._places)
        self.begin = _attempt_start(self._events, lines)
        if not self._clocks:
            self._clocks = [_ClockSegment(0.0, 0.0, self.begin)]
        self.marks: dict[str, float] = {}
        for event, place in zip(self._events, self._places, strict=True):
            self.marks.setdefault(str(event.get("event")), place)
        self.lines = self._placed([line for line in lines if line.get("kind") not in _BACKGROUND_KINDS])
        kept = (line["step"] for line in lines if is_durable_save(line) and is_valid_count(line.get("step")))
        self.saved_step = max(kept, default=0)
        """The newest step that got into the run directory."""
        self.steps = [line for line in self.lines if line.kind == "step"]
        self.exit: Record = next((one for one in self._events if one.get("event") == "exit"), {})
        self._measure()
        self.is_over = "exit" in self.marks or "processes_ended" in self.marks
        self.is_good = "result" in self.marks or self.exit.get("status") in ("done", "saved")

    def _measure(self) -> None:
        """The length, and what the wall clock, as it goes now, showed then."""
        end = self.marks.get("exit", self.marks.get("processes_ended"))
        last = self._places[-1] if self._places else 0.0
        self.length = last if end is None else end
        if end is None:
            self.length = max([self.length, *(line.at for line in self.lines)])
        self.end = self.length + self._clocks[-1].offset

    def _placed(self, lines: Sequence[Record]) -> list[TimedMetricRecord]:
        found: list[TimedMetricRecord] = []
        at, ahead = 0.0, self._clock_lead(lines)
        for line in lines:
            step, time = line.get("step"), _valid_number(line.get("time"))
            if not is_valid_count(step) or time is None:
                continue
            at = self._place(time - ahead, at)
            kind = str(line.get("kind", "step"))
            seconds = metric_seconds(line)
            found.append(TimedMetricRecord(kind, step, max(0.0, seconds or 0.0), at))
        return found

    def _clock_lead(self, lines: Sequence[Record]) -> float:
        """By how much at least the clock of rank 0's host is ahead of the supervisor's, or (negative) behind.

        No line is from before the ranks met, or from after the end: by so much they are moved, and no more.
        """
        stamps = [
            time
            for line in lines
            if is_valid_count(line.get("step"))
            if (time := _valid_number(line.get("time")))
        ]
        if not self._events or not stamps or len(self._clocks) != 1:
            return 0.0
        offset = self._clocks[0].offset
        last = next(
            (self.marks[name] for name in ("result", "exit", "processes_ended") if name in self.marks), None
        )
        if last is None and self._now is not None:
            last = self._now - offset
        behind = self.marks.get("ranks_connected", 0.0) - (min(stamps) - offset)
        ahead = -math.inf if last is None else max(stamps) - offset - last
        if ahead > _CLOCK_TOLERANCE_S:
            return ahead
        return -behind if behind > _CLOCK_TOLERANCE_S else 0.0

    def _place(self, time: float, previous: float) -> float:
        """Where a wall time stands, not before the previous one; with a clock that was set, near events."""
        for index, clock in enumerate(self._clocks):
            at = time - clock.offset
            low = max(previous, self._clocks[index - 1].last if index else 0.0)
            high = self._clocks[index + 1].first if index + 1 < len(self._clocks) else math.inf
            if low - _CLOCK_TOLERANCE_S <= at <= high + _CLOCK_TOLERANCE_S:
                return max(at, previous)
        return max(time - self._clocks[-1].offset, previous)

    def extend(self, now: float) -> None:
        """Go on until now."""
        self.length = max(self.length, now - self._clocks[-1].offset)

    @property
    def start(self) -> int | None:
        """The step after which this attempt went on; None where it did not come that far."""
        told = next((line.step for line in self.lines if line.kind == "start"), None)
        return self.steps[0].step - 1 if told is None and self.steps else told

    @property
    def spares_left(self) -> int | None:
        """As the newest relaunch here says."""
        events = (*self._before, *self._events)
        told = [one.get("spares_left") for one in events if one.get("event") == "relaunch"]
        return next((one for one in reversed(told) if is_valid_count(one)), None)

    def gap_bucket_before(self, previous: AttemptTimeline) -> str:
        """The bucket of the time between two attempts."""
        if "requeue" in previous.marks:
            return "queued"
        if "relaunch" in previous.marks or any(one.get("event") == "relaunch" for one in self._before):
            return "recovery"
        return gap_bucket(previous.job, self.job, is_over="exit" in previous.marks)

    @property
    def is_failed(self) -> bool:
        """Whether it ended, and neither well nor because a person interrupted it."""
        return self.is_over and not self.is_good and self.exit.get("status") != "interrupted"

    def fault(self) -> tuple[float, Record] | None:
        """When a fault was first seen, and the record that says most of it; None without one."""
        if self.is_good or self.exit.get("status") == "interrupted":
            return None
        seen = [
            (min(place, self.length), one)
            for one, place in zip(self._events, self._places, strict=True)
            if one.get("event") in _FAULT_EVENTS and (self.is_over or one.get("wait_status") != 0)
        ]
        if not seen:
            end = self.marks.get("processes_ended", self.length)
            return (min(end, self.length), {}) if self.is_over else None
        named = next((one for _, one in seen if one.get("event") == "fault"), {})
        # The supervisor says the cause; rank and node may only stand in what was seen first.
        return seen[0][0], {**seen[0][1], **{key: value for key, value in named.items() if value}}

    def spans(self, *, recovers: bool, is_counted: bool) -> dict[str, float]:
        """Its length, cut into buckets."""
        fault, result = self.fault(), self.marks.get("result")
        until = fault[0] if fault else self.length if result is None else min(result, self.length)
        met = self.marks.get("ranks_connected", self.lines[0].begin if self.lines else None)
        met = until if met is None else min(max(met, 0.0), until)
        spans = dict.fromkeys(_ATTEMPT_BUCKETS, 0.0)
        spans["start"] = met
        spans["recovery" if fault and recovers else "shutdown"] = self.length - until
        slack = self._fill(spans, until - met)
        if self.steps:
            before = self.lines[: self.lines.index(self.steps[0])]
            first = self.steps[0].begin - sum(line.seconds for line in before if line.kind != "start")
            restore = min(max(first - met, 0.0), slack)
        else:
            restore = slack if is_counted else 0.0
        last = self.lines[-1].at if self.lines else until
        tail = min(max(until - last, 0.0), slack - restore)
        end = "detection" if fault else "shutdown" if self.is_over else "other"
        spans["restore"] = restore
        spans[end] += tail
        spans["other"] += max(0.0, slack - restore - tail)
        return spans

    def _fill(self, spans: dict[str, float], window: float) -> float:
        """Put in what the lines say they took; what is left of the window."""
        of = {"save": "checkpoint", "eval": "eval"}
        named = [("lost" if one.is_lost else "productive", one.seconds) for one in self.steps]
        named += [(of[one.kind], one.seconds) for one in self.lines if one.kind in of]
        told = math.fsum(seconds for _, seconds in named)
        # Clocks differ by little, damaged lines by much: neither may claim more than there was.
        scale = window / told if told > window else 1.0
        for name in ("productive", "lost", *of.values()):
            spans[name] = scale * math.fsum(seconds for bucket, seconds in named if bucket == name)
        return max(0.0, window - told)


def metric_seconds(line: Record) -> float | None:
    """How long what a line tells of took by itself; what a step waited for a copy is in the step's time."""
    if line.get("kind", "step") == "step":
        return _valid_number(line.get("step_time_s"))
    seconds, within = _valid_number(line.get("seconds")), _valid_number(line.get("fence_wait_s"))
    return seconds if seconds is None or within is None else seconds - within


def launch_job_id(launch: Record) -> str:
    """The batch job of an attempt by its launch, `none` without one; empty where it is not known."""
    return str(launch["job"] or "none") if "job" in launch else ""


def gap_bucket(before: str, after: str, *, is_over: bool) -> str:
    """The bucket of the time between attempts of these jobs, where no event says what came between.

    Slurm queues the same job again; another one, or none, is somebody's. `is_over`: the first told its end.
    """
    if before and after:
        return "queued" if before == after != "none" else "stopped"
    # Whoever ended without a word was most likely lost with its node.
    return "stopped" if is_over or after == "none" else "queued"


def build_timelines(
    events: Iterable[Record], metrics: Iterable[Record], now: float | None = None
) -> list[AttemptTimeline]:
    """The attempts that the lines of both files tell of, in order; damaged lines are passed over.

    `now`, by the clock of the events, where the last of them goes on.
    """
    by_number: dict[int, tuple[list[Record], list[Record]]] = {}
    for index, records in enumerate((events, metrics)):
        for record in records:
            number = record.get("attempt")
            if is_valid_count(number) and _valid_number(record.get("time")) is not None:
                by_number.setdefault(number, ([], []))[index].append(record)
    last = max(by_number, default=0)
    made = [
        AttemptTimeline(number, _sort_events(own), lines, now if number == last else None)
        for number, (own, lines) in sorted(by_number.items())
    ]
    return [one for one in made if one.marks or one.lines]


def _sort_events(events: list[Record]) -> list[Record]:
    """In the order in which they happened, where one monotonic clock tells."""
    if len({event.get("host") for event in events}) == 1:
        clock = [_valid_number(event.get("monotonic")) for event in events]
        if None not in clock:
            order = sorted(zip(clock, events, strict=True), key=lambda one: one[0] or 0.0)
            return [event for _, event in order]
    return events


def _event_offsets(events: Sequence[Record]) -> list[float]:
    """The seconds of each event since the first one, never going back."""
    places: list[float] = []
    for index, event in enumerate(events):
        if index == 0:
            places.append(0.0)
            continue
        before = events[index - 1]
        passed = (
            _elapsed_seconds(before, event, "monotonic") if before.get("host") == event.get("host") else None
        )
        if passed is None or passed < 0:
            passed = _elapsed_seconds(before, event, "time") or 0.0
        places.append(places[-1] + max(0.0, passed))
    return places


def _elapsed_seconds(before: Record, after: Record, clock: str) -> float | None:
    first, second = _valid_number(before.get(clock)), _valid_number(after.get(clock))
    return None if first is None or second is None else second - first


def _clock_segments(events: Sequence[Record], places: Sequence[float]) -> list[_ClockSegment]:
    clocks: list[_ClockSegment] = []
    for event, place in zip(events, places, strict=True):
        offset = (_valid_number(event.get("time")) or 0.0) - place
        if clocks and abs(clocks[-1].offset - offset) < _CLOCK_TOLERANCE_S:
            clocks[-1] = clocks[-1]._replace(last=place)
        else:
            clocks.append(_ClockSegment(place, place, offset))
    return clocks


def _attempt_start(events: Sequence[Record], lines: Sequence[Record]) -> float:
    """What the wall clock showed at the beginning; where no event is left, before the first line's work."""
    if events:
        return _valid_number(events[0].get("time")) or 0.0
    first = lines[0]
    seconds = _valid_number(first.get("step_time_s")) or _valid_number(first.get("seconds")) or 0.0
    return (_valid_number(first.get("time")) or 0.0) - max(0.0, seconds)


def _valid_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_MAX_TIME_S < value < _MAX_TIME_S else None


def is_valid_count(value: Any) -> TypeGuard[int]:
    """Whether a value of a record can be a step, a rank, an attempt."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
