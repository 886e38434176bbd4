"""The optimizer on this rank's pieces, the global gradient norm, tied weights, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcrun.runtime.parallel import LocalParameter, Mesh
from hpcrun.specs.job import JobSpec, TrainSpec
from hpcrun.specs.plan import Plan


def learning_rate(train: TrainSpec, gbs: int, step: int) -> float:
    """Return the learning rate of a step, counted from 1: linear warm-up, then cosine, WSD or constant.

    `lr_scaling` multiplies by gbs / base_gbs (linear) or its square root (for Adam's noise scale).
    """
    peak = train.lr
    if train.lr_scaling is not None:
        ratio = gbs / train.lr_scaling.base_gbs
        peak *= ratio if train.lr_scaling.rule == "linear" else math.sqrt(ratio)
    if step <= train.warmup:
        return peak * step / train.warmup
    if train.schedule == "constant":
        return peak
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    if train.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    else:
        share = min(1.0, max(0.0, 1.0 - done) / train.decay)
    return peak * (train.min_lr + (1.0 - train.min_lr) * share)


def learning_rate_of_step(job: JobSpec, plan: Plan, step: int) -> float:
    """Return the learning rate of a step under a plan, which may have a smaller batch than the job."""
    # lr_scaling uses the batch of the job; `elastic` decides about one that is smaller for now.
    whole = job.train.gbs or plan.gbs
    rate = learning_rate(job.train, whole, step)
    return rate if job.elastic is None or plan.gbs == whole else rate * job.elastic.lr_factor(plan.gbs, whole)


class ShardedAdamW:
    """AdamW over local pieces; as it is elementwise, pieces need no communication.

    Working on plain tensors keeps DTensor's dispatch out of the step.
    """

    def __init__(self, parameters: Iterable[LocalParameter], train: TrainSpec) -> None:
        self.parameters = list(parameters)
        self.pieces = [nn.Parameter(parameter.local) for parameter in self.parameters]
        pairs = list(zip(self.parameters, self.pieces, strict=True))
        # Norms keep their scale: decay is for matrices.
        matrices = [piece for parameter, piece in pairs if parameter.parameter.dim() > 1]
        norms = [piece for parameter, piece in pairs if parameter.parameter.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        self._clip = train.grad_clip
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.lr,
            betas=(train.betas[0], train.betas[1]),
            eps=train.eps,
            fused=True,
        )
        for piece in self.pieces:
            self._adamw.state[piece] = {
                "step": torch.zeros((), dtype=torch.float32, device=piece.device),
                "exp_avg": torch.zeros_like(piece.detach()),
                "exp_avg_sq": torch.zeros_like(piece.detach()),
            }

    def collect_gradients(self) -> None:
        """Take this step's gradients from the model."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            piece.grad = parameter.local_grad()

    def square_sum(self) -> Tensor:
        """Return this rank's share of the squared global norm; pieces held by several ranks count once."""
        shares = [
            (piece.grad, parameter.copies)
            for parameter, piece in zip(self.parameters, self.pieces, strict=True)
            if piece.grad is not None and parameter.counted
        ]
        if not shares:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm([grad for grad, _ in shares])).to(torch.float64)
        copies = norms.new_tensor([float(copies) for _, copies in shares])
        return (norms.square() / copies).sum()

    def step(self, lr: float, norm: float) -> None:
        """Clip by the global norm (as torch's clip_grad_norm_ does), update, and drop the gradients."""
        grads = [piece.grad for piece in self.pieces if piece.grad is not None]
        coefficient = self._clip / (norm + 1e-6) if self._clip is not None else 1.0
        if coefficient < 1.0:
            torch._foreach_mul_(grads, coefficient)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            piece.grad = None
            parameter.parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name, as pieces of global tensors; filling them loads them."""
        entries: dict[str, Tensor] = {}
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            moments = self._adamw.state[piece]
            entries[f"model.{parameter.name}"] = parameter.as_global(piece.detach())
            for moment in ("exp_avg", "exp_avg_sq"):
                entries[f"optimizer.{parameter.name}.{moment}"] = parameter.as_global(moments[moment])
        return entries

    def loaded(self, step: int) -> None:
        """Complete a load into `state`: set the step count, and copy a tied weight that is held twice."""
        named = {p.name: piece for p, piece in zip(self.parameters, self.pieces, strict=True)}
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            moments, source = self._adamw.state[piece], named[parameter.name]
            moments["step"].fill_(float(step))
            if source is not piece:
                piece.detach().copy_(source.detach())
                for moment in ("exp_avg", "exp_avg_sq"):
                    moments[moment].copy_(self._adamw.state[source][moment])


class TiedWeights:
    """Sums the gradients of an embedding and an output head that are on different pipeline stages."""

    def __init__(self, plan: Plan, mesh: Mesh, optimizer: ShardedAdamW, tied: bool) -> None:
        self._pieces: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        if not tied or plan.pp == 1:
            return
        self._pieces = [
            piece
            for parameter, piece in zip(optimizer.parameters, optimizer.pieces, strict=True)
            if parameter.name == "embed_tokens.weight"
        ]
        first = next(rank for rank in range(plan.pp) if 0 in plan.stages_of(rank))
        last = next(rank for rank in range(plan.pp) if plan.stages - 1 in plan.stages_of(rank))
        if first != last:
            self._group = _tied_weight_group(plan, first, last)

    def sum_gradients(self) -> None:
        """Set the sum on both holders."""
        grads = [piece.grad for piece in self._pieces if piece.grad is not None]
        if len(grads) == 2:
            grads[0] += grads[1]
            grads[1].copy_(grads[0])
        elif grads and self._group is not None:
            dist.all_reduce(grads[0], group=self._group)


def _tied_weight_group(plan: Plan, first: int, last: int) -> dist.ProcessGroup | None:
    """Return the group of the two ranks that hold the tied weight at this place of the other axes."""
    per_stage = plan.degrees.world_size // plan.pp
    pairs = [[first * per_stage + i, last * per_stage + i] for i in range(per_stage)]
    group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call]
    return group if isinstance(group, dist.ProcessGroup) else None
