"""What the batch script of a job starts, without a Slurm: on this host, and on nodes that are this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, JobPaths

from hpcrun import process
from hpcrun.launch import batch_task
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import render_job
from hpcrun.specs.origin import record_provenance
from hpcrun.specs.records import read_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir

ROOT = Path(__file__).parents[2]
SRUN = """\
#!/bin/bash
for word in "$@"; do case $word in --nodelist=*) export SLURMD_NODENAME=${word#*=} ;; esac; done
while [[ $1 != *python* ]]; do shift; done
exec unshare --user --map-root-user --uts sh -c 'hostname $SLURMD_NODENAME; exec "$@"' sh "$@"
"""
"""A step, on a node that is this host by another name."""
HOST = os.uname().nodename
LOOP = "until [ -e {0}/mark ]; do sleep 0.05; done"


@dataclass
class Job:
    """A batch job's command, and the run that it is for."""

    run: RunDir
    place: Path
    command: subprocess.Popen[bytes]

    @property
    def supervisor(self) -> int:
        return int(read_supervisor_record(self.run)["pid"])

    def is_up(self, attempt: int) -> bool:
        return self.run.attempt(attempt).rank_record(0).exists()

    def kill(self) -> None:
        os.kill(self.supervisor, signal.SIGKILL)

    def until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            is_in_time = time.monotonic() < end and self.command.poll() is None
            assert is_in_time, (self.place / "said").read_text()
            time.sleep(0.02)

    def end(self) -> int:
        """Let the program end; the exit code of the batch command."""
        (self.place / "mark").touch()
        return self.command.wait(60)

    def relaunches(self) -> list[str | None]:
        attempts = self.run.attempts()
        return [(read_json(one.outcome) or {}).get("relaunched") for one in attempts]


def submitted(place: Path, spec: JobSpec, env: dict[str, str] | None = None) -> Job:
    """What the batch script of a job on this one node has just started."""
    run = create_run("t")
    run.spec.write_text(render_job(spec))
    record_provenance(run, spec)
    run.cluster.write_text("name: c\nnetwork: {interface: lo}\n")
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    pickle = JobPaths(run.submitit, "7", 0).submitted_pickle
    pickle.touch(mode=0o600)
    DelayedSubmission(batch_task.run_task, str(run.path)).dump(pickle)
    slurm = {
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": HOST,
        "SLURM_PROCID": "0",
    }
    with (place / "said").open("wb") as said:
        words = [sys.executable, "-m", "hpcrun", "_task", str(run.submitit)]
        environ = os.environ | {"PYTHONPATH": str(ROOT)} | slurm | (env or {})
        child = subprocess.Popen(words, cwd=place, env=environ, stdout=said, stderr=said)
    return Job(run, place, child)


def spec_of(words: Sequence[str], **more: object) -> JobSpec:
    return JobSpec.model_validate({"name": "t", "command": list(words), "retry": {}, **more})


@contextmanager
def over(job: Job) -> Iterator[Job]:
    """The job, once it is up; nothing of it is left after the block."""
    try:
        job.until(lambda: job.is_up(1))
        yield job
    finally:
        (job.place / "mark").touch()
        job.command.terminate()
        job.command.wait(60)
        assert process.processes_with_env("HPCRUN_RUN_ID", job.run.run_id) == []


def pretended_nodes(place: Path, names: str) -> dict[str, str]:
    """The environment of a job on nodes of these names, whose steps run here; skips where that cannot be."""
    words = ["unshare", "--user", "--map-root-user", "--uts", "hostname", "n1"]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("this kernel lets nobody name a host of his own (unshare --user --uts)")
    (place / "bin").mkdir()
    (place / "bin" / "srun").write_text(SRUN)
    (place / "bin" / "srun").chmod(0o755)
    return {"SLURM_JOB_NODELIST": names, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
