"""`hpcrun list`, `status`, `describe`, `wait`, `logs`, `cancel` on run directories in every state."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.cli.main import main
from hpcrun.specs.provenance import Provenance, SubmissionRecord, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.metric_lines import metric_line

Capture = pytest.CaptureFixture[str]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def make_run(
    name: str, *, pid: int | None = None, host: str = "", ended: dict[str, Any] | None = None
) -> RunDir:
    run = create_run(name)
    run.spec.write_text("name: t\n")
    write_provenance(run, origin(name))
    attempt = run.attempt(1).create()
    attempt.log(0).write_text("hello\n")
    if pid is not None:
        ticks = process.start_ticks(pid) or 1
        record = {"pid": pid, "start_ticks": ticks, "host": host or os.uname().nodename, "started": 1.0}
        write_json(attempt.supervisor, record)
    if ended is not None:
        write_json(run.exit, {"exit_code": 0, "message": "", "attempt": 1, "step": 4} | ended)
    return run


def origin(name: str, *submissions: SubmissionRecord) -> Provenance:
    return Provenance(
        kind="train",
        name=name,
        ranks=1,
        steps=10,
        created=1.0,
        user="me",
        host="login",
        directory="/home/me",
        argv=["hpcrun", "submit", "job.yaml"],
        hpcrun="0.1",
        python="3.11",
        commit="abc123",
        is_dirty=True,
        submissions=list(submissions),
    )


def write_metrics(run: RunDir, *records: dict[str, Any]) -> None:
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def status_of(run: RunDir, capsys: Capture) -> dict[str, Any]:
    assert call("status", run.id, "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 2
    return told


@pytest.fixture
def gone() -> int:
    with subprocess.Popen(["true"]) as child:
        pass
    return child.pid


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[str]]:
    """Stands in for a supervisor: stops at TERM with 75, ends at the second interrupt with 130."""
    code = (
        "import signal, sys, time\n"
        "asked = []\n"
        "def interrupt(*_):\n"
        "    asked.append(1)\n"
        "    if len(asked) == 2: sys.exit(130)\n"
        "signal.signal(signal.SIGINT, interrupt)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield child
        child.kill()


def test_every_state_is_told_apart(gone: int, capsys: Capture) -> None:
    assert status_of(make_run("running", pid=os.getpid()), capsys)["state"] == "running"
    dead = status_of(make_run("dead", pid=gone), capsys)
    assert dead["state"] == "dead"
    assert f"hpcrun train --resume {dead['id']}" in dead["message"]
    away = status_of(make_run("away", pid=os.getpid(), host="n99"), capsys)
    assert away["state"] == "unknown"
    assert "started on n99" in away["message"]
    failed = make_run(
        "failed", pid=gone, ended={"status": "failed", "exit_code": 5, "message": "rank 1 died"}
    )
    told = status_of(failed, capsys)
    assert (told["state"], told["exit_code"], told["message"], told["step"]) == (
        "failed",
        5,
        "rank 1 died",
        4,
    )
    assert status_of(make_run("strange"), capsys)["state"] == "unknown"


def test_a_world_of_another_launcher_is_known_by_its_result(capsys: Capture) -> None:
    run = make_run("joined")
    write_json(run.attempt(1).result, {"attempt": 1, "status": "saved", "step": 3})
    assert status_of(run, capsys)["state"] == "saved"


def test_a_pid_that_another_process_has_now_is_no_supervisor(capsys: Capture) -> None:
    run = make_run("reused", pid=os.getpid())
    path = run.attempt(1).supervisor
    record = json.loads(path.read_text())
    write_json(path, record | {"start_ticks": record["start_ticks"] - 1})
    assert status_of(run, capsys)["state"] == "dead"


def test_progress_is_that_of_the_last_lines(capsys: Capture) -> None:
    run = make_run("r", pid=os.getpid())
    filler = [metric_line("step", 9, loss=9.0, filler="x" * 1000)] * 100
    write_metrics(
        run,
        *filler,
        metric_line("step", 3, loss=1.5),
        metric_line("eval", 3, eval_loss=1.25),
        metric_line("save", 3),
    )
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    told = status_of(run, capsys)
    assert (told["step"], told["steps"], told["loss"], told["eval_loss"]) == (3, 10, 1.5, 1.25)
    assert call("status", run.id) == 0
    out = capsys.readouterr().out
    assert "state    running\n" in out
    assert "step     3 of 10\n" in out


def test_the_list_has_every_run_even_a_damaged_one(gone: int, runs_root: Path, capsys: Capture) -> None:
    assert call("list") == 0
    assert capsys.readouterr().out == f"no runs under {runs_root}\n"
    first = make_run("first", pid=gone, ended={"status": "done"})
    write_metrics(first, metric_line("step", 4, loss=1.25))
    os.utime(first.spec, (1, 1))
    second = make_run("second")
    second.job.write_text('{"pid": ')
    (runs_root / "no-run").mkdir()
    assert call("list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["RUN", "STATE", "JOB", "ATTEMPT", "STEP", "LOSS", "AGE"]
    assert lines[1][:6] == [first.id, "done", "-", "1", "4/10", "1.2500"]
    assert lines[2][:2] == [second.id, "unknown"]
    assert call("list", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["id"] for run in told["runs"]] == [first.id, second.id]
    assert "is damaged" in told["runs"][1]["message"]


def test_a_run_is_named_by_path_id_or_beginning(runs_root: Path, capsys: Capture) -> None:
    one, two = make_run("one"), make_run("two")
    twin = make_run("two")
    for word in (str(one.path), one.id, "one"):
        assert call("status", word) == 0
        assert str(one.path) in capsys.readouterr().out
    assert call("status", two.id) == 0
    capsys.readouterr()
    assert call("status", "tw") == 2
    err = capsys.readouterr().err
    assert "names 2 runs" in err
    assert twin.id in err
    assert call("status", "three") == 2
    assert "three: no such run under" in capsys.readouterr().err


def test_logs_of_a_rank_and_an_attempt(capsys: Capture) -> None:
    run = make_run("r")
    run.attempt(2).create().log(1).write_text("second, rank 1\n")
    run.attempt(2).launcher_log.write_text("mpiexec says\n")
    assert call("logs", run.id, "--attempt", "1") == 0
    assert capsys.readouterr().out == "hello\n"
    assert call("logs", run.id, "--rank", "1") == 0
    assert capsys.readouterr().out == "second, rank 1\n"
    assert call("logs", run.id) == 0
    assert capsys.readouterr().out == "mpiexec says\n", "before rank 0 has a log, the launcher's"
    assert call("logs", run.id, "--rank", "7") == 2
    assert "there are: launcher.log, rank-1.log" in capsys.readouterr().err
    assert call("logs", run.id, "--attempt", "3") == 2
    assert "has no attempt 3; there are 1, 2" in capsys.readouterr().err


def test_following_a_log_ends_with_the_run(supervisor: subprocess.Popen[str], runs_root: Path) -> None:
    run = make_run("r", pid=supervisor.pid)
    root = str(Path(process.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-m", "hpcrun", "logs", run.id, "-f"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "hello\n"
        assert follower.poll() is None
        with run.attempt(1).log(0).open("a") as file:
            file.write("last words\n")
        supervisor.kill()
        supervisor.wait()
        assert follower.stdout.read() == "last words\n"
    assert follower.returncode == 0


def test_cancel_asks_to_save_and_stop(supervisor: subprocess.Popen[str], capsys: Capture) -> None:
    run = make_run("r", pid=supervisor.pid)
    assert call("cancel", run.id) == 0
    assert capsys.readouterr().out == f"{run.id}: asked pid {supervisor.pid} to save and stop\n"
    assert supervisor.wait(20) == 75


def test_cancel_now_does_not_wait_for_a_save(supervisor: subprocess.Popen[str], capsys: Capture) -> None:
    run = make_run("r", pid=supervisor.pid)
    assert call("cancel", run.id, "--now") == 0
    assert capsys.readouterr().out == f"{run.id}: ended without a save\n"
    assert supervisor.wait(20) == 130


def test_what_does_not_run_here_cannot_be_cancelled(gone: int, capsys: Capture) -> None:
    done = make_run("done", pid=gone, ended={"status": "done"})
    assert call("cancel", done.id) == 2
    assert f"{done.id} is done; there is nothing to cancel" in capsys.readouterr().err
    away = make_run("away", pid=os.getpid(), host="n99")
    assert call("cancel", away.id) == 2
    assert "started on n99" in capsys.readouterr().err


def test_several_are_cancelled_even_if_one_is_over(
    supervisor: subprocess.Popen[str], gone: int, capsys: Capture
) -> None:
    done, run = make_run("done", pid=gone, ended={"status": "done"}), make_run("r", pid=supervisor.pid)
    assert call("cancel", done.id, run.id) == 2
    told = capsys.readouterr()
    assert f"{done.id} is done; there is nothing to cancel" in told.err
    assert told.out == f"{run.id}: asked pid {supervisor.pid} to save and stop\n"
    assert supervisor.wait(20) == 75


def test_what_was_cancelled_as_json(supervisor: subprocess.Popen[str], gone: int, capsys: Capture) -> None:
    done, run = make_run("done", pid=gone, ended={"status": "done"}), make_run("r", pid=supervisor.pid)
    assert call("cancel", done.id, run.id, "--json") == 2
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 2,
        "runs": [
            {"id": done.id, "done": [], "error": f"{done.id} is done; there is nothing to cancel"},
            {
                "id": run.id,
                "done": [f"{run.id}: asked pid {supervisor.pid} to save and stop"],
                "error": None,
            },
        ],
    }
    assert supervisor.wait(20) == 75


@pytest.mark.parametrize(
    "words", [["status", ""], ["describe", ""], ["logs", ""], ["wait", ""], ["cancel", ""], ["save", " "]]
)
def test_an_empty_word_does_not_mean_the_only_run(words: list[str], gone: int, capsys: Capture) -> None:
    make_run("r", pid=gone)
    assert call(*words) == 2
    assert capsys.readouterr().err.endswith("empty run name; see `hpcrun list`\n")


@pytest.mark.parametrize("verb", ["list", "logs", "describe"])
def test_output_that_cannot_be_written_is_one_line(verb: str, gone: int) -> None:
    run = make_run("r", pid=gone)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hpcrun", verb, *([] if verb == "list" else [run.id])],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
            | {"PYTHONPATH": str(Path(process.__file__).parents[1])},
            check=False,
        )
    assert (done.returncode, done.stderr) == (3, "hpcrun: standard output: No space left on device\n")


def test_a_file_that_the_system_refuses_is_one_line(capsys: Capture, runs_root: Path) -> None:
    run = make_run("r")
    run.job.unlink()
    run.job.mkdir()
    assert call("status", run.id) == 0
    assert f"state    unknown: {run.job}: is not a regular file; remove it\n" in capsys.readouterr().out


def test_several_are_one_table(gone: int, capsys: Capture) -> None:
    done = make_run("done", pid=gone, ended={"status": "done"})
    dead, running = make_run("dead", pid=gone), make_run("running", pid=os.getpid())
    assert call("status", done.id, dead.id) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["RUN", "STATE", "JOB", "STEP", "WHY"]
    assert lines[1].split() == [done.id, "done", "-", "4/10"]
    assert lines[2].split()[:6] == [dead.id, "dead", "-", "-", "its", "supervisor"]
    assert call("status", done.id, dead.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], [one["id"] for one in told["runs"]]) == (2, [done.id, dead.id])
    assert call("status", "--all", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["runs"]] == [running.id]
    for words in ((), (done.id, "--all")):
        assert call("status", *words) == 2
        assert "give --all" in capsys.readouterr().err


def test_the_list_of_one_state(gone: int, capsys: Capture) -> None:
    make_run("done", pid=gone, ended={"status": "done"})
    dead = make_run("dead", pid=gone)
    assert call("list", "--state", "dead", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["runs"]] == [dead.id]
    assert call("list", "--state", "failed") == 0
    assert "no runs in this state under" in capsys.readouterr().out
    assert call("list", "--state", "ded") == 2
    assert "'ded' is not a state; there are running, queued" in capsys.readouterr().err


def test_everything_about_a_run(gone: int, capsys: Capture) -> None:
    run = make_run("r", pid=gone, ended={"status": "failed", "exit_code": 5, "message": "rank 1 died"})
    write_provenance(run, origin("r", SubmissionRecord(1.0, job=7, cluster="north", array="0-3%2")))
    attempt = run.attempt(1)
    write_json(
        attempt.supervisor, json.loads(attempt.supervisor.read_text()) | {"slurm_job": 7, "restarts": 0}
    )
    ended = {"status": "failed", "message": "rank 1 died", "step": 4, "requeued": "crash"}
    write_json(attempt.outcome, ended)
    run.attempt(2).create()
    write_json(run.exit, json.loads(run.exit.read_text()) | {"attempt": 2})
    run.script.write_text("#!/bin/sh\n")
    assert call("describe", run.id) == 0
    out = capsys.readouterr().out
    for line in (
        f"run        {run.path}",
        "state      failed: rank 1 died",
        "code       commit abc123 with local changes, see code difference",
        "command    hpcrun submit job.yaml",
        f"script     {run.script}",
        f"spec       {run.spec}",
    ):
        assert f"{line}\n" in out
    assert "submitted  job 7 on north as array 0-3%2, " in out
    assert "attempt 1 on" in out
    assert "job 7 (restart 0): failed: rank 1 died, queued again (crash)" in out
    assert "attempt 2: failed: it left no word" in out
    assert call("describe", run.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["id"], told["origin"]["submissions"][0]["job"]) == (2, run.id, 7)
    assert [one["requeued"] for one in told["attempts"]] == ["crash", None]


def test_an_attempt_that_runs_has_left_no_word_yet(gone: int, capsys: Capture) -> None:
    run = make_run("r", pid=gone)
    attempt = run.attempt(2).create()
    me = {"pid": os.getpid(), "start_ticks": process.start_ticks(os.getpid()), "started": 1.0}
    write_json(attempt.supervisor, me | {"host": os.uname().nodename})
    write_provenance(run, replace(origin("r"), argv=["hpcrun", "submit", "my job.yaml"]))
    assert call("describe", run.id) == 0
    out = capsys.readouterr().out
    host = os.uname().nodename
    assert f"attempt 1 on {host}: unknown: it left no word; {run.attempt(1).log(0).parent}\n" in out
    assert f"attempt 2 on {host}: running; {attempt.log(0).parent}\n" in out
    assert any(
        line.split(maxsplit=1) == ["command", "hpcrun submit 'my job.yaml'"] for line in out.splitlines()
    )
    assert "train of 1 rank\n" in out


def test_logs_as_json(gone: int, capsys: Capture) -> None:
    run = make_run("r", pid=gone)
    assert call("logs", run.id, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["id"]) == (2, run.id)
    assert told["files"] == [{"path": str(run.attempt(1).log(0)), "text": "hello\n"}]
    assert call("logs", run.id, "--json", "-f") == 2
    assert "leave out --follow or --json" in capsys.readouterr().err


def test_waiting_ends_with_the_worst_exit_code(gone: int, capsys: Capture) -> None:
    done = make_run("done", pid=gone, ended={"status": "done"})
    saved = make_run("saved", pid=gone, ended={"status": "saved", "exit_code": 75})
    failed = make_run(
        "failed", pid=gone, ended={"status": "failed", "exit_code": 4, "message": "loss is NaN"}
    )
    assert call("wait", done.id) == 0
    assert call("wait", done.id, saved.id) == 75
    assert call("wait", failed.id, done.id, saved.id, "--json") == 4
    told = capsys.readouterr()
    assert f"hpcrun: {failed.id} is failed: loss is NaN\n" in told.err
    assert len(json.loads(told.out.splitlines()[-1])["runs"]) == 3


def test_waiting_ends_with_the_run_or_at_the_time_out(
    supervisor: subprocess.Popen[str], capsys: Capture
) -> None:
    run = make_run("r", pid=supervisor.pid)
    assert call("wait", run.id, "--timeout", "1s") == 1
    assert f"not over after 1s: {run.id}" in capsys.readouterr().err
    assert call("wait", run.id, "--timeout", "soon") == 2
    assert "--timeout: 'soon' is not a time" in capsys.readouterr().err
    supervisor.kill()
    supervisor.wait()
    assert call("wait", run.id) == 5
    assert "is dead" in capsys.readouterr().err
    assert call("wait", make_run("strange").id) == 2
    assert "there is nothing to wait for" in capsys.readouterr().err


def test_a_sweep_is_a_table_of_results(gone: int, capsys: Capture) -> None:
    run = make_run("s")
    write_json(run.sweep, [{"train.lr": 0.1, "train.seed": 1}, {"train.lr": 0.2, "train.seed": 2}])
    for number, status in enumerate(("done", "failed")):
        element = run.element(number)
        element.path.mkdir(parents=True)
        element.spec.write_text("name: s\n")
        element.attempt(1).create().log(0).write_text(f"element {number}\n")
        write_metrics(element, metric_line("step", 4, loss=1.25), metric_line("eval", 4, eval_loss=1.5))
        code = 0 if status == "done" else 5
        write_json(
            element.exit,
            {
                "status": status,
                "exit_code": code,
                "message": "rank 1 died\nof a cold" if code else "",
                "attempt": 1,
                "step": 4,
            },
        )
    assert call("status", run.id) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "state    1 done, 1 failed"
    assert lines[-3].split() == ["ELEMENT", "OVERRIDES", "STATE", "STEP", "LOSS", "EVAL", "LOSS", "WHY"]
    assert lines[-1].endswith("  rank 1 died")
    assert lines[-2].split() == ["0", "train.lr=0.1", "train.seed=1", "done", "4/10", "1.2500", "1.5000"]
    told = status_of(run, capsys)
    assert (told["state"], told["elements"], told["exit_code"]) == ("failed", {"done": 1, "failed": 1}, 5)
    assert told["results"][1]["overrides"] == {"train.lr": 0.2, "train.seed": 2}
    assert told["results"][1]["id"] == f"{run.id}/1"
    assert call("list") == 0
    assert "  1 done, 1 failed  " in capsys.readouterr().out
    assert call("wait", run.id) == 5
    assert call("logs", run.id, "--element", "1") == 0
    assert call("logs", f"{run.id}/0") == 0
    capsys.readouterr()
    assert call("logs", run.id) == 2
    assert "say which element" in capsys.readouterr().err
    assert call("describe", f"{run.id}/1") == 0
    assert "train.lr=0.2 train.seed=2\n" in capsys.readouterr().out
    assert call("cancel", run.id) == 2
    assert f"{run.id} is failed (1 done, 1 failed); there is nothing to cancel" in capsys.readouterr().err


def test_without_slurm_here_a_job_s_state_is_unknown(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = make_run("r")
    write_provenance(run, origin("r", SubmissionRecord(1.0, job=7)))
    told = status_of(run, capsys)
    assert (told["state"], told["job"]) == ("unknown", "7")
    assert "squeue: cannot be run" in told["message"]
    assert call("cancel", "7") == 3
    assert "nothing was cancelled: squeue: cannot be run" in capsys.readouterr().err
    run.submitit.mkdir()
    assert call("logs", "7", "--batch") == 2
    assert "no batch shell has printed anything yet" in capsys.readouterr().err
    (run.submitit / "7_0_log.out").write_text("from the batch shell\n")
    (run.submitit / "70_0_log.out").write_text("of another job\n")
    assert call("logs", "7", "--batch") == 0
    assert capsys.readouterr().out == "from the batch shell\n"
