"""The cost of a placement: hand-made cases, the emulated racks, and a plain re-computation of the model."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from hpcrun.errors import UsageError
from hpcrun.fabric.collectives import round_costs
from hpcrun.fabric.cost import (
    LinkLoads,
    PlacementCost,
    compute_placement_cost,
    find_topology_sites,
    slot_flows,
)
from hpcrun.fabric.graph import Fabric, FabricLevel, Grid, flat_fabric
from hpcrun.fabric.rounds import Collective, CollectiveAlgorithm, collective_rounds
from hpcrun.fabric.traffic import Traffic, TrafficFlow, TrafficPattern, declared_traffic
from hpcrun.mesh import AXES, ParallelDegrees
from hpcrun.specs.placement import Placement, place_in_blocks

MIB = 1 << 20
RING_OF_4 = ParallelDegrees(dp_replicate=4)


def tree(shape: dict[str, dict[str, int]], *levels: FabricLevel) -> Fabric:
    """Spines of leaves of so many nodes; nodes are called after their leaf."""
    units = [
        (f"{leaf}-{place}", leaf, spine, "core")
        for spine, leaves in shape.items()
        for leaf, size in leaves.items()
        for place in range(size)
    ]
    depth = len(levels)
    return Fabric(tuple(unit[0] for unit in units), levels, tuple(unit[1 : 1 + depth] for unit in units))


def racks(oversubscription: float | None = 20.0, bandwidth_Bps: float | None = 0.25e9) -> Fabric:
    """Two racks of four as the lab emulates them: 2 Gbit/s a node, 400 Mbit/s a rack."""
    return tree(
        {"spine": {"a": 4, "b": 4}},
        FabricLevel("leaf", bandwidth_Bps, 1.0),
        FabricLevel("spine", bandwidth_Bps, oversubscription),
    )


def ring(size_bytes: int, ranks: int = 4) -> Traffic:
    return Traffic((TrafficFlow("dp_replicate", "ring", ranks, size_bytes, 2 * (ranks - 1)),))


def of(
    fabric: Fabric, nodes: str, traffic: Traffic, degrees: ParallelDegrees = RING_OF_4, per_node: int = 1
) -> PlacementCost:
    return compute_placement_cost(
        fabric, place_in_blocks(nodes.split(), degrees.world_size, per_node), degrees, traffic
    )


# --- by hand


def test_the_lab_s_racks_are_worth_about_twice_in_an_allreduce() -> None:
    """Measured on the emulated racks, 8 MiB: 91 ms in one rack, 254 in rack order, 562 alternating."""
    sent = ring(2 * 3 * 8 * MIB // 4)
    one, ordered, mixed = (
        of(racks(), nodes, sent).seconds
        for nodes in ("a-0 a-1 a-2 a-3", "a-0 a-1 b-0 b-1", "a-0 b-0 a-1 b-1")
    )
    assert one is not None
    assert ordered is not None
    assert mixed is not None
    assert one < ordered < mixed
    assert 1.7 < mixed / ordered < 3
    assert 0.7 < ordered / 0.254 < 1.4


def test_a_node_s_link_is_the_limit_inside_a_rack() -> None:
    found = of(racks(), "a-0 a-1 a-2 a-3", ring(25_000_000))
    assert found.seconds == pytest.approx(0.1)
    assert dict(zip(found.levels, found.bytes, strict=True)) == {
        "node": 0,
        "leaf": 100_000_000,
        "spine": 0,
        "beyond": 0,
    }


def test_each_direction_of_a_link_is_counted_by_itself() -> None:
    chain = Traffic((TrafficFlow("pp", "chain", 2, 25_000_000, 1),))
    found = of(racks(), "a-0 b-0", chain, ParallelDegrees(pp=2))
    assert found.seconds == pytest.approx(25e6 / (0.25e9 * 4 / 20))
    assert found.bytes[2] == 50_000_000


def test_groups_of_an_axis_share_an_uplink_and_axes_follow_each_other() -> None:
    degrees = ParallelDegrees(pp=2, dp_replicate=4)
    pipeline = TrafficFlow("pp", "chain", 2, 10_000_000, 1)
    together = of(
        racks(), "a-0 a-1 a-2 a-3 b-0 b-1 b-2 b-3", Traffic((pipeline,)), degrees
    )  # four stages hand over at once
    assert together.seconds == pytest.approx(4 * 10e6 / 0.05e9)
    both = Traffic((pipeline, TrafficFlow("dp_replicate", "ring", 4, 25_000_000, 1)))
    assert of(racks(), "a-0 a-1 a-2 a-3 b-0 b-1 b-2 b-3", both, degrees).seconds == pytest.approx(0.8 + 0.1)


def test_what_stays_inside_a_node_is_free() -> None:
    found = of(
        racks(),
        "a-0 b-0",
        declared_traffic(ParallelDegrees(tp=2), 4),
        ParallelDegrees(pp=2, tp=2),
        per_node=2,
    )
    assert found.seconds == 0
    assert found.bytes[0] == sum(found.bytes) > 0


def test_messages_cost_the_latency_of_the_longest_way() -> None:
    near, far = FabricLevel("leaf", 1e9, 1.0, 1e-6), FabricLevel("spine", 1e9, 1.0, 5e-6)
    fabric = tree({"s": {"a": 2, "b": 2}}, near, far)
    sent = Traffic((TrafficFlow("dp_replicate", "ring", 2, 0, 10),))
    degrees = ParallelDegrees(dp_replicate=2)
    assert of(fabric, "a-0 a-1", sent, degrees).seconds == pytest.approx(10e-6)
    assert of(fabric, "a-0 b-0", sent, degrees).seconds == pytest.approx(60e-6)


def test_a_block_s_fast_links_carry_only_what_stays_inside() -> None:
    """A node's link into the leaf is the limit as soon as its bytes leave the block."""
    fabric = tree(
        {"leaf": {"x": 4, "y": 4}}, FabricLevel("block", 100e9, 1.0), FabricLevel("leaf", 10e9, 1.0)
    )
    sent = Traffic((TrafficFlow("dp_replicate", "ring", 4, 10**9, 1),))
    assert of(fabric, "x-0 x-1 x-2 x-3", sent).seconds == pytest.approx(0.01)
    # The blocks' uplinks could carry 4 × 10 GB/s, the one node that sends 10.
    assert of(fabric, "x-0 x-1 y-0 y-1", sent).seconds == pytest.approx(0.1)


