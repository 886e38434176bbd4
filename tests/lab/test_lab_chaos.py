"""Faults rehearsed over the nodes of a real allocation, from the login node."""

from __future__ import annotations

import json
import re

import pytest

from hpcrun.specs.records import read_json_lines
from tests.lab.desk import Desk, records, story
from tests.lab.test_lab_spares import outcomes


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_a_run_goes_on_after_a_rehearsed_death_and_a_node_that_vanishes(desk: Desk, launcher: str) -> None:
    desk.profile(f"mpi: {{launcher: {launcher}}}\n")
    mark = desk.path / "mark"
    body = f"until [ -e {mark} ]; do sleep 0.1; done"
    asked = ("name=hardy", "resources={nodes: 2, spares: 1}", "retry={crash: 2, node: 2}")
    run = desk.submit(*asked, "--", "sh", "-c", body)

    def up(attempt: int) -> bool:
        return all(run.attempt(attempt).rank_record(rank).exists() for rank in (0, 1))

    desk.until(lambda: up(1), run)
    desk.hpcrun("chaos", "stop-rank", run.id, "--rank", "1", "--for", "1s")
    filled = desk.hpcrun(
        *("chaos", "fill-disk", run.id, "--node", "n02", "--where", "/run/scratch", "--for", "1s", "--json")
    )
    texts = [one["text"] for one in json.loads(filled.stdout)["records"]]
    assert texts[0].startswith("fills /run/scratch (a file system of type tmpfs)")
    assert re.fullmatch(r"took 6[0-9.]+ MiB of /run/scratch", texts[1])
    assert texts[2:] == ["gives /run/scratch back"]
    assert outcomes(run) == []
    killed = desk.hpcrun("chaos", "kill-rank", run.id, "--rank", "1")
    assert ": SIGKILL to rank 1 (pid " in killed.stdout
    desk.until(lambda: up(2), run)
    refused = desk.hpcrun("chaos", "vanish", run.id, "--node", "n01", code=2)
    assert "node n01: also has the supervisor of hardy-" in refused.stderr
    lost = records(run, "attempts/2/placement.json")[0]["nodes"][1]
    vanished = desk.hpcrun("chaos", "vanish", run.id, "--node", lost)
    assert f"{lost}: SIGKILL to all of the run on {lost} (pid " in vanished.stdout
    desk.until(lambda: up(3), run)
    assert lost not in records(run, "attempts/3/placement.json")[0]["nodes"]
    mark.touch()
    assert desk.ended(run)["status"] == "done", story(run)
    assert outcomes(run) == [("failed", "crash", None), ("failed", "node", None), ("done", None, None)]
    told = desk.hpcrun("events", run.id).stdout
    assert told.index("SIGKILL to rank 1") < told.index("fault: crash")
    assert told.index(f"chaos on {lost}: SIGKILL to all") < told.index("fault: node")
    assert [one["do"] for one in read_json_lines(run.chaos)] == [
        *["stop-rank"] * 2,
        *["fill-disk"] * 3,
        "kill-rank",
        "vanish",
    ]


def test_a_run_outlives_an_agent_and_its_supervisor_but_not_what_brings_one_back(desk: Desk) -> None:
    asked = ("name=played", "resources={nodes: 2, spares: 1}", "retry={crash: 2, node: 2}")
    run = desk.submit(*asked, "--", "sh", "-c", "while :; do sleep 0.1; done")
    desk.until(lambda: run.attempt(1).rank_record(1).exists(), run)
    (desk.path / "scenario.yaml").write_text(
        "- {at: 0, do: slow, node: n02, share: 0.2, for: 1s}\n- {at: 2s, do: kill-agent, node: n02}\n"
    )
    told = json.loads(desk.hpcrun("chaos", "play", run.id, "scenario.yaml", "--json").stdout)
    assert told["all_done"]
    struck = [(one["do"], one["node"]) for one in told["records"] if one["phase"] == "injected"]
    assert struck == [("slow", "n02"), ("kill-agent", "n02")]
    desk.until(lambda: run.attempt(2).rank_record(1).exists(), run)
    assert outcomes(run) == [("failed", "node", None)]
    killed = desk.hpcrun("chaos", "kill-supervisor", run.id)
    assert "n01: SIGKILL to the supervisor (pid " in killed.stdout
    desk.until(lambda: run.attempt(3).rank_record(1).exists(), run)
    assert outcomes(run)[1:] == [("failed", "supervisor lost", None)]
    desk.hpcrun("chaos", "vanish", run.id, "--node", "n01", "--force")

    def is_over() -> bool:
        return bool(json.loads(desk.hpcrun("status", run.id, "--json").stdout)["state"] == "failed")

    desk.until(is_over, run)
    look = "grep -zl 'HPCRUN_RUN_DIR=.*/played' /proc/[0-9]*/environ 2>/dev/null; true"
    assert {node.name: node.run(["sh", "-c", look]).stdout for node in desk.lab.nodes} == dict.fromkeys(
        [node.name for node in desk.lab.nodes], ""
    )
