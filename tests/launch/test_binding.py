"""Which CPUs a rank keeps to, on a node of two sockets that a captured tree describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from hpcrun.launch.binding import bind
from hpcrun.specs.placement import Placement

FOUR = Placement(("other", "n1", "n1", "n1", "n1"))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for number, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Collection[int]], list[set[int]]]:
    """Say which CPUs the process has; what it binds itself to is kept in the list that comes back."""
    bound: list[set[int]] = []

    def have(cpus: Collection[int]) -> list[set[int]]:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(set(cpus)))
        return bound

    return have


def test_neighbours_share_a_socket(node: Path, given: Callable[[Collection[int]], list[set[int]]]) -> None:
    bound = given(range(8))
    assert [bind(FOUR, rank, node)["cpus"] for rank in (1, 2, 3, 4)] == ["0-3", "0-3", "4-7", "4-7"]
    assert bound == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2


def test_only_what_the_job_has_is_used(
    node: Path, given: Callable[[Collection[int]], list[set[int]]]
) -> None:
    bound = given([2, 3, 4, 5, 6])
    assert bind(FOUR, 1, node)["cpus"] == "2-3"
    assert bind(FOUR, 4, node)["cpus"] == "4-6"
    assert bound == [{2, 3}, {4, 5, 6}]


def test_a_launcher_that_has_bound_the_rank_is_left_alone(
    node: Path, given: Callable[[Collection[int]], list[set[int]]]
) -> None:
    bound = given([0, 1])
    assert bind(FOUR, 4, node) == {"cpus": "0-1"}
    assert bound == []


def test_one_socket_needs_no_binding(
    tmp_path: Path, given: Callable[[Collection[int]], list[set[int]]]
) -> None:
    bound = given(range(8))
    assert bind(FOUR, 1, tmp_path) == {"cpus": "0-7"}
    assert bound == []
