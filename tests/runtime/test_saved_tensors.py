"""What of a tensor is saved: its logical elements, once, whatever memory lies below it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.runtime.control import LoneControl
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.runtime.export import export_hf
from hpcrun.runtime.hf_weights import HFWeights
from hpcrun.runtime.importing import import_hf
from hpcrun.runtime.optimizer import ShardedAdamW
from hpcrun.runtime.parallel import LocalParameter
from hpcrun.runtime.sharded_model import state_shapes
from hpcrun.specs.job import TrainSpec
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.saves import resumable_checkpoints

JOB = """
name: tied
model: {vocab: 256, hidden: 16, ffn: 24, layers: 1, heads: 4, kv_heads: 2, context: 32, tied: true}
data: {text: TEXT, seq_len: 16}
train: {steps: 8, mbs: 2, gbs: 4}
device: cpu
"""

BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "strided": BASE[:, ::2],
    "sliced": BASE[1:3, 2:5],
    "expanded": BASE[0].expand(3, 6),
    "transposed": BASE.t(),
    "reversed order": BASE.permute(1, 0)[2:],
    "one of many": BASE[2, 3],
    "nothing of much": BASE[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_saved_as_its_own_elements(tmp_path: Path, view: Tensor) -> None:
    DirectCheckpointer(tmp_path, LoneControl(), attempt=1, keep=1).save(1, 1, {"model.x": view})
    (saved,) = resumable_checkpoints(tmp_path)
    with GenerationReader(saved) as generation:
        assert generation.manifest.tensors["model.x"].size_bytes == view.numel() * 4
    # Into memory that lies as strangely.
    state = {"model.x": torch.zeros(tuple(reversed(view.shape))).permute(tuple(reversed(range(view.dim()))))}
    DirectCheckpointer(tmp_path, LoneControl(), attempt=2, keep=1).restore(
        state, {"model.x": tuple(view.shape)}
    )
    assert torch.equal(state["model.x"], view)


def test_tied_weights_are_stored_once_everywhere_and_come_back_tied(tmp_path: Path, runs_root: Path) -> None:
    (tmp_path / "text").write_text("so it goes " * 50)
    (tmp_path / "job.yaml").write_text(JOB.replace("TEXT", str(tmp_path / "text")))
    job = load_job(tmp_path / "job.yaml").spec
    assert job.model is not None
    state = {name: torch.randn(shape) for name, shape in state_shapes(job.model).items()}
    assert "model.lm_head.weight" not in state
    run = create_run("tied")
    run.spec.write_text(render_job(job))
    DirectCheckpointer(run.checkpoints, LoneControl(), attempt=1, keep=1).save(4, 16, state)
    (saved,) = resumable_checkpoints(run.checkpoints)
    export_hf(run, saved, tmp_path / "hf")
    weights = HFWeights(tmp_path / "hf")
    assert "lm_head.weight" not in weights.layout.tensors
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert torch.equal(theirs.lm_head.weight, state["model.embed_tokens.weight"])
    (tmp_path / "again").mkdir()
    again = import_hf(tmp_path / "hf", tmp_path / "again" / "checkpoints", job, None).saved
    with GenerationReader(again) as generation:
        assert "model.lm_head.weight" not in generation.manifest.tensors


def test_every_update_counter_is_that_of_the_save() -> None:
    """Also of a parameter that this rank holds nothing of."""
    wholes = {"a": torch.zeros(3, 2), "empty": torch.zeros(0, 2)}
    parameters = [
        LocalParameter(name, torch.nn.Parameter(tensor), 1, True) for name, tensor in wholes.items()
    ]
    optimizer = ShardedAdamW(parameters, TrainSpec(steps=9))
    optimizer.loaded(2641)
    steps = [float(state["step"]) for state in optimizer._adamw.state.values()]
    assert steps == [2641.0, 2641.0]
