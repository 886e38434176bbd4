"""Runs with others beside them: what these get, and that nothing of theirs is felt by the run."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrun import process
from hpcrun.launch.run_context import RunContext as Place
from hpcrun.launch.telemetry_session import _sidecar_configs, telemetry_session
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.cluster import parse_cluster
from hpcrun.specs.load import load_job
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.launch.supervised import LIMITS, Recorder, Site, send
from tests.telemetry.test_trackers import WANDB


def hook(path: Path) -> str:
    words = json.dumps(["sh", "-c", 'cat >> "$0"', str(path)])
    return f"hooks=[{{command: {words}}}]"


def states(path: Path) -> list[str]:
    return [json.loads(line)["state"] for line in path.read_text().splitlines()]


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path of everybody beside the run."""
    path = tmp_path / "lib"
    path.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(path))
    return path


def test_a_run_that_goes_well_is_told_of(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "prom"
    folder.mkdir()
    path, answers = tmp_path / "told", []

    def scrape() -> None:
        targets = site.only_run.telemetry / "targets.json"
        end = time.monotonic() + 20
        while not targets.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        link = http.client.HTTPConnection(read_json(targets)[0]["targets"][0], timeout=10)
        link.request("GET", "/metrics")
        answers.append(link.getresponse().read().decode())
        link.close()
        send(signal.SIGTERM)()

    words = (hook(path), f"telemetry.textfile={folder}", "telemetry.port=19850")
    outcome = site.run("wait", *words, observer=Recorder(on_ready=scrape))
    assert outcome.exit_code == 75
    assert states(path) == ["starting", "running", "saved"]
    assert f'hpcrun_attempt_info{{attempt="1",host="{os.uname().nodename}",name="t"' in answers[0]
    (text,) = [one.read_text() for one in folder.iterdir()]
    assert f'hpcrun_state{{run="{outcome.run.id}",state="saved"}} 1.0' in text
    assert not (outcome.run.telemetry / "targets.json").exists()


def test_nobody_is_beside_a_run_that_names_nobody(site: Site) -> None:
    assert not site.run("done").run.telemetry.exists()


def test_relaunches_are_told_and_counted(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "told"
    words = (hook(path), f"telemetry.textfile={tmp_path}", "retry.crash=1")
    outcome = site.run("crash", *words)
    assert (outcome.exit_code, outcome.attempt) == (93, 2)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["state"] for one in told if one["state"] != "running"] == [
        *("starting", "fault", "relaunched", "starting", "fault", "failed")
    ]
    assert [one["alert"] for one in told if one["alert"]] == ["attempt-1", "attempt-2", "attempt-2"]
    (text,) = [one.read_text() for one in tmp_path.glob("*.prom")]
    assert f'hpcrun_restarts_total{{cause="crash",level="allocation",run="{outcome.run.id}"}} 1.0' in text
    assert f'hpcrun_faults_total{{cause="crash",run="{outcome.run.id}"}} 2.0' in text


def test_a_sink_that_always_dies_is_given_up_and_the_run_is_as_without_it(
    site: Site, lib: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (lib / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("FAKE_WANDB", str(lib / "log"))
    monkeypatch.setenv("FAKE_WANDB_FAILS", "yes")
    monkeypatch.setenv("WANDB_MODE", "offline")
    plain = site.run("done")
    outcome = site.run("done", "telemetry.wandb={project: p}")
    assert (outcome.status, outcome.exit_code, outcome.step) == (plain.status, plain.exit_code, plain.step)
    without = [{**one, "time": 0} for one in read_json_lines(plain.run.metrics)]
    assert [{**one, "time": 0} for one in read_json_lines(outcome.run.metrics)] == without
    told = [line for line in capfd.readouterr().err.splitlines() if "telemetry: wandb has failed" in line]
    assert len(told) == 1
    assert "ConnectionError: no route to api.wandb.ai" in told[0]
    assert "Traceback" in (outcome.run.telemetry / "wandb.log").read_text()


def test_a_sink_that_dies_is_started_again_so_many_times(
    site: Site, lib: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (lib / "wandb.py").write_text("raise RuntimeError('broken installation')\n")
    # Where beside is loaded anew: each child of the keeper sees the short waits.
    (lib / "sitecustomize.py").write_text(
        "import sys\n"
        "if '_beside' in sys.argv or '_beside' in ' '.join(sys.orig_argv):\n"
        "    import hpcrun.telemetry.sidecar as beside\n"
        "    beside._AGAIN_S = (0.0, 0.0)\n"
    )

    def wait() -> None:
        log = site.only_run.telemetry / "wandb.log"
        end = time.monotonic() + 30
        while not log.exists() or log.read_text().count("broken installation\n") < 3:
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(1.0)
        send(signal.SIGTERM)()

    outcome = site.run("wait", "telemetry.wandb={}", observer=Recorder(on_ready=wait))
    assert outcome.exit_code == 75
    told = [line for line in capfd.readouterr().err.splitlines() if "wandb has failed" in line]
    assert len(told) == 2
    assert "it is started again, the run continues" in told[0]
    assert "broken installation 3 times; it is not started again" in told[1]


def test_a_package_that_is_not_there_is_told_at_the_start(site: Site, lib: Path) -> None:
    # A directory of that name, which W&B itself leaves where it ran, is no package.
    (lib / "wandb").mkdir()
    observer = Recorder()
    assert site.run("done", "telemetry.wandb={}", observer=observer).exit_code == 0
    (told,) = [note for note in observer.notes if "telemetry" in note]
    assert told.startswith(f"telemetry.wandb: {sys.executable} has no package wandb; the run continues")
    assert told.endswith("pip install wandb")


def test_a_place_that_cannot_be_written_is_no_hindrance(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("hpcrun.launch.telemetry_session.subprocess.Popen", refuse)
    observer = Recorder()

    spec = load_job(site.job, ["telemetry.port=19850"]).spec
    run = RunDir(site.path / "r")
    run.path.mkdir()
    with telemetry_session(run, spec, Place(), observer.note):
        pass
    assert observer.notes == ["telemetry: [Errno 12] Cannot allocate memory; the run continues without it"]


def test_who_looks_after_the_rest_may_die_too(site: Site) -> None:
    def kill() -> None:
        beside = process.descendants(os.getpid())
        keeper = next(one for one in beside if _word(one.pid, -1) == str(site.only_run.path))
        os.kill(keeper.pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while any(_word(one.pid, -1) == "hooks" and process.is_alive(one) for one in beside):
            assert time.monotonic() < end
            time.sleep(0.05)
        send(signal.SIGTERM)()

    observer = Recorder(on_ready=kill)
    outcome = site.run("wait", "hooks=[{command: ['true']}]", observer=observer)
    assert outcome.exit_code == 75
    assert "telemetry: the exporter process died" in observer.notes[-1]


def _word(pid: int, index: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return words[index]


SUPERVISOR = """\
import sys, pathlib
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.telemetry_session import telemetry_session
from hpcrun.specs.load import load_job
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
run, spec = RunDir(pathlib.Path(sys.argv[1])), load_job(pathlib.Path(sys.argv[2]), sys.argv[3:]).spec
with telemetry_session(run, spec, RunContext(), print):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_supervisor_that_is_killed_is_told_as_lost_and_nobody_stays(site: Site, tmp_path: Path) -> None:
    run, path = RunDir(tmp_path / "r"), tmp_path / "told"
    run.path.mkdir()
    run.events.write_text(json.dumps(event_line("launch", 1.0)) + "\n")
    words = [sys.executable, "-c", SUPERVISOR, str(run.path), str(site.job), hook(path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        (keeper, *_) = process.descendants(child.pid)
        end = time.monotonic() + 20
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        beside = [keeper, *process.descendants(keeper.pid)]
        # What is meant for the run is none of theirs.
        for one in beside:
            os.kill(one.pid, signal.SIGTERM)
        child.kill()
    while any(map(process.is_alive, beside)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(process.is_alive, beside))
    assert states(path) == ["starting", "lost"]


def test_what_another_supervisor_tells_is_told_once(site: Site, tmp_path: Path) -> None:
    run, path, folder = RunDir(tmp_path / "r"), tmp_path / "told", tmp_path / "prom"
    run.path.mkdir()
    folder.mkdir()
    run.events.write_text(json.dumps(event_line("launch", 1.0)) + "\n")
    spec = load_job(site.job, [hook(path), f"telemetry.textfile={folder}"]).spec
    with telemetry_session(run, spec, Place(), print) as hand_over:
        end = time.monotonic() + 20
        while not (path.exists() and path.read_text().endswith("\n") and any(folder.glob("*.prom"))):
            assert time.monotonic() < end
            time.sleep(0.05)
        hand_over()
        with run.events.open("a") as events:
            events.write(json.dumps(event_line("fault", 2.0)) + "\n")
    assert states(path) == ["starting"]
    assert list(folder.iterdir()) == []


def test_hooks_of_the_profile_are_called_beside_the_job_s(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setenv("PLACE", str(tmp_path))
    text = "name: c\nnetwork: {interface: lo}\ntelemetry: {port: 9850, textfile: $PLACE/prom}\n"
    cluster = parse_cluster(text + "hooks: [{command: [/opt/tell]}]\n", "c.yaml")
    allocation = Allocation(7, ("n01", "n02"), "7_1", True, 0)
    spec = load_job(site.job, ["hooks=[{command: [mine]}]", "telemetry.port=9000"]).spec
    orders = _sidecar_configs(RunDir(tmp_path / "r"), spec, Place(allocation, cluster), print)
    assert [(one["command"], one["whose"]) for one in orders["hooks"]["hooks"]] == [
        (["mine"], "job"),
        (["/opt/tell"], "site"),
    ]
    assert orders["exporter"] == {
        **{"textfile": f"{tmp_path}/prom", "port": 9000, "targets": None},
        **{"address": "127.0.0.1", "suffix": ""},
    }
    assert (orders["about"]["slurm_job"], orders["about"]["ranks"]) == ("7", 1)


def test_a_hook_that_hangs_delays_no_relaunch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrun.launch.telemetry_session.FINAL_DELIVERY_S", 0.0)
    monkeypatch.setattr("hpcrun.launch.telemetry_session._EXIT_WAIT_S", 0.2)
    observer = Recorder()
    words = ("hooks=[{command: [sleep, '60']}]", "retry.crash=1")
    outcome = site.run("crash", *words, observer=observer, limits=LIMITS)
    assert outcome.attempt == 2
    times = {one["event"]: one["monotonic"] for one in read_json_lines(outcome.run.events)}
    assert times["relaunch"] - times["fault"] < 20
    assert observer.notes[-1] == "telemetry: what was still to be told took too long, and was dropped"
