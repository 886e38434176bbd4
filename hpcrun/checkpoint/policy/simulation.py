"""Simulates a run that saves at several tiers and fails as a trace says: the share of useful time.

Between failures the saves of a run repeat, so one cycle of them is simulated step by step, with slots, flush
and waiting, and the rest is arithmetic: years of a run with a thousand failures take little time.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcrun.checkpoint.policy.failure_rates import SURVIVED_FAILURES, FailureKind
from hpcrun.checkpoint.policy.interval import BacklogPolicy, IntervalAdvice, SaveGroup, find_covering_tier
from hpcrun.checkpoint.tier import TierName

FailureEvent = tuple[float, FailureKind]
"""When (seconds since the start), and of which kind."""
_MAX_CYCLE_SAVES, _MIN_CYCLE_SAVES = 2048, 64
"""Of a cycle that is played through: a group that comes more rarely than that is taken to come as often."""


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of a simulated run."""

    efficiency: float
    """Training that was kept, as a share of all time."""
    failures: int
    lost_s: float
    """Training that was done again."""
    restart_s: float


@dataclass(frozen=True)
class IntervalCandidate:
    """Intervals, and the efficiency that a simulation gave them."""

    every_s: tuple[float, ...]
    efficiency: float


@dataclass(frozen=True)
class AdviceCheck:
    """What a simulated run shows about recommended intervals."""

    at: Mapping[float, IntervalCandidate]
    """By factor: half, once and twice the recommended intervals."""
    best: IntervalCandidate
    """The best of all candidates."""
    failures: int


@dataclass
class _SaveCycle:
    """The saves of one cycle, from its beginning, in the steady state."""

    length_s: float
    ends: list[float]
    """When each save is over and training continues."""
    stored: dict[TierName, tuple[list[int], list[float]]] = field(default_factory=dict)
    """For each tier: which saves it gets, and when it has each; in this order."""


def draw_failure_trace(rates: Mapping[FailureKind, float], horizon_s: float, seed: int) -> list[FailureEvent]:
    """Failures that come independently, each kind at its rate."""
    draw, events = random.Random(seed), list[FailureEvent]()
    for kind, rate in sorted(rates.items()):
        at = 0.0
        while rate > 0 and (at := at + draw.expovariate(rate)) < horizon_s:
            events.append((at, kind))
    return sorted(events)


def simulate_run(
    groups: Sequence[SaveGroup],
    every_s: Sequence[float],
    trace: Sequence[FailureEvent],
    horizon_s: float,
    *,
    slots: int = 2,
    on_backlog: BacklogPolicy = "wait",
) -> SimulationResult:
    """Simulate a run of this length with these intervals; each has to be a multiple of the one before.

    A failure ends the flushes in progress, and a restart that is hit again begins anew.
    """
    times = [max(1, round(each / every_s[0])) for each in every_s]
    cycle = _simulate_cycle(groups, times, every_s[0], slots, on_backlog)
    run = _SimulatedRun(groups, cycle, every_s[0])
    for at, kind in trace:
        if at < horizon_s:
            run.fail(at, kind)
    run.end(horizon_s)
    kept = run.position_s
    return SimulationResult(kept / horizon_s, run.failures, run.lost_s, run.restart_s)


def check_advice(
    groups: Sequence[SaveGroup],
    advice: IntervalAdvice,
    rates: Mapping[FailureKind, float],
    *,
    slots: int = 2,
    on_backlog: BacklogPolicy = "wait",
    seed: int = 0,
    failures: int = 500,
) -> AdviceCheck | None:
    """Try the recommended intervals, their halves and doubles, and a grid around them, on the same trace.

    Failures that no tier survives are left out; None if no rate is known.
    """
    rates = {kind: rate for kind, rate in rates.items() if find_covering_tier(groups, kind) is not None}
    total = math.fsum(rates.values())
    if not total:
        return None
    horizon = failures / total
    trace = draw_failure_trace(rates, horizon, seed)
    times = [interval.times for interval in advice.intervals]
    first = advice.intervals[0].every_s

    def run(every: float, factors: Sequence[float]) -> IntervalCandidate:
        intervals = [every]
        for count, factor in zip(times[1:], factors, strict=True):
            intervals.append(intervals[-1] * max(1, round(count * factor)))
        simulated = simulate_run(groups, intervals, trace, horizon, slots=slots, on_backlog=on_backlog)
        return IntervalCandidate(tuple(intervals), simulated.efficiency)

    same = [1.0] * (len(times) - 1)
    at = {factor: run(first * factor, same) for factor in (0.5, 1.0, 2.0)}
    tried = list(at.values())
    for exponent in range(-8, 9):
        every = first * 2.0 ** (exponent / 3)
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0) if same else (1.0,):
            tried.append(run(every, [factor / 2.0 ** (exponent / 3), *same[1:]] if same else same))
    return AdviceCheck(at, max(tried, key=lambda tried_run: tried_run.efficiency), len(trace))


