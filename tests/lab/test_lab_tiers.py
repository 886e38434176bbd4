"""Runs whose saves are in memory alone lose a node or a whole rack, and go on without the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.cluster import Lab, Shape
from tests.lab.desk import Desk, records, story

JOB = """
name: tiers
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: python-stdlib, pattern: "a*.py", seq_len: 32, holdout: 0}
parallel: {dp_shard: 4}
train: {steps: 60, mbs: 1, gbs: 4}
checkpoint: {every: 5, memory: 2, durable: {every: 100000}, parity: {scheme: xor}, replicate_to_spares: false}
resources: {nodes: 4, spares: 4, mem: 2G, placement: spread}
"""


def steps(run: RunDir) -> dict[int, float]:
    """The loss of each step, as the newest attempt has it."""
    return {line["step"]: line["loss"] for line in read_json_lines(run.metrics) if line.get("kind") == "step"}


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.events) if line["event"] == name]


def stored(run: RunDir, tier: str) -> list[int]:
    """The steps that a tier has from all nodes."""
    return [line["step"] for line in events(run, "checkpoint_stored") if line["tier"] == tier]


def go_on_without(what: str, desk: Desk, placement: str) -> None:
    """Run a job on two nodes in each of two racks, take a node or a rack away, and look at how it went on."""
    (desk.path / "job.yaml").write_text(JOB)
    undisturbed = desk.undisturbed_losses()
    before = desk.shared_memory(node.name for node in desk.lab.nodes)
    run = desk.submit("job.yaml", f"resources.placement={placement}")
    desk.until(lambda: len(stored(run, "parity")) > 1, run)
    first = records(run, "attempts/1/placement.json")[0]["nodes"]
    racks = [rack for rack in ({node.name for node in rack} for rack in desk.lab.racks) if rack & {*first}]
    assert [len(rack & {*first}) for rack in racks] == [2, 2], records(run, "attempts/1/placement.json")
    # The first node has the batch shell and the supervisor.
    lost = [first[-1]] if what == "node" else sorted(racks[1] if first[0] in racks[0] else racks[0])
    for node in lost:
        desk.lab.node(node).power_off()
    assert desk.ended(run)["status"] == "done", story(run)
    (restored,) = events(run, "restore")
    assert restored["tiers"] == ["memory", "parity"], story(run)
    assert restored["rebuilt"] == len({*lost} & {*first})
    assert restored["step"] >= 10
    second = records(run, "attempts/2/placement.json")[0]["nodes"]
    assert not {*lost} & {*second}
    assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-00000060"]
    assert stored(run, "durable") == [60]
    assert steps(run) == undisturbed
    # The agents give the memory back when they leave, which is a moment after the end of the run.
    desk.until_none_is_left(run)
    for node, there in desk.shared_memory(second).items():
        assert there <= before[node], node


@pytest.mark.parametrize("what", ["node", "rack"])
def test_what_lost_nodes_held_comes_out_of_memory_and_parity(desk: Desk, what: str) -> None:
    go_on_without(what, desk, "spread")


def test_so_it_does_where_a_lost_rack_has_no_other_nodes(lab_here: None, tmp_path: Path) -> None:
    with Lab(Shape((2, 2, 2, 2))) as lab:
        desk = Desk(lab, tmp_path)
        desk.profile()
        go_on_without("rack", desk, "pack")
