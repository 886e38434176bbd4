"""Rounds of the algorithms, what they bring and send, and their α-β times on a flat network."""

from __future__ import annotations

import math

import pytest

from hpcrun.errors import UsageError
from hpcrun.fabric.collectives import IntraNodeLink, RoundCost, round_costs
from hpcrun.fabric.graph import Fabric, FabricLevel
from hpcrun.fabric.rounds import Collective, CollectiveAlgorithm, collective_rounds

ALPHA, BETA, GAMMA = 3e-6, 1 / 10e9, 1 / 40e9


def flat(count: int) -> Fabric:
    """Nodes on one switch that is in nobody's way."""
    names = tuple(f"n{number}" for number in range(count))
    return Fabric(names, (FabricLevel("leaf", 1 / BETA, 1.0, ALPHA),), (("leaf",),) * count)


def seconds(
    collective: Collective,
    algorithm: CollectiveAlgorithm,
    count: int,
    size: float,
    inner: int = 1,
    gamma: float = GAMMA,
) -> float:
    fabric = flat(count)
    found = round_costs(fabric, [fabric.nodes], collective, algorithm, inner=inner)
    assert found is not None
    return sum(one.seconds(size, gamma) for one in found)


def delivered(
    collective: Collective, algorithm: CollectiveAlgorithm, ranks: int, inner: int = 1
) -> list[set[int]]:
    """Whose data each rank has at the end, when a message brings all that its sender had."""
    have = [{rank} for rank in range(ranks)]
    for one in collective_rounds(collective, algorithm, ranks, inner):
        for _ in range(one.times):
            before = [set(own) for own in have]
            for sender, receiver in one.pairs:
                have[receiver] |= before[sender]
    return have


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 12, 16])
@pytest.mark.parametrize(
    "algorithm",
    [
        "whole_ring",
        "segmented_ring",
        "rabenseifner",
        "preorder_tree",
        "pipelined_tree",
        "double_binary_tree",
    ],
)
def test_an_allreduce_brings_everything_to_everybody(algorithm: CollectiveAlgorithm, ranks: int) -> None:
    assert delivered("all_reduce", algorithm, ranks) == [set(range(ranks))] * ranks


@pytest.mark.parametrize(("ranks", "inner"), [(4, 2), (8, 4), (12, 4), (12, 3), (15, 5)])
@pytest.mark.parametrize("algorithm", ["two_level", "torus"])
def test_so_does_one_in_two_dimensions(algorithm: CollectiveAlgorithm, ranks: int, inner: int) -> None:
    assert delivered("all_reduce", algorithm, ranks, inner) == [set(range(ranks))] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 11])
def test_bruck_gathers_for_any_count_in_as_few_rounds_as_can_be(ranks: int) -> None:
    assert delivered("all_gather", "bruck", ranks) == [set(range(ranks))] * ranks
    made = collective_rounds("all_gather", "bruck", ranks)
    assert len(made) == math.ceil(math.log2(ranks))
    assert sum(one.share for one in made) == pytest.approx((ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 11])
@pytest.mark.parametrize("algorithm", ["tree", "pipelined_tree", "double_binary_tree"])
def test_a_reduce_brings_everything_to_the_root(algorithm: CollectiveAlgorithm, ranks: int) -> None:
    assert any(have == set(range(ranks)) for have in delivered("reduce", algorithm, ranks))


