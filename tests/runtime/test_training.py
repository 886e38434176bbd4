"""Whole runs through the command: resuming, changing the layout, bad numbers, foreign launchers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcrun.specs.metrics import newest_steps, read_metrics
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.leftovers import check_no_new_segments, shared_segments

BIN = Path(sys.executable).parent
JOB = """
name: test
model: {vocab: 256, hidden: 32, ffn: 64, layers: 2, heads: 4, kv_heads: 2}
data: {text: TEXT, seq_len: 32, holdout: 0.1}
parallel: {dp_shard: 2}
train: {steps: 20, mbs: 2, gbs: 8, lr: 3e-3, warmup: 2, eval: {sequences: 8}}
device: cpu
"""


@dataclass
class Ended:
    """What a run of the command left."""

    code: int
    stdout: str
    stderr: str
    root: Path

    @property
    def run(self) -> RunDir:
        return RunDir(max(self.root.iterdir(), key=lambda path: path.stat().st_mtime))

    def losses(self) -> dict[int, float]:
        return {metric.step: metric.loss for metric in newest_steps(read_metrics(self.run))}


class Laboratory:
    """A place with a job file and a root for its runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.root = path, path / "runs"
        self.root.mkdir()
        text = path / "text"
        text.mkdir()
        for name in ("argparse", "ast", "asyncio/tasks"):
            source = Path(os.__file__).parent / f"{name}.py"
            (text / source.name).write_bytes(source.read_bytes())
        self.job = path / "job.yaml"
        self.job.write_text(JOB.replace("TEXT", str(text)))

    def environ(self) -> dict[str, str]:
        return os.environ | {"HPCRUN_ROOT": str(self.root), "OMP_NUM_THREADS": "1"}

    def start(self, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [*launcher, sys.executable, "-m", "hpcrun", "train", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.environ(), cwd=self.path, **pipes)

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        stdout, stderr = process.communicate(timeout=200)
        return Ended(process.returncode, stdout, stderr, self.root)

    def train(self, *words: str, launcher: tuple[str, ...] = ()) -> Ended:
        return self.finish(self.start(*words, launcher=launcher))

    def stop_at(self, step: int, *words: str) -> Ended:
        """Train, and ask for a stop with SIGTERM as soon as a step is recorded."""
        process = self.start(*words)
        before = set(self.root.iterdir())
        while process.poll() is None:
            new = set(self.root.iterdir()) - before
            if new and any(
                record.get("step", 0) >= step for record in read_json_lines(RunDir(new.pop()).metrics)
            ):
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.02)
        return self.finish(process)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def undisturbed(laboratory: Laboratory) -> Ended:
    ended = laboratory.train(
        str(laboratory.job), "name=undisturbed", "checkpoint.every=8", "train.eval.every=10"
    )
    assert ended.code == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def undisturbed_losses(undisturbed: Ended) -> dict[int, float]:
    return undisturbed.losses()


@pytest.fixture(scope="module")
def finished_run(undisturbed: Ended) -> RunDir:
    return undisturbed.run


def test_a_run_leaves_metrics_saves_and_a_result(
    undisturbed: Ended, finished_run: RunDir, undisturbed_losses: dict[int, float]
) -> None:
    records = list(read_json_lines(finished_run.metrics))
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 21))
    expected = {
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "step_time_s",
        "time_s",
        "mfu",
        "peak_memory_bytes",
    }
    assert expected <= steps[0].keys()
    assert sum(steps[0]["time_s"].values()) <= steps[0]["step_time_s"]
    assert [record["step"] for record in records if record["kind"] == "eval"] == [0, 10, 20]
    assert sorted(path.name for path in finished_run.checkpoints.iterdir()) == [
        "step-00000016",
        "step-00000020",
    ]
    assert undisturbed_losses[20] < undisturbed_losses[1] - 1
    exit_record = finished_run.read_exit()
    assert exit_record is not None
    assert (exit_record["status"], exit_record["step"]) == ("done", 20)
    assert str(finished_run.path) in undisturbed.stdout


