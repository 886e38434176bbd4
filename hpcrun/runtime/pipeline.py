"""One training step's forward and backward, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor

from hpcrun.runtime.data import MASKED
from hpcrun.runtime.model import Decoder, loss_function
from hpcrun.runtime.parallel import Mesh, loss_context
from hpcrun.runtime.replicas import ReplicaReducer
from hpcrun.specs.plan import Plan

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


class Engine:
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
            group = mesh.group("pp")
            pipes = [
                _Stage(module, index, plan, device, group, dtype)
                for module, index in zip(stages, indices, strict=True)
            ]
            several = plan.schedule in ("interleaved", "zero_bubble")
            self._schedule = _SCHEDULES[plan.schedule](
                pipes if several else pipes[0],
                n_microbatches=plan.grad_accum,
                loss_fn=self._share_of_loss,
                scale_grads=False,
            )

    def _share_of_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Divided here and not in the gradients afterwards: one pass over the weights less.
        if self._per_token is not None:
            return loss_function(logits, targets, reduction="sum") * self._per_token
        return loss_function(logits, targets) / (self._plan.grad_accum * self._summed_over)

    def _weigh(self, targets: Tensor) -> None:
        """Settle what a token counts: where replicas have different numbers of them, its share of all.

        Where all have as many, the mean over microbatches and replicas is the mean over tokens.
        """
        degrees = self._plan.degrees
        if not self._plan.is_uneven:
            return
        count = (targets != MASKED).sum().to(self._device)
        if dist.is_initialized():
            dist.all_reduce(count)
        # The ranks of a replica have counted the same tokens.
        tokens = int(count) * degrees.dp // degrees.world_size
        self._per_token = degrees.dp / (max(1, tokens) * self._summed_over)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of this rank's batch, (grad_accum, mbs, S) tokens; zero on a rank without the last stage."""
        self._weigh(targets)
        with loss_context(self._plan):
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
            loss = self._share_of_loss(self._stages[0](x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += _plain(loss)
        return total

    def _placed(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The microbatches on the device, moved at once: a copy for each would stop the queue each time."""
        return zip(inputs.to(self._device), targets.to(self._device), strict=True)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same without backward."""
        self._weigh(targets)
        with loss_context(self._plan):
            if self._schedule is not None:
                return self._pipeline(self._schedule.eval, inputs, targets) * self._summed_over
            losses = [
                _plain(self._share_of_loss(self._stages[0](x), y)) for x, y in self._placed(inputs, targets)
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
            torch.stack([_plain(loss) for loss in losses]).sum()
            if losses
            else torch.zeros((), dtype=torch.float64, device=self._device)
        )

    def _prepare_backward(self, *, last: bool) -> None:
        """ZeRO as FSDP's switches: 1 reduces gradients once a step, 2 every time, 3 drops parameters too."""
        if self._replicas is not None:
            self._replicas.arm(last)
        module = self._stages[0]
        if not isinstance(module, FSDPModule):
            return
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last or self._plan.zero >= 2)
        # Replicas only need the sum of the step.
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or self._plan.zero == 3)


class _Stage(PipelineStage):
    """A stage whose shapes are known beforehand, and which reduces gradients as the ZeRO stage says.

    PipelineStage itself keeps gradients whole to the last microbatch (ZeRO 1).
    """

    def __init__(
        self,
        module: Decoder,
        index: int,
        plan: Plan,
        device: torch.device,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        first, last = index == 0, index == plan.stages - 1
        # With shapes given, torch does not run every stage once more to find them out.
        rows, hidden = (plan.mbs, plan.seq_len), module.spec.hidden
        float_meta: dict[str, Any] = {"dtype": dtype, "device": "meta", "requires_grad": True}
        tokens = torch.empty(rows, dtype=torch.int64, device="meta")
        residual = torch.empty(plan.mbs, plan.seq_len // plan.tp, hidden, **float_meta)
        logits = torch.empty(*rows, module.spec.vocab // plan.tp, **float_meta)
        super().__init__(
            module,
            index,
            plan.stages,
            device,
            input_args=tokens if first else residual,
            output_args=logits if last else residual,
            group=group,
        )
        self._zero = plan.zero

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for a neighbour on this rank; an evaluation has none, which torch takes for a mistake."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients from a neighbour on this rank, if there is a backward at all."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Backward of one microbatch; with ZeRO 2 and 3 its gradients are reduced at once."""
        module = self.submod
        if self._zero < 2 or not isinstance(module, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "a plan never pairs ZeRO 2 and 3 with a split backward"
        module.set_is_last_backward(False)
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(last_backward)
        module.set_reshard_after_backward(self._zero == 3)
        gradients = stage_backward(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        )
        return gradients, None


def _plain(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).to(torch.float64)
