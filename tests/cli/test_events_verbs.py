"""`hpcrun events`, `postmortem`, `save`, `stop`, and what `status` and `describe` say of time and faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.cli.main import main
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric_line

Capture = pytest.CaptureFixture[str]
T0 = 1_700_000_000.0


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def write(run: RunDir, *events: dict[str, Any], metrics: tuple[dict[str, Any], ...] = ()) -> None:
    for path, records in ((run.events, events), (run.metrics, metrics)):
        with path.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in records)


def at(moment: float, attempt: int, event: str = "", **values: Any) -> dict[str, Any]:
    if event:
        return event_line(event, T0 + moment, attempt, **values)
    return {"time": T0 + moment, "attempt": attempt, **values}


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    """A run that lost a node after its save of step 2, and was done on a spare."""
    run = create_run("r")
    run.spec.write_text("name: r\n")
    write(
        run,
        at(0, 1, event="launch", ranks=2),
        at(4, 1, event="ranks_connected", seconds=4.0),
        at(10, 1, event="node_lost", node="n02", why="no answer for 3 s"),
        at(11, 1, event="exit", status="failed", exit_code=5, message="node n02 is lost"),
        at(12, 2, event="relaunch", excluded=["n02"], spares_left=1),
        at(12, 2, event="launch", ranks=2),
        at(14, 2, event="ranks_connected", seconds=2.0),
        at(18, 2, event="result", status="done"),
        at(20, 2, event="exit", status="done", exit_code=0, message="done at step 4"),
        metrics=(
            *(metric_line("step", step, time=T0 + 4 + step) for step in (1, 2, 3)),
            metric_line("start", 2, attempt=2, time=T0 + 14),
            *(metric_line("step", step, attempt=2, time=T0 + 13 + step) for step in (3, 4)),
        ),
    )
    record = {"status": "done", "exit_code": 0, "message": "done at step 4", "attempt": 2, "step": 4}
    run.attempt(2).create()
    write_json(run.exit, record)
    return run


@pytest.fixture
def live(runs_root: Path) -> Iterator[RunDir]:
    """A run whose stand-in of a supervisor saves at USR1, and writes its end and leaves at TERM."""
    run = create_run("live")
    run.spec.write_text("name: live\n")
    saved = json.dumps(metric_line("save", 7, time=T0 + 1))
    ended = json.dumps({"status": "saved", "exit_code": 75, "message": "saved at step 8", "attempt": 1})
    code = (
        "import os, signal, sys\n"
        "def save(*_): open(sys.argv[1], 'a').write(sys.argv[2] + '\\n')\n"
        "def stop(*_):\n"
        "    open(sys.argv[3] + '.new', 'w').write(sys.argv[4])\n"
        "    os.rename(sys.argv[3] + '.new', sys.argv[3])\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    words = [sys.executable, "-c", code, str(run.metrics), saved, str(run.exit), ended]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        found = process.identify_process(child.pid)
        assert found
        record = {"host": os.uname().nodename, "pid": found.pid, "start_ticks": found.start_ticks}
        write_json(run.attempt(1).create().supervisor, {**record, "started": 1.0})
        yield run
        child.kill()


def test_events_tell_the_story(run: RunDir, capsys: Capture) -> None:
    assert call("events", run.id) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[2] for line in lines] == [
        "attempt 1  launch of 2 ranks",
        "attempt 1  ranks connected after 4.0 s",
        "attempt 1  node n02 lost: no answer for 3 s",
        "attempt 1  failed: node n02 is lost",
        "attempt 2  relaunch in the same allocation without n02; 1 spare left",
        "attempt 2  launch of 2 ranks",
        "attempt 2  resumes after step 2",
        "attempt 2  ranks connected after 2.0 s",
        "attempt 2  done at step 4",
    ]
    assert call("events", run.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["run"], len(told["events"])) == (2, run.id, 9)
    assert told["events"][2]["what"] == "node_lost"
    empty = create_run("empty")
    empty.spec.write_text("name: e\n")
    assert call("events", empty.id) == 0
    assert "nothing has happened" in capsys.readouterr().err
    write_json(empty.sweep, [{}])
    assert call("events", empty.id) == 2
    assert f"is a sweep: name one of its elements, such as {empty.id}/0" in capsys.readouterr().err


def test_following_events_ends_with_the_run(live: RunDir, capsys: Capture) -> None:
    write(live, at(0, 1, event="launch", ranks=1))

    def goes_on() -> None:
        time.sleep(0.7)
        write(live, at(9, 1, event="exit", status="saved", message="saved at step 8"))
        write_json(live.exit, {"status": "saved", "exit_code": 75, "message": "", "attempt": 1})

    writer = threading.Thread(target=goes_on)
    writer.start()
    assert call("events", live.id, "-f", "--json") == 0
    writer.join()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["schema_version"], one["text"]) for one in told] == [
        (2, "launch of 1 rank"),
        (2, "saved at step 8"),
    ]


def test_status_tells_faults_spares_and_goodput(run: RunDir, capsys: Capture) -> None:
    assert call("status", run.id) == 0
    out = capsys.readouterr().out
    assert "\nfaults   1 node lost\nspares   1 left\n" in out
    # 2 of the 3 steps of the first attempt and both of the second, of 20 s in all
    assert "\ngoodput  20.0%; lost to start 6 s, detection 3 s, shutdown 3 s\n" in out
    assert call("status", run.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 2
    ledger = told["ledger"]
    assert sum(ledger["buckets_s"].values()) == pytest.approx(ledger["wall_s"]) == pytest.approx(20)
    assert (ledger["steps"], ledger["steps_lost"], ledger["spares_left"]) == (4, 1, 1)
    assert ledger["faults"][0]["cause"] == "node lost"


def test_a_run_of_very_many_steps_has_a_quick_status(
    run: RunDir, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrun.cli.runs._MAX_QUICK_LEDGER_BYTES", 100)
    assert call("status", run.id) == 0
    out = capsys.readouterr().out
    assert f"see hpcrun describe {run.id}\n" in out
    assert "faults" not in out


def test_of_a_run_that_nobody_knows_to_go_on_no_time_passes(run: RunDir, capsys: Capture) -> None:
    run.exit.unlink()
    for path in (run.spec, run.job, run.events, run.metrics):
        os.utime(path, (T0 + 20, T0 + 20))
    assert call("status", run.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "unknown"
    assert told["ledger"]["wall_s"] == pytest.approx(20)


def test_describe_has_the_whole_ledger(run: RunDir, capsys: Capture) -> None:
    lost = {"status": "failed", "message": "node n02 is lost", "requeued": None, "relaunched": "node_lost"}
    write_json(run.attempt(1).create().outcome, lost)
    assert call("describe", run.id) == 0
    out = capsys.readouterr().out
    assert "failed: node n02 is lost, relaunched (node_lost)" in out
    assert " 30.0%  start       from a launch until all ranks have met\n" in out
    assert "20.0 s in all, goodput 20.0%, 2 attempts\n" in out
    assert "attempt 1: node lost on n02: seen after 3.0 s, recovered in 7.0 s, 1 steps lost\n" in out
    assert call("describe", run.id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["goodput"] == pytest.approx(0.2)


def test_the_ledger_of_a_sweep_is_the_sum_of_its_elements(run: RunDir, capsys: Capture) -> None:
    sweep = create_run("s")
    sweep.spec.write_text("name: s\n")
    write_json(sweep.sweep, [{"train.lr": 0.1}, {"train.lr": 0.2}, {"train.lr": 0.3}])
    for number in (0, 1):
        element = sweep.element(number)
        element.attempt(2).create()
        for path in (run.events, run.metrics, run.exit):
            (element.path / path.name).write_text(path.read_text())
    assert call("describe", sweep.id, "--json") == 0
    ledger = json.loads(capsys.readouterr().out)["ledger"]
    assert (ledger["wall_s"], ledger["steps"], ledger["attempts"]) == (pytest.approx(40), 8, 4)


def test_postmortem_writes_one_tar(
    run: RunDir, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("postmortem", run.id) == 0
    told = capsys.readouterr()
    assert told.out == f"{run.id}-postmortem.tar.gz\n"
    assert "hpcrun: left out: of r-" in told.err
    assert call("postmortem", run.id, "--out", "b.tgz", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    with tarfile.open("b.tgz") as tar:
        assert tar.getnames() == [f"{run.id}/{name}" for name in listed["files"]]
    assert call("postmortem", run.id, "--out", "b.tgz") == 2
    assert "b.tgz: exists already" in capsys.readouterr().err


def test_save_asks_and_waits(live: RunDir, capsys: Capture) -> None:
    assert call("save", live.id, "--wait", "--timeout", "1m") == 0
    told = capsys.readouterr()
    assert "to save and continue\n" in told.out
    assert told.err == f"hpcrun: {live.id}: step 7 was saved in 0.5 s\n"


def test_stop_asks_and_waits_and_a_saved_run_is_a_success(live: RunDir, capsys: Capture) -> None:
    assert call("stop", live.id, "--wait") == 0
    told = capsys.readouterr()
    assert "to save and stop\n" in told.out
    assert told.err.endswith(f"hpcrun: {live.id} is saved: saved at step 8\n")


def test_who_is_over_stops_nobody_else_from_being_asked(live: RunDir, run: RunDir, capsys: Capture) -> None:
    assert call("save", run.id, live.id) == 2
    told = capsys.readouterr()
    assert f"{run.id} is done (done at step 4); there is nothing to save" in told.err
    assert f"{live.id}: asked pid" in told.out
    assert call("save", live.id, "--timeout", "1m") == 2
    assert "--timeout: is for --wait" in capsys.readouterr().err
