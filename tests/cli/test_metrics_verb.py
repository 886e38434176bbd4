"""`hpcrun metrics`: the figures of any run, and the files for Grafana and Prometheus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrun.cli.main import main
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric_line

Capture = pytest.CaptureFixture[str]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def done(run: RunDir) -> RunDir:
    run.spec.write_text("name: r\n")
    lines = [metric_line("step", step, time=4.0 + step) for step in (1, 2)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + "torn")
    run.events.write_text(json.dumps(event_line("launch", 1.0)) + "\n")
    write_json(run.exit, {"status": "done", "exit_code": 0, "message": "done at step 2"})
    return run


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    return done(create_run("r"))


def test_a_run_that_is_over_still_has_figures(run: RunDir, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(run.path.rglob("*"))
    assert call("metrics", run.id) == 0
    text = capsys.readouterr().out
    assert f'hpcrun_step{{run="{run.id}"}} 2.0\n' in text
    assert f'hpcrun_state{{run="{run.id}",state="done"}} 1.0\n' in text
    assert f'hpcrun_productive_seconds_total{{run="{run.id}"}} 2.0\n' in text
    assert sorted(run.path.rglob("*")) == before
    assert call("metrics", run.id, "--out", str(tmp_path / "r.prom")) == 0
    assert (tmp_path / "r.prom").read_text() == text
    assert call("metrics", run.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 2
    assert {"name": "hpcrun_step", "labels": {"run": run.id}, "value": 2.0} in told["samples"]


def test_several_runs_share_one_description_of_each_figure(run: RunDir, capsys: Capture) -> None:
    other = done(create_run("other"))
    assert call("metrics", run.id, other.id) == 0
    text = capsys.readouterr().out
    assert text.count("# TYPE hpcrun_step gauge") == 1
    assert text.count("\nhpcrun_step{") == 2


def test_the_elements_of_a_sweep_are_runs(runs_root: Path, capsys: Capture) -> None:
    sweep = create_run("s")
    sweep.spec.write_text("name: s\n")
    write_json(sweep.sweep, [{"train.lr": 1}, {"train.lr": 2}])
    for number in (0, 1):
        element = sweep.element(number)
        element.path.mkdir(parents=True)
        done(element)
    assert call("metrics", sweep.id) == 0
    text = capsys.readouterr().out
    assert [f'hpcrun_step{{run="{sweep.id}/{number}"}} 2.0' in text for number in (0, 1)] == [True, True]


def test_what_grafana_and_prometheus_load_is_printed(capsys: Capture) -> None:
    assert call("metrics", "--dashboard") == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "hpcrun-runs"
    assert call("metrics", "--alerts") == 0
    assert "HpcrunNoProgress" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "metrics: name a run, or several; or give --dashboard or --alerts"),
        (("nothing",), "nothing: no such run"),
        (("RUN", "--alerts"), "metrics: --dashboard and --alerts stand alone"),
        (("RUN", "--json", "--out", "x"), "metrics: --out is for Prometheus's text"),
    ],
)
def test_mistakes_are_told_in_one_line(
    run: RunDir, words: tuple[str, ...], told: str, capsys: Capture
) -> None:
    assert call("metrics", *(run.id if word == "RUN" else word for word in words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_place_that_cannot_be_written_is_named(run: RunDir, capsys: Capture) -> None:
    assert call("metrics", run.id, "--out", "/no/such/place/r.prom") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "/no/such/place" in line
    assert "No such file or directory" in line
