"""A login node is no place to load torch: every verb that runs there, and what its process has loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.shipped import shipped_file
from tests.checkpoint.generations import save

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "mpi4py", "numpy", "transformers", "tokenizers", "safetensors"}
SLOW = HEAVY | {"jinja2", "rich", "submitit", "pydantic", "hpcrun.specs.job"}
"""What the verbs that people run over and over must not wait for."""

DUMP_MODULES = """
import atexit, json, pathlib, sys
atexit.register(lambda: pathlib.Path(sys.argv[1]).write_text(json.dumps(sorted(sys.modules))))
from hpcrun.cli.main import main
main(sys.argv[2:])
"""


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    run = create_run("done")
    job = load_job(shipped_file("jobs/demo.yaml"))
    run.spec.write_text(render_job(job.spec), encoding="utf-8")
    attempt = run.attempt(1).create()
    attempt.log(0).write_text("step 1\n", encoding="utf-8")
    record = {"step": 1, "attempt": 1, "loss": 2.5, "time": 0.0}
    run.metrics.write_text(json.dumps(record) + "\n", encoding="utf-8")
    save(run.checkpoints, 2)
    return run


def call(arguments: list[str], cwd: Path) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    dump = cwd / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", DUMP_MODULES, str(dump), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return set(json.loads(dump.read_text())), done


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--help",
        "--version",
        "list",
        "list --json",
        "status RUN",
        "status RUN --json",
        "status --all",
        "describe RUN",
        "wait RUN",
        "logs RUN",
        "cancel RUN",
        "events RUN",
        "events RUN --json",
        "events RUN -f",
        "metrics RUN",
        "metrics RUN --json",
        "metrics --dashboard",
        "save RUN",
        "stop RUN",
        "tune lint",
        "tune explain NCCL_IB_TC NCCL_WIBBLE",
    ],
)
def test_quick_verbs_load_nothing_slow(words: str, run: RunDir, tmp_path: Path) -> None:
    loaded, done = call(words.replace("RUN", run.id).split(), tmp_path)
    assert done.stdout + done.stderr
    assert sorted(loaded & SLOW) == []


@pytest.mark.parametrize(
    "words",
    [
        "train --help",
        "train JOB --print-spec train.steps=30",
        "train JOB train.stepz=3",
        "data --help",
        "data inspect TEXT --show 1",
        "data prepare TEXT --out tokens.bin",
        "ckpt --help",
        "ckpt ls RUN",
        "ckpt inspect RUN",
        "ckpt verify RUN",
        "ckpt diff RUN 2 2",
        "ckpt gc RUN",
        "ckpt plan JOB",
        "ckpt repair RUN --is-over",
        "ckpt export RUN --format hpcrun --out copy",
        "postmortem RUN",
        "chaos --help",
        "cluster --help",
        "tune lint JOB",
        "template list",
        "doctor --root . --json",
        "doctor --counters FILE",
        "doctor --help",
        "doctor pairs n[1-8]",
        "tune --help",
        "tune advise JOB",
        "tune policy --help",
        "tune checklist roce-spectrum",
        "tune predict --nodes 4 --platform h100-ib400 --plot out.svg",
        "nonsense",
    ],
)
def test_verbs_of_a_login_node_load_no_torch(words: str, run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("in the beginning " * 200, encoding="utf-8")
    values = {"RUN": run.id, "JOB": str(shipped_file("jobs/demo.yaml")), "TEXT": str(tmp_path / "text")}
    loaded, done = call([values.get(word, word) for word in words.split()], tmp_path)
    wrong = words.endswith("stepz=3") or words == "nonsense"
    assert done.returncode == (2 if wrong else 0), done.stderr
    assert sorted(loaded & HEAVY) == []
