"""Verifies and records the Hugging Face weights that a run begins with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.runtime.control import Control
from hpcrun.runtime.hf_weights import HFWeights
from hpcrun.specs.base_model import keep_base_model
from hpcrun.specs.metrics import WeightsMetric
from hpcrun.specs.model import ModelSpec
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sha256sums import check_sha256sums
from hpcrun.typed_json import parse_typed


def adopt_initial_weights(spec: ModelSpec, run: RunDir, control: Control, kept: str) -> WeightsMetric:
    """Verify the files of `model.weights` by their hashes, all ranks together, and keep its other files.

    Returns the record of their origin and types, with notes where config.json and tensors differ. UsageError
    on every rank where a hash does not match.
    """
    assert spec.weights is not None
    directory, problem, is_hashed = Path(spec.weights), None, False
    try:
        is_hashed = check_sha256sums(directory, share=control.rank, shares=control.size)
    except (UsageError, OSError) as error:
        problem = str(error)
    problems = [text for text in control.allgather(problem) if text is not None]
    if problems:
        raise UsageError(f"model.weights: {problems[0]}")

    def keep() -> dict[str, Any]:
        weights = HFWeights(directory)
        weights.check_tied_head(spec)
        with keep_base_model(directory, run.path, weights.layout.torch_types()) as carried:
            counts = Counter(weights.layout.torch_types().values())
            return {
                "step": 0,
                "source": str(directory),
                "dtypes": dict(counts),
                "kept": kept,
                "is_hashed": is_hashed,
                "carried": list(carried.files),
                "absent": list(carried.absent),
                "left": list(carried.left),
                "notes": weights.notes(spec),
            }

    return parse_typed(WeightsMetric, control.everywhere(keep))
