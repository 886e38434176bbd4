"""The pictures: what a person reads in the tree, and that the SVG is one and shows every rank once."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hpcrun.errors import UsageError
from hpcrun.fabric.draw import render_fabric_tree, render_placement_svg
from hpcrun.fabric.graph import Fabric, FabricLevel, Grid, flat_fabric
from hpcrun.fabric.topology_reader import parse_fabric
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.placement import Placement, place_in_blocks

TWO_RACKS = parse_fabric(
    "SwitchName=leaf1 Level=0 Nodes=n[1-4]\nSwitchName=rackB Level=0 Nodes=n[5-8]\n"
    "SwitchName=spine Level=1 Nodes=n[1-8],nfs Switches=leaf1,rackB\n",
    name="two racks",
)


def test_states_ranks_and_spares() -> None:
    states = dict.fromkeys(TWO_RACKS.nodes, "idle") | {"n2": "drained", "n7": "allocated", "n8": "allocated"}
    del states["nfs"]
    text = render_fabric_tree(TWO_RACKS, states, place_in_blocks(["n3", "n1"], 8, 4), ["n4"])
    assert text.splitlines() == [
        "9 nodes, 5 free",
        "└─ spine: 9 nodes, 5 free",
        "   ├─ leaf1: 4 nodes, 3 free",
        "   │     ranks 0-3 on n3",
        "   │     ranks 4-7 on n1",
        "   │     spare n4",
        "   │     drained n2",
        "   ├─ leaf rackB: 4 nodes, 2 free: idle n[5-6], allocated n[7-8]",
        "   └─ in no unit below: 1 node, 0 free",
        "         unknown nfs",
    ]


def test_without_states_nothing_is_said_about_what_is_free() -> None:
    assert render_fabric_tree(TWO_RACKS).splitlines()[:3] == [
        "9 nodes",
        "└─ spine: 9 nodes",
        "   ├─ leaf1: 4 nodes: n[1-4]",
    ]


def test_ranks_that_do_not_follow_each_other() -> None:
    text = render_fabric_tree(TWO_RACKS, {}, Placement(("n1", "n2", "n1", "n2", "n1")))
    assert "ranks 0,2,4 on n1" in text
    assert "ranks 1,3 on n2" in text


def large(racks: int) -> Fabric:
    nodes = tuple(f"n{number:03}" for number in range(racks * 8))
    units = tuple((f"leaf{number // 8:02}", f"spine{number // 80}") for number in range(racks * 8))
    return Fabric(nodes, (FabricLevel("leaf"), FabricLevel("spine")), units)


def test_four_hundred_nodes_fit_a_few_screens() -> None:
    fabric = large(50)
    states = dict.fromkeys(fabric.nodes, "idle") | {"n100": "down", "n101": "allocated"}
    lines = render_fabric_tree(fabric, states, place_in_blocks(fabric.nodes[:40], 320, 8)).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 110
    assert "│  │     ranks 64-127 on n[008-015]" in lines
    assert "│  └─ 5 leaves leaf[05-09]: 40 nodes, 40 free: idle n[040-079]" in lines
    assert "│  ├─ leaf12: 8 nodes, 6 free: idle n[096-099,102-103], allocated n101, down n100" in lines


def test_no_topology_and_a_ring() -> None:
    fabric = flat_fabric(["n1", "n2", "n3"], "nothing")
    assert render_fabric_tree(fabric, {"n1": "idle", "n2": "mixed"}).splitlines() == [
        "3 nodes, 1 free",
        "   idle n1",
        "   mixed n2",
        "   unknown n3",
    ]
    ring = Fabric(("n1", "n2"), units=((), ()), grids=(Grid("r0", (2,), ("n1", "n2")),))
    assert render_fabric_tree(ring).splitlines() == ["2 nodes", "   n[1-2]", "ring r0 of 2"]


def test_names_that_no_host_list_takes() -> None:
    units = (("a b",), ("c/1",), ("d;2",), ("<x>",))
    fabric = Fabric(("n1", "n2", "n3", "n4"), (FabricLevel("leaf"),), units)
    assert "└─ 4 leaves a b,c/1,d;2,<x>: 4 nodes: n[1-4]" in render_fabric_tree(fabric)


SPACE = "{http://www.w3.org/2000/svg}"


def shapes(text: str) -> tuple[dict[int, str], list[str]]:
    """The colour of every rank, and all texts."""
    root = ElementTree.fromstring(text)
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    colours = {}
    for rect in root.iter(f"{SPACE}rect"):
        at = {name: int(rect.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        assert at["x"] + at["width"] <= width
        assert at["y"] + at["height"] <= height
        title = rect.findtext(f"{SPACE}title") or ""
        if match := re.match(r"rank (\d+) on (\S+):", title):
            assert int(match[1]) not in colours
            colours[int(match[1])] = rect.attrib["fill"]
    return colours, [text.text or "" for text in root.iter(f"{SPACE}text")]


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("tp", [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        ("dp_shard", [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        ("pp", [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ("cp", [{rank} for rank in range(8)]),
        ("dp", [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
    ],
)
def test_ranks_of_one_group_have_one_colour(axis: str, groups: list[set[int]]) -> None:
    placement = place_in_blocks(["n1", "n6", "n2", "n5"], 8, 2)
    colours, texts = shapes(
        render_placement_svg(TWO_RACKS, placement, ParallelDegrees(pp=2, dp_shard=2, tp=2), axis)
    )
    by_colour: dict[str, set[int]] = {}
    for rank, colour in colours.items():
        by_colour.setdefault(colour, set()).add(rank)
    assert sorted(by_colour.values(), key=min) == groups
    assert (
        f"8 ranks: pp 2 × dp_shard 2 × tp 2; one colour for each of the {len(groups)} groups along {axis}"
        in (texts[0])
    )
    assert {"spine", "leaf1", "rackB", "n1", "n4"} <= set(texts)


def test_racks_without_ranks_are_only_counted_and_many_ranks_wrap() -> None:
    fabric = large(30)
    nodes = [*fabric.nodes[:24], *fabric.nodes[100:104], "elsewhere"]
    placement = Placement(tuple(node for node in nodes for _ in range(16)))
    colours, texts = shapes(
        render_placement_svg(fabric, placement, ParallelDegrees(dp_shard=29, tp=16), "tp")
    )
    assert len(colours) == 29 * 16
    assert "26 racks without ranks left out" in texts[0]
    assert "in no unit" in texts
    assert "n050" not in texts


def test_what_stands_in_a_name_stays_text() -> None:
    fabric = Fabric(("n1",), (FabricLevel("leaf"),), (("<script>\"&'",),))
    text = render_placement_svg(fabric, Placement(("n1",)), ParallelDegrees(), "tp")
    assert "<script>" not in text
    assert "<script>\"&'" in shapes(text)[1]


@pytest.mark.parametrize(
    ("axis", "ranks", "message"),
    [
        ("ep", 2, "ep: is not an axis of the mesh; use pp, dp_replicate, dp_shard, cp, tp, dp"),
        ("tp", 3, "placement: has 3 ranks, but tp 2 is 2"),
    ],
)
def test_another_axis_or_another_size_is_refused(axis: str, ranks: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        render_placement_svg(TWO_RACKS, place_in_blocks(["n1"], ranks, 4), ParallelDegrees(tp=2), axis)
