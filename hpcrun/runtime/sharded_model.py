"""ShardedModel: this rank's share of model and optimizer, and one training step over it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hpcrun.errors import UsageError
from hpcrun.runtime.device import Device
from hpcrun.runtime.hf_weights import HFWeights
from hpcrun.runtime.model import Decoder, initial_value, parameter_shapes
from hpcrun.runtime.optimizer import ShardedAdamW, TiedWeights
from hpcrun.runtime.parallel import (
    TORCH_DTYPES,
    Mesh,
    ParameterValues,
    build_stage,
    local_parameters,
    materialise_stage,
)
from hpcrun.runtime.pipeline import MicrobatchEngine
from hpcrun.specs.hf_directory import why_precision_is_lost
from hpcrun.specs.job import TrainSpec
from hpcrun.specs.model import ModelSpec
from hpcrun.specs.plan import Plan


class ShardedModel:
    """All training state that torch holds on this rank."""

    def __init__(self, spec: ModelSpec, plan: Plan, train: TrainSpec, device: Device, rank: int) -> None:
        self._spec, self.device = spec, device
        self.mesh = Mesh(plan, rank, device.torch_device.type, train.precision)
        indices = plan.stages_of(self.mesh.at["pp"])
        self.stages = [build_stage(spec, plan, train, self.mesh, index) for index in indices]
        values = _initial_values(spec, train)
        for stage in self.stages:
            materialise_stage(stage, device.torch_device, values)
            _allocate_shards(stage)
        self.engine = MicrobatchEngine(
            self.stages, plan, self.mesh, device.torch_device, TORCH_DTYPES[train.precision]
        )
        self.optimizer = ShardedAdamW(local_parameters(self.stages, plan), train)
        self._tied = TiedWeights(plan, self.mesh, self.optimizer, spec.tied)
        # Ranks that hold the last stage see the same loss once for each of their tp and cp peers.
        self._loss_share = 1.0 / (plan.degrees.dp * plan.degrees.cp * plan.degrees.tp)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the mean loss, and leave the gradients in the optimizer's pieces."""
        loss = self.engine.forward_backward(inputs, targets)
        self.optimizer.collect_gradients()
        self._tied.sum_gradients()
        return loss * self._loss_share

    def totals(self, share: Tensor) -> tuple[float, float, Tensor]:
        """Return the global loss and gradient norm, and this rank's part of the squared norm."""
        squares = self.optimizer.square_sum()
        loss, square_sum = sum_over_ranks([share, squares], self.device.torch_device)
        return loss, math.sqrt(square_sum) if square_sum >= 0 else math.nan, squares

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the mean loss, without gradients."""
        return self.engine.evaluate(inputs, targets) * self._loss_share

    def expected_entries(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every tensor that a checkpoint of this job holds."""
        return state_shapes(self._spec)


def state_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of a job's training state: weights and AdamW's moments."""
    entries: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        entries[f"model.{name}"] = shape
        entries |= {f"optimizer.{name}.{moment}": shape for moment in ("exp_avg", "exp_avg_sq")}
    return entries


def sum_over_ranks(values: list[Tensor], device: torch.device) -> list[float]:
    """Return the sums of a few scalars over all ranks, in one collective."""
    packed = torch.stack([value.detach().to(device, torch.float64) for value in values])
    if dist.is_initialized():
        dist.all_reduce(packed)
    return [float(value) for value in packed.tolist()]


def _initial_values(spec: ModelSpec, train: TrainSpec) -> ParameterValues:
    """Return the source of first values: a directory of weights, or the seed."""
    if spec.weights is not None:
        stored = HFWeights(Path(spec.weights))
        stored.check(spec)
        if inexact := why_precision_is_lost(stored.layout, train.kept_dtype):
            raise UsageError(inexact)
        return lambda name, shape, slices: stored.read(name, slices)
    return lambda name, shape, slices: initial_value(spec, name, shape, train.seed, rows=slices[0])[
        (slice(None), *slices[1:])
    ]


def _allocate_shards(stage: Decoder) -> None:
    """Have FSDP allocate its shards now: the optimizer must see the memory of padded ones."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