def sent(collective: Collective, algorithm: CollectiveAlgorithm, ranks: int, inner: int = 1) -> float:
    """What the busiest rank sends in all, of the size."""
    total: dict[int, float] = {}
    for one in collective_rounds(collective, algorithm, ranks, inner):
        for sender, _ in one.pairs:
            total[sender] = total.get(sender, 0.0) + one.share * (1 if one.pipelined else one.times)
    return max(total.values())


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "inner", "shares"),
    [
        ("all_reduce", "ring", 6, 1, 2 * 5 / 6),
        ("all_reduce", "segmented_ring", 6, 1, 2 * 5 / 6),
        ("all_reduce", "rabenseifner", 8, 1, 2 * 7 / 8),
        ("all_reduce", "two_level", 8, 4, 2 * 7 / 8),
        ("all_reduce", "torus", 12, 4, 2 * 11 / 12),
        ("all_reduce", "whole_ring", 6, 1, 5.0),
        ("all_reduce", "recursive_doubling", 8, 1, 3.0),
        # Of two trees: half of the data up and down in each, and to two below in the one where it is inside.
        ("all_reduce", "double_binary_tree", 16, 1, 2.0),
        ("all_to_all", "pairwise", 8, 1, 7 / 8),
        ("all_to_all", "bruck", 8, 1, 3 / 2),
    ],
)
def test_what_a_rank_sends_in_all(
    collective: Collective, algorithm: CollectiveAlgorithm, ranks: int, inner: int, shares: float
) -> None:
    assert sent(collective, algorithm, ranks, inner) == pytest.approx(shares)


SIZE = 48e6


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_known_formulas(ranks: int) -> None:
    """α-β-γ times as in Thakur, Rabenseifner, Gropp (2005)."""
    m, p, log = SIZE, ranks, math.log2(ranks)
    most = (p - 1) / p * m

    def of(algorithm: CollectiveAlgorithm, collective: Collective = "all_reduce") -> float:
        return seconds(collective, algorithm, ranks, m)

    assert of("ring") == pytest.approx(2 * (p - 1) * ALPHA + 2 * most * BETA + most * GAMMA)
    assert of("recursive_doubling") == pytest.approx(log * (ALPHA + m * BETA + m * GAMMA))
    assert of("rabenseifner") == pytest.approx(2 * log * ALPHA + 2 * most * BETA + most * GAMMA)
    assert of("tree") == pytest.approx(2 * log * (ALPHA + m * BETA) + log * m * GAMMA)
    assert of("ring", "all_gather") == pytest.approx((p - 1) * ALPHA + most * BETA)
    assert of("bruck", "all_gather") == pytest.approx(log * ALPHA + most * BETA)
    assert of("pairwise", "all_to_all") == pytest.approx((p - 1) * ALPHA + most * BETA)
    assert of("bruck", "all_to_all") == pytest.approx(log * (ALPHA + m / 2 * BETA))


def test_two_levels_take_what_both_take() -> None:
    g, nodes, m = 4, 8, SIZE
    inside = 2 * (g - 1) * ALPHA + 2 * (g - 1) / g * m * BETA
    across = seconds("all_reduce", "rabenseifner", nodes, m / g, gamma=0)
    assert seconds("all_reduce", "two_level", g * nodes, m, g, gamma=0) == pytest.approx(inside + across)
    across = seconds("all_reduce", "ring", nodes, m / g, gamma=0)
    assert seconds("all_reduce", "torus", g * nodes, m, g, gamma=0) == pytest.approx(inside + across)


def test_the_wire_of_four_nodes_with_eight_nics() -> None:
    """4 GiB over 4 nodes of 8 ranks: 0.75 GiB a rank over the wire, at 50 GB/s a NIC 16.1 ms at best."""
    names = tuple(f"n{at}" for at in range(4))
    fabric = Fabric(names, (FabricLevel("leaf", 8 * 50e9, 1.0, 0.0),), (("leaf",),) * 4)
    ranks = [name for name in names for _ in range(8)]
    found = round_costs(fabric, [ranks], "all_reduce", "two_level", inner=8)
    assert found is not None
    assert sum(one.seconds(4 * 2**30) for one in found) == pytest.approx(16.1e-3, rel=2e-3)


