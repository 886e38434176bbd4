"""What Prometheus gets of a run, over HTTP and as a file, while it goes on and when it is over."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hpcrun.mesh import ParallelDegrees
from hpcrun.runs.heartbeat_age import HeartbeatAgeFile, read_heartbeat_ages
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.prometheus_exporter import Exporter, read_run_metrics
from hpcrun.telemetry.prometheus_metrics import RunMetrics, render_exposition
from tests.event_lines import event_line
from tests.metric_lines import metric_line
from tests.runs.made_runs import three_attempts, write

ABOUT = {"run": "r-1", "name": "r", "slurm_job": "17", "host": "n01", "ranks": 2}
ORDERS: dict[str, Any] = {
    "textfile": None,
    "port": None,
    "targets": None,
    "address": "127.0.0.1",
    "suffix": "",
}
NAMES = {
    "hpcrun_build_info",
    "hpcrun_attempt_info",
    "hpcrun_state",
    "hpcrun_step",
    "hpcrun_step_duration_seconds",
    "hpcrun_tokens",
    "hpcrun_checkpoint_last_step",
    "hpcrun_checkpoint_timestamp_seconds",
    "hpcrun_checkpoint_saves",
    "hpcrun_checkpoint_failures",
    "hpcrun_checkpoint_stall_seconds",
    "hpcrun_checkpoint_flush_seconds",
    "hpcrun_checkpoint_bytes",
    "hpcrun_checkpoint_lag_seconds",
    "hpcrun_checkpoint_bytes_ratio",
    "hpcrun_checkpoint_durable_age_seconds",
    "hpcrun_productive_seconds",
    "hpcrun_badput_seconds",
    "hpcrun_restarts",
    "hpcrun_faults",
    "hpcrun_detection_seconds",
    "hpcrun_recovery_seconds",
    "hpcrun_nodes",
    "hpcrun_heartbeat_age_seconds",
    "hpcrun_exporter_scrape_errors",
}
"""As the parser gives them: counters without their _total."""

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
Make = Callable[..., Exporter]


def parsed(text: str) -> Values:
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found
            found[key] = one.value
    return found


def value(text: str, metric: str, /, **labels: str) -> float:
    return parsed(text)[metric, frozenset({"run": "r-1", **labels}.items())]


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    run = create_run("r")
    run.telemetry.mkdir()
    write(run, three_attempts())
    attempt = run.attempt(3).create()
    placed = Placement(("n01", "n04"), spares=("n05",))
    write_placement(attempt.placement, placed, ParallelDegrees(pp=1, dp_replicate=2, dp_shard=1, cp=1, tp=1))
    return run


@pytest.fixture
def make(run: RunDir) -> Iterator[Make]:
    made: list[Exporter] = []

    def new(**orders: Any) -> Exporter:
        made.append(Exporter(run, ABOUT, ORDERS | orders))
        return made[-1]

    yield new
    for one in made:
        one.close()


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    link.request(method, path)
    answer = link.getresponse()
    found = answer.status, answer.headers["Content-Type"] or "", answer.read().decode()
    link.close()
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def port_of(run: RunDir) -> int:
    (target,) = json.loads((run.telemetry / "targets.json").read_text())
    return int(target["targets"][0].rpartition(":")[2])


def test_every_name_is_there_and_reads_back(run: RunDir) -> None:
    tally = read_run_metrics(run).tally
    figures = RunMetrics("r-1", tally, nodes={"active": 2}, heartbeat_ages_s={"n01": 0.5})
    text = render_exposition([figures, RunMetrics('r"2\\', tally)])
    assert {one.name for one in text_string_to_metric_families(text)} == NAMES
    assert value(text, "hpcrun_step") == 12
    assert value(text, "hpcrun_state", state="done") == 1
    assert value(text, "hpcrun_state", state="running") == 0
    assert value(text, "hpcrun_step_duration_seconds_bucket", le="+Inf") == 19
    assert value(text, "hpcrun_step_duration_seconds_count") == 19
    assert value(text, "hpcrun_faults_total", cause="crash") == 1
    assert value(text, "hpcrun_restarts_total", cause="node", level="requeue") == 1
    assert value(text, "hpcrun_restarts_total", cause="crash", level="requeue") == 0
    assert value(text, "hpcrun_checkpoint_last_step") == 12
    assert value(text, "hpcrun_productive_seconds_total") == pytest.approx(12, abs=1e-3)
    # A run without a step, and one without nodes that anybody knows, claims nothing.
    half = render_exposition([RunMetrics("r", tally, host="n\ud800", heartbeat_ages_s={"\udcff": 1.0})])
    assert half.encode().count(b"\\ud800") == half.encode().count(b"\\udcff") == 1
    empty = parsed(render_exposition([RunMetrics("new", type(tally)())]))
    assert not {name for name, _ in empty} & {"hpcrun_step", "hpcrun_nodes", "hpcrun_attempt_info"}


def test_metrics_are_served_and_nothing_else(run: RunDir, make: Make, tmp_path: Path) -> None:
    wanted = free_port()
    exporter = make(port=wanted, targets=str(tmp_path))
    port = port_of(run)
    status, kind, text = get(port)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert value(text, "hpcrun_nodes", role="spare") == 1
    assert value(text, "hpcrun_attempt_info", attempt="3", name="r", slurm_job="17", host="n01") == 1
    assert get(port, method="HEAD")[::2] == (200, "")
    assert get(port, "/../events.jsonl")[0] == 404
    assert get(port, method="POST")[0] == 501
    (target,) = json.loads((tmp_path / f"hpcrun-{run.shared_name}.json").read_text())
    assert target == {"targets": [f"127.0.0.1:{port}"], "labels": {"run_name": "r", "job_id": "17"}}
    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"\x00\xff nonsense\r\n\r\n")
    assert get(port)[0] == 200
    record = metric_line("step", 13, attempt=3, time=time.time())
    with run.metrics.open("a") as file:
        file.write(json.dumps(record) + "\n")
    exporter.turn()
    assert value(get(port)[2], "hpcrun_step") == 13
    exporter.close()
    assert not list(tmp_path.glob("*.json"))
    with pytest.raises(OSError, match="refused"):
        get(port)


def test_a_port_that_is_taken_is_left_to_its_owner_and_said(
    run: RunDir, make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        make(port=taken)
        assert taken < port_of(run) < taken + 16
        said = f"exporter: 127.0.0.1:{taken} is taken; the run's figures are served on port {port_of(run)}"
        assert said in capfd.readouterr().err
        assert get(port_of(run))[0] == 200


def test_a_file_for_the_node_exporter_stays_when_the_run_is_over(
    run: RunDir, make: Make, tmp_path: Path
) -> None:
    stale = tmp_path / "hpcrun-old-0123abcd.prom"
    stale.write_text("")
    os.utime(stale, (1, 1))
    exporter = make(textfile=str(tmp_path))
    (path,) = tmp_path.glob("*.prom")
    assert path.name == f"hpcrun-{run.shared_name}.prom"
    assert path.stat().st_mode & 0o777 == 0o644
    write_json(run.exit, {"status": "failed", "exit_code": 5, "message": ""})
    exporter.close()
    assert value(path.read_text(), "hpcrun_state", state="failed") == 1


def test_a_run_that_is_queued_again_leaves_no_file_here(run: RunDir, make: Make, tmp_path: Path) -> None:
    exporter = make(textfile=str(tmp_path))
    with run.events.open("a") as file:
        file.write(json.dumps(event_line("requeue", time.time(), 3, cause="preemption")) + "\n")
    exporter.turn()
    exporter.close()
    assert not list(tmp_path.glob("*.prom"))
    assert read_run_metrics(run).tally.state == "requeued"


def test_what_cannot_be_written_is_counted_and_told_once(
    run: RunDir, make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "prom"
    exporter = make(textfile=str(folder), port=free_port())
    for _ in range(3):
        exporter._written = float("-inf")
        exporter.turn()
    assert value(get(port_of(run))[2], "hpcrun_exporter_scrape_errors_total") >= 1
    told = [line for line in capfd.readouterr().err.splitlines() if "exporter" in line]
    assert len(told) == 1
    assert f"{folder}" in told[0]
    assert told[0].endswith("No such file or directory; the run continues")
    folder.mkdir()
    exporter.turn()
    exporter._written = float("-inf")
    exporter.turn()
    assert list(folder.glob("*.prom"))


def test_a_run_goes_on_counting_where_its_last_job_stood(run: RunDir, make: Make) -> None:
    make().close()
    told = json.loads((run.telemetry / "exporter.json").read_text())
    assert told["metrics"] == run.metrics.stat().st_size
    before = read_run_metrics(run).tally
    # Were the files read again, nothing of it would be left.
    run.metrics.write_text(" " * told["metrics"])
    assert read_run_metrics(run).tally.steps_s == before.steps_s > 0


def test_when_agents_were_heard_of_is_told_in_ages(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    HeartbeatAgeFile(run).show({"n01": 0.0, "n02": 7.0})
    # Somebody sets the clock.
    monkeypatch.setattr(time, "time", lambda: 4e9)
    ages = read_heartbeat_ages(run)
    assert (0 <= ages["n01"] < 5, 7 <= ages["n02"] < 12) == (True, True)
    told = json.loads((run.telemetry / "heard.json").read_text())
    elsewhere = json.dumps(told | {"host": "n09"})
    when, named = json.dumps(told | {"monotonic": "x"}), json.dumps(told | {"ages": {"n": "x"}})
    for damaged in ("", "[]", '{"time": 1}', when, named, elsewhere):
        (run.telemetry / "heard.json").write_text(damaged)
        assert read_heartbeat_ages(run) == {}
    assert read_heartbeat_ages(create_run("other")) == {}
