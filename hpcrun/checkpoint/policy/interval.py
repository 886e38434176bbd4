"""How often to save at each tier: from the cost of a save, the time of its flush, and the failure rates.

Tiers that are saved at the same steps are a group. Failures that a group survives, and no nearer one, cost
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

from hpcrun.checkpoint.policy.failure_rates import SURVIVED_FAILURES, FailureKind
from hpcrun.checkpoint.tier import TierName
from hpcrun.units import format_duration

BacklogPolicy = Literal["wait", "skip", "degrade"]
DEFAULT_OVERHEAD_BOUND = 0.03
"""The share of time that saving may cost by default."""
_MIN_INTERVAL_S = 1.0
"""Nothing is gained by saves that come more often."""


@dataclass(frozen=True)
class TierSaveCost:
    """What one save costs at one tier, in seconds."""

    tier: TierName
    stall_s: float = 0.0
    """For which training visibly waits, or by which it is slower."""
    flush_s: float = 0.0
    """That the tier itself takes, in the background."""
    restart_s: float = 0.0
    """From a failure until training continues from this tier."""


@dataclass(frozen=True)
class SaveGroup:
    """Tiers that are saved at the same steps."""

    costs: tuple[TierSaveCost, ...]

    @property
    def name(self) -> str:
        """Its tiers in words."""
        return " + ".join(cost.tier for cost in self.costs)

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
        return {kind for cost in self.costs for kind in SURVIVED_FAILURES[cost.tier]}


@dataclass(frozen=True)
class SaveInterval:
    """How often a group is saved."""

    group: SaveGroup
    every_s: float
    """Training between two saves."""
    times: int
    """How many intervals of the group before it takes; 1 for the first."""
    rate_per_s: float
    """Of the failures that it is there for."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class IntervalAdvice:
    """The intervals of all groups, and what they cost."""

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


def storage_lag_s(groups: Sequence[SaveGroup], index: int, tier: TierName) -> float:
    """From the moment of a save until this tier of this group has it: tiers take it one after the other."""
    total = 0.0
    for group in groups[: index + 1]:
        for cost in group.costs:
            total += cost.flush_s
            if group is groups[index] and cost.tier == tier:
                return total
    return total


def find_covering_tier(groups: Sequence[SaveGroup], kind: FailureKind) -> tuple[int, TierSaveCost] | None:
    """The nearest tier that survives a kind of failure, and the group that it is in; None where none does."""
    for index, group in enumerate(groups):
        for cost in group.costs:
            if kind in SURVIVED_FAILURES[cost.tier]:
                return index, cost
    return None


def recommend_intervals(
    groups: Sequence[SaveGroup],
    rates: Mapping[FailureKind, float],
    *,
    bound: float = DEFAULT_OVERHEAD_BOUND,
    step_s: float | None = None,
    slots: int = 2,
    on_backlog: BacklogPolicy = "wait",
) -> IntervalAdvice:
    """The interval of each group, nearest first; each is a multiple of the one before, in whole steps where
    `step_s` is known.

    `rates`: failures a second of the whole job, kinds that are not known left out. `bound`: the largest share
    of time that saves may cost. `slots`: saves that the memory of a node holds.
    """
    own = _covered_rates(groups, rates)
    pooled = _pool_intervals(groups, own, bound)
    reasons = [
        [_explain_interval(group, rate, want)] for group, rate, want in zip(groups, own, pooled, strict=True)
    ]
    total = math.fsum(group.stall_s / want for group, want in zip(groups, pooled, strict=True) if want)
    is_bound = total > bound * (1 + 1e-9)
    if is_bound:
        longer = total / bound
        pooled = [want * longer for want in pooled]
        note = f"saves would cost {total:.1%}: {longer:.3g} times as long for the bound of {bound:.1%}"
        for lines in reasons:
            lines.append(note)
    floors = _minimum_intervals(groups, slots, on_backlog)
    for index in range(len(groups) - 1, 0, -1):
        if pooled[index] <= pooled[index - 1] and floors[index] > floors[index - 1]:
            floors[index - 1] = floors[index]  # what is taken together waits together
    intervals: list[SaveInterval] = []
    for index, group in enumerate(groups):
        goal = _IntervalGoal(pooled[index], *floors[index], is_bound)
        times, every_s, lines = _round_to_multiple(intervals, goal, step_s)
        intervals.append(SaveInterval(group, every_s, times, own[index], (*reasons[index], *lines)))
    every = [interval.every_s for interval in intervals]
    overhead = math.fsum(group.stall_s / (t + group.stall_s) for group, t in zip(groups, every, strict=True))
    return IntervalAdvice(tuple(intervals), overhead, expected_waste(groups, every, rates))


def expected_waste(
    groups: Sequence[SaveGroup], every_s: Sequence[float], rates: Mapping[FailureKind, float]
) -> float:
    """The expected share of time that is not training.

    Saves, and for each failure half an interval, the lag of the tier that survives it, and the restart.
    """
    total = math.fsum(
        group.stall_s / (t + group.stall_s) for group, t in zip(groups, every_s, strict=True) if t
    )
    for kind, rate in rates.items():
        if (covering := find_covering_tier(groups, kind)) is not None:
            index, cost = covering
            total += rate * (every_s[index] / 2 + storage_lag_s(groups, index, cost.tier) + cost.restart_s)
    return min(1.0, total)


def _covered_rates(groups: Sequence[SaveGroup], rates: Mapping[FailureKind, float]) -> list[float]:
    """The failures that each group is there for: those that it survives, and none nearer does."""
    goals, before = [], set[FailureKind]()
    for group in groups:
        goals.append(math.fsum(rate for kind, rate in rates.items() if kind in group.survives - before))
        before |= group.survives
    return goals


def _pool_intervals(groups: Sequence[SaveGroup], own: Sequence[float], bound: float) -> list[float]:
    """Daly's interval of each group; one that would come oftener than a nearer one goes together with it.

    Of a group whose failures are not known, the shortest that the bound allows.
    """
    pools: list[tuple[float, float, int]] = []
    for group, rate in zip(groups, own, strict=True):
        pools.append((group.stall_s, rate, 1))
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
    groups: Sequence[SaveGroup], slots: int, on_backlog: BacklogPolicy
) -> list[tuple[float, str]]:
    """The shortest interval of each group, and why."""
    floors, busy = [], 0.0
    for group in groups:
        busy += group.flush_s
        floors.append((busy, f"flushing a save of it takes {format_duration(busy)}"))
    if groups and on_backlog != "skip" and busy / max(1, slots) > floors[0][0]:
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


def _explain_interval(group: SaveGroup, rate: float, wanted_s: float) -> str:
    if not rate:
        return "how often a failure needs it is not known: as often as the bound and its flush allow"
    stall, between = format_duration(group.stall_s), format_duration(1 / rate)
    times = f"training waits {stall} a save, and one failure in {between} needs it"
    if abs(daly_interval(group.stall_s, rate) - wanted_s) > 1e-6 * max(wanted_s, 1.0):
        return f"{times}; with the group beside it, least is lost at {format_duration(wanted_s)} (Daly)"
    young = format_duration(young_interval(group.stall_s, rate))
    return f"{times}: least is lost at {format_duration(wanted_s)} (Daly; Young {young})"
