"""Runs that lose nodes with no spare left, and go on with fewer replicas until there are nodes again."""

from __future__ import annotations

import pytest

from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story

JOB = """
name: elastic
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: python-stdlib, pattern: "a*.py", seq_len: 32, holdout: 0}
parallel: {dp_shard: 3, zero: 1}
train: {steps: 100000, schedule: constant, mbs: 1, gbs: 12}
checkpoint: {every: 5}
resources: {nodes: 3, mem: 2G}
elastic: {min_replicas: 2}
device: cpu
"""
ALONE = ("name=undisturbed", "parallel={dp_shard: 1, zero: 0}", "resources={nodes: 1}", "elastic=null")


def steps(run: RunDir) -> dict[int, float]:
    """The loss of each step, as the newest attempt has it."""
    return {line["step"]: line["loss"] for line in read_json_lines(run.metrics) if line.get("kind") == "step"}


def shards(run: RunDir) -> list[int]:
    return [plan["dp_shard"] for plan in records(run, "attempts/*/plan.json")]


def test_without_a_spare_a_lost_node_costs_a_replica_until_there_are_nodes_again(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml")
    assert "#SBATCH --no-kill\n" in run.script.read_text()
    desk.until(lambda: len(steps(run)) > 6, run)
    # The batch host, n01, has the supervisor; another node of the ranks goes.
    lost = desk.lab.node(records(run, "attempts/1/placement.json")[0]["nodes"][1])
    lost.power_off()
    desk.until(lambda: any(line.get("attempt") == 2 for line in read_json_lines(run.metrics)), run)
    shown = desk.hpcrun("status", run.id).stdout
    assert "2 of 3" in shown, shown
    told = next(line for line in read_json_lines(run.events) if line["event"] == "relaunch")
    assert (told["replicas"], told["replicas_before"], told["spares_left"]) == (2, 3, 0)
    # That Slurm takes the node from the job does not disturb it either.
    desk.lab.give_up_lost()
    desk.lab.wait_for_state([lost], {"down", "down*"})
    seen = max(steps(run))
    desk.until(lambda: max(steps(run)) > seen + 5, run)
    desk.hpcrun("stop", run.id)
    stopped = desk.ended(run)
    assert stopped["status"] == "saved", story(run)
    last = stopped["step"] + 10
    desk.hpcrun("submit", "--resume", run.id, f"train.steps={last}")
    desk.until(lambda: (run.read_exit() or {}).get("status") == "done", run)
    assert shards(run) == [3, 2, 3], story(run)
    assert "with 2 of 3 replicas (before: 3)" in desk.hpcrun("events", run.id).stdout
    desk.hpcrun("train", "job.yaml", *ALONE, f"train.steps={last}")
    (undisturbed,) = (RunDir(path) for path in desk.runs.iterdir() if path != run.path)
    assert steps(run) == pytest.approx(steps(undisturbed), rel=1e-5)
