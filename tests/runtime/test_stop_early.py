"""A stop is heard in every phase of a rank: where there is nothing to save it ends at once, else it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

ROOT = Path(__file__).parents[2]
JOB = """\
name: t
model: tiny
data: {text: corpus.txt, seq_len: 16, holdout: 0.3}
train: {steps: 100, mbs: 2, gbs: 2, eval: {sequences: 2}}
device: cpu
"""


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("phases")
    (place / "corpus.txt").write_text("to be or not to be, that is the question. " * 100)
    (place / "job.yaml").write_text(JOB)
    (place / "runs").mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/runtime/stop_phases.py"), str(place / "runs"), "job.yaml"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "phase",
    ["data", "rendezvous", "weights and model", "restore", "first evaluation", "compilation and first step"],
)
def test_before_the_first_step_it_ends_at_once(phases: dict[str, Any], phase: str) -> None:
    found = phases[phase]
    assert found["code"] == 75
    assert found["result"] == {"attempt": 1, "status": "saved", "step": 0, "steps_done": 0}
    assert found["saved"] == []


def test_within_a_step_it_is_heard_at_the_end_of_that_step(phases: dict[str, Any]) -> None:
    found = phases["a step"]
    assert (found["code"], found["result"]["status"], found["saved"]) == (75, "saved", [3])


def test_an_evaluation_is_broken_off(phases: dict[str, Any]) -> None:
    found = phases["an evaluation"]
    assert (found["code"], found["result"]["status"], found["saved"]) == (75, "saved", [1])
    assert ["eval", 0] in found["kinds"]
    assert ["eval", 1] not in found["kinds"]
    found = phases["the last evaluation"]
    assert (found["code"], found["result"]["status"], found["saved"]) == (75, "saved", [1])
    assert ["eval", 1] not in found["kinds"]


def test_a_job_that_says_nothing_of_saves_is_saved_by_the_clock(phases: dict[str, Any]) -> None:
    found = phases["by the clock"]
    assert (found["code"], found["result"]["status"]) == (0, "done")
    assert [one for one in found["kinds"] if one[0] == "save"] == [["save", 1], ["save", 2], ["save", 3]]
    assert ["save_interval", 1] in found["kinds"]
