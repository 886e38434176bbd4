"""`hpcrun.Checkpointer` in scripts of anybody's, with the worker that it starts for itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

import hpcrun  # noqa: E402
from hpcrun.checkpoint.generation import GenerationReader  # noqa: E402
from hpcrun.errors import UsageError  # noqa: E402
from hpcrun.specs.job import JobSpec  # noqa: E402
from hpcrun.specs.load import render_job  # noqa: E402
from hpcrun.specs.run_lookup import create_run  # noqa: E402
from hpcrun.specs.saves import resumable_checkpoints  # noqa: E402

ROOT = Path(__file__).parents[2]


def a_state(value: float = 1.0) -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4) * value
    return {
        "model": {"tied": base, "also": base, "view": base.t(), "empty": torch.empty(0, 3)},
        "list": [{"moment": torch.full((2,), value)}, torch.tensor(value)],
        "epoch": int(value),
        "betas": (value, 0.5),
        "names": ["a", "b"],
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saves through memory."""
    place = tmp_path_factory.mktemp("saves") / "mine"
    with hpcrun.Checkpointer(place, keep=5) as saves:
        for step in (1, 2):
            assert saves.save(step, a_state(float(step)), position=step * 10)
            saves.fence()
    return place


def test_a_state_of_any_shape_comes_back_in_place(directory: Path) -> None:
    state = a_state(9.0)
    moment, tied = state["list"][0]["moment"], state["model"]["tied"]
    with hpcrun.Checkpointer(directory, memory=0) as saves:
        assert saves.load(state) == 2
    assert moment.tolist() == [2.0, 2.0]
    assert torch.equal(tied, torch.arange(12.0).reshape(3, 4) * 2)
    assert state["model"]["also"] is tied
    assert (state["epoch"], state["betas"], state["names"]) == (2, (2.0, 0.5), ["a", "b"])


def test_tensors_that_are_one_are_stored_once_and_loaded_apart_as_well(directory: Path) -> None:
    (saved,) = [one for one in resumable_checkpoints(directory / "checkpoints") if one.step == 2]
    with GenerationReader(saved) as generation:
        names = sorted(generation.manifest.tensors)
    assert names == [
        *("hpcrun.0", "list.0.moment", "list.1"),
        *("model.empty", "model.tied", "model.view", "rng.0"),
    ]
    state = a_state(9.0)
    state["model"]["also"] = torch.zeros(3, 4)
    with hpcrun.Checkpointer(directory, memory=0) as saves:
        saves.load(state)
    assert torch.equal(state["model"]["also"], state["model"]["tied"])
    assert state["model"]["also"] is not state["model"]["tied"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["model"].pop("view"), "also holds model.view"),
        (lambda state: state["model"].update(new=torch.ones(2)), "lacks model.new"),
        (lambda state: state["model"].update(view=torch.ones(2)), "another shape or type of model.view"),
        (lambda state: state["list"][0].update(moment=torch.ones(2).int()), "type of list.0.moment"),
    ],
)
def test_another_state_is_refused_unless_told(directory: Path, change: Any, words: str) -> None:
    state = a_state(9.0)
    change(state)
    with hpcrun.Checkpointer(directory, memory=0) as saves:
        with pytest.raises(UsageError, match=words):
            saves.load(state)
        assert saves.load(state, strict=False) == 2
    assert state["model"]["tied"][0, 1] == 2.0


def test_only_part_of_a_save_may_be_wanted(directory: Path) -> None:
    state = a_state(9.0)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with hpcrun.Checkpointer(directory, memory=0) as saves:
        assert saves.load(state, only="model.") == 2
    assert state["model"]["tied"][0, 1] == 2.0
    assert (state["list"][1].item(), state["epoch"]) == (9.0, 9)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": object()}, "a is of type object"),
        ({"a": {(1, 2): [{"b": object()}]}}, r"a\.\(1, 2\)\.0\.b is of type object"),
        ({"a": torch.eye(2).to_sparse(), "b": torch.ones(1)}, "a: is a sparse_coo tensor"),
        ({"a": [torch.empty(2, device="meta")]}, r"a\.0: is on the meta device"),
    ],
)
def test_what_cannot_be_saved_is_said(tmp_path: Path, state: Any, words: str) -> None:
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves, pytest.raises(UsageError, match=words):
        saves.save(1, state)


def test_options_are_those_of_a_job(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"on_backlog: .*wait.*options: every, keep"):
        hpcrun.Checkpointer(tmp_path, on_backlog="later")
    with pytest.raises(UsageError, match="a directory is needed"):
        hpcrun.Checkpointer()


