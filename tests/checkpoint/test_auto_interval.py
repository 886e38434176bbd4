"""Saves by the clock: how far apart, by what they are measured to cost."""

from __future__ import annotations

from hpcrun.checkpoint.policy.auto_interval import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    AutoInterval,
    choose_interval,
)
from hpcrun.checkpoint.policy.interval import DEFAULT_OVERHEAD_BOUND
from tests.metric_lines import metric


def test_the_interval_follows_cost_and_failures_within_a_sane_range() -> None:
    # Few nodes seldom fail, and cheap saves cost next to nothing: the range has the last word.
    assert choose_interval(1, 5.0, 10.0).every_s == MAX_INTERVAL_S
    assert choose_interval(4096, 0.001, 1.0).every_s == MIN_INTERVAL_S
    assert (
        MIN_INTERVAL_S
        < choose_interval(1024, 5.0, 10.0).every_s
        < choose_interval(64, 5.0, 10.0).every_s
        <= MAX_INTERVAL_S
    )
    # Saves never cost more than the bound, and none is due before the last one is stored.
    assert choose_interval(4096, 200.0, 200.0).every_s == 200.0 / DEFAULT_OVERHEAD_BOUND
    assert choose_interval(4096, 1.0, 5000.0).every_s == 5000.0
    assert "training waits 3 min 20 s" in choose_interval(4096, 200.0, 200.0).why


def test_the_first_save_is_early_and_shows_what_the_next_ones_cost() -> None:
    auto = AutoInterval(nodes=8, now=1000.0)
    assert not auto.is_due(1000.0 + MIN_INTERVAL_S - 1)
    assert auto.is_due(1000.0 + MIN_INTERVAL_S)
    auto.saved(1300.0)
    assert auto.take(metric("step")) is None
    chosen = auto.take(metric("save", 7, seconds=150.0))
    assert chosen is not None
    assert chosen.every_s == auto.every_s == 150.0 / DEFAULT_OVERHEAD_BOUND
    assert not auto.is_due(1300.0 + auto.every_s - 1)
    assert auto.is_due(1300.0 + auto.every_s)
    # What changes nothing is not worth a word; what is much longer under way is.
    assert auto.take(metric("save", 9, seconds=149.0)) is None
    assert auto.take(metric("stored", 9, tier="local", lag_s=9000.0)) is None
    chosen = auto.take(metric("stored", 9, tier="durable", lag_s=9000.0))
    assert chosen is not None
    assert chosen.every_s == 9000.0
