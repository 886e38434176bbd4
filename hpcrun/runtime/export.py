"""Saved steps into other formats."""

from __future__ import annotations

from pathlib import Path

import torch

from hpcrun.errors import UsageError
from hpcrun.runtime.checkpoint import load_weights
from hpcrun.runtime.hf import write_hf
from hpcrun.specs.load import load_job
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import saved_steps

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_hf(run: RunDir, directory: Path, *, step: int | None = None, dtype: str = "float32") -> int:
    """Write a saved step (the newest by default) as a Hugging Face directory; returns which step it was.

    The whole model passes through the memory of this one process.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: not known; use {', '.join(_DTYPES)}")
    found = saved_steps(run.checkpoints)
    known = ", ".join(str(saved.step) for saved in found) or "none"
    chosen = [saved for saved in found if step is None or saved.step == step]
    if not chosen:
        raise UsageError(f"{run.id}: has no saved step {step or 'at all'} (saved: {known})")
    spec = load_job(run.spec).spec.model
    assert spec is not None
    weights = load_weights(chosen[-1])
    write_hf(spec, weights.items(), directory, _DTYPES[dtype])
    return chosen[-1].step