def test_tp_outside_a_block_is_worse_than_any_time() -> None:
    fabric = tree({"leaf": {"x": 2, "y": 2}}, FabricLevel("block", 1e9, 1.0), FabricLevel("leaf", 1e9, 1.0))
    degrees = ParallelDegrees(dp_replicate=2, tp=2)
    sent = Traffic((TrafficFlow("dp_replicate", "ring", 2, 10**9, 1), TrafficFlow("tp", "ring", 2, 1, 1)))
    inside = of(fabric, "x-0 x-1 y-0 y-1", sent, degrees)
    outside = of(fabric, "x-0 y-0 x-1 y-1", sent, degrees)
    assert inside.seconds is not None
    assert outside.seconds is not None
    assert outside.seconds <= inside.seconds
    assert inside.key < outside.key


@pytest.mark.parametrize(("bandwidth", "oversubscription"), [(None, 2.0), (1e9, None), (None, None)])
def test_without_bandwidths_bytes_at_the_outermost_level_decide(
    bandwidth: float | None, oversubscription: float | None
) -> None:
    fabric = racks(oversubscription, bandwidth)
    ordered = of(fabric, "a-0 a-1 b-0 b-1", ring(MIB))
    mixed = of(fabric, "a-0 b-0 a-1 b-1", ring(MIB))
    assert ordered.seconds is None
    assert {axis.seconds for axis in ordered.axes} == {None}
    assert ordered.key < mixed.key
    assert "time unknown" in str(ordered)


def test_nodes_that_meet_nowhere_have_no_time_and_come_last() -> None:
    lone = tree({"s": {"a": 2}, "t": {"b": 2}}, FabricLevel("leaf", 1e9, 1.0), FabricLevel("spine", 1e9, 1.0))
    degrees = ParallelDegrees(dp_replicate=2)
    apart = of(lone, "a-0 b-0", ring(MIB, 2), degrees)
    assert (apart.seconds, apart.bytes[-1]) == (None, 2 * MIB)
    assert of(lone, "a-0 a-1", ring(100 * MIB, 2), degrees).key < apart.key


