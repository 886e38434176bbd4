"""Runs followed through a real Slurm; a shell script stands in for the supervisor."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.runs.run_state import read_run_state
from hpcrun.specs.provenance import Provenance, SubmissionRecord, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.lab.cluster import Lab

Call = Callable[..., process.CompletedCommand]

SUPERVISOR = """#!/bin/sh
run=$1
[ -z "$SLURM_ARRAY_TASK_ID" ] || run=$run/elements/$SLURM_ARRAY_TASK_ID
number=$((${SLURM_RESTART_COUNT:-0} + 1))
attempt=$run/attempts/$number
ended() {
    printf '{"status": "%s", "exit_code": %s, "message": "", "attempt": %s, "step": 3, "ended": %s}' \\
        $1 $2 $number $(date +%s.%N) > $run/exit.new
    mv $run/exit.new $run/exit.json
    exit $2
}
trap 'ended saved 75' TERM
mkdir -p $attempt/logs
printf '{"host": "%s", "pid": %s, "start_ticks": 1, "started": %s, "slurm_job": %s, "restarts": %s}' \\
    $(hostname) $$ $(date +%s.%N) $SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} > $attempt/supervisor.new
mv $attempt/supervisor.new $attempt/supervisor.json
echo "attempt $number" > $attempt/logs/rank-0.log
"""
WAITS = "sleep 60 & wait $!\n"
REQUEUES_ONCE = """[ $number = 2 ] && ended done 0
trap 'exit 1' TERM
scontrol requeue $SLURM_JOB_ID
sleep 60 & wait $!
"""


@pytest.fixture
def hpcrun(lab: Lab, runs_root: Path) -> Call:
    """Runs our command on the login node; exit code 0 unless another is named."""

    def call(*words: str, code: int = 0, env: dict[str, str] | None = None) -> process.CompletedCommand:
        root = {"HPCRUN_ROOT": str(runs_root)}
        done = lab.run(["python", "-m", "hpcrun", *words], env=root | (env or {}))
        assert "Traceback" not in done.stderr
        assert done.exit_code == code, done.stderr + done.stdout
        return done

    return call


@pytest.fixture
def submit(lab: Lab) -> Callable[..., RunDir]:
    """Makes a run and hands it to sbatch; `body` is what its stand-in does after it has recorded itself."""

    def make(body: str, *options: str, elements: int = 0, script: str | None = None) -> RunDir:
        run = create_run("r")
        run.spec.write_text("name: r\n")
        run.submitit.mkdir()
        # Where our own scripts are: by its place a job is known to be this run's.
        path = run.submitit / "job.sh"
        path.write_text(SUPERVISOR + body if script is None else script)
        if elements:
            write_json(run.sweep, [{"train.lr": number / 10} for number in range(elements)])
            options = (*options, f"--array=0-{elements - 1}%2")
        pattern = "%A_%a_0" if elements else "%j_0"
        log = f"--output={run.submitit}/{pattern}_log.out"
        now = time.time()
        words = ["sbatch", "--parsable", "--requeue", "--open-mode=append", log, *options, str(path)]
        job = int(lab.run([*words, str(run.path)]).require_success().stdout)
        array = f"0-{elements - 1}%2" if elements else None
        record(run, SubmissionRecord(now, job=job, array=array))
        return run

    return make


def record(run: RunDir, *submissions: SubmissionRecord) -> None:
    words: dict[str, Any] = dict.fromkeys(("name", "user", "host", "directory", "hpcrun", "python"), "x")
    write_provenance(
        run,
        Provenance(
            kind="train", ranks=1, steps=4, created=1.0, argv=[], submissions=list(submissions), **words
        ),
    )


def state_of(hpcrun: Call, *words: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(hpcrun("status", "--json", *words).stdout)
    assert told["schema_version"] == 2
    return told


def wait_for(lab: Lab, hpcrun: Call, run: str, state: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def reached() -> bool:
        found.append(state_of(hpcrun, run))
        return bool(found[-1]["state"] == state)

    lab.wait_until(reached, 60, lambda: found[-1])
    return found[-1]


def test_a_held_job_says_why_it_waits_and_is_taken_out_of_the_queue(
    lab: Lab, hpcrun: Call, submit: Callable[..., RunDir]
) -> None:
    run = submit(WAITS, "--hold")
    told = state_of(hpcrun, run.id)
    assert (told["state"], told["attempt"]) == ("queued", None)
    assert told["message"].startswith("held by its owner; `scontrol release` frees it")
    assert state_of(hpcrun, told["job"])["id"] == run.id
    assert hpcrun("list", "--state", "queued").stdout.splitlines()[1].split()[:3] == [
        run.id,
        "queued",
        told["job"],
    ]
    assert "held by its owner" in hpcrun("describe", run.id).stdout
    assert "has no attempt yet" in hpcrun("logs", run.id, code=2).stderr
    assert "not over after 1s" in hpcrun("wait", run.id, "--timeout", "1s", code=1).stderr
    assert hpcrun("cancel", run.id).stdout == f"{run.id}: job {told['job']} was taken out of the queue\n"
    assert read_run_state(run).state == "cancelled", "also when Slurm has forgotten the job"
    assert hpcrun("wait", run.id, code=130).stdout == ""
    assert lab.run(["squeue", "-h"]).stdout == ""
    assert "is cancelled" in hpcrun("cancel", run.id, code=2).stderr


def test_a_job_that_can_never_start_says_so(hpcrun: Call, submit: Callable[..., RunDir]) -> None:
    first = submit(WAITS, "--hold")
    job = state_of(hpcrun, first.id)["job"]
    second = submit(WAITS, f"--dependency=afterok:{job}", "--kill-on-invalid-dep=no")
    assert "waits for another job" in state_of(hpcrun, second.id)["message"]
    hpcrun("cancel", first.id)
    told = state_of(hpcrun, second.id)
    assert told["message"].startswith(
        ("will never start: the job that it depends on", "waits for another job")
    )


def test_a_running_job_is_asked_to_save_and_stop(
    lab: Lab, hpcrun: Call, submit: Callable[..., RunDir]
) -> None:
    run = submit(WAITS, "--nodes=2", "--nodelist=n[02-03]")
    told = wait_for(lab, hpcrun, run.id, "running")
    assert told["nodes"] == "n[02-03]"
    lab.wait_until(lambda: run.attempt(1).log(0).exists(), 30)
    assert hpcrun("logs", run.id).stdout == "attempt 1\n"
    assert hpcrun("cancel", run.id).stdout == f"{run.id}: job {told['job']} was asked to save and stop\n"
    assert hpcrun("wait", run.id, code=75).stderr.endswith(f"{run.id} is saved\n")
    assert (state_of(hpcrun, run.id)["attempt"], state_of(hpcrun, run.id)["step"]) == (1, 3)


def test_cancel_now_ends_a_job_without_a_save(lab: Lab, hpcrun: Call, submit: Callable[..., RunDir]) -> None:
    run = submit("trap '' TERM\nsleep 60\n")
    job = wait_for(lab, hpcrun, run.id, "running")["job"]
    lab.wait_until(lambda: run.attempt(1).log(0).exists(), 30)
    assert hpcrun("cancel", "--now", run.id).stdout == f"{run.id}: job {job} was ended without a save\n"
    told = wait_for(lab, hpcrun, run.id, "cancelled")
    assert "Slurm says CANCELLED" in told["message"]


def test_following_goes_on_over_a_requeue(lab: Lab, hpcrun: Call, submit: Callable[..., RunDir]) -> None:
    run = submit(REQUEUES_ONCE)
    followed = hpcrun("logs", "-f", run.id)
    assert followed.stdout == "attempt 1\nattempt 2\n"
    assert f"attempt 2 of {run.id} begins\n" in followed.stderr
    assert f"{run.id} is queued: again, after attempt 1: " in followed.stderr
    assert (state_of(hpcrun, run.id)["state"], state_of(hpcrun, run.id)["attempt"]) == ("done", 2)
    assert "restart 1" in hpcrun("describe", run.id).stdout


def test_what_fails_before_our_supervisor_is_up_is_explained_by_the_batch_shell(
    lab: Lab, hpcrun: Call, submit: Callable[..., RunDir]
) -> None:
    run = submit("", script="#!/bin/sh\necho cuda/99: no such module >&2\nexit 3\n")
    told = wait_for(lab, hpcrun, run.id, "failed")
    assert told["message"].startswith("Slurm says FAILED")
    assert told["message"].endswith("the batch shell said last: cuda/99: no such module")
    assert hpcrun("logs", "--batch", run.id).stdout == "cuda/99: no such module\n"


def test_a_sweep_is_one_table_and_is_cancelled_by_element_and_as_a_whole(
    lab: Lab, hpcrun: Call, submit: Callable[..., RunDir]
) -> None:
    run = submit(WAITS, elements=6)

    def element(number: int) -> str:
        return f"{run.id}/{number}"

    for number in (0, 1):
        lab.wait_until(lambda number=number: run.element(number).attempt(1).log(0).exists(), 60)  # type: ignore[misc]
    for number in range(6):
        run.element(number).path.mkdir(parents=True, exist_ok=True)
    told = state_of(hpcrun, run.id)
    job = told["job"]
    assert (told["state"], told["elements"]) == ("running", {"queued": 4, "running": 2})
    assert [one["job"] for one in told["results"]] == [f"{job}_{index}" for index in range(6)]
    assert told["results"][3]["overrides"] == {"train.lr": 0.3}
    lines = hpcrun("status", run.id).stdout.splitlines()
    assert lines[-3].split()[:6] == ["3", "train.lr=0.3", "queued", "-", "-", "-"]
    assert hpcrun("cancel", element(5)).stdout == f"{element(5)}: job {job}_5 was taken out of the queue\n"
    assert hpcrun("logs", f"{job}_1").stdout == "attempt 1\n"
    assert hpcrun("logs", run.id, "--element", "0").stdout == "attempt 1\n"
    said = hpcrun("cancel", run.id).stdout
    assert said == f"{run.id}: of job {job}, 3 taken out of the queue and 2 asked to save and stop\n"
    assert hpcrun("wait", run.id, code=130).stderr.endswith("is cancelled: 2 saved, 4 cancelled\n")


def test_a_job_that_nobody_knows_is_lost_and_is_not_waited_for(
    hpcrun: Call, submit: Callable[..., RunDir]
) -> None:
    run = submit(WAITS, "--hold")
    hpcrun("cancel", run.id)
    run.exit.unlink()
    record(run, SubmissionRecord(time.time(), job=987654))
    told = state_of(hpcrun, run.id)
    assert (told["state"], told["job"]) == ("lost", "987654")
    assert f"hpcrun submit --resume {run.id}" in told["message"]
    assert hpcrun("wait", run.id, code=5).stdout == ""
    assert "is lost" in hpcrun("cancel", run.id, code=2).stderr


def test_many_runs_at_once(hpcrun: Call, submit: Callable[..., RunDir]) -> None:
    names: Sequence[str] = [submit(WAITS, "--hold").id for _ in range(3)]
    lines = hpcrun("status", *names).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[name, "queued"] for name in names]
    assert [one["id"] for one in json.loads(hpcrun("status", "--all", "--json").stdout)["runs"]] == names
