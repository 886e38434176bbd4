"""How often to save at each level: from the cost of a save, the time of its flush, and the failure rates.

Levels that are saved at the same steps are a tier. Failures that a tier survives, and no nearer one, cost
half of its interval each, and each save costs the time that training visibly waits: the sum is least at the
interval of J. W. Young (Communications of the ACM 17, 1974), with the term of higher order of J. T. Daly
(Future Generation Computer Systems 22, 2006). Training continues during a flush: that is no cost, but adds to
what a failure loses, and no interval may be shorter than the flush, or saves pile up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpcrun.checkpoint.levels import CheckpointLevel
from hpcrun.checkpoint.policy.failure_rates import SURVIVED_FAILURES, FailureKind
from hpcrun.units import format_duration

BacklogPolicy = Literal["wait", "skip", "degrade"]
DEFAULT_OVERHEAD_BOUND = 0.03
"""The share of time that saving may cost by default."""
_MIN_INTERVAL_S = 1.0
"""Nothing is gained by saves that come more often."""


@dataclass(frozen=True)
class LevelSaveCost:
    """What one save costs at one level, in seconds."""

    level: CheckpointLevel
    stall_s: float = 0.0
    """For which training visibly waits, or by which it is slower."""
    flush_s: float = 0.0
    """That the level itself takes, in the background."""
    restart_s: float = 0.0
    """From a failure until training continues from this level."""


@dataclass(frozen=True)
class LevelGroup:
    """Levels that are saved at the same steps."""

    costs: tuple[LevelSaveCost, ...]

    @property
    def name(self) -> str:
        """Its levels in words."""
        return " + ".join(cost.level for cost in self.costs)

    @property
    def stall_s(self) -> float:
        """What one save of it costs."""
        return math.fsum(cost.stall_s for cost in self.costs)

    @property
    def flush_s(self) -> float:
        """How long it keeps the checkpoint worker busy."""
        return math.fsum(cost.flush_s for cost in self.costs)

    @property
    def survives(self) -> set[FailureKind]:
        """Failures that it survives."""
        return {kind for cost in self.costs for kind in SURVIVED_FAILURES[cost.level]}


@dataclass(frozen=True)
class SaveInterval:
    """How often a tier is saved."""

    tier: LevelGroup
    every_s: float
    """Training between two saves."""
    times: int
    """How many intervals of the tier before it takes; 1 for the first."""
    rate_per_s: float
    """Of the failures that it is there for."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class IntervalAdvice:
    """The intervals of all tiers, and what they cost."""

    intervals: tuple[SaveInterval, ...]
    overhead: float
    """Share of time that saves take."""
    waste: float
    """Share of time that saves and failures take together, as far as the rates are known."""


def young_interval(cost_s: float, rate_per_s: float) -> float:
    """Young's interval: sqrt(2 C / rate)."""
    return math.sqrt(2.0 * cost_s / rate_per_s) if rate_per_s else math.inf


def daly_interval(cost_s: float, rate_per_s: float) -> float:
    """Daly's interval: sqrt(2 C M) (1 + x/3 + x²/9) - C, with M = 1 / rate and x = sqrt(C / 2M).

    M itself where a save takes 2 M or more.
    """
    if not rate_per_s:
        return math.inf
    mean = 1.0 / rate_per_s
    if cost_s >= 2.0 * mean:
        return mean
    x = math.sqrt(cost_s / (2.0 * mean))
    return math.sqrt(2.0 * cost_s * mean) * (1.0 + x / 3.0 + x * x / 9.0) - cost_s


def storage_lag_s(tiers: Sequence[LevelGroup], index: int, level: CheckpointLevel) -> float:
    """From the moment of a save until this level of this tier has it: levels take it one after the other."""
    total = 0.0
    for tier in tiers[: index + 1]:
        for cost in tier.costs:
            total += cost.flush_s
            if tier is tiers[index] and cost.level == level:
                return total
    return total


def find_covering_level(tiers: Sequence[LevelGroup], kind: FailureKind) -> tuple[int, LevelSaveCost] | None:
    """The nearest level that survives a kind of failure, and the tier that it is in; None where none does."""
    for index, tier in enumerate(tiers):
        for cost in tier.costs:
            if kind in SURVIVED_FAILURES[cost.level]:
                return index, cost
    return None


def recommend_intervals(
    tiers: Sequence[LevelGroup],
    rates: Mapping[FailureKind, float],
    *,
    bound: float = DEFAULT_OVERHEAD_BOUND,
    step_s: float | None = None,
    slots: int = 2,
    on_backlog: BacklogPolicy = "wait",
) -> IntervalAdvice:
    """The interval of each tier, nearest first; each is a multiple of the one before, in whole steps where
    `step_s` is known.

    `rates`: failures a second of the whole job, kinds that are not known left out. `bound`: the largest share
    of time that saves may cost. `slots`: saves that the memory of a node holds.
    """
    own = _covered_rates(tiers, rates)
    pooled = _pool_intervals(tiers, own, bound)
    reasons = [
        [_explain_interval(tier, rate, want)] for tier, rate, want in zip(tiers, own, pooled, strict=True)
    ]
    total = math.fsum(tier.stall_s / want for tier, want in zip(tiers, pooled, strict=True) if want)
    is_bound = total > bound * (1 + 1e-9)
    if is_bound:
        longer = total / bound
        pooled = [want * longer for want in pooled]
        note = f"saves would cost {total:.1%}: {longer:.3g} times as long for the bound of {bound:.1%}"
        for lines in reasons:
            lines.append(note)
    floors = _minimum_intervals(tiers, slots, on_backlog)
    for index in range(len(tiers) - 1, 0, -1):
        if pooled[index] <= pooled[index - 1] and floors[index] > floors[index - 1]:
            floors[index - 1] = floors[index]  # what is taken together waits together
    intervals: list[SaveInterval] = []
    for index, tier in enumerate(tiers):
        goal = _IntervalGoal(pooled[index], *floors[index], is_bound)
        times, every_s, lines = _round_to_multiple(intervals, goal, step_s)
        intervals.append(SaveInterval(tier, every_s, times, own[index], (*reasons[index], *lines)))
    every = [interval.every_s for interval in intervals]
    overhead = math.fsum(tier.stall_s / (t + tier.stall_s) for tier, t in zip(tiers, every, strict=True))
    return IntervalAdvice(tuple(intervals), overhead, expected_waste(tiers, every, rates))


