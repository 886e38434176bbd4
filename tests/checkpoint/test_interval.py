"""How often to save: the formulas, their bounds, and a run under failures that agrees with them."""

from __future__ import annotations

import math
import random

import pytest

from hpcrun.checkpoint.policy.failure_rates import (
    FAILURE_KINDS,
    FAILURE_PRIORS,
    FailureHistory,
    FailureKind,
    estimate_failure_rates,
)
from hpcrun.checkpoint.policy.interval import (
    SaveGroup,
    TierSaveCost,
    daly_interval,
    recommend_intervals,
    young_interval,
)
from hpcrun.checkpoint.policy.simulation import check_advice, draw_failure_trace, simulate_run
from hpcrun.checkpoint.tier import TierName

DAY = 86400.0
NEAR = SaveGroup((TierSaveCost("memory", 0.8, 2.0, 60.0), TierSaveCost("parity", 0.1, 6.0, 90.0)))
DEEP = SaveGroup((TierSaveCost("durable", 0.5, 60.0, 300.0),))
ALONE = SaveGroup((TierSaveCost("durable", 30.0, 0.0, 300.0),))
RATES: dict[FailureKind, float] = {"process": 1 / (0.5 * DAY), "node": 1 / (4 * DAY), "site": 1 / (7 * DAY)}


def test_the_formulas_give_what_their_papers_say() -> None:
    assert young_interval(50.0, 1e-4) == pytest.approx(1000.0)
    assert daly_interval(50.0, 1e-4) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly_interval(30.0, 0.1) == 10.0, "a save that takes more than twice the time between failures"
    assert daly_interval(1.0, 0.0) == math.inf
    assert daly_interval(0.01, 1e-6) == pytest.approx(young_interval(0.01, 1e-6), rel=1e-3)


def test_a_rate_is_between_what_was_believed_and_what_was_seen() -> None:
    (process, node, site, storage) = estimate_failure_rates(FailureHistory(), 10)
    assert process.per_s == pytest.approx(0.75 * 419 / 54 / 2048 / DAY * 10)
    assert [one.kind for one in (process, node, site, storage)] == list(FAILURE_KINDS)
    assert storage.per_s is None
    assert "no published figure" in storage.source
    shares = [one.per_node_day for one in FAILURE_PRIORS.values()]
    assert sum(shares) == pytest.approx(419 / 54 / 2048)
    seen = FailureHistory(1000 * DAY, {"node": 30}, runs=9)
    told = {one.kind: one for one in estimate_failure_rates(seen, 1)}
    assert told["node"].per_s is not None
    assert FAILURE_PRIORS["node"].per_node_day < told["node"].per_s * DAY < 0.03
    much = FailureHistory(1e6 * DAY, {"node": 30_000}, runs=9)
    assert {one.kind: one.per_s for one in estimate_failure_rates(much, 1)}["node"] == pytest.approx(
        0.03 / DAY, rel=0.01
    )
    assert "30 in 1e+03 node-days of 9 runs of yours" in told["node"].source
    quiet = {one.kind: one.per_s for one in estimate_failure_rates(FailureHistory(1e5 * DAY, {}, runs=50), 1)}
    assert quiet["node"] is not None
    assert quiet["node"] < FAILURE_PRIORS["node"].per_node_day / DAY, "no failure is evidence too"
    assert {one.kind: one.per_s for one in estimate_failure_rates(FailureHistory(), 1, {"storage": 2e-8})}[
        "storage"
    ] == 2e-8


def test_what_two_runs_saw_adds_up() -> None:
    both = FailureHistory(10.0, {"node": 1}, 1, 2) + FailureHistory(5.0, {"node": 2, "site": 1}, 1)
    assert both == FailureHistory(15.0, {"node": 3, "site": 1}, 2, 2)


