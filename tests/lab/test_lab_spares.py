"""Runs that lose ranks and nodes, and go on in the same allocation from their newest save."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hpcrun.runs.lease import LEADER_TIMEOUT_S
from hpcrun.runs.ledger import read_ledger
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story

JOB = """
name: hardy
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: python-stdlib, pattern: "a*.py", seq_len: 32, holdout: 0}
parallel: {dp_shard: 2}
train: {steps: 60, mbs: 1, gbs: 4}
checkpoint: {every: 5}
resources: {nodes: 2, spares: 1, mem: 2G}
"""


def steps(run: RunDir) -> dict[int, float]:
    """The loss of each step, as the newest attempt has it."""
    return {line["step"]: line["loss"] for line in read_json_lines(run.metrics) if line.get("kind") == "step"}


def outcomes(run: RunDir) -> list[tuple[str, str | None, str | None]]:
    found = records(run, "attempts/*/outcome.json")
    return [(one["status"], one["relaunched"], one["requeued"]) for one in found]


def test_a_killed_rank_and_a_lost_node_cost_an_attempt_each_and_no_requeue(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    undisturbed = desk.undisturbed_losses()
    run = desk.submit("job.yaml")
    assert "#SBATCH --nodes=3\n" in run.script.read_text()
    assert "#SBATCH --no-kill\n" in run.script.read_text()
    desk.until(lambda: len(steps(run)) > 6, run)
    record = json.loads(run.attempt(1).rank_record(1).read_text())
    desk.lab.node(record["node"]).run(["kill", "-9", str(record["pid"])]).require_success()
    desk.until(lambda: (run.attempt(2).path / "placement.json").exists(), run)
    desk.until(lambda: any(line.get("attempt") == 2 for line in read_json_lines(run.metrics)), run)
    # The batch host, n01, has the supervisor; the other node of the ranks goes.
    lost = records(run, "attempts/2/placement.json")[0]["nodes"][1]
    desk.lab.node(lost).power_off()
    assert desk.ended(run)["status"] == "done", story(run)
    assert outcomes(run) == [("failed", "crash", None), ("failed", "node", None), ("done", None, None)]
    third = records(run, "attempts/3/placement.json")[0]
    assert lost not in third["nodes"]
    assert steps(run) == undisturbed
    told = [line for line in read_json_lines(run.events) if line["event"] == "relaunch"]
    assert [line["spares_left"] for line in told] == [1, 0]


def test_what_fails_twice_in_the_same_way_is_not_tried_again(desk: Desk) -> None:
    words = ("name=same", "retry={crash: 5}", "resources.nodes=2", "--", "sh", "-c", "sleep 0.3; exit 3")
    run = desk.submit(*words)
    ended = desk.ended(run)
    assert outcomes(run) == [("failed", "crash", None), ("failed", None, None)], story(run)
    assert ended["exit_code"] == 93
    assert ended["message"].endswith("not tried again: it failed twice in the same way, without progress")


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.events) if line["event"] == name]


def test_a_lost_batch_host_costs_an_attempt_and_no_requeue(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    undisturbed = desk.undisturbed_losses()
    run = desk.submit("job.yaml")
    desk.until(lambda: len(steps(run)) > 6, run)
    off = time.time()
    desk.lab.node("n01").power_off()
    desk.until(lambda: bool(events(run, "failover")), run)
    # That Slurm gives the node up does not disturb the run.
    desk.lab.give_up_lost()
    took = events(run, "failover")[0]
    assert (took["former"], took["epoch"]) == ("n01", 2)
    assert off < took["claimed"] < took["time"]
    assert took["host"] in ("n02", "n03")
    assert desk.ended(run)["status"] == "done", story(run)
    assert outcomes(run) == [("failed", "node", None), ("done", None, None)]
    second = records(run, "attempts/2/placement.json")[0]
    assert sorted(second["nodes"]) == ["n02", "n03"]
    assert [one["restarts"] for one in records(run, "attempts/*/supervisor.json")] == [0, 0]
    assert steps(run) == undisturbed
    assert events(run, "fault")[0]["nodes"] == ["n01"]
    desk.until_none_is_left(run)
    first_new = next(line["time"] for line in read_json_lines(run.metrics) if line["attempt"] == 2)
    print(f"takeover after {took['time'] - off:.1f} s, first new step after {first_new - off:.1f} s")
    told = desk.hpcrun("events", run.id).stdout
    assert f"supervisor on n01 lost; {took['host']} continues the run" in told
    ledger = read_ledger(run)
    times = [line["time"] for line in read_json_lines(run.events)]
    assert ledger.wall_s == pytest.approx(times[-1] - times[0], abs=0.5)
    assert [(one.cause, one.node) for one in ledger.faults] == [("node", "n01")]


def test_after_a_takeover_the_record_says_whether_the_next_run_starts(desk: Desk) -> None:
    # Two runs lose their batch hosts, which may be one, at once; one of them fails afterwards.
    (desk.path / "job.yaml").write_text(JOB)
    well = desk.submit("job.yaml", "name=well")
    fails = f"test -e {desk.path}/off && exit 3; sleep 300"
    asked = ("retry={crash: 0}", "resources={nodes: 2, spares: 1, time: 10m}")
    ill = desk.submit("name=ill", *asked, "--", "sh", "-c", fails)
    small = ("resources.time=5m", "--", "true")
    after_well = desk.submit("name=after-well", "--after", well.id, *small)
    after_ill = desk.submit("name=after-ill", "--after", ill.id, *small)
    last = desk.submit("name=last", "--after", after_ill.id, *small)
    both = desk.submit("name=both", "--after", f"{well.id},{ill.id}", *small)
    desk.until(lambda: len(steps(well)) > 6, well)
    desk.until(lambda: ill.attempt(1).rank_record(1).exists(), ill)
    (desk.path / "off").touch()
    for host in {records(run, "attempts/1/supervisor.json")[0]["host"] for run in (well, ill)}:
        desk.lab.node(host).power_off()
    desk.until(lambda: bool(events(well, "failover") and events(ill, "failover")), well)
    desk.lab.give_up_lost()
    assert desk.ended(well, 200)["status"] == "done", story(well)
    assert desk.ended(ill, 200)["status"] == "failed", story(ill)
    assert [len(events(run, "failover")) for run in (well, ill)] == [1, 1]
    assert desk.ended(after_well)["status"] == "done", story(after_well)
    for run, before in ((after_ill, ill), (last, after_ill), (both, ill)):
        ended = desk.ended(run)
        assert (ended["status"], ended["exit_code"]) == ("cancelled", 130), story(run)
        assert f"not started: {before.id} is " in ended["message"]
        assert run.attempts() == []
    desk.until_none_is_left(both)
    assert f"{well.id}" in (listed := desk.hpcrun("list").stdout)
    assert "done (Slurm says CANCELLED)" in next(one for one in listed.splitlines() if well.id in one)
    assert "done (Slurm says CANCELLED)" in desk.hpcrun("status", well.id).stdout
    assert "(Slurm says" not in desk.hpcrun("describe", after_well.id).stdout
    assert desk.hpcrun("wait", well.id).stderr.endswith("done (Slurm says CANCELLED): done at step 60\n")


def test_who_took_over_is_asked_to_save_and_to_stop(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml", "train.steps=100000", "checkpoint.every=0")
    desk.until(lambda: len(steps(run)) > 6, run)
    desk.lab.node("n01").power_off()
    desk.until(lambda: any(line.get("attempt") == 2 for line in read_json_lines(run.metrics)), run)
    assert "to save and continue" in desk.hpcrun("save", run.id).stdout
    desk.until(lambda: any(line.get("kind") == "save" for line in read_json_lines(run.metrics)), run)
    state = json.loads(desk.hpcrun("status", run.id, "--json").stdout)
    assert (state["state"], state["attempt"]) == ("running", 2)
    desk.hpcrun("stop", run.id)
    assert desk.ended(run)["status"] == "saved", story(run)
    desk.until_none_is_left(run)


ONE_STEP = """
import os, sys
from pathlib import Path
from hpcrun.address import reachable_address
from hpcrun.slurm.allocation import find_allocation
from hpcrun.launch.agents.agent_pool import AgentPool
from hpcrun.launch.launchers import step_environment
from hpcrun.runs.lease import Leadership
from hpcrun.specs.rundir import RunDir

