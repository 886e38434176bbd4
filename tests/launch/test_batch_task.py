"""What a submitted job does at its start, here: its Python, its elements, and whose record it may write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.launch import batch_task
from hpcrun.launch.signal_queue import unblock_signals
from hpcrun.runs.run_lock import lock_run
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import render_job
from hpcrun.specs.origin import record_provenance
from hpcrun.specs.provenance import write_provenance
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import write_sweep

Capture = pytest.CaptureFixture[str]


def made(*command: str, python: str | None = None) -> RunDir:
    """A run of a command, as `submit` leaves it."""
    spec = JobSpec(name="t", command=list(command))
    run = create_run("t")
    run.spec.write_text(render_job(spec))
    record = record_provenance(run, spec)
    if python:
        write_provenance(run, replace(record, python=python))
    return run


def status(run: RunDir) -> str:
    ended = run.read_exit()
    assert ended is not None
    return str(ended["status"])


@pytest.fixture(autouse=True)
def no_slurm(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outside of any job; signals, which a task holds back at its end, are let through again."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "HPCRUN_ELEMENT"):
        monkeypatch.delenv(name, raising=False)
    yield
    unblock_signals()


def test_another_python_than_the_one_that_submitted_is_told(capfd: Capture) -> None:
    run = made("true", python="3.1.4")
    assert batch_task.run_task(str(run.path)) == 0
    assert "the job was submitted with 3.1.4 on " in capfd.readouterr().err
    assert status(run) == "done"
    assert batch_task.run_task(str(made("true").path)) == 0
    assert "was submitted with" not in capfd.readouterr().err


def test_a_python_that_lacks_what_the_profile_wants_is_refused() -> None:
    run = made("true")
    run.cluster.write_text("name: c\npython: {checks: [json, no_such_module]}\n")
    assert batch_task.run_task(str(run.path)) == 3
    ended = run.read_exit()
    assert ended is not None
    assert "lacks no_such_module; set python in the job or" in ended["message"]


def test_who_does_not_own_the_run_writes_no_end_of_it() -> None:
    run = made("true")
    with lock_run(run):
        assert batch_task.run_task(str(run.path)) == 2
        assert not run.exit.exists()


def test_without_slurm_the_elements_of_a_sweep_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("true")
    write_sweep(run, [{"command": ["true"]}, {"command": ["false"]}, {"command": ["true"]}])
    for number, word in enumerate(("true", "false", "true")):
        run.element(number).path.mkdir(parents=True)
        run.element(number).spec.write_text(render_job(JobSpec(name="t", command=[word])))
    assert batch_task.run_task(str(run.path)) == 5
    assert [status(run.element(number)) for number in range(3)] == ["done", "failed", "done"]
    monkeypatch.setenv("HPCRUN_ELEMENT", "1")
    assert batch_task.run_task(str(run.path)) == 5
    assert len(run.element(1).attempts()) == 2


def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the batch script of a run finds itself in Slurm's job 77."""
    told = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n1", "SUBMITIT_EXECUTOR": "slurm"}
    told |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in (told | {"SLURM_NODEID": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_FOLDER", "")


def test_a_script_that_was_submitted_by_hand_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    run = made("true")
    run.submitit.mkdir()
    # As a submission leaves it: the name that Slurm was given goes on leading to the script.
    (run.submitit / ".submission_file_0a.sh").symlink_to("12_submission.sh")
    assert batch_task.run_submitted(str(run.submitit)) == 2, "without Slurm"
    by_hand(monkeypatch)
    assert batch_task.run_submitted(str(run.submitit)) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert "this is not a job; submit the run with `hpcrun submit --resume" in first
    assert "job 77 was not submitted by hpcrun" in second
    assert run.read_exit() is None, "the run's own job may still wait"


def test_a_job_that_is_quicker_than_its_submission_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("true")
    run.submitit.mkdir()
    by_hand(monkeypatch)
    (run.submitit / ".submission_file_0a.sh").touch()
    pickle = run.submitit / "77_submitted.pkl"
    late = threading.Timer(0.5, pickle.touch)
    late.start()
    assert batch_task.why_foreign_job(run.submitit) is None
    late.join()
    pickle.unlink()
    monkeypatch.setattr(batch_task, "_PICKLE_TIMEOUT_S", 0.3)
    assert "job 77 was not submitted by hpcrun" in str(batch_task.why_foreign_job(run.submitit))
