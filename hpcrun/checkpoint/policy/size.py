"""What one save of a job holds, on each node and altogether, and how many saves a run keeps."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.checkpoint.policy.retention import RetentionRule, count_kept_saves
from hpcrun.formulas import layer_parameters, model_parameters
from hpcrun.specs.job import JobSpec
from hpcrun.specs.plan import Plan

_STATE_COPIES = 3
"""A save holds the weights and the two moments of AdamW."""


@dataclass(frozen=True)
class SourcedValue:
    """A figure, and where it comes from."""

    value: float | None
    """None where it is not known."""
    source: str


@dataclass(frozen=True)
class SaveSizes:
    """Bytes of one save."""

    whole: SourcedValue
    node: SourcedValue
    """Of the node that holds most."""


def compute_save_sizes(spec: JobSpec, plan: Plan | None) -> SaveSizes:
    """Compute the sizes by the formulas of model and layout; headers and hashes are left out.

    What several ranks hold is written once and divided evenly among them, so each rank of a pipeline rank's
    group writes as much; ranks are placed on nodes in blocks.
    """
    if spec.model is None or plan is None:
        unknown = SourcedValue(None, "a user's program: what it saves is unknown")
        return SaveSizes(unknown, unknown)
    width = _bytes_per_parameter(spec)
    each = [count * width / (spec.ranks // plan.pp) for count in count_stage_parameters(spec, plan)]
    per_node, loads = spec.ranks_per_node, dict[int, float]()
    for rank in range(spec.ranks):
        node = rank // per_node
        loads[node] = loads.get(node, 0.0) + each[rank // (spec.ranks // plan.pp)]
    words = (
        f"{model_parameters(spec.model):,} parameters, {width} bytes each: weights and both moments of AdamW"
    )
    share = (
        f"of {len(loads)} nodes with {per_node} ranks in blocks, {plan.degrees}"
        if len(loads) > 1
        else "one node"
    )
    return SaveSizes(SourcedValue(whole_save_bytes(spec), words), SourcedValue(max(loads.values()), share))


def count_stage_parameters(spec: JobSpec, plan: Plan) -> list[int]:
    """Parameters that each pipeline rank's group holds, once."""
    model = spec.model
    assert model is not None
    embedding, counts = model.vocab * model.hidden, []
    for pp_rank in range(plan.pp):
        total = 0
        for stage in plan.stages_of(pp_rank):
            first, end = plan.stage_layers[stage]
            total += (end - first) * layer_parameters(model)
            total += embedding if stage == 0 else 0
            if stage == plan.stages - 1:
                total += model.hidden + (0 if model.tied else embedding)
        counts.append(total)
    return counts


def whole_save_bytes(spec: JobSpec) -> int:
    """Bytes of one save of a job with a model, on all nodes together."""
    assert spec.model is not None
    return model_parameters(spec.model) * _bytes_per_parameter(spec)


def _bytes_per_parameter(spec: JobSpec) -> int:
    return (8 if spec.train.precision == "fp64" else 4) * _STATE_COPIES


def max_kept_saves(spec: JobSpec, *, with_milestones: bool = True) -> int:
    """How many saves are in the run directory at most, with or without those of `checkpoint.keep_every`."""
    checkpoint = spec.checkpoint
    every = checkpoint.durable.every or checkpoint.every_steps
    if checkpoint.every == "auto":
        every = 1  # any step may be saved
    rule = RetentionRule(checkpoint.keep, checkpoint.keep_every if with_milestones else 0)
    return count_kept_saves(spec.train.steps, every, rule)
