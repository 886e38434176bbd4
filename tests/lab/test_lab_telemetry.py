"""A run that loses a node, as Prometheus and the hooks of its user and its site see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story

SCRAPE = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"


def scraped(desk: Desk, run: RunDir) -> str:
    """What a Prometheus on the login node would get."""
    (target,) = read_json(run.telemetry / "targets.json")
    url = f"http://{target['targets'][0]}/metrics"
    return desk.lab.run(["python", "-c", SCRAPE, url], timeout_s=60).require_success().stdout


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_lost_node_is_seen_and_told_while_the_run_goes_on(desk: Desk) -> None:
    mark, ours, sites = (desk.path / name for name in ("mark", "ours", "sites"))
    append = ["sh", "-c", 'cat >> "$0"']
    hook = json.dumps({"command": [*append, str(sites)], "on": ["fault"]})
    desk.profile(f"telemetry: {{port: 9850}}\nhooks: [{hook}]\n")
    body = f"[ -e {mark} ] && exit 0; sleep 300"
    own = json.dumps([{"command": [*append, str(ours)]}])
    words = ("name=seen", "resources={nodes: 2, spares: 1}", f"hooks={own}")
    run = desk.submit(*words, "--", "sh", "-c", body)
    desk.until((run.telemetry / "heard.json").exists, run)
    desk.until(lambda: "running" in [one["state"] for one in told(ours)], run)
    desk.until(lambda: 'node="n01"' in scraped(desk, run), run)
    text = scraped(desk, run)
    assert f'hpcrun_nodes{{role="spare",run="{run.id}"}} 1.0' in text
    ages = [line for line in text.splitlines() if line.startswith("hpcrun_heartbeat_age_seconds{")]
    assert len(ages) == 3
    assert all(float(line.rpartition(" ")[2]) < 10 for line in ages)
    mark.touch()
    lost = records(run, "attempts/1/placement.json")[0]["nodes"][1]
    desk.lab.node(lost).power_off()
    assert desk.ended(run)["status"] == "done", story(run)
    desk.until(lambda: "done" in [one["state"] for one in told(ours)], run)
    states = [one["state"] for one in told(ours)]
    assert states[:4] == ["starting", "running", "fault", "relaunched"], story(run)
    (fault,) = told(sites)
    assert (fault["cause"], fault["nodes"], fault["slurm_job"]) == (
        "node",
        [lost],
        told(ours)[0]["slurm_job"],
    )
    text = desk.hpcrun("metrics", run.id).stdout
    assert f'hpcrun_restarts_total{{cause="node",level="allocation",run="{run.id}"}} 1.0' in text
    assert f'hpcrun_nodes{{role="excluded",run="{run.id}"}} 1.0' in text
    assert f'hpcrun_state{{run="{run.id}",state="done"}} 1.0' in text
