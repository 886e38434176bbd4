"""Training that saves through memory: the same losses and saves, to the bit, and it goes on from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.compare import differences
from hpcrun.checkpoint.read import Generation
from hpcrun.specs.saves import saved_steps

JOB = """\
name: t
model: tiny
data: {text: corpus.txt, seq_len: 16, holdout: 0}
train: {steps: 8, gbs: 2}
checkpoint: {every: 2, keep: 9}
"""
ROOT = Path(__file__).parents[2]


def train(place: Path, root: str, *words: str) -> tuple[Path, list[dict[str, Any]], str]:
    environ = {"PYTHONPATH": str(ROOT), "HPCRUN_ROOT": str(place / root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", "train", *words],
        cwd=place,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (place / root).glob("t-*")
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], done.stderr


def steps_of(lines: list[dict[str, Any]]) -> list[Any]:
    return [(one["step"], one["loss"], one["grad_norm"]) for one in lines if one["kind"] == "step"]


def test_saves_behind_training_change_no_bit_and_are_gone_on_from(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "job.yaml").write_text(JOB)
    direct, waited, _ = train(tmp_path, "direct", "job.yaml")
    options = ("checkpoint.memory=2", "checkpoint.durable={every: 4}")
    behind, lines, told = train(tmp_path, "behind", "job.yaml", *options)
    assert steps_of(lines) == steps_of(waited)
    kinds = [(one["kind"], one["step"], one["level"]) for one in lines if one["kind"] in ("save", "stored")]
    saves = [("save", step, "memory") for step in (2, 4, 6, 8)]
    assert sorted(kinds) == [*saves, ("stored", 4, "durable"), ("stored", 8, "durable")]
    assert "step 8: saved after" in told
    last = [saved_steps(run / "checkpoints")[-1] for run in (direct, behind)]
    assert [saved.step for saved in saved_steps(behind / "checkpoints")] == [4, 8]
    with Generation(last[0]) as one, Generation(last[1]) as other:
        assert not [different.name for different in differences(one, other)]
        assert not list(other.damages())
    longer = ("--resume", str(behind), "train.steps=10")
    _, lines, _ = train(tmp_path, "behind", *longer)
    assert [one["step"] for one in lines if one["kind"] == "restore"] == [8]
    assert [step for step, *_ in steps_of(lines)][-2:] == [9, 10]
