"""Placement: as cheap as every other order of every other choice of nodes, and in words why."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from hpcrun.errors import UsageError
from hpcrun.fabric.cost import compute_placement_cost
from hpcrun.fabric.graph import Fabric, FabricLevel, Grid, flat_fabric
from hpcrun.fabric.place import NoSingleTreeError, PlacementResult, order_granted_nodes, place_job
from hpcrun.fabric.topology_reader import parse_fabric
from hpcrun.fabric.traffic import Traffic, TrafficFlow, declared_traffic
from hpcrun.mesh import AXES, ParallelDegrees
from hpcrun.specs.placement import place_in_blocks
from tests.fabric.rendered_topology import render_topology

LEAF, SPINE, CORE = (
    FabricLevel("leaf", 1e9, 1.0),
    FabricLevel("spine", 1e9, 4.0),
    FabricLevel("core", 1e9, 2.0),
)


def tree(leaves: dict[str, int], *levels: FabricLevel, spines: Sequence[str] = ("s",)) -> Fabric:
    """Leaves of so many nodes, dealt to the spines in turns; nodes are called after their leaf."""
    units = [
        (f"{leaf}-{place:02}", leaf, spines[turn % len(spines)], "core")
        for turn, (leaf, size) in enumerate(leaves.items())
        for place in range(size)
    ]
    levels = levels or (LEAF, SPINE)
    return Fabric(tuple(one[0] for one in units), levels, tuple(one[1 : 1 + len(levels)] for one in units))


def racks_of(found: PlacementResult) -> dict[str, int]:
    return dict(Counter(node.split("-")[0] for node in found.placement.nodes))


def simple(fabric: Fabric, free: Sequence[str], nodes: int, **options: object) -> PlacementResult:
    """A ring over so many nodes with one rank each."""
    degrees = ParallelDegrees(dp_replicate=nodes)
    return place_job(fabric, free, nodes, 1, degrees, declared_traffic(degrees, nodes), **options)  # type: ignore[arg-type]


# --- the cheapest


def drawn(seed: int) -> tuple[Fabric, list[str], ParallelDegrees, Traffic]:
    """A small cluster with some nodes taken, and a job of four ranks or six."""
    draw = random.Random(seed)
    leaves = {f"l{leaf}": draw.randint(2, 4) for leaf in range(draw.randint(2, 4))}
    levels = [
        FabricLevel(name, draw.choice((None, 1e9, 1e9, 4e9)), draw.choice((1.0, 2.0, 8.0)), 1e-5)
        for name in ("leaf", "spine", "core")
    ]
    fabric = tree(leaves, *levels, spines=("s", "t")[: draw.randint(1, 2)])
    nodes = list(fabric.nodes)
    draw.shuffle(nodes)  # the table's order need not be the tree's
    fabric = fabric.restricted(nodes)
    degrees = draw.choice(
        [
            ParallelDegrees(pp=2, dp_shard=2),
            ParallelDegrees(pp=4),
            ParallelDegrees(dp_replicate=2, dp_shard=2),
            ParallelDegrees(cp=4),
        ]
        + (
            [ParallelDegrees(pp=2, dp_shard=3), ParallelDegrees(dp_replicate=3, cp=2)]
            if 6 <= len(nodes) < 8
            else []
        )
    )
    flows = [
        TrafficFlow(
            axis, "chain" if axis == "pp" else "ring", size, draw.randint(1, 10**8), draw.randint(1, 5)
        )
        for axis, size in zip(AXES, degrees.shape, strict=True)
        if size > 1
    ]
    return fabric, nodes[: max(degrees.world_size, 7)], degrees, Traffic(tuple(flows))


def whole(fabric: Fabric, free: Sequence[str], taken: Sequence[str]) -> int:
    """How large the racks are that are left: the sum of the squares."""
    left = Counter(fabric.unit(node, 0) for node in free if node not in taken)
    return sum(count**2 for count in left.values())


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_any_choice_of_nodes_is_cheaper(seed: int) -> None:
    fabric, free, degrees, traffic = drawn(seed)
    ranks = degrees.world_size
    found = place_job(fabric, free, ranks, 1, degrees, traffic)
    # One of every class of orders that differ only by nodes of one leaf.
    classes = {
        tuple(fabric.unit(node, 0) for node in nodes): nodes for nodes in itertools.permutations(free, ranks)
    }
    best = min(
        compute_placement_cost(fabric, place_in_blocks(nodes, ranks, 1), degrees, traffic).key
        for nodes in classes.values()
    )
    assert found.cost.key == best
    tidiest = max(
        whole(fabric, free, nodes)
        for nodes in classes.values()
        if compute_placement_cost(fabric, place_in_blocks(nodes, ranks, 1), degrees, traffic).key == best
    )
    assert whole(fabric, free, found.placement.nodes) == tidiest
    assert found.method == "exact"
    assert found.cost == compute_placement_cost(fabric, found.placement, degrees, traffic)


@pytest.mark.parametrize("seed", range(4))
def test_a_larger_job_is_never_worse_than_the_plain_orders(seed: int) -> None:
    draw = random.Random(seed)
    leaves = {f"l{leaf}": draw.randint(4, 12) for leaf in range(16)}
    fabric = tree(leaves, LEAF, SPINE, CORE, spines=("s", "t", "u"))
    nodes = list(fabric.nodes)
    draw.shuffle(nodes)
    fabric = fabric.restricted(nodes)
    degrees = draw.choice(
        [ParallelDegrees(pp=4, dp_replicate=2, dp_shard=8, tp=4), ParallelDegrees(pp=2, dp_shard=64, tp=2)]
    )
    traffic = declared_traffic(degrees, degrees.world_size)
    free = [node for node in nodes if draw.random() < 0.8]
    found = place_job(fabric, free, degrees.world_size, 4, degrees, traffic)
    assert found.method == "heuristic"
    for listed in (free, sorted(free)):
        plain = place_in_blocks(listed[: len(found.placement.nodes)], degrees.world_size, 4)
        assert found.cost.key <= compute_placement_cost(fabric, plain, degrees, traffic).key
    assert found == place_job(fabric, free, degrees.world_size, 4, degrees, traffic)


def test_the_axis_with_the_most_bytes_stays_inside_a_leaf() -> None:
    fabric = tree({"a": 4, "b": 4})
    degrees = ParallelDegrees(pp=2, dp_shard=4)
    heavy_shards = Traffic(
        (TrafficFlow("pp", "chain", 2, 10, 1), TrafficFlow("dp_shard", "ring", 4, 1000, 1))
    )
    heavy_stages = Traffic(
        (TrafficFlow("pp", "chain", 2, 1000, 1), TrafficFlow("dp_shard", "ring", 4, 10, 1))
    )
    shards = place_job(fabric, fabric.nodes, 8, 1, degrees, heavy_shards)
    assert {node[0] for node in shards.placement.ranks[:4]} in ({"a"}, {"b"})
    stages = place_job(fabric, fabric.nodes, 8, 1, degrees, heavy_stages)
    assert all(stages.placement.ranks[at][0] == stages.placement.ranks[at + 4][0] for at in range(4))


def test_neighbouring_ranks_share_a_node() -> None:
    fabric = tree({"a": 2, "b": 2})
    degrees = ParallelDegrees(dp_replicate=2, tp=4)
    found = place_job(fabric, fabric.nodes, 8, 4, degrees, declared_traffic(degrees, 8))
    assert found.placement.ranks[:4] == (found.placement.ranks[0],) * 4
    assert found.placement.per_node == 4


def test_a_tensor_parallel_group_stays_in_a_block_where_one_has_room() -> None:
    block = FabricLevel("block", 1e9, 1.0)
    fabric = tree({"x": 3, "y": 3, "z": 2}, block, LEAF)
    degrees = ParallelDegrees(dp_shard=3, tp=4)
    traffic = Traffic((TrafficFlow("dp_shard", "ring", 3, 10**9, 1), TrafficFlow("tp", "ring", 4, 1, 1)))
    found = place_job(fabric, fabric.nodes, 12, 2, degrees, traffic)
    for group in range(3):
        assert len({node[0] for node in found.placement.ranks[4 * group : 4 * group + 4]}) == 1
    full = place_job(fabric, [node for node in fabric.nodes if node != "z-00"], 12, 2, degrees, traffic)
    assert any(line.startswith("tp does not fit into a block") for line in full.why)


def test_on_a_ring_of_nodes_neighbours_are_taken() -> None:
    names = tuple(f"n{place}" for place in range(8))
    fabric = Fabric(names, (), ((),) * 8, grids=(Grid("r", (8,), names),))
    found = simple(fabric, ["n6", "n2", "n7", "n4", "n0"], 3)
    assert set(found.placement.nodes) == {"n6", "n7", "n0"}


def test_without_a_topology_the_plain_order_stays() -> None:
    fabric = flat_fabric(["c", "a", "b", "d"], "nothing")
    found = simple(fabric, ["d", "b", "c"], 2)
    assert found.placement.nodes == ("c", "b")
    assert "no switches or blocks are known" in found.why[0]


def test_thin_uplinks_may_be_worth_more_leaves_and_that_is_said() -> None:
    fabric = tree({f"l{leaf}": 8 for leaf in range(8)}, LEAF, FabricLevel("spine", 1e9, 16.0))
    degrees = ParallelDegrees(dp_shard=32)
    traffic = Traffic((TrafficFlow("dp_shard", "all_to_all", 32, 31 * 10**6, 1),))
    found = place_job(fabric, fabric.nodes, 32, 1, degrees, traffic)
    assert racks_of(found) == dict.fromkeys((f"l{leaf}" for leaf in range(8)), 4)
    assert any(
        line.startswith("4 leaves could hold it at 1.71 times the modelled time; more are")
        for line in found.why
    )
    wide_enough = tree({f"l{leaf}": 8 for leaf in range(8)}, LEAF, FabricLevel("spine", 1e9, 1.0))
    assert len(racks_of(place_job(wide_enough, wide_enough.nodes, 32, 1, degrees, traffic))) == 4


# --- which nodes


def test_at_equal_cost_few_leaves_come_first() -> None:
    fabric = tree(
        {"x": 2, "y": 2, "large": 8}, FabricLevel("leaf", 50e9, 1.0), FabricLevel("spine", 50e9, 1.0)
    )
    degrees, traffic = (
        ParallelDegrees(dp_shard=4),
        Traffic((TrafficFlow("dp_shard", "ring", 4, 3 * 10**6, 0),)),
    )
    assert racks_of(place_job(fabric, fabric.nodes, 4, 1, degrees, traffic)) == {"large": 4}


def test_large_free_racks_are_left_whole() -> None:
    fabric = tree({"big": 12, "small": 5, "tiny": 3})
    found = simple(fabric, fabric.nodes, 4)
    assert racks_of(found) == {"small": 4}
    assert "left whole: big (12 free), tiny (3 free)" in found.why


def test_of_two_racks_that_hold_the_job_the_smaller_is_used_up() -> None:
    fabric = tree({"big": 12, "small": 5, "tiny": 3})
    assert racks_of(simple(fabric, fabric.nodes, 3)) == {"tiny": 3}


def test_no_more_racks_are_broken_into_than_needed() -> None:
    fabric = tree({"a": 3, "b": 6, "c": 6, "d": 2}, LEAF, FabricLevel("spine", 1e9, 1.0))
    assert racks_of(simple(fabric, fabric.nodes, 8)) in ({"b": 6, "d": 2}, {"c": 6, "d": 2})


def test_spread_takes_nodes_of_as_many_racks_as_there_are() -> None:
    fabric = tree({"a": 6, "b": 6, "c": 6})
    assert set(racks_of(simple(fabric, fabric.nodes, 5, policy="spread"))) == {"a", "b", "c"}


def test_spread_keeps_its_nodes_apart_though_there_are_spares() -> None:
    fabric = tree({"a": 4, "b": 4}, LEAF, FabricLevel("spine", 1e9, 1.0))
    placed = simple(fabric, fabric.nodes, 4, spares=4, policy="spread")
    assert racks_of(placed) == {"a": 2, "b": 2}


def test_pin_takes_the_given_nodes_and_orders_them() -> None:
    fabric = tree({"a": 4, "b": 4})
    found = simple(fabric, ["a-00", "b-00", "a-01", "b-01"], 4, policy="pin")
    assert [node[0] for node in found.placement.nodes] in (list("aabb"), list("bbaa"), list("abba"))
    assert sorted(found.placement.nodes) == ["a-00", "a-01", "b-00", "b-01"]


def test_none_leaves_the_nodes_as_they_come() -> None:
    fabric = tree({"a": 4, "b": 4})
    found = simple(fabric, ["b-00", "a-00", "b-01", "a-01", "a-02"], 4, policy="none", spares=1)
    assert found.placement.nodes == ("b-00", "a-00", "b-01", "a-01")
    assert found.spares == ("a-02",)
    assert found.method == "as given"


def test_spares_stand_in_different_racks_first_where_the_job_is() -> None:
    fabric = tree({"a": 6, "b": 6, "c": 6})
    (rack,) = racks_of(simple(fabric, fabric.nodes, 4, spares=1))
    first, second = simple(fabric, fabric.nodes, 4, spares=2).spares
    assert first[0] == rack != second[0]


def test_spares_come_from_the_smallest_rests_where_the_job_s_racks_are_full() -> None:
    fabric = tree({"a": 3, "b": 2, "c": 3})
    found = simple(fabric, fabric.nodes, 3, spares=3)
    assert racks_of(found) == {"a": 3}
    assert [node[0] for node in found.spares] == ["b", "c", "b"]


def test_granted_nodes_that_are_over_become_spares_of_many_racks() -> None:
    fabric = tree({"a": 4, "b": 4, "c": 4})
    degrees = ParallelDegrees(dp_replicate=9)
    flat_cost = Traffic((TrafficFlow("dp_replicate", "ring", 9, 0, 0),))
    found = order_granted_nodes(fabric, fabric.nodes, 9, 1, degrees, flat_cost)
    assert sorted(node[0] for node in found.spares) == ["a", "b", "c"]


def test_the_dearest_of_the_granted_nodes_is_the_one_that_stays_spare() -> None:
    fabric = tree({"a": 4, "b": 4})
    degrees = ParallelDegrees(dp_replicate=4)
    found = order_granted_nodes(
        fabric, ["a-00", "b-03", "a-01", "a-02", "a-03"], 4, 1, degrees, declared_traffic(degrees, 4)
    )
    assert found.spares == ("b-03",)


def test_nodes_to_be_avoided_are_not_taken() -> None:
    fabric = tree({"a": 4, "b": 6})
    found = simple(fabric, fabric.nodes, 4, avoid=["a-01"])
    assert racks_of(found) == {"b": 4}
    assert "to be avoided: a-01" in found.why
    degrees = ParallelDegrees(dp_replicate=4)
    granted = order_granted_nodes(
        fabric, fabric.nodes[:5], 4, 1, degrees, declared_traffic(degrees, 4), avoid=["a-01"]
    )
    assert "a-01" not in (*granted.placement.nodes, *granted.spares)


def test_nodes_that_no_rank_needs_stay_spare() -> None:
    fabric = tree({"a": 4})
    assert len(simple(fabric, fabric.nodes, 2, node_count=3).spares) == 1


def test_too_few_free_nodes_are_told_in_one_line() -> None:
    fabric = tree({"a": 4})
    with pytest.raises(UsageError) as error:
        simple(fabric, fabric.nodes, 3, spares=1, avoid=["a-00"])
    assert str(error.value) == (
        "resources.nodes: 3 nodes and 1 spare are needed, 3 are free (a-[01-03]), a-00 to be avoided;"
        " ask for fewer, or wait"
    )
    with pytest.raises(UsageError, match=r"1 node is needed, 0 are free \(none\); ask"):
        simple(fabric, [], 1)
    with pytest.raises(UsageError, match=r"1 is given \(a-00\); ask for fewer, or name more nodes"):
        simple(fabric, ["a-00"], 2, policy="pin")


# --- in words


def test_the_reasons_say_what_crosses_which_level() -> None:
    fabric = tree({"a": 4, "b": 4})
    degrees = ParallelDegrees(pp=2, dp_shard=4, tp=2)
    traffic = Traffic(
        (
            TrafficFlow("pp", "chain", 2, 150_000, 1),
            TrafficFlow("dp_shard", "ring", 4, 10**7, 1),
            TrafficFlow("tp", "ring", 2, 10**7, 1),
        )
    )
    found = place_job(fabric, fabric.nodes, 16, 2, degrees, traffic)
    assert found.why == (
        "8 of 8 free nodes, from 2 leaves: a (4), b (4)",
        "pp crosses the spine with 2.289 MiB a step",
        "dp_shard stays inside leaves",
        "tp stays inside nodes",
    )


def test_unknown_bandwidths_and_assumed_traffic_are_said() -> None:
    fabric = tree({"a": 2, "b": 2}, FabricLevel("leaf"), FabricLevel("spine"))
    found = place_job(fabric, fabric.nodes, 4, 1, ParallelDegrees(), declared_traffic(ParallelDegrees(), 4))
    assert found.why[-2:] == (
        "bandwidths or ways are unknown: bytes are compared, from the outermost level inwards",
        "a command that declares no degrees: one ring over all ranks is assumed",
    )


def test_a_placement_dumps_to_json() -> None:
    fabric = tree({"a": 4, "b": 4})
    found = simple(fabric, fabric.nodes, 2, spares=1)
    values = json.loads(json.dumps(found.as_json()))
    assert values["placement"]["ranks"] == list(found.placement.ranks)
    assert values["spares"] == list(found.spares)
    assert values["cost"]["seconds"] == found.cost.seconds


# --- several trees


TREES = (
    "SwitchName=east Switches=e[1-2]\nSwitchName=e1 Nodes=n[1-8]\nSwitchName=e2 Nodes=n[9-16]\n"
    "SwitchName=west Nodes=n[17-32]\n"
)


@pytest.mark.parametrize(
    ("text", "trees"),
    [
        (TREES, {"east": 16, "west": 16}),
        ("SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-8]\n", {"a": 4, "b": 4}),
        ("SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[4-8]\n", {}),
        (f"{TREES}SwitchName=top Switches=east,west\n", {}),
        ("SwitchName=a Level=0 Nodes=n[1-4]\nSwitchName=s Level=1 Nodes=n[1-8] Switches=a,b\n", {}),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n"
            "SwitchName=s Switches=a\nSwitchName=t Switches=a,b\n",
            {},
        ),
        ("BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\n", {}),
        ("a: n[1-4]\nb: n[5-8]\n", {}),
    ],
)  # fmt: skip
def test_the_trees_of_a_topology(text: str, trees: dict[str, int]) -> None:
    fabric = parse_fabric(text, name="t")
    assert Counter(fabric.trees.values()) == trees
    if "SwitchName" in text:
        assert parse_fabric(render_topology(fabric), name="t").trees.keys() == fabric.trees.keys()


@pytest.mark.parametrize("policy", ["pack", "spread", "none", "pin"])
def test_a_job_stands_inside_one_tree(policy: str) -> None:
    fabric = parse_fabric(TREES, name="t")
    free = [*fabric.nodes[3:16], *fabric.nodes[16:]]
    for count in (1, 5, 13, 14, 16):
        found = simple(fabric, free, count, policy=policy, avoid=["n17"] if count < 16 else ())
        assert len({fabric.trees[node] for node in (*found.placement.nodes, *found.spares)}) == 1
        assert "n17" not in found.placement.nodes or count == 16
    assert found.why[0] == "inside the tree of west: Slurm joins no two"
    mixed = ["n20", "n1", "n21", "n2"]
    assert set(simple(fabric, mixed, 2, policy=policy).placement.nodes) in ({"n20", "n21"}, {"n1", "n2"})


@pytest.mark.parametrize("policy", ["pack", "spread", "none", "pin"])
def test_a_job_that_no_tree_holds_is_refused(policy: str) -> None:
    fabric = parse_fabric(TREES, name="t")
    for count, spares in ((20, 0), (17, 0), (16, 1)):
        with pytest.raises(
            NoSingleTreeError, match=r"no tree has the \d+ nodes .* no job nodes of two trees"
        ) as told:
            simple(fabric, fabric.nodes, count, policy=policy, spares=spares)
        assert told.value.exit_code == 1
        assert "\n" not in str(told.value)
    with pytest.raises(UsageError, match="33 nodes are needed, 32 are"):
        simple(fabric, fabric.nodes, 33, policy=policy)


def test_nodes_that_are_granted_are_never_refused() -> None:
    fabric, degrees = parse_fabric(TREES, name="t"), ParallelDegrees(dp_replicate=20)
    found = order_granted_nodes(fabric, fabric.nodes[:20], 20, 1, degrees, declared_traffic(degrees, 20))
    assert set(found.placement.nodes) == set(fabric.nodes[:20])