def test_limits_of_large_and_of_small() -> None:
    """A ring has full bandwidth and p rounds; two trees have full bandwidth and log p rounds."""
    large = 1e15
    for count in (8, 64):
        ideal = 2 * large * BETA
        assert seconds("all_reduce", "ring", count, large, gamma=0) == pytest.approx(
            ideal, rel=1 / count + 1e-3
        )
        assert seconds("all_reduce", "double_binary_tree", count, large, gamma=0) == pytest.approx(
            ideal, rel=0.01
        )
        assert seconds("all_reduce", "pipelined_tree", count, large, gamma=0) == pytest.approx(
            2 * ideal, rel=0.01
        )
        log = math.log2(count)
        assert seconds("all_reduce", "double_binary_tree", count, 0) <= (2 * log + 2) * ALPHA
        assert seconds("all_reduce", "ring", count, 0) == pytest.approx(2 * (count - 1) * ALPHA)


def test_halves_go_to_the_nearest_first() -> None:
    there = collective_rounds("all_reduce", "rabenseifner", 8)[:3]
    assert [(abs(one.pairs[0][0] - one.pairs[0][1]), one.share) for one in there] == [
        (1, 1 / 2),
        (2, 1 / 4),
        (4, 1 / 8),
    ]


def test_a_pipeline_is_cut_into_the_best_number_of_pieces() -> None:
    pace = RoundCost(1e-6, 1e-10, times=5, pipelined=True)
    for size in (1e3, 1e6, 1e9):
        plain = [(5 + pieces - 1) * (1e-6 + size * 1e-10 / pieces) for pieces in range(1, 3000)]
        assert pace.seconds(size) == pytest.approx(min(plain))


def test_a_rack_s_uplink_is_shared_by_who_crosses_it() -> None:
    """With the nearest first only an eighth crosses; with the farthest first a half does."""
    units = tuple((f"leaf{at // 4}", "spine") for at in range(8))
    names = tuple(f"n{at}" for at in range(8))
    fabric = Fabric(names, (FabricLevel("leaf", 1e9, 1.0, 0.0), FabricLevel("spine", 1e9, 100.0, 0.0)), units)
    uplink = 1e9 * 4 / 100

    def time(algorithm: CollectiveAlgorithm) -> float:
        found = round_costs(fabric, [names], "all_reduce", algorithm)
        assert found is not None
        return sum(one.seconds(1e9) for one in found)

    assert time("rabenseifner") == pytest.approx(2 * (1e9 / 2 / 1e9 + 1e9 / 4 / 1e9 + 4 * 1e9 / 8 / uplink))
    assert time("halving_doubling") == pytest.approx(2 * (4 * 1e9 / 2 / uplink + 1 / 4 + 1 / 8))


def test_what_stays_in_a_node_costs_what_the_node_carries() -> None:
    fabric = flat(2)
    ranks = ["n0", "n0", "n1", "n1"]

    def time(inside: IntraNodeLink | None) -> float:
        found = round_costs(fabric, [ranks], "all_reduce", "ring", inside=inside)
        assert found is not None
        return sum(one.seconds(1e9) for one in found)

    free = 6 * (ALPHA + 0.25e9 * BETA)
    assert time(None) == pytest.approx(free)
    assert time(IntraNodeLink(1e12, 1e-9)) == pytest.approx(free)
    assert time(IntraNodeLink(1e9, 1e-3)) == pytest.approx(6 * (1e-3 + 0.25))
    alone = round_costs(flat(1), [["n0", "n0"]], "all_reduce", "ring", inside=IntraNodeLink(1e9, 1e-3))
    assert alone is not None
    assert sum(one.seconds(1e9) for one in alone) == pytest.approx(2 * (1e-3 + 0.5))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="two_level wants 8 ranks in several equal groups"):
        collective_rounds("all_reduce", "two_level", 8, 3)
    with pytest.raises(UsageError, match="torus wants 8 ranks in several equal groups"):
        collective_rounds("all_reduce", "torus", 8)
    assert collective_rounds("all_to_all", "bruck", 8)
