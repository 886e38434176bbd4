"""The supervisor alone is killed on the batch host: another comes in its place, in the same job."""

from __future__ import annotations

import json

import pytest

from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_spares import outcomes
from tests.lab.test_lab_tiers import JOB, events, stored

LEFT = "grep -zl 'HPCRUN_RUN_DIR=.*/{}' /proc/[0-9]*/environ 2>/dev/null; true"


def losses(run: RunDir) -> dict[int, float]:
    """Of every step the newest."""
    return {one["step"]: one["loss"] for one in read_json_lines(run.metrics) if one.get("kind") == "step"}


def job_of(run: RunDir) -> str:
    return str(json.loads(run.job.read_text())["submissions"][-1]["job"])


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_the_run_goes_on_with_the_same_losses_and_slurm_knows_nothing_of_it(
    desk: Desk, launcher: str
) -> None:
    desk.profile(f"mpi: {{library: mpich, launcher: {launcher}}}\n")
    (desk.path / "job.yaml").write_text(JOB)
    before = desk.shared_memory(node.name for node in desk.lab.nodes)
    asked = ("job.yaml", "resources={nodes: 2, spares: 1}", "parallel.dp_shard=4", "retry={}", "cluster=lab")
    plain = desk.submit(*asked)
    assert desk.ended(plain, 200)["status"] == "done", story(plain)
    run = desk.submit(*asked)
    desk.until(lambda: len(stored(run, "parity")) > 1, run)
    first = read_supervisor_record(run)
    desk.hpcrun("chaos", "kill-supervisor", run.id)
    ended = desk.ended(run)
    assert (ended["status"], ended["attempt"]) == ("done", 2), story(run)
    assert outcomes(run) == [("failed", "supervisor lost", None), ("done", None, None)]
    (restored,) = events(run, "restore")
    assert restored["tiers"] == ["memory"], story(run)
    assert events(run, "node_lost") == []
    second = read_supervisor_record(run)
    assert (second["host"], second["slurm_job"]) == (first["host"], first["slurm_job"])
    assert second["pid"] != first["pid"]
    nodes = [records(run, f"attempts/{attempt}/placement.json")[0]["nodes"] for attempt in (1, 2)]
    assert nodes[0] == nodes[1]
    assert losses(run) == losses(plain)
    desk.until_none_is_left(run)
    shown = desk.lab.run(["scontrol", "show", "job", job_of(run)]).require_success().stdout
    assert "JobState=COMPLETED" in shown
    assert "ExitCode=0:0" in shown
    assert "Restarts=0" in shown
    for node, there in desk.shared_memory(before).items():
        assert there <= before[node], node
    look = ["sh", "-c", LEFT.format(run.id)]
    assert {node.run(look).stdout for node in desk.lab.nodes} == {""}


def test_on_one_node_too_and_a_request_to_stop_reaches_the_new_one(desk: Desk) -> None:
    run = desk.submit("name=alone", "retry={}", "--", "sh", "-c", "while :; do sleep 0.1; done")
    desk.until(lambda: run.attempt(1).rank_record(0).exists(), run)
    desk.hpcrun("chaos", "kill-supervisor", run.id)
    desk.until(lambda: run.attempt(2).rank_record(0).exists(), run)
    assert json.loads(desk.hpcrun("status", run.id, "--json").stdout)["state"] == "running"
    desk.hpcrun("cancel", run.id)
    assert desk.ended(run)["status"] == "interrupted", story(run)
    desk.until_none_is_left(run)
    shown = desk.lab.run(["scontrol", "show", "job", job_of(run)]).require_success().stdout
    assert "ExitCode=130:0" in shown
