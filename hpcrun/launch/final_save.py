"""The last save before the end of an allocation: when it has to begin, by what saves of the run have taken.

Slurm's signal comes a fixed time before the end. Where a save takes longer than that, the supervisor asks the
ranks by itself, early enough.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from hpcrun.checkpoint.tier import TIER_NAMES, TierName
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.job import JobSpec
from hpcrun.specs.metrics import MetricReader, MetricRecord, SaveMetric, StepMetric, StoredMetric
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.timing import FINAL_SAVE_MARGIN
from hpcrun.units import parse_time

_MAX_SAVES = 8
"""So many saves are looked back on."""
_POLL_S = 5.0
_CHUNK_BYTES = 4 << 20
_QUERY_INTERVAL_S = 300.0
"""How often Slurm is asked for the time that is left: somebody may have changed the limit."""


def final_save_deadline(end: float, lead_s: float) -> float:
    """When the last save is to be asked for, for an allocation that ends then and saves that take so long."""
    return end - lead_s


def deepest_reachable_tier(left_s: float, takes_s: Mapping[TierName, float]) -> TierName | None:
    """The deepest tier that a save reaches in the time that is left; None where it reaches none."""
    fitting = [tier for tier in TIER_NAMES if tier in takes_s and takes_s[tier] <= left_s]
    return fitting[-1] if fitting else None


class SaveDurations:
    """How long saves of a run take until a tier has them, by the lines of metrics.jsonl."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_MAX_SAVES)
        self._takes = defaultdict[str, deque[float]](lambda: deque(maxlen=_MAX_SAVES))

    def take(self, records: Iterable[MetricRecord]) -> None:
        """More lines."""
        for record in records:
            match record.metric:
                case StepMetric(step_time_s=seconds):
                    self._steps.append(seconds)
                case SaveMetric(tier=tier, seconds=seconds):
                    self._takes[tier].append(seconds)
                case StoredMetric() as stored:
                    # Without the rests of workers: at the end there are none.
                    self._takes[stored.tier].append(max(0.0, stored.lag_s - stored.rested_s))

    def save_times_s(self) -> dict[TierName, float]:
        """With the margin and the step that has to end first: the longest of the newest saves, by tier."""
        step = max(self._steps, default=0.0)
        return {
            tier: FINAL_SAVE_MARGIN * max(self._takes[tier]) + step
            for tier in TIER_NAMES
            if tier in self._takes
        }

    @property
    def lead_s(self) -> float:
        """How long before the end the last save has to be asked for, to be durable; 0 where nobody knows."""
        return self.save_times_s().get("durable", 0.0)


def effective_grace_s(run: RunDir, spec: JobSpec) -> float:
    """How long before the end of the allocation the run was asked to save: by Slurm, or earlier by us."""
    grace_s = parse_time(spec.retries.grace).seconds if spec.retries else 0.0
    pace, reader = SaveDurations(), MetricReader(run)
    while records := reader.read(_CHUNK_BYTES):
        pace.take(records)
    return max(grace_s, pace.lead_s)


class FinalSaveTimer:
    """Says when the ranks have to be asked for their last save, earlier than Slurm's signal would have it."""

    def __init__(self, grace_s: float, left: Callable[[], float | None], now: Callable[[], float]) -> None:
        self._grace_s, self._left, self._now = grace_s, left, now
        self._end: float | None = None
        self._asked = -_QUERY_INTERVAL_S
        self.pace = SaveDurations()

    def why_due(self) -> str | None:
        """Why the last save is due, or None; it is where only the signal is waited for, too."""
        now, lead = self._now(), self.pace.lead_s
        if lead <= self._grace_s:
            return None
        if now - self._asked >= _QUERY_INTERVAL_S:
            left, self._asked = self._left(), now
            self._end = None if left is None else now + left
        if self._end is None or now < final_save_deadline(self._end, lead):
            return None
        left_s = self._end - now
        reached = deepest_reachable_tier(left_s, self.pace.save_times_s())
        what = f"it is to be {reached}" if reached else "it may not arrive anywhere"
        return (
            f"{left_s:.0f} s are left, and saves take up to {lead / FINAL_SAVE_MARGIN:.0f} s, more than"
            " retry.grace"
            f" ({self._grace_s:g} s) leaves room for: the last save begins now; {what}"
        )


@contextmanager
def watch_time_limit(
    allocation: Allocation | None, run: RunDir, spec: JobSpec, note: Callable[[str], None]
) -> Iterator[None]:
    """Meanwhile send ourselves what Slurm would send, where a save takes longer than its signal leaves."""
    if allocation is None or spec.retries is None:
        yield
        return
    over = threading.Event()
    call = FinalSaveTimer(parse_time(spec.retries.grace).seconds, allocation.seconds_left, time.monotonic)
    reader = MetricReader(run)

    def watch() -> None:
        while not over.wait(_POLL_S):
            while records := reader.read(_CHUNK_BYTES):
                call.pace.take(records)
            why = call.why_due()
            if why is not None:
                note(why)
                os.kill(os.getpid(), signal.SIGUSR2)
                return

    thread = threading.Thread(target=watch, name="last call", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
