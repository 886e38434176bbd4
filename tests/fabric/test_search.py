"""The search for sites: its starts, its local steps and its proof, each by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hpcrun.fabric import search
from hpcrun.fabric.cost import LinkLoads, TopologySite, slot_flows
from hpcrun.fabric.graph import Fabric, FabricLevel
from hpcrun.fabric.search import PlacementSearch, TreeAllocator, axis_orders
from hpcrun.fabric.traffic import Traffic, TrafficFlow, declared_traffic
from hpcrun.mesh import ParallelDegrees

LEAVES = ("a", "b", "c", "d")
FABRIC = Fabric(
    tuple(f"{leaf}{place}" for leaf in LEAVES for place in range(12)),
    (FabricLevel("leaf", 1e9, 1.0), FabricLevel("spine", 1e9, 8.0), FabricLevel("core", 1e9, 8.0)),
    tuple((leaf, "s" if leaf in "ac" else "t", "core") for leaf in LEAVES for _ in range(12)),
)
SITES = [TopologySite((leaf, "s" if leaf in "ac" else "t", "core"), f"{leaf}0") for leaf in LEAVES]


def loads(degrees: ParallelDegrees, traffic: Traffic | None = None) -> LinkLoads:
    sent = traffic or declared_traffic(degrees, degrees.world_size)
    return LinkLoads(FABRIC, SITES, degrees.world_size, slot_flows(sent, degrees, range(degrees.world_size)))


def key(degrees: ParallelDegrees, where: Sequence[int]) -> tuple[float, ...]:
    placed = loads(degrees)
    placed.place(where)
    return placed.key()


def test_the_proof_leaves_a_good_start_for_a_tidier_one() -> None:
    """No single step leads from one rack to another: half-way the job would be cut."""
    found = PlacementSearch(loads(ParallelDegrees(dp_replicate=4)), [12, 4, 12, 6]).run([[0, 0, 0, 0]])
    assert found == ((1, 1, 1, 1), "exact")


def test_local_steps_alone_repair_a_bad_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXACT_SLOTS", 0)
    degrees = ParallelDegrees(dp_replicate=4)
    where, method = PlacementSearch(loads(degrees), [2, 2, 0, 0]).run([[0, 1, 0, 1]])
    assert method == "heuristic"
    assert key(degrees, where) == key(degrees, [0, 0, 1, 1])


@pytest.mark.parametrize("seed", range(10))
def test_no_start_is_better_than_what_is_found(seed: int) -> None:
    draw = random.Random(seed)
    degrees = ParallelDegrees(pp=4, dp_shard=8)
    starts = [draw.sample([site for site in range(4) for _ in range(12)], 32) for _ in range(5)]
    where, _ = PlacementSearch(loads(degrees), [12] * 4).run(starts)
    assert all(where.count(site) <= 12 for site in range(4))
    assert key(degrees, where) <= min(key(degrees, start) for start in starts)


def test_no_site_is_given_more_than_it_has() -> None:
    degrees = ParallelDegrees(dp_replicate=5)
    where, _ = PlacementSearch(loads(degrees), [2, 1, 1, 1]).run([[0, 1, 2, 3, 0]])
    assert sorted(where) == [0, 0, 1, 2, 3]


def test_best_fit_takes_the_smallest_part_that_holds_all() -> None:
    assert TreeAllocator(SITES, [12, 5, 6, 12]).best_fit(4, 1) == [1] * 4
    assert TreeAllocator(SITES, [12, 5, 6, 12]).best_fit(6, 1) == [2] * 6
    # Spine t has 17 and is the smaller of the two; in it the largest leaf is used up first.
    assert TreeAllocator(SITES, [12, 5, 6, 12]).best_fit(14, 1) == [3] * 12 + [1] * 2


def test_best_fit_keeps_blocks_of_slots_together() -> None:
    assert TreeAllocator(SITES, [5, 5, 5, 5]).best_fit(8, 4) == [0] * 4 + [2] * 4
    assert TreeAllocator(SITES, [3, 3, 3, 3]).best_fit(8, 4) == [0] * 3 + [2] * 1 + [1] * 3 + [3] * 1
    assert TreeAllocator(SITES, [3, 3, 3, 3]).best_fit(14, 4) is None


def test_dealt_slots_are_spread_in_blocks_in_the_order_of_the_tree() -> None:
    assert TreeAllocator(SITES, [12] * 4).round_robin(8, 2) == [0, 0, 2, 2, 1, 1, 3, 3]
    assert TreeAllocator(SITES, [12, 3, 12, 12]).round_robin(8, 4) == [0] * 4 + [2] * 4
    assert TreeAllocator(SITES, [3] * 4).round_robin(8, 4) is None


def test_the_first_nesting_has_the_heaviest_axis_innermost_and_the_last_is_the_plain_order() -> None:
    degrees = ParallelDegrees(pp=2, dp_shard=3, tp=2)
    nested = axis_orders(degrees, 12, 2, {"pp": 9, "dp_shard": 1, "tp": 99})
    assert nested[0] == ([0, 3, 1, 4, 2, 5], [1, 2])
    assert nested[-1] == ([0, 1, 2, 3, 4, 5], [1])
    assert axis_orders(ParallelDegrees(), 12, 2, {}) == [nested[-1]]


def test_equal_questions_have_equal_answers() -> None:
    degrees = ParallelDegrees(pp=4, dp_shard=8)
    traffic = Traffic((TrafficFlow("pp", "chain", 4, 5, 1), TrafficFlow("dp_shard", "ring", 8, 7, 1)))
    start = [site for site in range(4) for _ in range(8)]
    random.Random(3).shuffle(start)
    first, second = (PlacementSearch(loads(degrees, traffic), [12] * 4).run([start]) for _ in range(2))
    assert first == second
