"""Counters of a run, folded from its records as they come: they only ever grow, whatever becomes of it.

The ledger judges a run in hindsight: steps that were kept may be lost later. A counter must not go back, so
here every second is judged once, when the record that ends it arrives: a step that was never done before is
productive, one that is done again is recompute. The time since the newest record is not yet counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpcrun.errors import EXIT_NOT_A_NUMBER, EXIT_RANKS_DIED
from hpcrun.runs.checkpoint_stats import CheckpointStats, parse_checkpoint_stats
from hpcrun.runs.ledger import LEDGER_BUCKETS
from hpcrun.runs.save_text import is_durable_save
from hpcrun.runs.timeline import gap_bucket, is_valid_count, launch_job_id, metric_seconds
from hpcrun.specs.records import JsonLineReader
from hpcrun.specs.rundir import RunDir

Record = Mapping[str, Any]

BADPUT_BUCKETS = tuple(
    "recompute" if name == "lost" else name for name in LEDGER_BUCKETS if name != "productive"
)
"""The ledger's buckets, but that the time is in the steps that are done again, not in those thrown away."""
STEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TELEMETRY_STATES = (
    *("waiting", "starting", "running", "fault", "requeued"),
    *("done", "saved", "failed", "interrupted", "lost"),
)
_FINAL_STATES = TELEMETRY_STATES[5:]
_FAILURE_EVENTS = ("rank_ended", "rank_failed", "node_lost", "launcher_ended")
_IGNORED_EVENTS = ("rank_started", "ranks_connected", "signal")
"""In the middle of a step, which is told of only at its end."""
_MAX_TIME_S = 1e11
_PIECE_BYTES = 4 << 20