def expected_waste(
    tiers: Sequence[LevelGroup], every_s: Sequence[float], rates: Mapping[FailureKind, float]
) -> float:
    """The expected share of time that is not training.

    Saves, and for each failure half an interval, the lag of the level that survives it, and the restart.
    """
    total = math.fsum(tier.stall_s / (t + tier.stall_s) for tier, t in zip(tiers, every_s, strict=True) if t)
    for kind, rate in rates.items():
        if (covering := find_covering_level(tiers, kind)) is not None:
            index, cost = covering
            total += rate * (every_s[index] / 2 + storage_lag_s(tiers, index, cost.level) + cost.restart_s)
    return min(1.0, total)


def _covered_rates(tiers: Sequence[LevelGroup], rates: Mapping[FailureKind, float]) -> list[float]:
    """The failures that each tier is there for: those that it survives, and none nearer does."""
    goals, before = [], set[FailureKind]()
    for tier in tiers:
        goals.append(math.fsum(rate for kind, rate in rates.items() if kind in tier.survives - before))
        before |= tier.survives
    return goals


def _pool_intervals(tiers: Sequence[LevelGroup], own: Sequence[float], bound: float) -> list[float]:
    """Daly's interval of each tier; one that would come oftener than a nearer one goes together with it.

    Of a tier whose failures are not known, the shortest that the bound allows.
    """
    pools: list[tuple[float, float, int]] = []
    for tier, rate in zip(tiers, own, strict=True):
        pools.append((tier.stall_s, rate, 1))
        # Without a known failure it has no wish of its own.
        while (
            len(pools) > 1 and pools[-1][1] and daly_interval(*pools[-1][:2]) < daly_interval(*pools[-2][:2])
        ):
            (cost, last_rate, count), (other, other_rate, others) = pools.pop(), pools.pop()
            pools.append((cost + other, last_rate + other_rate, count + others))
    return [
        daly_interval(cost, rate) if rate else cost / bound
        for cost, rate, count in pools
        for _ in range(count)
    ]


def _minimum_intervals(
    tiers: Sequence[LevelGroup], slots: int, on_backlog: BacklogPolicy
) -> list[tuple[float, str]]:
    """The shortest interval of each tier, and why."""
    floors, busy = [], 0.0
    for tier in tiers:
        busy += tier.flush_s
        floors.append((busy, f"flushing a save of it takes {format_duration(busy)}"))
    if tiers and on_backlog != "skip" and busy / max(1, slots) > floors[0][0]:
        flushes = f"flushing the deepest save takes {format_duration(busy)}"
        what = f"{flushes}, and memory holds {slots} (on_backlog: {on_backlog})"
        floors[0] = (busy / max(1, slots), what)
    return floors


class _IntervalGoal(NamedTuple):
    """How long an interval should be, and must be."""

    wanted_s: float
    floor_s: float
    why: str
    is_bound: bool
    """Whether the wanted interval is also the shortest allowed."""


def _round_to_multiple(
    before: Sequence[SaveInterval], goal: _IntervalGoal, step_s: float | None
) -> tuple[int, float, list[str]]:
    """A wish as a multiple of the interval before, or of a step: not below the floor."""
    lines = []
    if goal.floor_s > goal.wanted_s:
        lines.append(f"no shorter than {format_duration(goal.floor_s)}: {goal.why}")
    interval_s = max(goal.floor_s, goal.wanted_s, _MIN_INTERVAL_S)
    least = interval_s if goal.is_bound else goal.floor_s
    unit = before[-1].every_s if before else step_s or 0.0
    if not unit:
        return 1, interval_s, lines
    count = max(1, round(interval_s / unit))
    if count * unit < least * (1 - 1e-9):
        count += 1
    return count if before else 1, count * unit, lines


def _explain_interval(tier: LevelGroup, rate: float, wanted_s: float) -> str:
    if not rate:
        return "how often a failure needs it is not known: as often as the bound and its flush allow"
    stall, between = format_duration(tier.stall_s), format_duration(1 / rate)
    times = f"training waits {stall} a save, and one failure in {between} needs it"
    if abs(daly_interval(tier.stall_s, rate) - wanted_s) > 1e-6 * max(wanted_s, 1.0):
        return f"{times}; with the tier beside it, least is lost at {format_duration(wanted_s)} (Daly)"
    young = format_duration(young_interval(tier.stall_s, rate))
    return f"{times}: least is lost at {format_duration(wanted_s)} (Daly; Young {young})"
