"""A running job of a real Slurm is asked to save, then to save and stop, and tells its story."""

from __future__ import annotations

import json
import tarfile

import pytest

from tests.lab.desk import Desk
from tests.lab.test_lab_requeue import JOB, steps

LONG = JOB.replace("steps: 80", "steps: 5000")


def test_a_running_job_saves_when_asked_goes_on_and_saves_and_stops(desk: Desk) -> None:
    (desk.path / "job.yaml").write_text(LONG)
    run = desk.submit("job.yaml")
    desk.until(lambda: len(steps(run)) > 3, run)
    asked = desk.hpcrun("save", run.id, "--wait", "--timeout", "5m")
    assert f"{run.id}: asked job " in asked.stdout
    assert " was saved in " in asked.stderr
    seen = len(steps(run))
    desk.until(lambda: len(steps(run)) > seen + 3, run)
    stopped = desk.hpcrun("stop", run.id, "--wait", "--timeout", "5m")
    assert f"{run.id} is saved: saved at step " in stopped.stderr
    told = [line.split("  ", 2)[2] for line in desk.hpcrun("events", run.id).stdout.splitlines()]
    assert told[0] == "preflight of 2 nodes: passed"
    assert told[1].startswith("launch of 4 ranks on n[0")
    assert [line for line in told if line.startswith("SIG")] == ["SIGUSR1: save", "SIGTERM: save and stop"]
    assert len([line for line in told if " saved in " in line]) == 2
    ledger = json.loads(desk.hpcrun("status", run.id, "--json").stdout)["ledger"]
    assert sum(ledger["buckets_s"].values()) == pytest.approx(ledger["wall_s"])
    assert (ledger["steps"], ledger["steps_lost"], ledger["faults"]) == (len(steps(run)), 0, [])
    desk.hpcrun("postmortem", run.id, "--out", str(desk.path / "all.tar.gz"))
    with tarfile.open(desk.path / "all.tar.gz") as tar:
        slurm = tar.extractfile(f"{run.id}/slurm.txt")
        assert slurm is not None
        assert "JobState=FAILED" in slurm.read().decode()