def test_resume_is_bitwise(laboratory: Laboratory, undisturbed_losses: dict[int, float]) -> None:
    stopped = laboratory.stop_at(8, str(laboratory.job), "name=stopped")
    assert stopped.code == 75, stopped.stderr
    run = stopped.run
    assert len(stopped.losses()) < 20
    resumed = laboratory.train("--resume", run.id)
    assert resumed.code == 0, resumed.stderr
    assert resumed.losses() == undisturbed_losses
    records = [record for record in read_json_lines(run.metrics) if record["kind"] == "step"]
    assert [record["step"] for record in records] == list(range(1, 21)), "a step was lost or done twice"
    assert {record["attempt"] for record in records} == {1, 2}


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.pp=2"])
def test_resume_with_another_layout_goes_on_the_same_way(
    laboratory: Laboratory, undisturbed_losses: dict[int, float], layout: str
) -> None:
    stopped = laboratory.stop_at(8, str(laboratory.job), "name=relaid")
    assert stopped.code == 75, stopped.stderr
    resumed = laboratory.train("--resume", stopped.run.id, "parallel.dp_shard=1", layout)
    assert resumed.code == 0, resumed.stderr
    losses = resumed.losses()
    assert losses.keys() == undisturbed_losses.keys()
    for step, loss in losses.items():
        assert loss == pytest.approx(undisturbed_losses[step], rel=1e-5)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_save(laboratory: Laboratory) -> None:
    ended = laboratory.train(
        str(laboratory.job), "name=diverges", "train.lr=1e30", "train.grad_clip=null", "checkpoint.every=1"
    )
    assert ended.code == 4
    (line,) = [
        line for line in ended.stderr.splitlines() if "nan" in line and "step " in line and "rank" in line
    ]
    assert "the save of step" in line
    saves = sorted(path.name for path in ended.run.checkpoints.iterdir())
    assert saves
    assert all(name.startswith("step-") for name in saves)
    assert "Traceback" not in ended.stderr


def test_ranks_with_different_jobs_are_told_apart(laboratory: Laboratory) -> None:
    mpiexec = (str(BIN / "mpiexec"), "-launcher", "fork", "-n", "1")
    other = [sys.executable, "-m", "hpcrun", "train", str(laboratory.job), "train.lr=0.5"]
    before = shared_segments()
    ended = laboratory.train(str(laboratory.job), ":", "-n", "1", *other, launcher=mpiexec)
    check_no_new_segments(before)
    assert ended.code == 2
    assert "rank 1 has train.lr = 0.5" in ended.stderr or "rank 0 has train.lr" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_world_of_the_wrong_size_is_refused(laboratory: Laboratory) -> None:
    mpiexec = (str(BIN / "mpiexec"), "-launcher", "fork", "-n", "2")
    ended = laboratory.train(str(laboratory.job), "parallel.dp_shard=4", launcher=mpiexec)
    assert ended.code == 2
    assert "4 ranks" in ended.stderr
    assert "has 2" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_lone_worlds_do_not_train_side_by_side(laboratory: Laboratory) -> None:
    environ = laboratory.environ() | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "hpcrun", "train", str(laboratory.job)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 3
    assert "2 ranks" in done.stderr
    assert "world of 1" in done.stderr


@pytest.mark.parametrize("kind", ["mpiexec", "torchrun"])
def test_a_foreign_launcher_gets_the_same_losses(
    laboratory: Laboratory, undisturbed_losses: dict[int, float], kind: str
) -> None:
    if kind == "mpiexec":
        ended = laboratory.train(
            str(laboratory.job),
            "name=foreign",
            launcher=(str(BIN / "mpiexec"), "-launcher", "fork", "-n", "2"),
        )
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        command = [*torchrun, "hpcrun", "train", str(laboratory.job), "name=foreign"]
        done = subprocess.run(
            command, env=laboratory.environ(), capture_output=True, text=True, timeout=200, check=False
        )
        ended = Ended(done.returncode, done.stdout, done.stderr, laboratory.root)
    assert ended.code == 0, ended.stderr
    assert ended.losses() == undisturbed_losses
    lines = ended.stderr.splitlines()
    assert len([line for line in lines if line.startswith("hpcrun: step 20/20")]) == 1, "rank 0 alone talks"
    assert str(ended.run.path) in ended.stderr


