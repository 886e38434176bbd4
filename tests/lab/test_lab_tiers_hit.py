"""What befalls runs with saves in memory: the batch host goes, an agent goes, or they are queued again."""

from __future__ import annotations

import json

import pytest

from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_tiers import JOB, events, stored


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_whoever_takes_over_goes_on_from_memory(desk: Desk, launcher: str) -> None:
    desk.profile(f"mpi: {{library: mpich, launcher: {launcher}}}\n")
    (desk.path / "job.yaml").write_text(JOB)
    before = desk.shared_memory(node.name for node in desk.lab.nodes)
    run = desk.submit("job.yaml", "resources.nodes=4", "resources.spares=2", "cluster=lab")
    desk.until(lambda: len(stored(run, "parity")) > 1, run)
    first = records(run, "attempts/1/placement.json")[0]["nodes"]
    desk.lab.node(first[0]).power_off()
    desk.until(lambda: bool(events(run, "failover")), run)
    desk.lab.give_up_lost()
    assert desk.ended(run)["status"] == "done", story(run)
    (restored,) = events(run, "restore")
    assert (restored["tiers"], restored["rebuilt"]) == (["memory", "parity"], 1), story(run)
    second = records(run, "attempts/2/placement.json")[0]["nodes"]
    desk.until_none_is_left(run)
    for node, there in desk.shared_memory(second).items():
        assert there <= before[node], node


def test_a_run_that_is_queued_again_loses_no_save(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml", "resources={nodes: 2, spares: 0}", "parallel.dp_shard=4", "retry={}")
    desk.until(lambda: len(stored(run, "parity")) > 1, run)
    job = json.loads(run.job.read_text())["submissions"][-1]["job"]
    # Whether there is the time to write down how it ended, before Slurm kills what is left, is not known.
    desk.lab.run(["scontrol", "requeue", str(job)]).require_success()
    assert desk.ended(run)["status"] == "done", story(run)
    (restored,) = events(run, "restore")
    # On the same nodes their memory may still be there.
    assert restored["tiers"] in (["memory"], ["durable"]), story(run)
    assert restored["step"] >= 10
    assert restored["lost_steps"] == 0


def test_a_killed_agent_costs_its_node_but_no_save(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    before = desk.shared_memory(node.name for node in desk.lab.nodes)
    run = desk.submit("job.yaml", "resources.nodes=4", "resources.spares=2")
    desk.until(lambda: len(stored(run, "parity")) > 1, run)
    nodes = records(run, "attempts/1/placement.json")[0]["nodes"]
    desk.hpcrun("chaos", "kill-agent", run.id, "--node", nodes[-1])
    assert desk.ended(run)["status"] == "done", story(run)
    (restored,) = events(run, "restore")
    assert "durable" not in restored["tiers"], story(run)
    assert restored["step"] >= 10
    desk.until_none_is_left(run)
    # What the killed agent cannot give back, the next run on that node does.
    for node, there in desk.shared_memory({*before} - {nodes[-1]}).items():
        assert there <= before[node], node
