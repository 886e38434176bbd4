"""The goodput ledger: where the wall time of a run went, in buckets that add up, and what its faults cost.

The account of the run (runs/time_account.py) cuts the time. Each attempt is laid out on a line of its own, by
the supervisor's monotonic clock, so nothing is counted twice or forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.runs.time_account import Fault, TimeAccount
from hpcrun.runs.timeline import AttemptTimeline, build_timelines
from hpcrun.specs.events.log import EventRecord, read_events
from hpcrun.specs.events.supervisor import RelaunchEvent, RequeueEvent
from hpcrun.specs.metrics import Metric, MetricRecord, StepMetric, read_metrics
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt, RunDir

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
    events = read_events(run.events)
    requeued = {record.attempt for record in events if isinstance(record.event, RequeueEvent)}
    for attempt in run.attempts():
        with suppress(UsageError):  # a damaged outcome says nothing
            outcome = read_json(attempt.outcome)
            if attempt.number not in requeued and (requeue := _requeue_of_outcome(outcome, attempt, events)):
                events.append(requeue)
    return compute_ledger(events, read_metrics(run), now=now)


def _requeue_of_outcome(outcome: Any, attempt: Attempt, events: Sequence[EventRecord]) -> EventRecord | None:
    """What the outcome of an attempt says of a requeue, where no event does, by the clock of its events."""
    if not isinstance(outcome, dict) or not (cause := outcome.get("requeued")):
        return None
    stamps = [record.stamp for record in events if record.attempt == attempt.number]
    # The outcome is written with the last event.
    return EventRecord(stamps[-1], RequeueEvent(str(cause))) if stamps else None


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
    events: Iterable[EventRecord], metrics: Iterable[MetricRecord], *, now: float | None = None
) -> GoodputLedger:
    """What events.jsonl and metrics.jsonl say.

    `now`, by the clock of the events, for a run that goes on; without it the last attempt is taken as over.
    """
    account, attempts = account_attempts(events, metrics, now)
    kept_s, lost_s, lost_steps = _judge_steps(attempts, now)
    buckets = {name: account.buckets.get(name, 0.0) for name in LEDGER_BUCKETS}
    buckets |= {"productive": kept_s, "lost": lost_s}
    lost_of = {attempt.timeline.number: len(attempt.steps) - attempt.kept_count for attempt in attempts}
    return GoodputLedger(
        buckets,
        len(attempts),
        len({step for attempt in attempts for step, _ in attempt.steps if step <= attempt.kept}),
        lost_steps,
        tuple(_fault_cost(fault, lost_of[fault.attempt]) for fault in account.faults),
        next((one.spares_left for one in reversed(attempts) if one.spares_left is not None), None),
    )


@dataclass
class AccountedAttempt:
    """An attempt and its steps: of each its number, and the seconds that were counted as its own."""

    timeline: AttemptTimeline
    steps: list[tuple[int, float]]
    spares_left: int | None = None
    """As its newest relaunch says."""
    kept: float = math.inf
    """The last step that was kept, as later attempts show."""

    @property
    def kept_count(self) -> int:
        """How many of the steps were kept."""
        return sum(step <= self.kept for step, _ in self.steps)


def account_attempts(
    events: Iterable[EventRecord], metrics: Iterable[MetricRecord], now: float | None = None
) -> tuple[TimeAccount, list[AccountedAttempt]]:
    """The account of all attempts, each placed on one line by the better of its clocks."""
    account, attempts = TimeAccount(), list[AccountedAttempt]()
    base, before = 0.0, None
    for timeline in build_timelines(events, metrics, now):
        for event in timeline.before:
            account.take_event(event, timeline.number, account.last)
        if before is not None:
            base += before.length + max(0.0, timeline.begin - before.end)
        if not timeline.has_launch:
            account.start_attempt(timeline.number, base)
        attempt = AccountedAttempt(timeline, [])
        for place, record in timeline.records():
            if isinstance(record, Metric):
                own_s = account.take_metric(record, timeline.number, base + place)
                if isinstance(record, StepMetric):
                    attempt.steps.append((record.step, own_s))
            else:
                account.take_event(record, timeline.number, base + place)
        relaunches = [event for event in timeline.events if isinstance(event, RelaunchEvent)]
        attempt.spares_left = relaunches[-1].spares_left if relaunches else None
        attempts.append(attempt)
        before = timeline
    account.finish(None if now is None or before is None else base + before.place_of_time(now))
    return account, attempts


def _judge_steps(attempts: Sequence[AccountedAttempt], now: float | None) -> tuple[float, float, int]:
    """The seconds of steps that were kept and lost, and how many were lost.

    Steps that a later attempt began before, and those that died with their ranks, are lost.
    """
    saved = 0
    for index, attempt in enumerate(attempts):
        timeline = attempt.timeline
        starts = [later.timeline.start for later in attempts[index + 1 :] if later.timeline.start is not None]
        saved = max(saved, timeline.saved_step)
        goes_on = now is not None and index == len(attempts) - 1 and not timeline.is_over
        if starts:
            attempt.kept = min(starts)
        elif not timeline.is_good and not goes_on:
            attempt.kept = max(saved, timeline.start or 0)
    steps = [(step <= attempt.kept, own_s) for attempt in attempts for step, own_s in attempt.steps]
    kept_s = math.fsum(own_s for is_kept, own_s in steps if is_kept)
    lost_s = math.fsum(own_s for is_kept, own_s in steps if not is_kept)
    return kept_s, lost_s, sum(not is_kept for is_kept, _ in steps)


def _fault_cost(fault: Fault, steps_lost: int) -> FaultCost:
    return FaultCost(
        fault.attempt,
        fault.cause,
        fault.message,
        ",".join(fault.nodes) or None,
        fault.rank,
        fault.detection_s,
        fault.recovery_s,
        steps_lost,
    )


def _mean_or_none(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
