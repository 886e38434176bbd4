"""The learning rate over the steps of a run."""

from __future__ import annotations

import math

import pytest

from hpcrun.runtime.optimizer import learning_rate
from hpcrun.specs.job import LrScalingSpec, TrainSpec


def rates(**fields: object) -> list[float]:
    train = TrainSpec.model_validate({"steps": 100, "lr": 1.0, "warmup": 10, **fields})
    return [learning_rate(train, 64, step) for step in range(1, 101)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_to_the_peak(schedule: str) -> None:
    assert rates(schedule=schedule)[:10] == pytest.approx([0.1 * step for step in range(1, 11)])


def test_cosine_ends_at_the_floor_and_is_halfway_in_the_middle() -> None:
    values = rates(schedule="cosine", min_lr=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert values[54] == pytest.approx((1.0 + 0.1) / 2)
    assert values[9:] == sorted(values[9:], reverse=True)
    assert values[31] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 22 / 90)))


def test_wsd_stays_at_the_peak_and_decays_linearly_over_its_share() -> None:
    values = rates(schedule="wsd", min_lr=0.0, decay=0.2)
    assert values[9:82] == pytest.approx([1.0] * 73)
    assert values[-1] == pytest.approx(0.0)
    assert values[90] == pytest.approx(0.5)


def test_constant_stays() -> None:
    assert set(rates(schedule="constant")[9:]) == {1.0}


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_lr_scales_with_the_global_batch_when_asked(rule: str, factor: float) -> None:
    scaling = LrScalingSpec.model_validate({"rule": rule, "base_gbs": 16})
    assert max(rates(lr_scaling=scaling, schedule="constant")) == pytest.approx(factor)
