"""Saves by the clock (`checkpoint.every: auto`): the interval follows from what saves are measured to cost.

The first save comes early, and is the first measure. From then on the interval is the one that loses least
time by what is published of failures (Daly), between LEAST_S and MOST_S, but never so short that training
waits for more than the bound's share of its time, or that a save is due before the last one is stored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hpcrun.checkpoint.policy.failure_rates import FailureHistory, estimate_failure_rates
from hpcrun.checkpoint.policy.interval import DEFAULT_OVERHEAD_BOUND, SaveGroup, TierSaveCost, daly_interval
from hpcrun.specs.metrics import Metric, SaveMetric, StoredMetric
from hpcrun.units import format_duration

MIN_INTERVAL_S, MAX_INTERVAL_S = 300.0, 3600.0
_SHORTEST, _LONGEST = format_duration(MIN_INTERVAL_S), format_duration(MAX_INTERVAL_S)
AUTO_DESCRIPTION = f"as often as its measured cost allows, {_SHORTEST} to {_LONGEST} apart"
"""What `auto` means, for those who plan."""
_SAMPLES = 4
"""The number of newest saves that are measured."""
_MIN_CHANGE = 0.1
"""A smaller change of the interval is not worth a word."""


@dataclass(frozen=True)
class ChosenInterval:
    """An interval, and why it is that."""

    every_s: float
    stall_s: float
    flush_s: float
    why: str


def choose_interval(nodes: int, stall_s: float, flush_s: float) -> ChosenInterval:
    """Return the interval for a job of this many nodes whose saves have this cost."""
    group = SaveGroup((TierSaveCost("memory", stall_s), TierSaveCost("durable", 0.0, flush_s)))
    rate = sum(
        estimate.per_s or 0.0
        for estimate in estimate_failure_rates(FailureHistory(), nodes)
        if estimate.kind in group.survives
    )
    best = daly_interval(stall_s, rate)
    interval_s = min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, best))
    least = max(stall_s / DEFAULT_OVERHEAD_BOUND, flush_s)
    nodes_told = f"{nodes} node{'s' * (nodes > 1)}"
    why = (
        f"training waits {format_duration(stall_s)} a save and it is stored after"
        f" {format_duration(flush_s)}; with one failure of {nodes_told} in {format_duration(1 / rate)}"
        f" least is lost at {format_duration(best)} (Daly)"
    )
    if least > interval_s:
        what = (
            f"a cost of {DEFAULT_OVERHEAD_BOUND:.0%}"
            if stall_s / DEFAULT_OVERHEAD_BOUND >= flush_s
            else "the last save to be stored"
        )
        return ChosenInterval(least, stall_s, flush_s, f"{why}; made longer for {what}")
    if interval_s != best:
        why += f"; saves stay between {_SHORTEST} and {_LONGEST} apart"
    return ChosenInterval(interval_s, stall_s, flush_s, why)


class AutoInterval:
    """Decides when a save is due; the caller has the clock."""

    def __init__(self, nodes: int, now: float) -> None:
        self._nodes, self._since = nodes, now
        self._stalls, self._flushes = deque[float](maxlen=_SAMPLES), deque[float](maxlen=_SAMPLES)
        self._told_s = 0.0
        self.every_s = MIN_INTERVAL_S
        """Until the first save has shown what it costs."""

    def is_due(self, now: float) -> bool:
        """Whether the next save is."""
        return now - self._since >= self.every_s

    def saved(self, now: float) -> None:
        """Note that a save was begun, for any reason."""
        self._since = now

    def take(self, metric: Metric) -> ChosenInterval | None:
        """Learn from a line of metrics.jsonl; the interval where it is another one now, worth a word."""
        if isinstance(metric, SaveMetric):
            self._stalls.append(metric.seconds)
        elif isinstance(metric, StoredMetric) and metric.is_durable_save:
            self._flushes.append(metric.lag_s)
        else:
            return None
        if not self._stalls:
            return None
        chosen = choose_interval(self._nodes, max(self._stalls), max(self._flushes, default=0.0))
        self.every_s = chosen.every_s
        if abs(chosen.every_s - self._told_s) <= _MIN_CHANGE * self._told_s:
            return None
        self._told_s = chosen.every_s
        return chosen