def test_a_node_that_the_topology_does_not_know_is_far_from_all() -> None:
    found = of(racks(), "a-0 stranger", ring(MIB, 2), ParallelDegrees(dp_replicate=2))
    assert (found.seconds, found.bytes[-1]) == (None, 2 * MIB)


def test_no_topology_means_no_difference() -> None:
    fabric = flat_fabric(["a", "b", "c", "d"], "nothing")
    assert of(fabric, "a b c d", ring(MIB)).key == of(fabric, "a c b d", ring(MIB)).key


def test_on_a_ring_of_nodes_the_hops_count() -> None:
    names = tuple(f"n{place}" for place in range(6))
    fabric = Fabric(names, (), ((),) * 6, grids=(Grid("r", (6,), names),))
    assert of(fabric, "n0 n1 n2 n3", ring(1)).key[1] == 1 + 1 + 1 + 3
    assert of(fabric, "n0 n2 n1 n3", ring(1)).key[1] == 2 + 1 + 2 + 3


def test_a_cost_prints_and_dumps() -> None:
    found = of(racks(), "a-0 a-1 b-0 b-1", ring(MIB))
    values = json.loads(json.dumps(found.as_json()))
    assert values["seconds"] == found.seconds
    assert values["bytes"] == list(found.bytes)
    assert str(found) == "21 ms a step (leaf 2 MiB, spine 2 MiB)"


# --- the model, computed again in the plainest way

PATTERNS: tuple[TrafficPattern, ...] = ("ring", "chain", "loop", "all_to_all")