@dataclass
class RunCounters:
    """The counters, and what has to be remembered to go on counting; dumps to JSON and reads back."""

    state: str = "waiting"
    attempt: int = 0
    step: int | None = None
    productive_s: float = 0.0
    badput_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BADPUT_BUCKETS, 0.0))
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    """How many steps took up to each bound, and longer than all; each step in one of them."""
    steps_s: float = 0.0
    tokens: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    """By CAUSE/LEVEL: level is allocation or requeue."""
    faults: dict[str, int] = field(default_factory=dict)
    detections: int = 0
    detection_s: float = 0.0
    recoveries: int = 0
    recovery_s: float = 0.0
    saved_step: int | None = None
    saved_at: float | None = None
    excluded: int = 0
    saves: CheckpointStats = field(default_factory=CheckpointStats)
    """By level."""
    # From here on: what is remembered.
    seen: float | None = None
    """Up to here (wall clock) all time is counted."""
    gap: str = "stopped"
    """The bucket of the time between two attempts."""
    job: str | None = None
    """Of the newest attempt; None before the first."""
    reached: int = 0
    is_met: bool = False
    has_stepped: bool = False
    is_good: bool = False
    is_over: bool = True
    progress_at: float | None = None
    died_at: float | None = None
    cause: str = "unknown"
    recovering_since: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def take(self, events: Iterable[Record], metrics: Iterable[Record]) -> None:
        """Fold in further records of both files; what makes no sense is passed over."""
        both = [(one, False) for one in events if _is_valid_record(one)]
        both += [(one, True) for one in metrics if _is_valid_record(one)]
        for record, is_line in sorted(both, key=lambda one: _record_order(one[0])):
            if is_line:
                self._line(record, str(record.get("kind", "step")))
            else:
                self._event(record, str(record.get("event")))

    def _count_time_until(self, now: float, bucket: str, own: str = "", own_s: float = 0.0) -> None:
        """Count the time until now: up to `own_s` of it as `own`, the rest in the bucket."""
        passed = max(0.0, now - self.seen) if self.seen is not None else 0.0
        self.seen = now if self.seen is None else max(self.seen, now)
        part = min(max(own_s, 0.0), passed)
        self._count(own or bucket, part)
        self._count(bucket, passed - part)

    def _count(self, bucket: str, seconds: float) -> None:
        if bucket == "productive":
            self.productive_s += seconds
        else:
            self.badput_s[bucket] += seconds

    def _line(self, line: Record, kind: str) -> None:
        step, now = line.get("step"), float(line["time"])
        self.saves.take(line)
        if is_valid_count(step) and is_durable_save(line):
            self.saved_step, self.saved_at = step, now
        if not is_valid_count(step) or kind not in ("start", "step", "save", "eval"):
            return
        seconds = _valid_seconds(metric_seconds(line))
        if not self.is_met:
            # Rank 0 may be heard of before the supervisor has seen that all have met.
            self._count_time_until(now - seconds, "start")
            self.is_met, self.state = True, "running"
        between = "other" if self.has_stepped else "restore"
        self.progress_at = now
        if kind == "step":
            self._step(line, step, now, seconds, between)
        elif kind == "start":
            self._count_time_until(now, "restore")
        else:
            self._count_time_until(now, between, {"save": "checkpoint", "eval": "eval"}[kind], seconds)

    def _step(self, line: Record, step: int, now: float, seconds: float, between: str) -> None:
        is_new = step > self.reached
        self._count_time_until(now, between, "productive" if is_new else "recompute", seconds)
        self.step, self.has_stepped = step, True
        self.step_counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self.steps_s += seconds
        self.tokens += round(_valid_seconds(line.get("tokens_per_s")) * seconds)
        if is_new:
            self.reached = step
            if self.recovering_since is not None:
                self.recoveries += 1
                self.recovery_s += max(0.0, now - self.recovering_since)
                self.recovering_since = None

    def _event(self, event: Record, name: str) -> None:
        now = float(event["time"])
        if name == "launch":
            self._launch(event, now)
        elif name == "ranks_connected" and not self.is_met:
            self._count_time_until(now, "start")
            self.is_met, self.state, self.progress_at = True, "running", now
        elif name in _FAILURE_EVENTS:
            self._death(event, name, now)
        elif name == "result":
            self._count_time_until(now, "shutdown")
            self.is_good = True
        elif name in ("processes_ended", "exit"):
            self._count_time_until(
                now, "recovery" if self.died_at is not None and not self.is_good else "shutdown"
            )
            if name == "exit":
                self._exit(event, now)
        elif name == "fault":
            self._count_time_until(now, "recovery")
            self._fault(str(event.get("cause") or "unknown"), now)
        elif name in ("relaunch", "requeue"):
            self._again(event, name, now)
        elif name not in _IGNORED_EVENTS:
            self._count_time_until(now, "other" if self.is_met else "start")

    def _launch(self, event: Record, now: float) -> None:
        if not self.is_over:
            self._fault("supervisor lost", self.seen or now)
        if self.gap == "stopped" and self.job is not None:
            self.gap = gap_bucket(self.job, launch_job_id(event), is_over=self.is_over)
        if self.gap == "stopped":
            self.recovering_since = None  # a person came between
        self._count_time_until(now, self.gap)
        self.state, self.attempt, self.gap = "starting", int(event["attempt"]), "stopped"
        self.job = launch_job_id(event)
        self.is_met = self.has_stepped = self.is_good = self.is_over = False
        self.progress_at, self.died_at = now, None

    def _death(self, event: Record, name: str, now: float) -> None:
        is_orderly = name in ("rank_ended", "launcher_ended") and event.get("wait_status") == 0
        if self.is_good or is_orderly:
            self._count_time_until(now, "shutdown")
        elif self.died_at is not None:
            self._count_time_until(now, "recovery")
        else:
            self._count_time_until(now, "detection" if self.is_met else "start")
            self.died_at = now

    def _exit(self, event: Record, now: float) -> None:
        self.is_over = True
        status, code = str(event.get("status")), event.get("exit_code")
        self.state = status if status in _FINAL_STATES else "failed"
        # Of ranks that died the supervisor says more in a moment.
        if self.state == "failed" and code != EXIT_RANKS_DIED:
            hang = "hang" if self.is_met else "not started"
            self._fault("not a number" if code == EXIT_NOT_A_NUMBER else hang, now)
            self.state = "failed"

    def _fault(self, cause: str, now: float) -> None:
        self.state, self.cause = "fault", cause
        self.faults[cause] = self.faults.get(cause, 0) + 1
        seen = self.died_at if self.died_at is not None else now
        self.detections += 1
        self.detection_s += max(0.0, seen - (self.progress_at if self.progress_at is not None else seen))
        self.recovering_since = seen

    def _again(self, event: Record, name: str, now: float) -> None:
        self._count_time_until(now, "recovery" if name == "relaunch" else "shutdown")
        cause = str(event.get("cause") or self.cause)
        key = f"{cause}/{'allocation' if name == 'relaunch' else 'requeue'}"
        self.restarts[key] = self.restarts.get(key, 0) + 1
        self.is_over = True
        if name == "relaunch":
            self.gap = "recovery"
            self.excluded = len(named) if isinstance(named := event.get("excluded"), list) else 0
        else:
            self.gap, self.state, self.excluded = "queued", "requeued", 0


