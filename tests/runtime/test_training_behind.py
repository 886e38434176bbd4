"""Training that saves through memory: the same losses and saves, to the bit, and it goes on from them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.compare import compare_generations
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_record import parse_checksummed, render_checksummed
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.specs.metrics import Metric, StepMetric
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.saves import resumable_checkpoints
from hpcrun.submission.prepare import prepare_job
from tests.launch.supervised import Recorder, send

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
    kinds = [(one["kind"], one["step"], one["tier"]) for one in lines if one["kind"] in ("save", "stored")]
    saves = [("save", step, "memory") for step in (2, 4, 6, 8)]
    assert sorted(kinds) == [*saves, ("stored", 4, "durable"), ("stored", 8, "durable")]
    assert "step 8: saved in the background after" in told
    last = [resumable_checkpoints(run / "checkpoints")[-1] for run in (direct, behind)]
    assert [saved.step for saved in resumable_checkpoints(behind / "checkpoints")] == [4, 8]
    with GenerationReader(last[0]) as one, GenerationReader(last[1]) as other:
        assert not [different.name for different in compare_generations(one, other)]
        assert not list(other.damages())
    longer = ("--resume", str(behind), "train.steps=10")
    _, lines, _ = train(tmp_path, "behind", *longer)
    assert [one["step"] for one in lines if one["kind"] == "restore"] == [8]
    assert [step for step, *_ in steps_of(lines)][-2:] == [9, 10]


def test_a_damaged_save_is_made_whole_by_what_a_node_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parts one is damaged in the run directory, and the other one on no node any more."""
    pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    alike = ["parallel.dp_shard=2", "train.schedule=constant"]
    words = [
        *alike,
        "train.steps=100000",
        "retry={crash: 0}",
        "checkpoint.memory=2",
        f"checkpoint.local={tmp_path}/disk",
        "checkpoint.durable={every: 4}",
    ]
    observer = Recorder()

    def act(record: Metric) -> None:
        if isinstance(record, StepMetric) and record.step == 6:
            send(signal.SIGTERM)()

    monkeypatch.setattr(observer, "step", act)
    with SignalQueue() as inbox:
        first = Supervisor(prepare_job(tmp_path / "job.yaml", words), inbox, observer).run()
    assert first.status == "saved", first.message
    newest = resumable_checkpoints(first.run.checkpoints)[-1]
    assert newest.step == first.step
    _lose_on_disk(tmp_path / "disk", newest.generation, 1)
    with GenerationReader(newest) as generation:
        part = generation.manifest.parts[0]
    path = newest.path / f"data-{part.file:05d}.bin"
    data = bytearray(path.read_bytes())
    data[part.start + part.tail_at // 2] ^= 1
    path.write_bytes(data)

    end = f"train.steps={newest.step + 4}"
    with SignalQueue() as inbox:
        again = Supervisor(prepare_job(None, [end], resume=first.run), inbox, Recorder()).run()
    assert again.status == "done", again.message
    events = list(read_json_lines(first.run.events))
    restores = [
        (one["step"], one["tiers"]) for one in events if one["event"] == "restore" and one["attempt"] > 1
    ]
    assert restores == [(newest.step, ["durable"]), (newest.step, ["local", "durable"])]
    assert len(list(first.run.checkpoints.glob("damaged-*"))) == 1
    _, plain, _ = train(tmp_path, "plain", "job.yaml", *alike, end)
    assert steps_of(list(read_json_lines(first.run.metrics))) == steps_of(plain)


def _lose_on_disk(disk: Path, generation: str, number: int) -> None:
    """As if the part, the last one in its file, had been on a node that is gone."""
    (record,) = disk.rglob(f"*.{generation}.json")
    told = parse_checksummed(json.loads(record.read_text()))
    told["parts"] = [one for one in told["parts"] if one["number"] != number]
    os.truncate(
        record.with_suffix(".bin"), max(one["at"] + one["part"]["size_bytes"] for one in told["parts"])
    )
    record.write_text(render_checksummed(told))