def test_a_profile_window_leaves_a_trace(laboratory: Laboratory) -> None:
    ended = laboratory.train(
        str(laboratory.job),
        "name=profile",
        "parallel.dp_shard=1",
        "train.steps=4",
        "train.profile={start: 2, steps: 2}",
    )
    assert ended.code == 0, ended.stderr
    trace = json.loads((ended.run.attempt(1).path / "profile" / "rank-0.json").read_text())
    assert len(trace["traceEvents"]) > 100


def test_bf16_learns_like_fp32(laboratory: Laboratory, undisturbed_losses: dict[int, float]) -> None:
    ended = laboratory.train(str(laboratory.job), "name=bf16", "train.precision=bf16")
    assert ended.code == 0, ended.stderr
    for step, loss in ended.losses().items():
        assert loss == pytest.approx(undisturbed_losses[step], rel=0.02)


def test_transformers_computes_the_same_from_an_export(laboratory: Laboratory, finished_run: RunDir) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed; pip install 'hpcrun-slurm[test]'"
    )
    out = laboratory.path / "exported"
    command = [sys.executable, "-m", "hpcrun", "ckpt", "export", finished_run.id, "--out", str(out)]
    done = subprocess.run(
        command, env=laboratory.environ(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    from hpcrun.checkpoint.generation import GenerationReader
    from hpcrun.runtime.model import Decoder
    from hpcrun.runtime.resharding import fill_from_chunks
    from hpcrun.specs.load import load_job
    from hpcrun.specs.saves import resumable_checkpoints

    spec = load_job(finished_run.spec).spec.model
    assert spec is not None
    ours = Decoder(spec)
    weights = {f"model.{name}": parameter.detach() for name, parameter in ours.named_parameters()}
    with GenerationReader(resumable_checkpoints(finished_run.checkpoints)[-1]) as generation:
        fill_from_chunks(generation, weights)
    theirs = transformers.LlamaForCausalLM.from_pretrained(out)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
    # And back: training that starts from the exported weights starts at their loss.
    again = laboratory.train(
        str(laboratory.job),
        "name=again",
        "model={hf: exported}",
        "parallel.dp_shard=1",
        "parallel.tp=2",
        "train.steps=1",
        "train.warmup=0",
    )
    assert again.code == 0, again.stderr
    evals = [
        record["eval_loss"] for record in read_json_lines(finished_run.metrics) if record["kind"] == "eval"
    ]
    first = next(r["eval_loss"] for r in read_json_lines(again.run.metrics) if r["kind"] == "eval")
    assert first == pytest.approx(evals[-1], rel=1e-5)


def test_a_tied_weight_that_a_rank_holds_twice_is_restored_twice(laboratory: Laboratory) -> None:
    words = ("model.tied=true", "model.layers=4", "parallel.dp_shard=1", "parallel.pp=2")
    layout = (*words, "parallel.schedule=zero_bubble", "train.steps=6", "checkpoint.every=3")
    whole = laboratory.train(str(laboratory.job), "name=vee", *layout)
    assert whole.code == 0, whole.stderr
    expected, run = whole.losses(), whole.run
    # As if it had been stopped at step 3.
    shutil.rmtree(run.checkpoints / "step-00000006")
    run.metrics.unlink()
    run.exit.unlink()
    resumed = laboratory.train("--resume", run.id)
    assert resumed.code == 0, resumed.stderr
    assert resumed.losses() == {step: loss for step, loss in expected.items() if step > 3}


def test_a_rank_whose_job_is_wrong_takes_the_others_with_it(laboratory: Laboratory) -> None:
    mpiexec = (str(BIN / "mpiexec"), "-launcher", "fork", "-n", "1")
    other = [sys.executable, "-m", "hpcrun", "train", "missing.yaml"]
    ended = laboratory.train(str(laboratory.job), "name=half", ":", "-n", "1", *other, launcher=mpiexec)
    assert ended.code == 2
    assert ended.stderr == "hpcrun: rank 1: missing.yaml: no such file\n"
    assert not [path for path in laboratory.root.iterdir() if path.name.startswith("half")]


def flip_a_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_save_is_passed_over_and_refused_when_it_is_the_last(laboratory: Laboratory) -> None:
    words = ("train.steps=4", "checkpoint.every=2")
    ended = laboratory.train(str(laboratory.job), "name=damaged", *words)
    assert ended.code == 0, ended.stderr
    save, losses = ended.run.checkpoints / "step-00000004", ended.losses()
    # In the second rank's part, so that the first must hear of it.
    flip_a_byte(save / "data-00000.bin", (save / "data-00000.bin").stat().st_size * 3 // 4)
    ended.run.exit.unlink()  # as if it had been stopped there
    again = laboratory.train("--resume", ended.run.id)
    assert again.code == 0, again.stderr
    (line,) = [line for line in again.stderr.splitlines() if "passed over" in line]
    assert f"{save}/data-00000.bin at" in line
    assert "do not match their hash" in line
    assert "resumes from step 2; 2 saved steps are lost" in again.stderr
    names = sorted(path.name.partition(".")[0] for path in ended.run.checkpoints.iterdir())
    assert names == ["damaged-step-00000004", "step-00000002", "step-00000004"]
    assert again.losses() == losses
    for path in ended.run.checkpoints.glob("step-*"):
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:100])
    none = laboratory.train("--resume", ended.run.id, "train.steps=8")
    assert none.code == 3
    (line,) = [line for line in none.stderr.splitlines() if "damaged" in line and "remove" in line]
    assert str(save) in line
    assert "Traceback" not in none.stderr


def test_leftovers_of_a_broken_save_go_with_the_next(laboratory: Laboratory) -> None:
    single = ("parallel.dp_shard=1", "train.steps=2")
    ended = laboratory.train(str(laboratory.job), "name=leftover", *single)
    (ended.run.checkpoints / ".step-00000001.1").mkdir()
    again = laboratory.train("--resume", ended.run.id, "train.steps=3", "checkpoint.keep=1")
    assert again.code == 0, again.stderr
    assert [path.name for path in again.run.checkpoints.iterdir()] == ["step-00000003"]


def test_a_rank_killed_in_a_step_takes_the_run_down_and_leaves_nothing(laboratory: Laboratory) -> None:
    before = shared_segments()
    process = laboratory.start(str(laboratory.job), "name=killed", "train.steps=100000", "retry.crash=0")
    record: dict[str, Any] = {}
    while process.poll() is None:
        found = [path for path in laboratory.root.iterdir() if path.name.startswith("killed")]
        if found and any(line["kind"] == "step" for line in read_json_lines(RunDir(found[0]).metrics)):
            record = json.loads(RunDir(found[0]).attempt(1).rank_record(1).read_text())
            os.kill(record["pid"], signal.SIGKILL)
            break
        time.sleep(0.02)
    # Every other rank is gone within ten seconds, or some more on a machine with much else to do.
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 5, stderr
    assert f"rank 1 on node {record['node']}" in stderr
    assert "SIGKILL" in stderr
    assert "Traceback" not in stdout + stderr
    ranks = RunDir(found[0]).attempt(1).path / "ranks"
    pids = [json.loads(path.read_text())["pid"] for path in ranks.glob("rank-?.json")]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    check_no_new_segments(before)


def test_a_stop_that_reaches_one_rank_alone_stops_all_at_the_same_step(laboratory: Laboratory) -> None:
    process = laboratory.start(str(laboratory.job), "name=alone", "train.steps=100000")
    while process.poll() is None:
        found = [path for path in laboratory.root.iterdir() if path.name.startswith("alone")]
        if found and any(line["kind"] == "step" for line in read_json_lines(RunDir(found[0]).metrics)):
            record = json.loads(RunDir(found[0]).attempt(1).rank_record(1).read_text())
            os.kill(record["pid"], signal.SIGUSR2)
            break
        time.sleep(0.02)
    ended = laboratory.finish(process)
    assert ended.code == 75, ended.stderr
    told = ended.run.read_exit()
    assert told is not None
    assert told["status"] == "saved"
    last = max(ended.losses())
    assert told["step"] == last
    saves = [line["step"] for line in read_json_lines(ended.run.metrics) if line["kind"] == "save"]
    assert saves[-1] == last