@pytest.mark.parametrize(
    ("groups", "rates"),
    [
        ([ALONE], RATES),
        ([NEAR, DEEP], RATES),
        (
            [
                SaveGroup((TierSaveCost("memory", 3.0, 1.0, 60.0),)),
                SaveGroup((TierSaveCost("durable", 2.0, 300.0, 300.0),)),
            ],
            RATES,
        ),
        (
            [NEAR, SaveGroup((TierSaveCost("durable", 20.0, 90.0, 300.0),))],
            {**RATES, "process": 1 / (0.1 * DAY)},
        ),
    ],
)
def test_no_other_interval_is_better_under_failures(
    groups: list[SaveGroup], rates: dict[FailureKind, float]
) -> None:
    advice = recommend_intervals(groups, rates, bound=0.2)
    checked = check_advice(groups, advice, rates)
    assert checked is not None
    told = checked.at[1.0].efficiency
    assert told >= checked.best.efficiency * 0.99
    assert told == pytest.approx(1 - advice.waste, abs=0.01), "and it is what the formula expects"
    assert told > checked.at[0.5].efficiency
    assert told > checked.at[2.0].efficiency


def test_every_advice_keeps_what_it_promises() -> None:
    draw = random.Random(7)
    for _ in range(300):
        stalls = [draw.choice([0.0, draw.uniform(0.01, 60)]) for _ in range(3)]
        flushes = [draw.choice([0.0, draw.uniform(0.1, 900)]) for _ in range(3)]
        tiers: tuple[TierName, ...] = ("memory", "durable", "object")
        groups = [
            SaveGroup((TierSaveCost(tier, stall, flush),))
            for tier, stall, flush in zip(tiers, stalls, flushes, strict=True)
        ][: draw.randint(1, 3)]
        known = draw.sample(["process", "node", "site", "storage"], draw.randint(0, 4))
        rates: dict[FailureKind, float] = {kind: 10 ** draw.uniform(-8, -3) for kind in known}  # type: ignore[misc]
        step = draw.choice([None, draw.uniform(0.05, 30)])
        bound = draw.uniform(0.005, 0.2)
        advice = recommend_intervals(groups, rates, bound=bound, step_s=step)
        busy = 0.0
        for one, before in zip(advice.intervals, (None, *advice.intervals), strict=False):
            busy += one.group.flush_s
            assert one.every_s >= busy * (1 - 1e-9), "saves do not pile up"
            assert one.times >= 1
            assert one.reasons
            if before:
                assert one.every_s == pytest.approx(one.times * before.every_s)
            elif step:
                assert one.every_s / step == pytest.approx(round(one.every_s / step))
        assert advice.overhead <= bound * 1.3 + 1e-9
        assert 0 <= advice.waste <= 1


def test_a_bound_makes_intervals_longer_and_says_so() -> None:
    often: dict[FailureKind, float] = {"process": 1 / 600}
    free, bound = (
        recommend_intervals([NEAR], often, bound=0.5),
        recommend_intervals([NEAR], often, bound=0.01),
    )
    assert bound.overhead <= 0.01 < free.overhead
    assert bound.waste > free.waste
    assert "for the bound of 1.0%" in bound.intervals[0].reasons[1]


def test_nothing_is_made_up_where_no_rate_is_known() -> None:
    advice = recommend_intervals([NEAR], {})
    assert "not known" in advice.intervals[0].reasons[0]
    assert advice.overhead <= 0.0301
    assert check_advice([NEAR], advice, {}) is None
    assert check_advice([NEAR], advice, {"site": 1e-5}) is None, "nothing here survives it"


def test_a_tier_for_frequent_failures_pulls_the_nearer_ones_along() -> None:
    advice = recommend_intervals([NEAR, DEEP], {"process": 1e-7, "site": 1e-3}, bound=0.5)
    assert [one.times for one in advice.intervals] == [1, 1]
    assert advice.intervals[0].every_s == pytest.approx(max(daly_interval(1.4, 1e-3 + 1e-7), 68.0))


