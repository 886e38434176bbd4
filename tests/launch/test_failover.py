"""What a supervisor finds out of a run whose supervisor it comes after."""

from __future__ import annotations

import json
import os
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.failover import state
from hpcrun.launch.failover.failover_main import run_failover
from hpcrun.launch.failover.guardian import SupervisorCrash
from hpcrun.launch.failover.heartbeat import Heartbeat
from hpcrun.launch.failover.local_recovery import LocalRecovery
from hpcrun.launch.failover.state import FailoverState, own_run, read_left_out_nodes
from hpcrun.launch.recovery import restart_cause
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.runs import lease
from hpcrun.runs.lease import FencedError, Leadership
from hpcrun.runs.run_lock import RunOwnedError, lock_run
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.job import JobSpec
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.slurm.fakes import calls, stand_ins

LOST = (1, "node_lost", {"node": "n3"})
WITHOUT = (1, "relaunch", {"excluded": ["n2", "n3"]})


@pytest.mark.parametrize(
    ("events", "lost", "suspect"),
    [
        ([(1, "launch", {}), LOST], set(), set()),
        ([(1, "launch", {}), LOST, WITHOUT, (2, "preflight", {})], {"n3"}, {"n2"}),
        ([(1, "launch", {}), LOST, WITHOUT, (2, "relaunch", {"excluded": ["n3"]})], {"n3"}, set()),
        # Another allocation has nodes of its own.
        ([LOST, WITHOUT, (2, "launch", {}), (2, "requeue", {}), (3, "launch", {})], set(), set()),
        ([LOST, WITHOUT, (2, "launch", {}), (3, "launch", {}), (3, "relaunch", {})], set(), set()),
    ],
    ids=["nothing yet", "both", "back", "queued again", "resumed"],
)
def test_who_is_left_out(
    tmp_path: Path, events: list[tuple[int, str, dict[str, Any]]], lost: set[str], suspect: set[str]
) -> None:
    run = RunDir(tmp_path)
    lines = [event_line(event, 1.0, attempt, **values) for attempt, event, values in events]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [*map(set, read_left_out_nodes(run))] == [lost, suspect]


def job(number: int, restarts: int) -> Allocation:
    return Allocation(number, ("n1", "n2"), str(number), is_batch=True, restarts=restarts)


def test_a_job_that_slurm_queued_again_takes_its_run_from_a_node_that_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_FENCED_RANKS_S", 0.1)
    said: list[str] = []
    run = RunDir(tmp_path)
    write_json(run.attempt(1).create().supervisor, {"host": "n1", "pid": 1, "slurm_job": 7, "restarts": 0})
    with lock_run(run):
        old = Leadership(run)
        pulse = Heartbeat(0.1, old.renew)
        for other in (job(7, 0), job(8, 1), None):  # itself, somebody's resume, and a laptop
            with pytest.raises(RunOwnedError), own_run(run, other, said.append):
                pass
        old.verify()
        with own_run(run, job(7, 1), said.append):
            with pytest.raises(FencedError):
                old.verify()
            with pytest.raises(RunOwnedError), lock_run(run):
                pass
        pulse.stop()
    assert said == ["the supervisor on n1, from before the job was queued again, lives; it is fenced"]
    # One that is gone is waited for in vain.
    with own_run(run, job(7, 2), said.append):
        assert len(said) == 1


def test_a_lease_that_is_read_while_it_is_written_is_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_FENCED_RANKS_S", 0.1)
    run = RunDir(tmp_path)
    write_json(run.attempt(1).create().supervisor, {"host": "n1", "pid": 1, "slurm_job": 7, "restarts": 0})
    found = chain([{}, {"count": 1}, {}, {"count": 2}], repeat({}))
    with lock_run(run):
        Leadership(run)
        monkeypatch.setattr(lease, "read_lease", lambda _run: next(found))
        with own_run(run, job(7, 1), lambda _text: None):
            pass


@pytest.mark.parametrize("way", ["heard", "not heard", "before", "not at all"])
def test_a_wish_to_stop_outlives_the_supervisor_that_it_was_told(tmp_path: Path, way: str) -> None:
    run = RunDir(tmp_path)
    write_json(run.attempt(1).create().supervisor, {"started": 100.0})
    told = event_line("signal", 1.0, signal="SIGTERM" if way == "heard" else "SIGUSR1")
    run.events.write_text(json.dumps(told) + "\n")
    if way in ("not heard", "before"):
        # By the clock of a login node, hours from ours.
        wish = {"time": 7e3, "attempt": None} if way == "before" else {"time": 1.0, "attempt": 1}
        write_json(run.wish, wish)
    outcome = FailoverState(2, "n1").last_attempt(run, ())
    assert outcome is not None
    wanted = way in ("heard", "not heard")
    assert (outcome.stop is not None, "asked to save and stop" in outcome.message) == (wanted, wanted)
    assert (restart_cause(outcome) is None) == wanted


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_an_end_that_another_node_has_written_counts_whatever_its_clock_says(
    tmp_path: Path, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = RunDir(tmp_path), time.time()
    run.attempt(1).create()
    for name, value in (("JOB_ID", "9"), ("ARRAY_JOB_ID", "7"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    fall = SupervisorCrash(os.getpid(), (1,), "SIGKILL", 1, now)
    spec = JobSpec(name="t", command=["true"])

    def found(**more: int) -> bool:
        told = {"status": "done", "exit_code": 0, "message": "done", "attempt": 1, "step": None}
        write_json(run.exit, told | more | {"ended": now + ahead_s})
        with SignalQueue() as inbox:
            after = LocalRecovery(run, spec, RunContext(), fall, inbox, lambda _: None).decide()
        return isinstance(after, AttemptOutcome) and after.status == "done"

    assert found(slurm_job=7, restarts=1)
    assert run.exit.exists()
    for other in ({"slurm_job": 6, "restarts": 1}, {"slurm_job": 7, "restarts": 0}, {}):
        assert not found(**other), "of another job, or of this one before it was queued again"
        assert not run.exit.exists()


@pytest.mark.process
def test_a_run_that_had_ended_when_its_supervisor_was_lost_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = stand_ins(tmp_path, monkeypatch)("scancel", "")
    run = RunDir(tmp_path / "run")
    run.attempt(1).create()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[01-02]")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    told = {"status": "done", "exit_code": 0, "message": "done", "attempt": 1, "step": 5, "ended": 1.0}
    write_json(run.exit, told | {"slurm_job": 7, "restarts": 0})
    assert run_failover(str(run.path), "3") == 0
    assert [one.number for one in run.attempts()] == [1]
    assert calls(cancelled) == ["7"]
    assert run.read_exit() == told | {"slurm_job": 7, "restarts": 0, "slurm_state": "CANCELLED"}
