"""Asking a run to save, or to save and stop; a process and a command stand in for supervisor and scancel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.errors import SiteError, UsageError
from hpcrun.runs.cancel import cancel_run
from hpcrun.runs.follow import PollIntervals
from hpcrun.runs.requests import SaveRequest, request_save, wait_for_saves
from hpcrun.specs.provenance import Provenance, SubmissionRecord, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.metric_lines import metric_line

AT_ONCE = PollIntervals(records=0.01, slurm=0.01, slurm_max=0.01, believe=0.0)


def make(*submissions: SubmissionRecord, steps: int | None = 10, kind: Any = "train") -> RunDir:
    run = create_run("r")
    run.spec.write_text("name: r\n")
    words: dict[str, Any] = dict.fromkeys(("name", "user", "host", "directory", "hpcrun", "python"), "x")
    origin = Provenance(
        kind=kind, ranks=1, steps=steps, created=1.0, argv=[], submissions=list(submissions), **words
    )
    write_provenance(run, origin)
    return run


def begin(run: RunDir, *, attempt: int = 1, job: int | None = None, **more: Any) -> RunDir:
    record = {"host": "n01", "pid": 4, "start_ticks": 5, "started": 10.0, "slurm_job": job, "restarts": 0}
    write_json(run.attempt(attempt).create().supervisor, record | more)
    return run


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Says which signals it gets."""
    code = (
        "import signal\n"
        "def say(number, _): print(signal.Signals(number).name, flush=True)\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, say)\n"
        "print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield child
        child.kill()


def here(child: subprocess.Popen[str]) -> dict[str, Any]:
    found = process.identify_process(child.pid)
    assert found
    return {"host": os.uname().nodename, "pid": found.pid, "start_ticks": found.start_ticks}


@dataclass
class Slurm:
    """Commands in Slurm's place."""

    path: Path

    def command(self, name: str, *rows: str, code: int = 0) -> None:
        body = "".join(f"echo '{row}'\n" for row in rows)
        (self.path / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >> {self.path}/calls\n{body}exit {code}\n'
        )
        (self.path / name).chmod(0o755)

    def queue(self, *jobs: tuple[str, str]) -> None:
        self.command("squeue", *(f"{job}|{state}|None|N/A|n01|main|0:00|5:00|r" for job, state in jobs))

    @property
    def cancelled(self) -> list[str]:
        calls = (self.path / "calls").read_text().splitlines()
        return [one for one in calls if one.startswith("scancel")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    made = Slurm(tmp_path / "bin")
    made.command("scancel")
    return made


def test_a_process_here_is_asked_by_a_signal(supervisor: subprocess.Popen[str]) -> None:
    run = begin(make(), **here(supervisor))
    assert request_save(run).lines == [f"{run.id}: asked pid {supervisor.pid} to save and continue"]
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "SIGUSR1\n"
    assert cancel_run(run) == [f"{run.id}: asked pid {supervisor.pid} to save and stop"]
    assert supervisor.stdout.readline() == "SIGTERM\n"


def test_a_job_is_asked_through_its_batch_shell(slurm: Slurm) -> None:
    run = begin(make(SubmissionRecord(1.0, job=7, cluster="north")), job=7)
    slurm.queue(("7", "RUNNING"))
    assert request_save(run).lines == [f"{run.id}: asked job 7 to save and continue"]
    assert slurm.cancelled == ["scancel --state=RUNNING --batch --signal=USR1 -M north 7"]
    assert cancel_run(run) == [f"{run.id}: job 7 was asked to save and stop"]
    assert slurm.cancelled[1:] == ["scancel --state=RUNNING --batch --signal=TERM -M north 7"]


def test_who_has_taken_over_is_asked_on_its_node(slurm: Slurm, supervisor: subprocess.Popen[str]) -> None:
    """The batch shell of the job is gone with its host."""
    who = here(supervisor) | {"host": "n02"}
    run = begin(make(SubmissionRecord(1.0, job=7)), job=7, taken_over=2, **who)
    slurm.queue(("7", "RUNNING"))
    slurm.path.joinpath("srun").write_text(
        f'#!/bin/sh\necho "srun $*" >> {slurm.path}/calls\nPATH=/usr/bin:/bin\n'
        'while [ "$1" != sh ]; do shift; done\nexec "$@"\n'
    )
    slurm.path.joinpath("srun").chmod(0o755)
    assert request_save(run).lines == [f"{run.id}: asked pid {supervisor.pid} on n02 to save and continue"]
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "SIGUSR1\n"
    assert cancel_run(run) == [f"{run.id}: asked pid {supervisor.pid} on n02 to save and stop"]
    assert supervisor.stdout.readline() == "SIGTERM\n"
    assert slurm.cancelled == []
    calls = (slurm.path / "calls").read_text()
    step = next(line for line in calls.splitlines() if line.startswith("srun")).split(" sh -c ")[0].split()
    assert {"--jobid=7", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n02"} <= set(step)
    # Another process may have its number by now.
    again = begin(make(SubmissionRecord(1.0, job=7)), job=7, taken_over=2, **{**who, "start_ticks": 1})
    with pytest.raises(SiteError, match="it has ended just now"):
        request_save(again)


def test_of_a_sweep_only_elements_that_have_begun_are_asked(slurm: Slurm) -> None:
    run = make(SubmissionRecord(1.0, job=9, array="0-4"))
    write_json(run.sweep, [{"train.lr": 0.1}] * 5)
    slurm.queue(*((f"9_{number}", "RUNNING") for number in range(4)), ("9_[4]", "PENDING"))
    for number in (0, 2, 3):
        begin(run.element(number), job=10 + number)
    write_json(run.element(3).attempt(1).outcome, {"status": "saved"})
    asked = request_save(run)
    assert asked.lines == [f"{run.id}: asked job 9_0, 9_2 to save and continue"]
    assert list(asked.answers) == [run.element(0), run.element(2)]
    assert slurm.cancelled == ["scancel --state=RUNNING --batch --signal=USR1 9_0 9_2"]


def test_who_is_not_up_yet_is_left_alone(slurm: Slurm) -> None:
    """A batch shell that has set no traps would die of the signal."""
    early = make(SubmissionRecord(100.0, job=7))
    slurm.queue(("7", "RUNNING"))
    with pytest.raises(UsageError, match=r"is about to start \(the job has started.*nothing to save yet"):
        request_save(early)
    again = begin(early, job=7, started=200.0)
    write_json(again.attempt(1).outcome, {"status": "saved", "requeued": "time_limit"})
    with pytest.raises(UsageError, match="is about to start; there is nothing to save yet"):
        request_save(again)
    slurm.queue(("7", "PENDING"))
    with pytest.raises(UsageError, match=r"is queued .*; there is nothing to save"):
        request_save(again)
    assert not slurm.cancelled


def test_what_is_over_or_unknown_cannot_be_asked(slurm: Slurm) -> None:
    run = begin(make(SubmissionRecord(1.0, job=7)), job=7)
    slurm.command("squeue", "slurm is not here", code=1)
    with pytest.raises(SiteError, match=r"nothing was asked: squeue .*slurm is not here"):
        request_save(run)
    write_json(run.exit, {"status": "done", "exit_code": 0, "message": "done at step 9", "attempt": 1})
    with pytest.raises(UsageError, match=r"is done \(done at step 9\); there is nothing to save"):
        request_save(run)


def test_a_refusal_of_slurm_is_told_in_its_words(slurm: Slurm) -> None:
    run = begin(make(SubmissionRecord(1.0, job=7)), job=7)
    slurm.queue(("7", "RUNNING"))
    slurm.command("scancel", "scancel: error: Access denied", code=1)
    with pytest.raises(SiteError, match="Access denied"):
        request_save(run)


def test_a_program_of_one_s_own_is_signalled_on_demand_only(supervisor: subprocess.Popen[str]) -> None:
    run = begin(make(steps=None, kind="command"), **here(supervisor))
    with pytest.raises(UsageError, match="SIGUSR1 ends it unless"):
        request_save(run)
    assert request_save(run, force=True).lines
    with pytest.raises(UsageError, match="is a function"):
        request_save(begin(make(steps=None, kind="function"), **here(supervisor)))


def metric(run: RunDir, kind: str, step: int, **values: Any) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps(metric_line(kind, step, **values)) + "\n")


def test_waiting_ends_with_a_save_after_the_request(supervisor: subprocess.Popen[str]) -> None:
    run = begin(make(), **here(supervisor))
    metric(run, "save", 5, seconds=1.0)
    asked, notes = request_save(run), list[str]()
    assert not wait_for_saves(asked, notes.append, timeout_s=0.05, pace=AT_ONCE)
    assert notes == [f"no save within 0.05 s: {run.id}"]
    metric(run, "step", 6)
    metric(run, "save", 6, seconds=0.5)
    assert wait_for_saves(asked, notes.append, pace=AT_ONCE)
    assert notes[1:] == [f"{run.id}: step 6 was saved in 0.5 s"]


def test_waiting_ends_with_the_run_where_that_saves_no_more(supervisor: subprocess.Popen[str]) -> None:
    first, second = (begin(make(), **here(supervisor)) for _ in range(2))
    both, notes = SaveRequest([], request_save(first).answers | request_save(second).answers), list[str]()
    metric(first, "save", 6, seconds=0.5)
    write_json(second.exit, {"status": "failed", "exit_code": 5, "message": "rank 1 died", "attempt": 1})
    assert not wait_for_saves(both, notes.append, pace=AT_ONCE)
    assert notes == [
        f"{first.id}: step 6 was saved in 0.5 s",
        f"{second.id} is failed: rank 1 died; it has written no further save",
    ]