run, allocation = RunDir(Path(sys.argv[1])), find_allocation(os.environ)
address = reachable_address(None, allocation.nodes).text
crew = AgentPool(run, Leadership(run), address, allocation.nodes)
steps = allocation.agent_steps(run, allocation.nodes, most=2)
crew.start(steps, step_environment(os.environ))
print(len(steps), *sorted(one.node for one in crew.living))
crew.close()
"""


def test_above_a_number_of_nodes_one_step_has_all_agents(desk: Desk) -> None:
    words = ["salloc", "--nodes=3", "python", "-c", ONE_STEP, str(desk.path)]
    done = desk.lab.run(words, cwd=desk.path)
    assert done.stdout == "1 n01 n02 n03\n", done.stderr
    assert (desk.path / "agents" / "step.log").exists()


def test_a_batch_host_that_is_cut_off_stands_back(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    undisturbed = desk.undisturbed_losses()
    run = desk.submit("job.yaml")
    desk.until(lambda: len(steps(run)) > 6, run)
    cut = time.time()
    # It still sees the run directory, which all nodes of the lab share: only its own doubt holds it back.
    desk.lab.node("n01").cut_link()
    desk.until(lambda: bool(events(run, "failover")), run)
    took = events(run, "failover")[0]
    desk.lab.node("n01").restore_link()
    assert desk.ended(run)["status"] == "done", story(run)
    desk.until_none_is_left(run)
    assert outcomes(run) == [("failed", "node", None), ("done", None, None)]
    assert steps(run) == undisturbed
    told = list(read_json_lines(run.events))
    assert {line["host"] for line in told[: told.index(took)]} == {"n01"}
    assert {line["host"] for line in told[told.index(took) :]} == {took["host"]}
    assert "another supervisor has taken over; this one stands back" in story(run)
    print(f"takeover after {took['time'] - cut:.1f} s")


def test_a_job_that_is_suspended_goes_on_where_it_stood(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(JOB)
    run = desk.submit("job.yaml", "train.steps=100000")
    desk.until(lambda: len(steps(run)) > 6, run)
    job = str(json.loads(run.job.read_text())["submissions"][-1]["job"])
    desk.lab.run(["scontrol", "suspend", job]).require_success()
    time.sleep(LEADER_TIMEOUT_S + 4)
    seen = max(steps(run))
    desk.lab.run(["scontrol", "resume", job]).require_success()
    desk.until(lambda: max(steps(run)) > seen + 5, run)
    desk.hpcrun("stop", run.id)
    assert desk.ended(run)["status"] == "saved", story(run)
    assert outcomes(run) == [("saved", None, None)]