class RunCountersReader:
    """Keeps the tally of a run, reading only what is new; its state goes on where an earlier one stood."""

    def __init__(self, run: RunDir, state: Any = None) -> None:
        self.run = run
        told = state if isinstance(state, dict) else {}
        known = _parse_run_counters(told.get("tally"))
        offsets = [told.get(name) for name in ("events", "metrics")] if known else [0, 0]
        first, second = (one if is_valid_count(one) else 0 for one in offsets)
        self.tally = known if known else RunCounters()
        self._events, self._metrics = JsonLineReader(run.events, first), JsonLineReader(run.metrics, second)

    def read(self) -> RunCounters:
        """The tally with all that has been written until now."""
        events = [one for one in self._events.read() if _is_valid_record(one)]
        # In pieces: the steps of a long run do not have to fit into memory.
        while lines := self._more_lines():
            last = _record_order(lines[-1])
            self.tally.take([one for one in events if _record_order(one) <= last], lines)
            events = [one for one in events if _record_order(one) > last]
        self.tally.take(events, ())
        return self.tally

    def _more_lines(self) -> list[dict[str, Any]]:
        """The next whole lines, or none when all are read."""
        while True:
            before = self._metrics.offset
            lines = [one for one in self._metrics.read(_PIECE_BYTES) if _is_valid_record(one)]
            if lines or self._metrics.offset == before:
                return lines

    def as_json(self) -> dict[str, Any]:
        """What another one needs to go on from here."""
        return {
            "events": self._events.offset,
            "metrics": self._metrics.offset,
            "tally": self.tally.as_json(),
        }


def _parse_run_counters(found: Any) -> RunCounters | None:
    """A tally that was dumped; None where it is damaged, or of another version."""
    empty = RunCounters()
    if not isinstance(found, dict) or found.keys() != {one.name for one in fields(RunCounters)}:
        return None
    saves = parse_checkpoint_stats(found["saves"])
    if saves is None:
        return None
    for name, value in found.items():
        usual = getattr(empty, name)
        if (
            name != "saves"
            and usual is not None
            and not isinstance(value, float if type(usual) is float else type(usual))
        ):
            return None
    tally = RunCounters(**{**found, "saves": saves})
    lists = len(tally.step_counts) == len(empty.step_counts) and all(map(is_valid_count, tally.step_counts))
    return tally if lists and tally.badput_s.keys() == empty.badput_s.keys() else None


def _is_valid_record(record: Record) -> bool:
    moment = record.get("time")
    is_time = isinstance(moment, int | float) and not isinstance(moment, bool) and 0 <= moment < _MAX_TIME_S
    return is_time and is_valid_count(record.get("attempt"))


def _record_order(record: Record) -> tuple[int, float]:
    # Attempts first: a clock may be set between two of them.
    return record["attempt"], record["time"]


def _valid_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value < _MAX_TIME_S else 0.0
