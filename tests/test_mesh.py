"""Positions in the mesh, and the cut of layers into stages against every possible cut."""

from __future__ import annotations

import itertools
import random

import pytest

from hpcrun.mesh import AXES, ParallelDegrees, partition_layers


def test_coordinates_enumerate_the_mesh_with_tp_fastest() -> None:
    degrees = ParallelDegrees(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    positions = [tuple(degrees.coordinates(rank)[axis] for axis in AXES) for rank in range(48)]
    assert degrees.world_size == 48
    assert positions == list(itertools.product(range(2), range(2), range(3), range(2), range(2)))


def test_dp_rank_counts_replicas_outermost_and_ignores_the_other_axes() -> None:
    degrees = ParallelDegrees(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert degrees.dp == 4
    assert [degrees.dp_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_degrees_describe_themselves() -> None:
    assert str(ParallelDegrees(pp=2, tp=4)) == "pp 2 × tp 4"
    assert str(ParallelDegrees()) == "one rank"


def loads(cuts: list[range], costs: list[int], first: int, last: int) -> list[int]:
    parts = [sum(costs[i] for i in cut) for cut in cuts]
    parts[0] += first
    parts[-1] += last
    return parts


def best_by_trying_all(costs: list[int], parts: int, first: int, last: int) -> tuple[int, int]:
    count = len(costs)
    scores = []
    for inner in itertools.combinations(range(1, count), parts - 1):
        cuts = [range(a, b) for a, b in itertools.pairwise((0, *inner, count))]
        found = loads(cuts, costs, first, last)
        scores.append((max(found), sum(load * load for load in found)))
    return min(scores)


def test_partition_is_the_best_of_all_cuts() -> None:
    rng = random.Random(3)
    for _ in range(150):
        count = rng.randrange(1, 9)
        parts = rng.randrange(1, count + 1)
        costs = [rng.choice((0, 1, 2, 3, 5, 9)) for _ in range(count)]
        first, last = rng.choice((0, 1, 4)), rng.choice((0, 3, 20))
        cuts = partition_layers(costs, parts, first, last)
        assert [i for cut in cuts for i in cut] == list(range(count))
        assert len(cuts) == parts
        assert all(cuts)
        found = loads(cuts, costs, first, last)
        assert (max(found), sum(load * load for load in found)) == best_by_trying_all(
            costs, parts, first, last
        )


def test_the_dearest_part_counts_before_the_sum_of_squares() -> None:
    costs = [0, 2, 6, 2, 2, 8, 1]  # 2+6+4+9 would have the smaller squares
    assert loads(partition_layers(costs, 4), costs, 0, 0) == [8, 4, 8, 1]


def test_partition_spares_the_part_that_carries_more() -> None:
    assert [len(cut) for cut in partition_layers([1.0] * 8, 4)] == [2, 2, 2, 2]
    assert [len(cut) for cut in partition_layers([1.0] * 9, 4, last=2.0)] == [2, 3, 3, 1]


def test_partition_refuses_more_parts_than_layers() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 parts"):
        partition_layers([1.0, 1.0], 3)
