"""TensorBoard and W&B: the figures by their keys, in order, once, through faults and requeues."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun.specs.branch import make_copy_independent
from hpcrun.specs.metrics import parse_metric
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.shared_files import SharedFile
from hpcrun.telemetry.trackers import ScalarReader, TensorBoard, Wandb, metric_scalars
from tests.event_lines import event_line
from tests.metric_lines import metric, metric_line

ABOUT = {"run": "r-1", "name": "r", "slurm_job": "17", "host": "n01", "ranks": 4}
STEP: dict[str, Any] = {
    **{"attempt": 1, "time": 10.0, "kind": "step", "step": 1, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3},
    **{"tokens_per_s": 4000.0, "step_time_s": 2.0, "time_s": {"data": 0.5}, "mfu": 0.25},
    "peak_memory_bytes": 2**31,
}
WANDB = """\
import json, os, pathlib
class Run:
    def __init__(self, **given):
        self.step = 0
        names = ("WANDB_API_KEY", "WANDB_BASE_URL")
        self.say(init=given, env={name: os.environ.get(name) for name in names})
    def say(self, **words):
        with pathlib.Path(os.environ["FAKE_WANDB"]).open("a") as out:
            out.write(json.dumps(words) + "\\n")
    def log(self, figures, step):
        if os.environ.get("FAKE_WANDB_FAILS"):
            raise ConnectionError("no route to api.wandb.ai")
        self.say(log=figures, step=step)
    def mark_preempting(self):
        self.say(preempting=True)
    def finish(self, exit_code):
        self.say(finish=exit_code)
def init(**given):
    return Run(**given)