def sent_by_rank(flow: TrafficFlow, degrees: ParallelDegrees) -> Counter[tuple[int, int]]:
    """Bytes from rank to rank, from the coordinates in the mesh."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(degrees.world_size):
        others = degrees.coordinates(rank)
        del others[flow.axis]
        groups.setdefault(tuple(others.items()), []).append(rank)
    sent: Counter[tuple[int, int]] = Counter()
    for group in groups.values():
        size = len(group)
        for place, rank in enumerate(group):
            if flow.pattern == "all_to_all":
                for other in group:
                    if other != rank:
                        sent[rank, other] += -(-flow.bytes // (size - 1))
            elif flow.pattern == "ring":
                sent[rank, group[(place + 1) % size]] += flow.bytes
            elif place + 1 < size or flow.pattern == "loop":
                sent[rank, group[(place + 1) % size]] += flow.bytes
                sent[group[(place + 1) % size], rank] += flow.bytes
    return sent


def plain_seconds(fabric: Fabric, placement: Placement, degrees: ParallelDegrees, traffic: Traffic) -> float:
    total, depth = 0.0, len(fabric.levels)
    for flow in traffic.flows:
        load: Counter[tuple[object, ...]] = Counter()
        latency = 0.0
        for (a, b), size in sent_by_rank(flow, degrees).items():
            first, second = placement.ranks[a], placement.ranks[b]
            met = fabric.common_level(first, second)
            for level in range(met):
                load["out", first, level] += size
                load["in", second, level] += size
                if level + 1 < met:
                    load["out", "uplink", level, fabric.unit(first, level)] += size
                    load["in", "uplink", level, fabric.unit(second, level)] += size
            latency = max(latency, sum(one.latency_s or 0 for one in fabric.levels[:met]))
        times = [0.0]
        for link, size in load.items():
            if link[1] == "uplink":
                level = int(str(link[2])) + 1
                members = len(fabric.members(level - 1)[str(link[3])])
                capacity = speed(fabric, level) * members / (fabric.levels[level].oversubscription or 1)
            else:
                level = int(str(link[2]))
                capacity = speed(fabric, level)
                capacity /= (fabric.levels[0].oversubscription or 1) if level == 0 else 1
            times.append(size / capacity)
        total += max(times) + flow.messages * latency
        assert depth >= met
    return total


def speed(fabric: Fabric, level: int) -> float:
    bandwidth = fabric.levels[level].bandwidth_Bps
    assert bandwidth is not None
    return bandwidth


def drawn(draw: random.Random) -> tuple[Fabric, ParallelDegrees, Traffic]:
    """A fabric of three levels with odd sizes and figures, a mesh, and traffic on some of its axes."""
    shape = {
        f"s{spine}": {f"l{spine}{leaf}": draw.randint(1, 4) for leaf in range(draw.randint(1, 3))}
        for spine in range(draw.randint(1, 2))
    }
    levels = [
        FabricLevel(
            name, draw.choice((1e9, 2e9, 5e9)), draw.choice((1.0, 2.0, 3.0)), draw.choice((None, 1e-5))
        )
        for name in ("leaf", "spine", "core")
    ]
    degrees = ParallelDegrees(
        **{axis: draw.choice((1, 1, 2, 3)) for axis in AXES[:-1]}, tp=draw.choice((1, 2))
    )
    flows = [
        TrafficFlow(
            axis, draw.choice(PATTERNS), size, draw.choice((0, 1, 10**6, 7654321)), draw.randint(1, 9)
        )
        for axis, size in zip(AXES, degrees.shape, strict=True)
        if size > 1 and draw.random() < 0.8
    ]
    return tree(shape, *levels), degrees, Traffic(tuple(flows))


@pytest.mark.parametrize("seed", range(60))
def test_the_cost_is_that_of_the_model_in_its_plainest_form(seed: int) -> None:
    draw = random.Random(seed)
    fabric, degrees, traffic = drawn(draw)
    # Any placement, also with ranks strewn over the nodes.
    ranks = tuple(draw.choice(fabric.nodes) for _ in range(degrees.world_size))
    placement = Placement(ranks)
    assert compute_placement_cost(fabric, placement, degrees, traffic).seconds == pytest.approx(
        plain_seconds(fabric, placement, degrees, traffic)
    )


@pytest.mark.parametrize("seed", range(20))
def test_moves_leave_the_same_loads_behind_as_a_fresh_start(seed: int) -> None:
    draw = random.Random(seed)
    fabric, degrees, traffic = drawn(draw)
    slots = degrees.world_size
    streams = slot_flows(traffic, degrees, range(slots))
    sites, _ = find_topology_sites(fabric, fabric.nodes)
    moved, where = LinkLoads(fabric, sites, slots, streams), [-1] * slots
    for _ in range(4 * slots):
        slot, site = draw.randrange(slots), draw.randrange(-1, len(sites))
        moved.move(slot, site)
        where[slot] = site
    where = [max(0, site) for site in where]
    for slot, site in enumerate(where):
        moved.move(slot, site)
    fresh = LinkLoads(fabric, sites, slots, streams)
    fresh.place(where)
    assert moved.key() == fresh.key()


def test_the_key_of_a_part_is_never_above_the_key_of_the_whole() -> None:
    for seed in range(10):
        draw = random.Random(seed)
        fabric, degrees, traffic = drawn(draw)
        slots = degrees.world_size
        sites, _ = find_topology_sites(fabric, fabric.nodes)
        loads = LinkLoads(fabric, sites, slots, slot_flows(traffic, degrees, range(slots)))
        keys = []
        for slot in range(slots):
            loads.move(slot, draw.randrange(len(sites)))
            keys.append(loads.key())
        assert all(part <= whole for part, whole in itertools.pairwise(keys))


# --- single collectives


def delivered(collective: Collective, algorithm: CollectiveAlgorithm, ranks: int) -> list[set[int]]:
    """Whose data each rank has at the end, when a message brings all that its sender had."""
    have = [{rank} for rank in range(ranks)]
    for one in collective_rounds(collective, algorithm, ranks):
        for _ in range(one.times):
            before = [set(own) for own in have]
            for sender, receiver in one.pairs:
                have[receiver] |= before[sender]
    return have


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "halving_doubling", "tree"])
def test_an_allreduce_brings_everything_to_everybody(algorithm: CollectiveAlgorithm, ranks: int) -> None:
    assert delivered("all_reduce", algorithm, ranks) == [set(range(ranks))] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("collective", "algorithm", "shares"),
    [
        ("all_reduce", "ring", 2.0),
        ("all_reduce", "halving_doubling", 2.0),
        ("all_gather", "ring", 1.0),
        ("all_gather", "recursive_doubling", 1.0),
        ("reduce_scatter", "halving_doubling", 1.0),
        ("all_to_all", "pairwise", 1.0),
    ],
)
def test_algorithms_that_waste_no_bandwidth_send_the_least_that_can_be(
    collective: Collective, algorithm: CollectiveAlgorithm, shares: float, ranks: int
) -> None:
    sent = sum(one.share * one.times for one in collective_rounds(collective, algorithm, ranks))
    assert sent == pytest.approx(shares * (ranks - 1) / ranks)


def test_a_broadcast_reaches_everybody_in_as_few_rounds_as_can_be() -> None:
    assert all(0 in have for have in delivered("broadcast", "tree", 11))
    assert len(collective_rounds("broadcast", "tree", 11)) == 4


def estimate_collective_seconds(
    fabric: Fabric,
    groups: Sequence[Sequence[str]],
    collective: Collective,
    algorithm: CollectiveAlgorithm,
    size_bytes: float,
) -> float | None:
    """Seconds until all groups are done; None: unknown."""
    found = round_costs(fabric, groups, collective, algorithm)
    return None if found is None else sum(one.seconds(size_bytes) for one in found)


def test_groups_share_the_uplink_they_both_cross() -> None:
    one = [["a-0", "a-1", "b-0", "b-1"]]
    two = [*one, ["a-2", "a-3", "b-2", "b-3"]]
    alone, shared = (
        estimate_collective_seconds(racks(), groups, "all_reduce", "ring", 8 * MIB) for groups in (one, two)
    )
    assert alone is not None
    assert alone == pytest.approx(of(racks(), "a-0 a-1 b-0 b-1", ring(2 * 3 * 8 * MIB // 4)).seconds)
    assert shared == pytest.approx(2 * alone)


def test_what_comes_in_loads_a_link_as_what_goes_out_does() -> None:
    """Two racks that send to a third one: its uplink has twice what each of theirs has."""
    fabric = tree(
        {"s": {"a": 1, "b": 1, "c": 1}}, FabricLevel("leaf", 8e9, 1.0), FabricLevel("spine", 8e9, 8.0)
    )
    alone = estimate_collective_seconds(fabric, [["a-0", "c-0"]], "send", "direct", 10**9)
    to_one = estimate_collective_seconds(fabric, [["a-0", "c-0"], ["b-0", "c-0"]], "send", "direct", 10**9)
    from_one = estimate_collective_seconds(fabric, [["c-0", "a-0"], ["c-0", "b-0"]], "send", "direct", 10**9)
    assert (alone, to_one, from_one) == (1.0, 2.0, 2.0)


def test_groups_on_the_same_nodes_share_their_links() -> None:
    one, two = (
        estimate_collective_seconds(racks(), [["a-0", "a-1"]] * groups, "send", "direct", 10**9)
        for groups in (1, 2)
    )
    assert one is not None
    assert two == pytest.approx(2 * one)


def test_small_messages_want_few_rounds_and_large_ones_little_traffic() -> None:
    slow = FabricLevel("leaf", 1e9, 1.0, 1e-3)
    fabric = tree({"s": {"a": 8}}, slow)

    def time(algorithm: CollectiveAlgorithm, size_bytes: int) -> float:
        found = estimate_collective_seconds(fabric, [fabric.nodes], "all_reduce", algorithm, size_bytes)
        assert found is not None
        return found

    assert time("recursive_doubling", 64) < time("ring", 64)
    assert time("ring", 1 << 30) < time("recursive_doubling", 1 << 30)
    assert time("recursive_doubling", 0) == pytest.approx(3e-3)
    assert time("tree", 0) == pytest.approx(6e-3)


def test_a_collective_without_bandwidths_has_no_time() -> None:
    assert estimate_collective_seconds(racks(None), [["a-0", "b-0"]], "send", "direct", 1) is None


def test_an_algorithm_of_another_collective_is_refused() -> None:
    with pytest.raises(UsageError, match="broadcast: has no algorithm ring; use tree"):
        estimate_collective_seconds(racks(), [["a-0", "a-1"]], "broadcast", "ring", 1)
    with pytest.raises(UsageError, match=r"groups are of one size, these have \[1, 2\] ranks"):
        estimate_collective_seconds(racks(), [["a-0", "a-1"], ["b-0"]], "send", "direct", 1)
