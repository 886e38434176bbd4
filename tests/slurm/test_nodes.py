"""Nodes of both releases, read from all that scontrol and sinfo print about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrun.slurm.nodes import (
    NodeState,
    parse_gpus,
    parse_node_state,
    parse_scontrol_nodes,
    parse_sinfo,
)

Captured = Callable[[str, str], str]
ALL = [f"n{number:02}" for number in range(1, 9)]


def test_scontrol_show_node(captured: Captured, version: str) -> None:
    nodes = parse_scontrol_nodes(captured(version, "show-nodes-oneline"))
    assert [node.name for node in nodes] == ALL
    assert {(node.cpus, node.memory_mib, node.gpus) for node in nodes} == {(8, 64000, 4)}
    assert {node.state.usable for node in nodes} == {True}
    assert nodes[0].state.name == "MIXED"
    new = version == "25.11.7"
    assert {node.partitions for node in nodes} == {("main", "blk") if new else ("main",)}
    assert {node.features for node in nodes} == {("rack1",) if new else ()}
    # a reason stays behind when the node is back in service
    assert [node.reason for node in nodes if node.reason] == (
        ["xid 79 on gpu 2 [root@2026-11-29T15:06:10]", "link flap [root@2026-11-29T15:06:10]"] if new else []
    )


def test_a_drained_node(captured: Captured, version: str) -> None:
    (node,) = parse_scontrol_nodes(captured(version, "show-node-drained"))
    assert node.state == NodeState("IDLE", ("DRAIN", "PLANNED"))
    assert node.state.usable is False
    assert node.reason.startswith("xid 79 on gpu 2 [root@")
    assert node.cpus == 8


def test_a_reason_cannot_pass_for_other_fields() -> None:
    (node,) = parse_scontrol_nodes(
        "NodeName=n1 CPUTot=8\n   State=DOWN\n   Reason=a State=IDLE\n   State=IDLE\n"
    )
    assert (node.state.name, node.reason) == ("DOWN", "a State=IDLE")


def test_sinfo_lists_a_node_once(captured: Captured, version: str) -> None:
    nodes = parse_sinfo(captured(version, "sinfo-N"))
    assert [node.name for node in nodes] == ALL
    assert {(node.cpus, node.memory_mib, node.gpus) for node in nodes} == {(8, 64000, 4)}
    assert {node.partitions for node in nodes} == {("main", "blk") if version == "25.11.7" else ("main",)}
    assert {node.state.usable for node in nodes} == {True}
    assert nodes[0].state.name == "MIXED"


def test_sinfo_of_nodes_out_of_service(captured: Captured, version: str) -> None:
    rows = [line.split("|") for line in captured(version, "sinfo-drain").splitlines() if "|" in line]
    text = "\n".join(f"{name}|{state}|main*|8|64000|(null)|rack1|{why}" for name, state, _, why in rows)
    nodes = {node.name: node for node in parse_sinfo(text)}
    assert {name for name, node in nodes.items() if not node.state.usable} == {"n07", "n08"}
    assert nodes["n07"].reason == "xid 79 on gpu 2"
    assert nodes["n08"].state.name == "DOWN"
    assert (nodes["n01"].gpus, nodes["n01"].partitions, nodes["n01"].reason) == (0, ("main",), "")


@pytest.mark.parametrize(
    ("text", "name", "usable"),
    [
        ("IDLE", "IDLE", True),
        ("idle", "IDLE", True),
        ("alloc", "ALLOCATED", True),
        ("mix-", "MIXED", True),
        ("plnd", "PLANNED", True),
        ("comp", "COMPLETING", True),
        ("idle~", "IDLE", True),
        ("down*", "DOWN", False),
        ("idle*", "IDLE", False),
        ("drain", "DRAIN", False),
        ("drng", "ALLOCATED", False),
        ("draining@", "ALLOCATED", False),
        ("maint", "MAINTENANCE", False),
        ("boot^", "REBOOT_ISSUED", False),
        ("MIXED+DRAIN", "MIXED", False),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE", True),
        ("ALLOCATED+MAINTENANCE", "ALLOCATED", False),
        ("DOWN+LEVITATING", "DOWN", False),
        ("IDLE+LEVITATING", "IDLE", None),
        ("unk", "unknown", None),
        ("", "unknown", None),
        ("ßß*", "unknown", False),
    ],
)
def test_node_states(text: str, name: str, usable: bool | None) -> None:
    state = parse_node_state(text)
    if name == "unknown" and usable is False:
        name = "NOT_RESPONDING"
    assert (state.name, state.usable) == (name, usable)


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("gpu:4", 4, ""),
        ("gpu:h100:8(S:0-1)", 8, "h100"),
        ("gpu:a100:2(IDX:0,3)", 2, "a100"),
        ("gres:gpu:2", 2, ""),
        ("gres/gpu:2", 2, ""),
        ("gpu:a:1,gpu:b:2,nic:1", 3, "a"),
        ("gpu", 1, ""),
        ("(null)", 0, ""),
        ("", 0, ""),
        ("nic:2,gpumem:40G", 0, ""),
    ],
)
def test_gpus(text: str, count: int, kind: str) -> None:
    assert parse_gpus(text) == (count, kind)
