"""The start of a run that was submitted behind others: what their records say decides, and not Slurm."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.launch import batch_task, predecessors
from hpcrun.launch.predecessors import check_predecessors
from hpcrun.launch.signal_queue import unblock_signals
from hpcrun.runs.run_state import read_run_state
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import render_job
from hpcrun.specs.origin import record_provenance
from hpcrun.specs.predecessors import write_predecessors
from hpcrun.specs.provenance import SubmissionRecord, count_attempts, read_provenance, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import write_sweep
from tests.slurm.fakes import Fake, calls, stand_ins

JOB = Allocation(20, ("n01",), "20", is_batch=True)
NO_JOB = "!slurm_load_jobs error: Invalid job id specified"
NO_ACCOUNTS = "!Slurm accounting storage is disabled"
NO_DATABASE = "!sacct: error: Unable to contact slurmdbd: Connection refused"


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A Slurm that knows no job any more and keeps no accounts; late records are not waited for."""
    put = stand_ins(tmp_path, monkeypatch)
    put("squeue", NO_JOB)
    put("sacct", NO_ACCOUNTS)
    put("scontrol", "")
    monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setattr(predecessors, "RECORD_DELAY_S", 0.0)
    monkeypatch.setattr(predecessors, "_POLL_S", 0.01)
    return put


def made(name: str, job: int, **more: Any) -> RunDir:
    """A run of a command as this job."""
    spec = JobSpec(name=name, command=["true"])
    run = create_run(name)
    run.spec.write_text(render_job(spec))
    write_provenance(run, record_provenance(run, spec).submitted(SubmissionRecord(1.0, job=job, **more)))
    return run


def ended(run: RunDir, status: str = "done", **more: Any) -> RunDir:
    run.attempt(1).create()
    told = {"status": status, "exit_code": 0 if status == "done" else 5, "message": "as it said"}
    write_json(run.exit, told | {"attempt": 1, "step": 4, "ended": 2.0} | more)
    return run


def behind(*runs: RunDir, job: int = 20) -> RunDir:
    """A run that was submitted behind others."""
    run = made("next", job)
    write_predecessors(run, runs, count_attempts(run))
    return run


def test_a_run_that_ended_well_lets_the_next_one_start_whatever_slurm_says_of_its_job(slurm: Fake) -> None:
    asked = slurm("squeue", "10|CANCELLED|None|N/A|n01|main|0:00|5:00|first")
    notes: list[str] = []
    assert check_predecessors(behind(ended(made("first", 10))), JOB, notes.append) is None
    assert check_predecessors(made("alone", 20), JOB, notes.append) is None
    assert (notes, calls(asked)) == ([], []), "its own record is enough"


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("failed", "COMPLETED"),
        ("cancelled", "CANCELLED"),
        ("saved", "COMPLETED"),
        ("interrupted", "COMPLETED"),
    ],
)
def test_a_run_that_did_not_end_well_starts_nothing_whatever_slurm_says(
    slurm: Fake, status: str, says: str
) -> None:
    slurm("squeue", f"10|{says}|None|N/A|n01|main|0:00|5:00|first")
    first = ended(made("first", 10), status)
    run, notes = behind(ended(made("well", 9)), first), list[str]()
    outcome = check_predecessors(run, JOB, notes.append)
    assert outcome is not None
    assert outcome.exit_code == 130
    state = read_run_state(run)
    assert (state.state, state.is_over, state.code) == ("cancelled", True, 130)
    assert state.message == (
        f"not started: {first.id} is {status}: as it said; to start it anyway: hpcrun submit --resume"
        f" {run.id}"
    )
    assert notes == [state.message]
    third = behind(run, job=30)
    assert check_predecessors(third, JOB, notes.append) is not None
    assert f"not started: {run.id} is cancelled: not started: {first.id}" in str(third.read_exit())


@pytest.mark.parametrize(
    ("queue", "accounts", "says"),
    [
        ("10|FAILED|None|N/A|n01|main|0:00|5:00|first", NO_ACCOUNTS, "is failed: Slurm says FAILED"),
        # A job that ended well for Slurm, but whose run never said so, proves nothing.
        ("10|COMPLETED|None|N/A|n01|main|0:00|5:00|first", NO_ACCOUNTS, "is failed: Slurm says COMPLETED"),
        (NO_JOB, NO_ACCOUNTS, "is lost: Slurm does not know job 10 any more"),
        (NO_JOB, NO_DATABASE, "ended well is not known: sacct said: "),
        ("!squeue: error: Unable to contact slurm controller", "", "ended well is not known: squeue said: "),
    ],
)
def test_without_a_record_nothing_starts_and_the_reason_is_told(
    slurm: Fake, queue: str, accounts: str, says: str
) -> None:
    slurm("squeue", queue)
    slurm("sacct", accounts)
    run = behind(made("first", 10))
    assert check_predecessors(run, JOB, lambda _: None) is not None
    record = run.read_exit()
    assert record
    assert says in record["message"]
    assert record["status"] == "cancelled"


