"""Builds the pipeline stages of this rank and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from hpcrun.runtime.model import Decoder
from hpcrun.specs.plan import Plan

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


def build_schedule(
    stages: Iterable[tuple[Decoder, int]],
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Build the schedule that runs these stages, each given with its number in the whole pipeline."""
    pipes = [_Stage(module, index, plan, device, group, dtype) for module, index in stages]
    several = plan.schedule in ("interleaved", "zero_bubble")
    return _SCHEDULES[plan.schedule](
        pipes if several else pipes[0],
        n_microbatches=plan.grad_accum,
        loss_fn=loss,
        scale_grads=False,
    )


class _Stage(PipelineStage):
    """A stage with known shapes that reduces gradients as the ZeRO stage says.

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
        # With shapes given, torch need not run every stage once to infer them.
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
        """Return gradients for a neighbour on this rank; torch does not expect an evaluation to have none."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Set gradients from a neighbour on this rank, if there is a backward."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run backward of one microbatch; with ZeRO 2 and 3 its gradients are reduced at once."""
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