"""
ORDERS: dict[str, Any] = {
    "project": None,
    "entity": None,
    "group": None,
    "mode": None,
    "env": {},
    "secrets": {},
    "config": {},
}


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    run = create_run("r")
    run.telemetry.mkdir()
    return run


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a stand-in of the package writes what it is told."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "wandb.log"))
    for name in ("API_KEY", "BASE_URL", "RUN_ID", "MODE", "RESUME", "PROJECT", "NAME"):
        monkeypatch.setenv(f"WANDB_{name}", "")
        monkeypatch.delenv(f"WANDB_{name}")
    yield tmp_path / "wandb.log"
    sys.modules.pop("wandb", None)


def write(run: RunDir, *lines: dict[str, Any]) -> None:
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def steps(first: int, last: int, **more: Any) -> list[dict[str, Any]]:
    return [{**STEP, "step": step, "loss": float(step), **more} for step in range(first, last + 1)]


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_figures_have_the_keys_that_people_know() -> None:
    assert metric_scalars(parse_metric(STEP).metric, 4) == {
        "loss_metrics/global_avg_loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "throughput(tps)": 1000.0,
        "mfu(%)": 25.0,
        "time_metrics/end_to_end(s)": 2.0,
        "time_metrics/data_loading(s)": 0.5,
        "time_metrics/data_loading(%)": 25.0,
        "memory/max_allocated(GiB)": 2.0,
    }
    assert metric_scalars(metric("eval", eval_loss=3), 1) == {"validation_metrics/loss": 3.0}
    assert metric_scalars(metric("save", seconds=0.5), 1) == {"time_metrics/checkpoint(s)": 0.5}
    assert metric_scalars(metric("start", 0), 1) == {}
    # What is unknown is left out.
    assert set(metric_scalars(metric("step", step_time_s=0), 1)) == {
        *("loss_metrics/global_avg_loss", "grad_norm", "lr", "throughput(tps)", "time_metrics/end_to_end(s)")
    }
    assert metric_scalars(metric("eval", eval_loss=None), 1) == {}


def test_no_step_comes_twice_nor_late(run: RunDir) -> None:
    points = ScalarReader(run, 1, {})
    write(run, *steps(1, 4), metric_line("start", 2, attempt=2), *steps(3, 6, attempt=2))
    assert [step for step, _, _ in points.new()] == [1, 2, 3, 4, 5, 6]
    again = ScalarReader(run, 1, json.loads(json.dumps(points.state)))
    write(run, *steps(5, 7, attempt=3), {"kind": "step", "step": "x"}, {"kind": "step"})
    assert [step for step, _, _ in again.new()] == [7]
    assert [step for step, _, _ in ScalarReader(run, 1, {"metrics": "x", "steps": [1]}).new()] == list(
        range(1, 8)
    )


def test_wandb_is_told_step_by_step_under_one_id(run: RunDir, wandb: Path) -> None:
    secret = wandb.with_name("key")
    secret.write_text("k3y\n")
    secret.chmod(0o600)
    more: dict[str, Any] = {"project": "p", "config": {"lr": 1}, "secrets": {"WANDB_API_KEY": str(secret)}}
    sink = Wandb(run, ABOUT, ORDERS | more | {"env": {"WANDB_BASE_URL": "http://here"}})
    write(run, *steps(1, 2), metric_line("eval", 2, eval_loss=9.0))
    sink.turn()
    with run.events.open("a") as file:
        file.write(json.dumps(event_line("requeue", 20.0, cause="preemption")) + "\n")
    sink.close()
    init, first, second, *ends = told(wandb)
    assert init["env"] == {"WANDB_API_KEY": "k3y", "WANDB_BASE_URL": "http://here"}
    wanted = {"id": run.run_id, "resume": "allow", "project": "p", "mode": "online", "config": {"lr": 1}}
    assert init["init"].items() >= wanted.items()
    assert (first["step"], first["log"]["loss_metrics/global_avg_loss"]) == (1, 1.0)
    assert (second["step"], second["log"]["validation_metrics/loss"], second["log"]["lr"]) == (2, 9.0, 1e-3)
    assert ends == [{"preempting": True}, {"finish": 1}]
    wandb.unlink()
    write(run, *steps(1, 3, attempt=2))
    again = Wandb(run, ABOUT, ORDERS)
    again.turn()
    write_json(run.exit, {"status": "done", "exit_code": 0, "message": ""})
    again.close()
    init, only, end = told(wandb)
    assert (init["init"]["id"], only["step"], end) == (run.run_id, 3, {"finish": 0})


def test_wandb_without_a_key_writes_offline(
    run: RunDir, wandb: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    Wandb(run, ABOUT, ORDERS | {"secrets": {"WANDB_API_KEY": "/no/such/file"}}).turn()
    (init,) = told(wandb)
    assert (init["init"]["mode"], init["init"]["id"], init["init"]["project"]) == ("offline", "mine", "r")
    assert "it writes offline; later: wandb sync" in capfd.readouterr().err
    (wandb.parent / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    Wandb(run, ABOUT, ORDERS)
    assert told(wandb)[-1]["init"]["mode"] == "online"


def test_tensorboard_files_can_be_opened(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard: pip install tensorboard")
    write(run, *steps(1, 3))
    logs = tmp_path / "logs"
    sink = TensorBoard(run, ABOUT, {"directory": str(logs)})
    sink.turn()
    sink.close()
    write(run, *steps(2, 5, attempt=2))
    again = TensorBoard(run, ABOUT, {"directory": str(logs)})
    again.turn()
    again.close()
    loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(logs.iterdir(), key=lambda path: (path.stat().st_mtime, path.name)):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for one in event.summary.value:
                found.setdefault(one.tag, []).append((event.step, one.simple_value))
    assert sorted(found["loss_metrics/global_avg_loss"]) == [(step, float(step)) for step in range(1, 6)]
    assert found["memory/max_allocated(GiB)"][0] == (1, 2.0)


def test_a_copy_of_a_run_tells_its_own_series(run: RunDir, tmp_path: Path, wandb: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy = RunDir(Path(shutil.copytree(run.path, tmp_path / "elsewhere" / run.id)))
    make_copy_independent(copy)
    assert copy.id == run.id
    assert copy.shared_name != run.shared_name
    for one in (run, copy):
        Wandb(one, ABOUT, ORDERS)
    first, second = (line["init"]["id"] for line in told(wandb))
    assert first != second
    folder = tmp_path / "shown"
    folder.mkdir()
    for one in (run, copy):
        SharedFile(one, str(folder), ".prom", print).write("x")
    assert len(list(folder.iterdir())) == 2
