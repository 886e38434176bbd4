"""Faults of whole runs on this machine: what they go on from, and whether their losses stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.specs.metrics import newest_steps, read_metrics
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.rundir import Attempt, RunDir
from tests.checkpoint.faults import Case, Told

_JOB = """\
name: t
model: tiny
data: {text: corpus.txt, seq_len: 16, holdout: 0}
parallel: {dp_shard: 2}
train: {gbs: 2}
checkpoint: {every: 2, memory: 2, durable: {every: 8}}
retry: {crash: 99}
"""
_PACE_STEPS, _LIMIT_S = 20, 300.0
"""So many steps lie between two faults."""


def _losses(run: RunDir) -> list[Any]:
    return [(metric.step, metric.loss, metric.grad_norm) for metric in newest_steps(read_metrics(run))]


Strike = Callable[[RunDir, Attempt], None]


def _train(root: Path, name: str, steps: int, faults: int, strike: Strike) -> RunDir:
    """A run, with so many faults at even distances."""
    environ = {
        "HPCRUN_ROOT": str(root / name),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    words = [sys.executable, "-m", "hpcrun", "train", "job.yaml", f"train.steps={steps}"]
    with subprocess.Popen(
        words, cwd=root, env=os.environ | environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        deadline, done = time.monotonic() + _LIMIT_S, 0
        while child.poll() is None and done < faults:
            if time.monotonic() > deadline:
                child.kill()
            time.sleep(0.02)
            for path in (root / name).glob("t-*"):
                run = RunDir(path)
                newest = max(
                    (line["step"] for line in read_json_lines(run.metrics) if "step" in line), default=0
                )
                if newest >= (done + 1) * _PACE_STEPS:
                    done += 1
                    strike(run, run.attempts()[-1])
        told = child.communicate(timeout=_LIMIT_S)[1]
    if child.returncode:
        raise RuntimeError(told.decode())
    (path,) = (root / name).glob("t-*")
    return RunDir(path)


def _compared(root: Path, told: Told, strike: Strike) -> Told:
    (root / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (root / "job.yaml").write_text(_JOB)
    steps = (told.faults + 1) * _PACE_STEPS
    plain = _train(root, "plain", steps, 0, strike)
    run = _train(root, "struck", steps, told.faults, strike)
    pairs = zip(_losses(plain), _losses(run), strict=True)
    told.silent += sum(ours != theirs for ours, theirs in pairs)
    for event in read_json_lines(run.events):
        if event["event"] == "restore" and event["attempt"] > 1:
            told.loaded(f"{event['lost_steps']} steps lost, from {' and '.join(event['tiers'])}")
    return told


def killed_ranks(root: Path, quick: bool) -> Told:
    """Ranks of a run, one after the other."""

    def strike(_run: RunDir, attempt: Attempt) -> None:
        record = read_json(attempt.rank_record(attempt.number % 2))
        os.kill(record["pid"], signal.SIGKILL)

    return _compared(
        root, Told("a rank is killed while training, again and again", 1 if quick else 4), strike
    )


def killed_workers(root: Path, quick: bool) -> Told:
    """Kill the checkpoint worker of a run and a rank; the run continues from what the next worker finds."""

    def strike(run: RunDir, attempt: Attempt) -> None:
        supervisor = read_json(attempt.supervisor)["pid"]
        for one in process.descendants(supervisor):
            words = Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
            if b"_checkpoint_worker" in words:
                os.kill(one.pid, signal.SIGKILL)
        os.kill(read_json(attempt.rank_record(0))["pid"], signal.SIGKILL)

    return _compared(
        root, Told("the checkpoint worker and a rank are killed at once", 1 if quick else 3), strike
    )


RUN_CASES: dict[str, Case] = {
    "killed ranks of a run": killed_ranks,
    "killed workers and ranks of a run": killed_workers,
}
