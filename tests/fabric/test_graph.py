"""The graph: who meets whom where, how far apart they are, what an uplink carries, and its JSON."""

from __future__ import annotations

import json

import pytest

from hpcrun.fabric.graph import Fabric, FabricLevel, Grid, flat_fabric

TWO_RACKS = Fabric(
    nodes=("a1", "a2", "b1", "b2", "fat", "nfs", "dns"),
    levels=(FabricLevel("leaf", 10.0, 1.0), FabricLevel("spine", 10.0, 4.0, 1e-6), FabricLevel("core")),
    units=(
        ("a", "s1", "c"),
        ("a", "s1", "c"),
        ("b", "s1", "c"),
        ("b", "s1", "c"),
        ("x", None, "c"),
        (None, None, None),
        (None, None, None),
    ),
    rails={"a1": ("a", "b")},
    source="by hand",
    notes=("nfs: in no unit",),
)


@pytest.mark.parametrize(
    ("a", "b", "level", "hops"),
    [
        ("a1", "a1", 0, 0),
        ("a1", "a2", 1, 2),
        ("a2", "b2", 2, 4),
        ("fat", "a1", 3, 5),  # one level is missing on one side
        ("nfs", "a1", 4, None),
        ("nfs", "nfs", 0, 0),
        ("nfs", "dns", 4, None),
        ("elsewhere", "a1", 4, None),
        ("elsewhere", "elsewhere2", 4, None),
    ],
)
def test_where_two_nodes_meet(a: str, b: str, level: int, hops: int | None) -> None:
    assert (TWO_RACKS.common_level(a, b), TWO_RACKS.hops(a, b)) == (level, hops)
    assert (TWO_RACKS.common_level(b, a), TWO_RACKS.hops(b, a)) == (level, hops)


def test_units_and_their_members() -> None:
    assert TWO_RACKS.unit("b1", 0) == "b"
    assert TWO_RACKS.unit("nfs", 0) is TWO_RACKS.unit("elsewhere", 2) is None
    assert TWO_RACKS.members(0) == {"a": ("a1", "a2"), "b": ("b1", "b2"), "x": ("fat",)}
    assert TWO_RACKS.members(1) == {"s1": ("a1", "a2", "b1", "b2")}


def test_a_part_of_it_keeps_the_order_that_it_is_asked_for() -> None:
    part = TWO_RACKS.restricted(["b2", "new", "a1", "b2"])
    assert part.nodes == ("b2", "new", "a1")
    assert part.units == (("b", "s1", "c"), (None, None, None), ("a", "s1", "c"))
    assert part.rails == {"a1": ("a", "b")}
    assert TWO_RACKS.restricted(["b1"]).rails == {}


def test_rings_and_tori_have_distances_only() -> None:
    ring = Fabric(
        ("n1", "n2", "n3", "n4", "n5"),
        units=((),) * 5,
        grids=(Grid("r", (5,), ("n1", "n3", "n5", "n2", "n4")),),
    )
    assert [ring.hops("n1", other) for other in ring.nodes] == [0, 2, 1, 1, 2]
    assert ring.common_level("n1", "n2") == 1
    names = tuple(f"t{number}" for number in range(4 * 3 * 2))
    torus = Fabric(names, units=((),) * 24, grids=(Grid("t", (4, 3, 2), names),))
    # t0 is (0, 0, 0), t3 is (3, 0, 0), t8 is (0, 2, 0), t12 is (0, 0, 1), t23 is (3, 2, 1)
    assert [torus.hops("t0", f"t{other}") for other in (2, 3, 8, 12, 23)] == [2, 1, 1, 1, 3]
    assert torus.hops("t0", "elsewhere") is None


@pytest.mark.parametrize("fabric", [TWO_RACKS, flat_fabric(["a", "b"], "nothing", ["?"]), Fabric(())])
def test_json(fabric: Fabric) -> None:
    values = json.loads(json.dumps(fabric.as_json()))
    assert values["schema_version"] == 1
    assert tuple(values["nodes"]) == fabric.nodes
    assert [level["name"] for level in values["levels"]] == [level.name for level in fabric.levels]


def test_it_prints_on_one_line() -> None:
    assert str(TWO_RACKS) == "7 nodes: 3 leaves, 1 spine, 1 core (by hand)"
    assert str(flat_fabric(["n1"], "Slurm")) == "1 node: no topology known (Slurm)"
    assert str(Fabric((), grids=(Grid("r", (5,), ()),))) == "0 nodes: ring r of 5 (unknown)"