def test_a_record_that_comes_late_is_waited_for(slurm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predecessors, "RECORD_DELAY_S", 60.0)
    first = made("first", 10)
    run, looks = behind(first), list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            ended(first)

    # Its own sleep alone: the wait for a command that has not ended yet sleeps too.
    monkeypatch.setattr(predecessors, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert check_predecessors(run, JOB, lambda _: None) is None
    assert len(looks) == 3


def test_a_run_that_is_gone_starts_nothing(slurm: Fake) -> None:
    first = made("first", 10)
    run = behind(first)
    shutil.rmtree(first.path)
    assert check_predecessors(run, JOB, lambda _: None) is not None
    assert f"not started: {first.path} is gone, so it is unknown" in str(run.read_exit())


def test_a_run_that_was_resumed_meanwhile_is_waited_for_again(slurm: Fake) -> None:
    first = ended(made("first", 10), "failed")
    origin = read_provenance(first)
    assert origin
    first.exit.unlink()
    write_provenance(first, origin.submitted(SubmissionRecord(5.0, job=11, attempts={"": 1})))
    slurm("squeue", "11|PENDING|Priority|N/A||main|0:00|5:00|first")
    said = slurm("scontrol", "")
    run = behind(first)
    outcome = check_predecessors(run, JOB, lambda _: None)
    assert outcome is not None
    assert (outcome.exit_code, run.exit.exists()) == (75, False)
    assert calls(said) == [
        "update JobId=20 Requeue=1",
        "requeue 20",
        "update JobId=20 Dependency=afterany:11",
    ]
    slurm("scontrol", "!Requested operation is presently disabled")
    assert check_predecessors(run, JOB, lambda _: None) is not None
    assert "the job cannot wait again: Requested operation is presently disabled" in str(run.read_exit())


def test_of_a_sweep_every_element_has_to_end_well_and_each_is_told_of_by_itself(slurm: Fake) -> None:
    sweep = made("sweep", 10, array="0-1")
    write_sweep(sweep, [{"train.seed": 0}, {"train.seed": 1}])
    for number, status in enumerate(("done", "failed")):
        sweep.element(number).path.mkdir(parents=True)
        ended(sweep.element(number), status)
    assert check_predecessors(behind(sweep), JOB, lambda _: None) is not None
    assert check_predecessors(behind(sweep.element(0)), JOB, lambda _: None) is None
    assert check_predecessors(behind(sweep.element(1)), JOB, lambda _: None) is not None
    later = behind(sweep, job=20)
    write_sweep(later, [{"train.seed": 0}, {"train.seed": 1}])
    later.element(0).path.mkdir(parents=True)
    assert check_predecessors(later.element(0), JOB, lambda _: None) is not None
    assert (later.element(0).exit.exists(), later.exit.exists()) == (True, False)
    ended(sweep.element(1))
    assert check_predecessors(later.element(0), JOB, lambda _: None) is None


def test_a_run_that_has_begun_goes_on_whatever_became_of_those_before_it(slurm: Fake) -> None:
    run = made("next", 20)
    run.attempt(1).create()
    first = ended(made("first", 10), "failed")
    write_predecessors(run, [first], count_attempts(run))
    assert check_predecessors(run, JOB, lambda _: None) is not None, "that attempt was before"
    run.attempt(2).create()
    assert check_predecessors(run, JOB, lambda _: None) is None


@pytest.mark.parametrize("text", ["[]", '{"runs": 4, "attempts": {}}', '{"runs": [3], "attempts": {}}', "{"])
def test_a_damaged_record_of_what_comes_before_is_told(text: str) -> None:
    run = made("next", 20)
    run.after.write_text(text)
    with pytest.raises(UsageError, match=r"after\.json: is damaged"):
        check_predecessors(run, JOB, lambda _: None)


def test_the_batch_job_runs_nothing_when_it_may_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    run = behind(ended(made("first", 10), "failed"))
    assert batch_task.run_task(str(run.path)) == 130
    unblock_signals()
    assert run.attempts() == []
    assert json.loads(run.exit.read_text())["status"] == "cancelled"
