"""Runs forward and backward of a training step, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpcrun.runtime.data_loader import IGNORED_TARGET
from hpcrun.runtime.gradient_sync import ReplicaReducer
from hpcrun.runtime.model import Decoder, loss_function
from hpcrun.runtime.parallel import Mesh, loss_parallel_context
from hpcrun.specs.plan import Plan


class MicrobatchEngine:
    """Runs the microbatches of a step through this rank's stages; gradients end up in `.grad`, averaged."""

    def __init__(
        self, stages: list[Decoder], plan: Plan, mesh: Mesh, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._stages, self._plan, self._device = stages, plan, device
        indices = plan.stages_of(mesh.at["pp"])
        self._has_input = 0 in indices
        self._has_loss = plan.stages - 1 in indices
        self._replicas: ReplicaReducer | None = None
        replicas = mesh.group("dp_replicate")
        if replicas is not None and not mesh.uses_fsdp:
            parameters = [parameter for stage in stages for parameter in stage.parameters()]
            self._replicas = ReplicaReducer(parameters, replicas)
        # FSDP averages gradients, the reducer sums them.
        self._summed_over = replicas.size() if self._replicas is not None and replicas is not None else 1
        self._per_token: float | None = None
        self._schedule: Any = None
        if plan.pp > 1:
            # Imported only here: it loads torch.compile, a fifth of a rank's start-up time.
            from hpcrun.runtime.pipeline_stages import build_schedule

            self._schedule = build_schedule(
                zip(stages, indices, strict=True),
                plan,
                device,
                mesh.group("pp"),
                dtype,
                loss=self._weighted_loss,
            )

    def _weighted_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Dividing here instead of in the gradients saves a pass over the weights.
        if self._per_token is not None:
            return loss_function(logits, targets, reduction="sum") * self._per_token
        return loss_function(logits, targets) / (self._plan.grad_accum * self._summed_over)

    def _set_token_weights(self, targets: Tensor) -> None:
        """Set the weight of a token: where replicas have different numbers, its share of all tokens.

        Where all have as many, the mean over microbatches and replicas is the mean over tokens.
        """
        degrees = self._plan.degrees
        if not self._plan.is_uneven:
            return
        count = (targets != IGNORED_TARGET).sum().to(self._device)
        if dist.is_initialized():
            dist.all_reduce(count)
        # The ranks of a replica have counted the same tokens.
        tokens = int(count) * degrees.dp // degrees.world_size
        self._per_token = degrees.dp / (max(1, tokens) * self._summed_over)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of this rank's batch, (grad_accum, mbs, S) tokens; zero without the last stage."""
        self._set_token_weights(targets)
        with loss_parallel_context(self._plan):
            if self._schedule is not None:
                loss = self._pipeline(self._schedule.step, inputs, targets)
            else:
                loss = self._microbatches(inputs, targets)
            if self._replicas is not None:
                self._replicas.finish()
            return loss * self._summed_over

    def _microbatches(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, (x, y) in enumerate(self._placed(inputs, targets)):
            self._prepare_backward(last=index == len(inputs) - 1)
            loss = self._weighted_loss(self._stages[0](x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += _plain_loss(loss)
        return total

    def _placed(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Move all microbatches to the device in one copy: one copy each would stall the queue each time."""
        return zip(inputs.to(self._device), targets.to(self._device), strict=True)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss without backward."""
        self._set_token_weights(targets)
        with loss_parallel_context(self._plan):
            if self._schedule is not None:
                return self._pipeline(self._schedule.eval, inputs, targets) * self._summed_over
            losses = [
                _plain_loss(self._weighted_loss(self._stages[0](x), y))
                for x, y in self._placed(inputs, targets)
            ]
            return torch.stack(losses).sum() * self._summed_over

    def _pipeline(self, run: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        first = (inputs.flatten(0, 1).to(self._device),) if self._has_input else ()
        last: dict[str, Any] = {}
        if self._has_loss:
            last = {"target": targets.flatten(0, 1).to(self._device), "losses": losses}
        run(*first, **last, return_outputs=False)
        return (
            torch.stack([_plain_loss(loss) for loss in losses]).sum()
            if losses
            else torch.zeros((), dtype=torch.float64, device=self._device)
        )

    def _prepare_backward(self, *, last: bool) -> None:
        """Set FSDP for ZeRO: 1 reduces gradients once a step, 2 every time, 3 frees parameters too."""
        if self._replicas is not None:
            self._replicas.arm(last)
        module = self._stages[0]
        if not isinstance(module, FSDPModule):
            return
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last or self._plan.zero >= 2)
        # Replicas need only the sum of the step.
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or self._plan.zero == 3)


def _plain_loss(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).to(torch.float64)
