"""Saving and restoring over several ranks: one world runs every scenario, the tests look at what it told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.worlds import told_by

RANKS = 4


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    told: dict[str, Any] = told_by("save_world.py", tmp_path_factory.mktemp("world"), RANKS)
    return told


def test_every_layout_loads_into_every_other(told: dict[str, Any]) -> None:
    assert told["reshard"] == []


def test_what_all_ranks_hold_is_written_once_and_shared_out(told: dict[str, Any]) -> None:
    assert told["replicas"] == [[8] * RANKS, 1]


def test_a_steady_save_sends_the_same_few_bytes_whatever_is_saved(told: dict[str, Any]) -> None:
    (first, second, third, noticed), (first_of_many, of_many, _, noticed_again) = told["steady"]
    assert first_of_many > 2 * first
    assert second == third
    assert abs(second - of_many) < 10
    assert second < 200
    assert noticed
    assert noticed_again


def test_another_state_than_the_saved_one_is_refused(told: dict[str, Any]) -> None:
    assert told["strict"] == [
        "also holds model.b",
        "lacks model.c",
        "has another shape of model.b",
        "has another type of model.a",
    ]


def test_random_state_comes_back_to_each_rank(told: dict[str, Any]) -> None:
    assert told["randomness"] is True


def test_a_save_fails_as_a_whole_and_the_next_one_works(told: dict[str, Any]) -> None:
    said, left, later = told["failing"]
    for line in said:
        assert f"rank {RANKS - 1} cannot write step 2: " in line
        assert line.endswith("data-00000.bin: No space left on device (ENOSPC)")
    assert left == ["step-00000001"]
    assert later == ["step-00000001", "step-00000003"]


def test_all_ranks_go_back_when_one_reads_damage(told: dict[str, Any]) -> None:
    assert told["fallen_back"] == [1, 1, 1, True, ["damaged-step-00000002", "step-00000001", "step-00000002"]]


STALE = [
    *([2, True, 0, ["step-00000001", "step-00000002"], True],) * 2,
    *([1, True, 1, ["step-00000001", "step-00000002"], True],) * 3,
]
"""Seen a little later; not seen at all, and other bytes than those that rank 0 sees."""


def test_what_one_rank_alone_does_not_see_is_waited_for_and_never_renamed(told: dict[str, Any]) -> None:
    assert told["stale"] == STALE
