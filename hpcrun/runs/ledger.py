"""The goodput ledger: where the wall time of a run went, in buckets that add up, and what its faults cost.

Each attempt is laid out on a line of its own, by the supervisor's monotonic clock where there is one, and cut
there; the pieces and the gaps between attempts are the wall time, so nothing is counted twice or forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hpcrun.errors import EXIT_NOT_A_NUMBER, UsageError
from hpcrun.runs.timeline import AttemptTimeline, Record, build_timelines, is_valid_count
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.rundir import RunDir

LEDGER_BUCKETS: Mapping[str, str] = {
    "productive": "steps that were kept",
    "lost": "steps that were thrown away, to be done again",
    "queued": "in the queue again, between two attempts",
    "start": "from a launch until all ranks have met",
    "restore": "from then until the first step: model, data, saved state, compilation",
    "checkpoint": "saves that steps waited for",
    "eval": "evaluations",
    "detection": "from the last sign of progress until a fault was seen",
    "recovery": "from a fault until the next launch",
    "shutdown": "from the last sign of progress to the end, where it ended in order or nobody went on",
    "stopped": "over, until somebody resumed it",
    "other": "the rest: between steps, and what nobody records",
}
"""Every second from the first launch to the end is in one of these."""


@dataclass(frozen=True)
class FaultCost:
    """What took an attempt down, and what it cost."""

    attempt: int
    cause: str
    message: str = ""
    node: str | None = None
    rank: int | None = None
    detection_s: float = 0.0
    recovery_s: float | None = None
    """From the moment it was seen to the first step beyond the old ones; None while there was none."""
    steps_lost: int = 0

    def __str__(self) -> str:
        """In one line."""
        where = f" on {self.node}" if self.node else ""
        back = "not recovered" if self.recovery_s is None else f"recovered in {self.recovery_s:.1f} s"
        seen = f"seen after {self.detection_s:.1f} s"
        return f"attempt {self.attempt}: {self.cause}{where}: {seen}, {back}, {self.steps_lost} steps lost"


@dataclass(frozen=True)
class GoodputLedger:
    """Where the time went. `buckets` has every name of BUCKETS, in seconds."""

    buckets: Mapping[str, float]
    attempts: int = 0
    steps: int = 0
    """Steps that were kept, each once."""
    steps_lost: int = 0
    faults: tuple[FaultCost, ...] = ()
    spares_left: int | None = None
    """As of the newest relaunch; None where there was none."""

    @property
    def wall_s(self) -> float:
        """From the first launch to the end."""
        return math.fsum(self.buckets.values())

    @property
    def goodput(self) -> float | None:
        """Productive time over wall time, but for the time stopped; None where no step was recorded."""
        spent = self.wall_s - self.buckets["stopped"]
        return self.buckets["productive"] / spent if spent > 0 and self.steps + self.steps_lost else None

    @property
    def mttd_s(self) -> float | None:
        """Mean time to detect a fault."""
        return _mean_or_none([one.detection_s for one in self.faults])

    @property
    def mttr_s(self) -> float | None:
        """Mean time from a fault that was seen to new progress, over those that were recovered from."""
        return _mean_or_none([one.recovery_s for one in self.faults if one.recovery_s is not None])

    @property
    def causes(self) -> dict[str, int]:
        """How many faults of each cause, the most frequent first."""
        return dict(Counter(one.cause for one in self.faults).most_common())

    def losses(self, count: int = 3) -> list[tuple[str, float]]:
        """The largest buckets that are not productive time, largest first."""
        lost = [
            (name, spent) for name, spent in self.buckets.items() if name not in ("productive", "stopped")
        ]
        return sorted((one for one in lost if one[1] > 0), key=lambda one: -one[1])[:count]

    def lines(self) -> list[str]:
        """A table in plain text: the buckets that hold time, then goodput, work lost and faults."""
        wall = self.wall_s or 1.0
        lines = [
            f"{spent:12.1f} s  {spent / wall:6.1%}  {name:10}  {LEDGER_BUCKETS[name]}"
            for name, spent in self.buckets.items()
            if spent > 0
        ]
        goodput = "unknown" if self.goodput is None else f"{self.goodput:.1%}"
        attempts = f"{self.attempts} attempt{'s' * (self.attempts != 1)}"
        lines.append(f"{self.wall_s:12.1f} s in all, goodput {goodput}, {attempts}")
        lines.append(f"{self.steps:12} steps kept, {self.steps_lost} lost")
        return lines + [str(fault) for fault in self.faults]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        figures = {"wall_s": self.wall_s, "goodput": self.goodput, "buckets_s": dict(self.buckets)}
        times = {"mttd_s": self.mttd_s, "mttr_s": self.mttr_s, "faults_by_cause": self.causes}
        work = {"attempts": self.attempts, "steps": self.steps, "steps_lost": self.steps_lost}
        faults = [asdict(one) for one in self.faults]
        return figures | work | times | {"faults": faults, "spares_left": self.spares_left}


def read_ledger(run: RunDir, *, now: float | None = None) -> GoodputLedger:
    """The ledger of a run directory; `now`, by the clock of its events, for a run that goes on."""
    events = list(read_json_lines(run.events))
    told = {event.get("attempt") for event in events if event.get("event") == "requeue"}
    for attempt in run.attempts():
        ended: Record = {}
        with suppress(UsageError):  # a damaged one says nothing
            found = read_json(attempt.outcome)
            ended = found if isinstance(found, dict) else {}
        if (cause := ended.get("requeued")) and attempt.number not in told:
            stamp = {"time": ended.get("ended"), "attempt": attempt.number}
            events.append({**stamp, "event": "requeue", "cause": cause})
    return compute_ledger(events, read_json_lines(run.metrics), now=now)


def sum_ledgers(ledgers: Iterable[GoodputLedger]) -> GoodputLedger:
    """The sum over runs, such as the elements of a sweep."""
    parts = list(ledgers)
    return GoodputLedger(
        {name: math.fsum(one.buckets[name] for one in parts) for name in LEDGER_BUCKETS},
        sum(one.attempts for one in parts),
        sum(one.steps for one in parts),
        sum(one.steps_lost for one in parts),
        tuple(fault for one in parts for fault in one.faults),
    )


def compute_ledger(
    events: Iterable[Record], metrics: Iterable[Record], *, now: float | None = None
) -> GoodputLedger:
    """What the lines of events.jsonl and metrics.jsonl say; lines that make no sense are passed over.

    `now`, by the clock of the events, for a run that goes on; without it the last attempt is taken as over.
    """
    attempts = build_timelines(events, metrics, now)
    buckets = dict.fromkeys(LEDGER_BUCKETS, 0.0)
    if not attempts:
        return GoodputLedger(buckets)
    is_counted = any(attempt.steps for attempt in attempts)
    gaps = _attempt_gaps(attempts, now)
    _mark_lost_steps(attempts, now)
    spans = []
    for index, attempt in enumerate(attempts):
        is_end = now is None and index == len(attempts) - 1
        spans.append(attempt.spans(recovers=not is_end, is_counted=is_counted))
        for name, seconds in spans[-1].items():
            buckets[name] += seconds
    for name, seconds in gaps:
        buckets[name] += seconds
    lines = [line for attempt in attempts for line in attempt.steps]
    spares = [one.spares_left for one in attempts if one.spares_left is not None]
    return GoodputLedger(
        buckets,
        len(attempts),
        len({line.step for line in lines if not line.is_lost}),
        sum(line.is_lost for line in lines),
        tuple(_fault_costs(attempts, gaps, [one["detection"] for one in spans], now)),
        spares[-1] if spares else None,
    )


def _attempt_gaps(attempts: Sequence[AttemptTimeline], now: float | None) -> list[tuple[str, float]]:
    """The gap after each attempt; the last one's reaches until now."""
    gaps = [
        (after.gap_bucket_before(before), max(0.0, after.begin - before.end))
        for before, after in pairwise(attempts)
    ]
    last = attempts[-1]
    if now is not None and last.is_over:
        name = "queued" if "requeue" in last.marks else "recovery" if last.is_failed else "other"
        gaps.append((name, max(0.0, now - last.end)))
    elif now is not None:
        last.extend(now)
    return gaps


