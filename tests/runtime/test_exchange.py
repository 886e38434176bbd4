"""Export and import: out of a run and back, what others read of it, and everything that is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typer.testing import CliRunner, Result

from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.verify import find_generation_damages
from hpcrun.cli.ckpt import app
from hpcrun.errors import HpcrunError
from hpcrun.runtime.control import LoneControl
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.runtime.export import export_hf
from hpcrun.runtime.hf_weights import HFWeights
from hpcrun.runtime.resharding import fill_from_chunks
from hpcrun.runtime.sharded_model import state_shapes
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.records import read_json_lines
from hpcrun.specs.run_lookup import create_run, find_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import SavedCheckpoint, resumable_checkpoints
from tests.checkpoint.injuries import flip
from tests.checkpoint.test_repair import chunk_at

JOB = """
name: small
device: cpu
model: {vocab: 256, hidden: 16, ffn: 24, layers: 2, heads: 4, kv_heads: 2, head_dim: 4, context: 32}
data: {text: TEXT, seq_len: 16}
train: {steps: 8, mbs: 2, gbs: 4}
"""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("so it goes " * 100)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("TEXT", str(text)))
    return path


def state_of(job: Path, seed: int = 0) -> dict[str, Tensor]:
    model = load_job(job).spec.model
    assert model is not None
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in state_shapes(model).items()}


@pytest.fixture
def saved_run(job: Path, runs_root: Path) -> RunDir:
    """A run with a save of step 4, of a state that is known."""
    made = create_run("small")
    made.spec.write_text(render_job(load_job(job).spec), encoding="utf-8")
    DirectCheckpointer(made.checkpoints, LoneControl(), attempt=1, keep=2).save(4, 16, state_of(job))
    return made


def run(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(*arguments: str | Path | int) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema_version"] == 2
    return found


def refused(*arguments: str | Path | int) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, HpcrunError), result.exception
    text = str(result.exception)
    assert "\n" not in text
    return text


def read_all(saved: SavedCheckpoint) -> dict[str, Tensor]:
    with GenerationReader(saved) as generation:
        assert find_generation_damages(generation, 1) == []
        state = {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for name, tensor in generation.manifest.tensors.items()
        }
        fill_from_chunks(generation, state)
    return state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def restored(checkpoints: Path, job: Path) -> tuple[int, int, dict[str, Tensor]]:
    """What training would go on from."""
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(job).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = DirectCheckpointer(checkpoints, LoneControl(), attempt=2, keep=2).restore(state, shapes)
    assert found is not None
    assert found.saved is not None
    return found.saved.step, found.saved.position, state


def test_torch_loads_what_is_exported_for_it(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    found = told("export", saved_run.id, "--format", "dcp", "--out", tmp_path / "dcp")
    assert (found["step"], found["format"]) == (4, "dcp")
    assert ".metadata" in found["files"]
    expected = state_of(job)
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp_load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state, expected)


@pytest.mark.parametrize("form", ["dcp", "hpcrun"])
def test_what_is_exported_comes_back_as_it_was(
    saved_run: RunDir, job: Path, tmp_path: Path, form: str
) -> None:
    (original,) = resumable_checkpoints(saved_run.checkpoints)
    assert run("export", saved_run.id, "--format", form, "--out", tmp_path / "out").exit_code == 0
    found = told("import", tmp_path / "out", "--name", "again")
    assert found["format"] == form
    (again,) = resumable_checkpoints(find_run("again").checkpoints)
    assert (again.step, again.position, again.world_size) == (4, 16, 1)
    assert again.structure == original.structure
    assert (again.generation == original.generation) is (form == "hpcrun")
    assert same(read_all(again), read_all(original)), "random state too"
    assert restored(find_run("again").checkpoints, job)[:2] == (4, 16)
    assert load_job(find_run("again").spec).spec.name == "again"


def test_a_state_that_torch_saved_elsewhere_is_imported(job: Path, tmp_path: Path) -> None:
    state = state_of(job, seed=5)
    dcp_save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "give the job of the new run with --job" in refused("import", tmp_path / "dcp", "--name", "new")
    words = ("import", tmp_path / "dcp", "--name", "new", "--job", job)
    assert "does not say of which step it is; give --step N" in refused(*words)
    assert not list(tmp_path.glob("runs/*")), "no half-made run is left"
    assert told(*words, "--step", 6)["samples"] == 24
    step, position, loaded = restored(find_run("new").checkpoints, job)
    assert (step, position) == (6, 24)
    assert same(loaded, state)


def test_weights_of_hugging_face_become_the_state_before_the_first_step(
    saved_run: RunDir, job: Path, tmp_path: Path
) -> None:
    run("export", saved_run.id, "--out", tmp_path / "hf")
    assert "holds weights alone" in refused(
        "import", tmp_path / "hf", "--name", "tuned", "--job", job, "--step", 3
    )
    told("import", tmp_path / "hf", "--name", "tuned", "--job", job)
    step, position, loaded = restored(find_run("tuned").checkpoints, job)
    assert (step, position) == (0, 0)
    for name, tensor in state_of(job).items():
        expected = tensor if name.startswith("model.") else torch.zeros_like(tensor)
        assert torch.equal(loaded[name], expected), name


def test_an_import_into_a_run_is_what_it_goes_on_from(saved_run: RunDir, job: Path, tmp_path: Path) -> None:
    state = state_of(job, seed=7)
    dcp_save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "has a save of step 4, from which the run would resume" in refused(
        "import", tmp_path / "dcp", "--run", saved_run.id, "--step", 4
    )
    told("import", tmp_path / "dcp", "--run", saved_run.id, "--step", 5)
    assert restored(saved_run.checkpoints, job)[0] == 5
    assert "give either --run RUN, or --name NAME" in refused("import", tmp_path / "dcp")


Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("model.norm.weight"), "lacks model.norm.weight;"),
        (lambda state: state.update(extra=torch.zeros(2)), "also holds extra;"),
        (lambda state: state.update({"lr": 0.1}), "also holds lr, which is not a tensor"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(17)}),
            "has another shape of model.norm.weight: [17] instead of [16];",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(16, dtype=torch.bfloat16)}),
            "has another type of model.norm.weight: bfloat16 instead of float32;",
        ),
    ],
    ids=["missing", "unknown", "no tensor", "shape", "type"],
)
def test_a_state_of_another_model_is_refused(job: Path, tmp_path: Path, change: Change, said: str) -> None:
    state: dict[str, Any] = dict(state_of(job))
    change(state)
    dcp_save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert said in refused("import", tmp_path / "dcp", "--name", "new", "--job", job, "--step", 1)


def dcp_of(job: Path, path: Path) -> Path:
    dcp_save(dict(state_of(job)), checkpoint_id=path, no_dist=True)
    return path


class Evil:
    """What a crafted list of tensors would hold."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class Sly:
    """One that hides behind a name that is allowed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (torch.Size, "__class__")


def test_a_list_of_tensors_that_is_code_is_refused_and_not_run(job: Path, tmp_path: Path) -> None:
    source, mark = dcp_of(job, tmp_path / "dcp"), tmp_path / "mark"
    words = ("import", source, "--name", "new", "--job", job, "--step", 1)
    for crafted, said in ((Evil(mark), "it names posix.mkdir"), (Sly(), "it looks into an object")):
        (source / ".metadata").write_bytes(pickle.dumps(crafted))
        assert said in refused(*words)
        assert not mark.exists()
    (source / ".metadata").write_bytes(b"\x80")
    assert "is damaged" in refused(*words)


def test_a_directory_that_others_may_write_is_refused(job: Path, tmp_path: Path) -> None:
    source = dcp_of(job, tmp_path / "dcp")
    (source / ".metadata").chmod(0o666)
    said = refused("import", source, "--name", "new", "--job", job, "--step", 1)
    assert "belongs to another user or is writable by all" in said


def test_a_flipped_byte_in_files_of_torch_is_found(job: Path, tmp_path: Path) -> None:
    """Torch itself loads it without a word."""
    source = dcp_of(job, tmp_path / "dcp")
    path = max(source.glob("*.distcp"), key=lambda one: one.stat().st_size)
    data = path.read_bytes()
    number = state_of(job)["model.embed_tokens.weight"].numpy().tobytes()
    at = data.index(number[:64]) + 40
    flip(path, at)
    said = refused("import", source, "--name", "new", "--job", job, "--step", 1)
    assert "Bad CRC-32" in said
    assert not list(tmp_path.glob("runs/*"))
    path.write_bytes(data[: len(data) // 2])
    assert "is damaged" in refused("import", source, "--name", "new", "--job", job, "--step", 1)


def test_a_damaged_save_is_neither_exported_nor_imported(
    saved_run: RunDir, tmp_path: Path, job: Path
) -> None:
    run("export", saved_run.id, "--format", "hpcrun", "--out", tmp_path / "copy")
    file, at = chunk_at(resumable_checkpoints(saved_run.checkpoints)[0], "model.norm.weight")
    for path in (file, tmp_path / "copy" / file.name):
        flip(path, at)
    for form in ("hf", "dcp", "hpcrun"):
        assert "do not match their hash" in refused(
            "export", saved_run.id, "--format", form, "--out", tmp_path / form
        )
        assert not (tmp_path / form).exists()
    assert "do not match their hash" in refused("import", tmp_path / "copy", "--name", "new")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"copy", "runs", "job.yaml", "text.txt"}


def test_targets_and_options_that_make_no_sense_are_refused(saved_run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for form in ("hf", "dcp", "hpcrun"):
        words = ("export", saved_run.id, "--format", form, "--out")
        assert "is not empty; give a new directory" in refused(*words, tmp_path / "full")
    out = ("--out", tmp_path / "out")
    assert "--format zip: is not known; use hf, dcp, hpcrun" in refused(
        "export", saved_run.id, "--format", "zip", *out
    )
    assert "--dtype: is of --format hf" in refused(
        "export", saved_run.id, "--format", "dcp", "--dtype", "float16", *out
    )
    assert "--shard-size big: is not a size; write 5GB" in refused(
        "export", saved_run.id, "--shard-size", "big", *out
    )
    assert "--dtype int8: not known" in refused("export", saved_run.id, "--dtype", "int8", *out)
    assert "cannot be imported: it has none of" in refused("import", tmp_path / "full", "--name", "x")
    assert "is not a directory" in refused("import", tmp_path / "job.yaml", "--name", "x")
    assert not (tmp_path / "out").exists()


def test_shards_are_as_large_as_asked_and_transformers_reads_them(
    saved_run: RunDir, job: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers"
    )
    out = tmp_path / "hf"
    found = told("export", saved_run.id, "--out", out, "--dtype", "bfloat16", "--shard-size", "4KB")
    assert "model.safetensors.index.json" in found["files"]
    assert len([name for name in found["files"] if name.endswith(".safetensors")]) > 2
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    stored = dict(theirs.state_dict())
    for name, tensor in state_of(job).items():
        if name.startswith("model."):
            short = name.removeprefix("model.")
            full = short if short == "lm_head.weight" else f"model.{short}"
            assert torch.equal(stored[full], tensor.to(torch.bfloat16)), name


def test_a_number_that_does_not_fit_the_type_is_not_lost(
    saved_run: RunDir, job: Path, tmp_path: Path
) -> None:
    state = state_of(job)
    state["model.norm.weight"][3] = 1e6
    DirectCheckpointer(saved_run.checkpoints, LoneControl(), attempt=1, keep=2).save(6, 24, state)
    words = ("export", saved_run.id, "--out", tmp_path / "hf", "--dtype")
    said = refused(*words, "float16")
    assert said == "--dtype float16: model.norm.weight holds 1e+06, too large for it; use bfloat16"
    assert run(*words, "bfloat16").exit_code == 0


def test_a_job_that_was_changed_after_the_save_is_named(saved_run: RunDir, tmp_path: Path) -> None:
    saved_run.spec.write_text(saved_run.spec.read_text().replace("ffn: 24", "ffn: 32"))
    said = refused("export", saved_run.id, "--out", tmp_path / "hf")
    assert "has [24, 16] of model.layers.0.mlp.gate_proj.weight" in said
    assert "spec.yaml says [32, 16]; was it changed after the save?" in said


def test_no_more_than_a_tensor_is_in_memory(saved_run: RunDir, tmp_path: Path) -> None:
    """Seen from the reading: a tensor is asked for when the one before is in its file."""
    sizes = list[int]()
    (saved,) = resumable_checkpoints(saved_run.checkpoints)

    def look(_size: int) -> None:
        aside = next(tmp_path.glob(".hf.*.partial"))
        sizes.append(sum(path.stat().st_size for path in aside.glob("*.shard")))

    export_hf(saved_run, saved, tmp_path / "hf", shard_bytes=1000, progress=look)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 5
    HFWeights(tmp_path / "hf").check(load_job(saved_run.spec).spec.model)  # type: ignore[arg-type]


def test_a_full_disk_leaves_nothing(
    saved_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    for form in ("hf", "dcp", "hpcrun"):
        said = refused("export", saved_run.id, "--format", form, "--out", tmp_path / form)
        assert "cannot be written: [Errno 28] No space left on device" in said
    assert not [path for path in tmp_path.iterdir() if "hf" in path.name or "dcp" in path.name]


def test_a_save_of_format_1_is_imported_without_its_record(
    saved_run: RunDir, job: Path, tmp_path: Path
) -> None:
    old = dcp_of(job, tmp_path / "old")
    record = {"format_version": 1, "step": 5, "position": 20, "world_size": 1, "attempt": 1}
    (old / "complete.json").write_text(json.dumps(record))
    assert "save format 1 is no longer read" in refused("import", old, "--run", saved_run.id)
    (old / "complete.json").unlink()
    told("import", old, "--run", saved_run.id, "--step", 5)
    assert restored(saved_run.checkpoints, job)[0] == 5
    shutil.rmtree(old)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def losses(run: RunDir) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in read_json_lines(run.metrics) if one["kind"] == "step"}


def test_training_goes_on_from_an_import_as_if_nothing_had_been(job: Path, tmp_path: Path) -> None:
    command("train", str(job), "train.steps=6", "checkpoint.every=3")
    expected = losses(find_run("small"))
    told("export", "small", "--format", "dcp", "--step", "3", "--out", tmp_path / "dcp")
    told("import", tmp_path / "dcp", "--name", "onward")
    command("train", "--resume", "onward")
    assert losses(find_run("onward")) == {step: loss for step, loss in expected.items() if step > 3}