class _SimulatedRun:
    """The state of a simulated run: how far it is, and which of its saves each tier has."""

    def __init__(self, groups: Sequence[SaveGroup], cycle: _SaveCycle, every_s: float) -> None:
        self._costs = [cost for group in groups for cost in group.costs]
        self._cycle, self._every_s = cycle, every_s
        self._has = dict.fromkeys((cost.tier for cost in self._costs), 0)
        """The newest save of each tier, by its number; 0 is the beginning."""
        self._from, self._begin = 0, 0.0
        self.position_s = self.lost_s = self.restart_s = 0.0
        self.failures = 0

    def train(self, until: float) -> None:
        """Continue from the newest save until this moment."""
        passed = until - self._begin
        if passed <= 0:
            return
        cycle, at = self._cycle, self._moment(self._from) + passed
        whole, rest = divmod(at, cycle.length_s)
        done = int(whole) * len(cycle.ends) + bisect_right(cycle.ends, rest)
        self.position_s = min(
            done * self._every_s + max(0.0, at - self._moment(done)), (done + 1) * self._every_s
        )
        for tier, stored in cycle.stored.items():
            newest = self._newest(*stored, at)
            # What was taken before is there only if this tier still has it.
            self._has[tier] = newest if newest > self._from else self._has[tier]

    def end(self, at: float) -> None:
        """The end of the trace."""
        self.train(at)
        self.restart_s -= max(0.0, self._begin - at)

    def _moment(self, save: int) -> float:
        """When a save is over, counted from a beginning without failures."""
        if save <= 0:
            return 0.0
        whole, rest = divmod(save - 1, len(self._cycle.ends))
        return whole * self._cycle.length_s + self._cycle.ends[rest]

    def _newest(self, saves: Sequence[int], moments: Sequence[float], at: float) -> int:
        """The newest save that a tier has then, had there been no failure; 0 for none."""
        length = self._cycle.length_s
        for rounds in range(int(at // length), -1, -1) if moments else ():
            if index := bisect_right(moments, at - rounds * length):
                return rounds * len(self._cycle.ends) + saves[index - 1]
        return 0

    def fail(self, at: float, kind: FailureKind) -> None:
        """Apply a failure: what is lost, and from where the run continues."""
        self.train(at)
        reached, self.failures = self.position_s, self.failures + 1
        left = [cost for cost in self._costs if kind in SURVIVED_FAILURES[cost.tier]]
        best = max(left, key=lambda cost: self._has[cost.tier], default=None)
        save = self._has[best.tier] if best else 0
        for cost in self._costs:
            if cost not in left:
                self._has[cost.tier] = 0
        restart = best.restart_s if best else max(cost.restart_s for cost in self._costs)
        self.restart_s += restart - max(0.0, self._begin - at)
        self._from, self._begin = save, at + restart
        self.position_s = save * self._every_s
        self.lost_s += reached - self.position_s


def _simulate_cycle(
    groups: Sequence[SaveGroup], times: Sequence[int], every_s: float, slots: int, on_backlog: BacklogPolicy
) -> _SaveCycle:
    """The last of several cycles, when queues are as full as they get."""
    counts = [min(count, _MAX_CYCLE_SAVES) for count in times]
    size = max(counts) * -(-_MIN_CYCLE_SAVES // max(counts))
    ends, free = list[float](), [0.0] * max(1, slots)
    stored: dict[TierName, list[tuple[int, float]]] = {
        cost.tier: [] for group in groups for cost in group.costs
    }
    now = worker = 0.0
    for number in range(1, 2 * size + 1):
        now += every_s
        begin = max(now, min(free))
        if begin == now or on_backlog != "skip":
            due = [group for group, count in zip(groups, counts, strict=True) if number % count == 0]
            now = begin + math.fsum(group.stall_s for group in due)
            worker = max(worker, now)
            for due_cost in (cost for group in due for cost in group.costs):
                worker += due_cost.flush_s
                stored[due_cost.tier].append((number, worker))
            free[free.index(min(free))] = worker
        ends.append(now)
    start = ends[size - 1]
    second = {
        tier: ([n - size for n, _ in stored_at if n > size], [at - start for n, at in stored_at if n > size])
        for tier, stored_at in stored.items()
    }
    return _SaveCycle(ends[-1] - start, [end - start for end in ends[size:]], second)