def test_inside_a_run_what_its_job_says_of_saves_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"memory": 2, "every": 2, "durable": {"every": 4}, "local": str(tmp_path / "disk"), "keep": 9}
    run = create_run("own")
    job = JobSpec.model_validate({"name": "own", "command": ["true"], "checkpoint": section})
    run.spec.write_text(render_job(job))
    monkeypatch.setenv("HPCRUN_RUN_DIR", str(run.path))
    with hpcrun.Checkpointer() as saves:
        for step in (1, 2, 3, 4):
            saves.save(step, {"weight": torch.full((8,), float(step))})
            saves.fence()
    assert [saved.step for saved in resumable_checkpoints(run.checkpoints)] == [4]
    assert list((tmp_path / "disk").rglob("step-*.bin"))
    with hpcrun.Checkpointer(start="resume", durable={"every": 1}, local=None) as saves:
        saves.save(5, {"weight": torch.zeros(8)})
    assert [saved.step for saved in resumable_checkpoints(run.checkpoints)] == [4, 5]


def test_an_optimizer_is_fenced_off_and_a_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    def train(steps: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.rand(2, 64)).sum().backward()  # makes the moments, which a load then fills
        optimizer.step()
        losses = []
        with hpcrun.Checkpointer(tmp_path, on_record=told.append) as saves:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
            begin = saves.load(state) or 0
            saves.fence_before(optimizer)
            for step in range(begin + 1, steps + 1):
                optimizer.zero_grad()
                loss = model(torch.rand(2, 64)).square().mean()
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                saves.save(step, state)
        return losses

    first = train(3)
    rest = train(6)
    again = tmp_path / "checkpoints"
    for saved in resumable_checkpoints(again):
        assert saved.step in (5, 6)
    assert len(first) == len(rest) == 3
    assert {one["kind"] for one in told} <= {"save", "stored"}


def objects(seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "rates": rates, "epoch": 0}, model, optimizer, rates


def steps_of(model: Any, optimizer: Any, rates: Any, *, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = model(torch.full((2, 8), float(number))).square().mean()
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


def test_models_and_optimizers_are_given_as_they_are(tmp_path: Path) -> None:
    _, *undisturbed = objects(1)
    whole = steps_of(*undisturbed, numbers=range(1, 9))
    state, *parts = objects(1)
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        assert saves.load(state) is None
        assert not parts[1].state  # nothing is left of looking
        assert steps_of(*parts, numbers=range(1, 5)) == whole[:4]
        state["epoch"] = 7
        saves.save(4, state)
    fresh, *others = objects(2)
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        assert saves.load(fresh) == 4
    assert fresh["epoch"] == 7
    assert steps_of(*others, numbers=range(5, 9)) == whole[4:]
    assert others[1].param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**4)


def test_of_a_part_of_a_save_the_rest_stays_as_new(tmp_path: Path) -> None:
    state, *parts = objects(1)
    steps_of(*parts, numbers=range(1, 3))
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        saves.save(2, {"model": state["model"]})
        fresh, _, optimizer, _ = objects(2)
        with pytest.raises(UsageError, match="lacks optimizer"):
            saves.load(fresh)
        assert not optimizer.state
        assert saves.load(fresh, strict=False) == 2
    assert not optimizer.state
    assert torch.equal(fresh["model"].weight, state["model"].weight)


SCRIPT = """\
import json, os, pathlib, signal, sys, torch, torch.distributed as dist, hpcrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
weights = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
state = {"weights": weights, "mine": {"rank": rank}}
with hpcrun.Checkpointer(sys.argv[1]) as saves:
    nothing = saves.load(state)
    for step in (1, 2):
        saves.save(step, state)
        saves.fence()
        weights.to_local().add_(1)
    asked = [saves.should_stop()]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    asked.append(saves.should_stop())
    saves.save(3, state, wait=True)
fresh = {"weights": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)]), "mine": {"rank": 9}}
with hpcrun.Checkpointer(sys.argv[1]) as saves:
    step = saves.load(fresh)
told = [asked, nothing, step, fresh["mine"]["rank"] == rank, fresh["weights"].full_tensor().sum().item()]
pathlib.Path(f"told-{rank}.json").write_text(json.dumps(told))
dist.barrier()  # a rank that leaves while the other still talks to it takes it down
dist.destroy_process_group()
"""


def test_signals_are_kept_from_the_first_question_on_and_given_back(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
            assert not saves.should_stop()
            signal.raise_signal(signal.SIGUSR2)
            assert saves.should_stop()
            # Whoever had it before hears it too.
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_under_torchrun_the_first_rank_of_a_node_runs_the_worker(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "script.py", str(tmp_path / "saves")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert told == [[[False, True], None, 3, True, 105.0 + 30.0]] * 2
    assert "no parity on other nodes" in done.stderr
    assert [saved.step for saved in resumable_checkpoints(tmp_path / "saves" / "checkpoints")] == [2, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 0, "local": "/scratch"}, "Checkpointer: local: needs saves in the memory of nodes"),
        (
            {"durable": {"every": 4}, "object": {"url": "file:///x", "every": 6}},
            r"Checkpointer: object.every: 6 does not fall .* use 4 or 8",
        ),
    ],
)
def test_levels_that_cannot_work_together_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        hpcrun.Checkpointer(tmp_path, **options)