def _mark_lost_steps(attempts: Sequence[AttemptTimeline], now: float | None) -> None:
    """Steps that a later attempt began before, and those that died with their ranks, are lost."""
    saved = 0
    for index, attempt in enumerate(attempts):
        later = [one.start for one in attempts[index + 1 :] if one.start is not None]
        saved = max(saved, attempt.saved_step)
        is_alive = attempt.is_good or (now is not None and index == len(attempts) - 1 and not attempt.is_over)
        if later:
            kept = min(later)
        elif is_alive:
            continue
        else:
            kept = max(saved, attempt.start or 0)
        for line in attempt.steps:
            line.is_lost = line.step > kept


def _fault_costs(
    attempts: Sequence[AttemptTimeline],
    gaps: Sequence[tuple[str, float]],
    detection: Sequence[float],
    now: float | None,
) -> list[FaultCost]:
    begins = [0.0]
    for attempt, (_, gap) in zip(attempts, gaps, strict=False):
        begins.append(begins[-1] + attempt.length + gap)
    found = []
    for index, attempt in enumerate(attempts):
        told = attempt.fault()
        goes_on = now is not None and index == len(attempts) - 1
        if told is None and (goes_on or attempt.is_over or attempt.is_good):
            continue
        at, record = told or (attempt.length, {})
        found.append(
            FaultCost(
                attempt.number,
                _fault_cause(attempt, record),
                str(record.get("message") or record.get("why") or attempt.exit.get("message") or ""),
                _fault_node(record),
                record.get("rank") if is_valid_count(record.get("rank")) else None,
                detection[index],
                _recovery_seconds(attempts, gaps, begins, index, at),
                sum(line.is_lost for line in attempt.steps),
            )
        )
    return found


def _fault_cause(attempt: AttemptTimeline, record: Record) -> str:
    if record.get("event") == "fault":
        return str(record.get("cause") or "unknown")
    if attempt.exit.get("exit_code") == EXIT_NOT_A_NUMBER:
        return "not a number"
    if record.get("event") in ("node_lost", "hang"):
        return str(record["event"]).replace("_", " ")
    if record:
        return "crash"
    if not attempt.is_over:
        return "supervisor lost"
    return "hang" if "ranks_connected" in attempt.marks else "not started"


def _recovery_seconds(
    attempts: Sequence[AttemptTimeline],
    gaps: Sequence[tuple[str, float]],
    begins: Sequence[float],
    index: int,
    at: float,
) -> float | None:
    """From a fault in one attempt to the first step beyond all before; None where a person came between."""
    reached = max((line.step for one in attempts[: index + 1] for line in one.steps), default=0)
    for later in range(index + 1, len(attempts)):
        if gaps[later - 1][0] == "stopped":
            return None
        for line in attempts[later].steps:
            if line.step > reached:
                place = min(line.at, attempts[later].length)
                return max(0.0, begins[later] + place - begins[index] - at)
    return None


def _mean_or_none(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _fault_node(record: Record) -> str | None:
    """The node of a fault; of several, all."""
    nodes = record.get("nodes")
    if isinstance(nodes, list) and nodes:
        return ",".join(map(str, nodes))
    node = record.get("node")
    return node if isinstance(node, str) else None
