"""Training with a failing sink and a failing hook beside it: the losses are the same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = """\
name: t
model: tiny
data: {text: corpus.txt, seq_len: 16, holdout: 0}
train: {steps: 4}
checkpoint: {every: 2}
"""
ROOT = Path(__file__).parents[2]


def losses(place: Path, root: str, *words: str) -> tuple[list[Any], str]:
    environ = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{place / 'lib'}",
        "HPCRUN_ROOT": str(place / root),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", "train", "job.yaml", *words],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (place / root).glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (one["step"], one["loss"], one["grad_norm"]) for one in lines if one["kind"] == "step"
    ], done.stderr


def test_what_fails_beside_the_training_changes_no_bit_of_it(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text("raise RuntimeError('broken installation')\n")
    plain, _ = losses(tmp_path, "plain")
    words = ("telemetry={wandb: {}, port: 19870, textfile: /no/such/place}", "hooks=[{command: ['false']}]")
    beside, told = losses(tmp_path, "beside", *words)
    assert beside == plain
    assert len(plain) == 4
    for what in ("wandb has failed", "hook of the job failed at starting", "/no/such/place"):
        assert what in told