def naive(
    cost: TierSaveCost, every_s: float, trace: list[tuple[float, FailureKind]], horizon_s: float
) -> tuple[float, float]:
    """One tier, second by event, without any arithmetic of cycles: training kept, and training lost."""
    now = position = saved = lost = 0.0
    failures = [at for at, _ in trace]
    while now < horizon_s:
        coming = next((at for at in failures if at > now), math.inf)
        end = now + every_s + cost.stall_s
        if min(end, horizon_s) < coming:
            position += min(every_s, horizon_s - now)
            now = end
            saved = position if end <= horizon_s else saved
            continue
        lost += min(every_s, coming - now)
        position, now = saved, coming + cost.restart_s
        while (struck := next((at for at in failures if coming < at <= now), None)) is not None:
            coming, now = struck, struck + cost.restart_s
    return position, lost


def test_the_quick_simulation_is_the_slow_one() -> None:
    cost, horizon = TierSaveCost("durable", 7.0, 0.0, 40.0), 200_000.0
    trace = draw_failure_trace({"site": 1e-3, "node": 1e-3}, horizon, 3)
    assert len(trace) > 300
    for every in (20.0, 110.0, 400.0):
        told = simulate_run([SaveGroup((cost,))], [every], trace, horizon)
        position, lost = naive(cost, every, trace, horizon)
        assert told.efficiency * horizon == pytest.approx(position, abs=every)
        assert told.lost_s == pytest.approx(lost, rel=1e-6)


def test_what_is_lost_depends_on_the_tier_that_survives() -> None:
    groups, every = [NEAR, DEEP], [100.0, 1000.0]
    for kind, least, most in (("process", 0.0, 110.0), ("node", 0.0, 110.0), ("site", 0.0, 1110.0)):
        told = simulate_run(groups, every, [(50_930.0, kind)], 100_000.0)  # type: ignore[list-item]
        assert least <= told.lost_s <= most, kind
        assert told.failures == 1
    kinds: tuple[FailureKind, ...] = ("process", "site", "storage")
    lost = [simulate_run(groups, every, [(50_930.0, kind)], 1e5).lost_s for kind in kinds]
    assert lost == sorted(lost)
    assert lost[2] > 40_000, "nothing here survives that"


def test_a_save_that_still_drains_does_not_help() -> None:
    slow = [
        SaveGroup((TierSaveCost("memory", 0.0, 0.0),)),
        SaveGroup((TierSaveCost("durable", 0.0, 90.0),)),
    ]
    # The save at 100 s is stored at 190 s.
    lost = {at: simulate_run(slow, [100.0, 100.0], [(at, "site")], 1000.0).lost_s for at in (180.0, 195.0)}
    assert lost == {180.0: pytest.approx(180.0), 195.0: pytest.approx(95.0)}


def test_saves_that_come_too_often_make_training_wait_or_are_left_out() -> None:
    slow = [SaveGroup((TierSaveCost("memory", 1.0, 1.0), TierSaveCost("durable", 0.0, 99.0)))]
    wait = simulate_run(slow, [10.0], [], 100_000.0, slots=2, on_backlog="wait")
    skip = simulate_run(slow, [10.0], [], 100_000.0, slots=2, on_backlog="skip")
    assert wait.efficiency == pytest.approx(0.1, abs=0.01), (
        "ten seconds of training for each hundred of flush"
    )
    assert skip.efficiency > 0.98


def test_what_a_failure_took_from_a_tier_is_not_there_for_the_next_one() -> None:
    every, after = [100.0, 1000.0], 50_930.0
    alone = simulate_run([NEAR, DEEP], every, [(after, "site")], 1e5).lost_s
    # Half a minute after the restart there is nothing in memory yet: the durable save again.
    twice = simulate_run([NEAR, DEEP], every, [(after, "site"), (after + 330.0, "process")], 1e5).lost_s
    assert twice == pytest.approx(alone + 30.0)
