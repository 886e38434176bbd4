"""Saves behind training over several ranks, with a real checkpoint worker: what one world told of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.worlds import told_by

RANKS = 4


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    told: dict[str, Any] = told_by("async_checkpoint_world.py", tmp_path_factory.mktemp("world"), RANKS)
    return told


def test_a_save_behind_training_holds_the_same_bits_as_one_that_is_waited_for(told: dict[str, Any]) -> None:
    assert told["equal"] == [True, [], 1, True]


def test_what_one_rank_changes_too_early_costs_that_save_alone(told: dict[str, Any]) -> None:
    kinds, steps, (why,) = told["changed"]
    assert steps == [2]
    assert ["save_failed", 1] in kinds
    assert ["stored", 2] in kinds
    assert "rank 2" in why
    assert "model.a was changed while it was copied" in why


def test_a_killed_worker_costs_the_save_it_held_and_another_takes_its_place(told: dict[str, Any]) -> None:
    assert told["killed"] == [True, [["save_failed", 1]], 3]


def test_a_steady_save_sends_nothing_but_a_few_bits(told: dict[str, Any]) -> None:
    first, *later = told["steady"]
    assert first > 1000
    assert later == [0, 0, 0]


def test_all_ranks_leave_a_save_out_or_none(told: dict[str, Any]) -> None:
    begun, skipped, steps = told["alike"]
    assert begun == [[True, False, True]] * RANKS
    assert skipped == [["save_skipped", 2]]
    assert steps == [1, 3]
