"""Trees and blocks of both releases, and the address of a node in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrun.slurm.topology import TopologyUnit, parse_topoconf, parse_topology, split_topology_address

Captured = Callable[[str, str], str]


def test_a_tree(captured: Captured, version: str) -> None:
    units = parse_topology(captured(version, "show-topology"))
    assert {unit.name: (unit.kind, unit.level, unit.nodes, unit.children) for unit in units} == {
        "leaf1": ("switch", 0, "n[01-04]", ""),
        "leaf2": ("switch", 0, "n[05-08]", ""),
        "spine": ("switch", 1, "n[01-08]", "leaf[1-2]"),
    }


@pytest.mark.parametrize("name", ["show-topology-block-default", "show-topology-name"])
def test_blocks_and_their_aggregates(captured: Captured, name: str) -> None:
    units = parse_topology(captured("25.11.7", name))
    assert [unit for unit in units if unit.kind == "block"] == [
        TopologyUnit("block", f"b{number}", f"n[{2 * number - 1:02}-{2 * number:02}]", size=2)
        for number in (1, 2, 3, 4)
    ]
    assert [(unit.name, unit.size) for unit in units if unit.kind == "aggregate"] == [
        ("b[1-2]", 4),
        ("b[3-4]", 4),
    ]


def test_a_bare_word_means_something_else_since_25_05(captured: Captured) -> None:
    assert len(parse_topology(captured("22.05.8", "show-topology-node"))) == 2
    assert parse_topology(captured("25.11.7", "show-topology-node")) == []
    assert len(parse_topology(captured("25.11.7", "show-topology-nodearg"))) == 2
    assert [unit.name for unit in parse_topology(captured("25.11.7", "show-topology-unit"))] == ["leaf1"]


def test_a_block_without_size_a_switch_without_nodes_and_a_torus() -> None:
    units = parse_topology(
        "BlockName=nvl1 BlockIndex=0 Nodes=gb[001-018]\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Switches=leaf[1-2]\n"
        "RingName=r0 Nodes=n[01-08] RingSize=8\n"
        "TorusName=pod1 Dims=4x4x2 Nodes=n[01-32]\n  TorusName=pod1 PlacementDims=2x2x1(4) Anchors=8\n"
    )
    assert {unit.name: (unit.kind, unit.nodes, unit.size) for unit in units} == {
        "nvl1": ("block", "gb[001-018]", None),
        "spine": ("switch", "", None),
        "r0": ("ring", "n[01-08]", None),
        "pod1": ("torus", "n[01-32]", None),
    }


def test_several_topologies(captured: Captured) -> None:
    fabric, nvlink = parse_topoconf(captured("25.11.7", "show-topoconf"))
    assert (fabric.name, fabric.is_default) == ("fabric", True)
    assert fabric.units == (
        TopologyUnit("switch", "spine", "", "leaf[1-2]"),
        TopologyUnit("switch", "leaf1", "n[01-04]"),
        TopologyUnit("switch", "leaf2", "n[05-08]"),
    )
    assert (nvlink.name, nvlink.is_default, len(nvlink.units)) == ("nvlink", False, 4)
    assert nvlink.units[3] == TopologyUnit("block", "b4", "n[07-08]", size=2)


@pytest.mark.parametrize(
    "text", ["", "topology: x", "- 1", "- [", "scontrol: error: invalid entity:topoconf", "- {tree: 3}"]
)
def test_what_is_no_topology_has_no_units(text: str) -> None:
    assert not any(topology.units for topology in parse_topoconf(text))
    assert parse_topology(text) == []


@pytest.mark.parametrize(
    ("address", "pattern", "expected"),
    [
        (
            "spine.leaf1.n01",
            "switch.switch.node",
            [("switch", "spine"), ("switch", "leaf1"), ("node", "n01")],
        ),
        ("b4.n08", "block.node", [("block", "b4"), ("node", "n08")]),
        ("spine..n01", "switch.switch.node", [("switch", "spine"), ("switch", ""), ("node", "n01")]),
        ("n01.site.org", "node", [("node", "n01.site.org")]),
        ("leaf1.n01.site.org", "switch.node", [("switch", "leaf1"), ("node", "n01.site.org")]),
        ("n01", "switch.node", []),
        ("", "", []),
    ],
)
def test_addresses(address: str, pattern: str, expected: list[tuple[str, str]]) -> None:
    assert split_topology_address(address, pattern) == expected


def test_addresses_in_a_job(captured: Captured, version: str) -> None:
    lines = [line.split() for line in captured(version, "job-environment").splitlines()]
    found = {
        tuple(split_topology_address(line[-2], line[-1]))
        for line in lines
        if len(line) > 1 and line[-1].endswith(".node")
    }
    assert {address[-1][1] for address in found if address} == {"n01", "n02"}
    assert {address[:-1] for address in found if address} == {(("switch", "spine"), ("switch", "leaf1"))}


def test_addresses_in_a_job_on_blocks(captured: Captured) -> None:
    rows = [line.split() for line in captured("25.11.7", "job-topology-addr-block").splitlines()]
    assert {
        node: dict(split_topology_address(address, pattern))["block"] for node, address, pattern in rows
    } == {
        "n05": "b3",
        "n06": "b3",
        "n07": "b4",
        "n08": "b4",
    }
