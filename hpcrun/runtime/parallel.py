"""Distributes the model over the mesh with torch's parts: stages, tensor and sequence parallel, FSDP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from hpcrun.mesh import AXES
from hpcrun.runtime.model import Decoder, canonical_name
from hpcrun.specs.job import TrainSpec
from hpcrun.specs.model import ModelSpec
from hpcrun.specs.plan import Plan

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

ParameterValues = Callable[[str, tuple[int, ...], tuple[slice, ...]], Tensor]
"""Maps (canonical name, whole shape, slices) to that slice of a parameter's first values."""


def wrap_local_piece(whole: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor like the piece of `whole`, with its shape, mesh and placements if any."""
    if not isinstance(whole, DTensor):
        return local
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@dataclass(frozen=True)
class LocalParameter:
    """One parameter as this rank holds it, and how many ranks hold the same piece."""

    name: str
    """Canonical: the same on every layout, a tied head under the embedding's name."""
    parameter: nn.Parameter
    copies: int
    counted: bool
    """False for the second holder of a tied weight, which must not enter a global norm twice."""

    @property
    def local(self) -> Tensor:
        """This rank's piece."""
        parameter = self.parameter.detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def local_grad(self) -> Tensor | None:
        """This rank's piece of the gradient, reduced over every axis that does not shard it."""
        grad = self.parameter.grad
        if isinstance(grad, DTensor):
            assert isinstance(self.parameter, DTensor)
            if grad.placements != self.parameter.placements:
                grad = grad.redistribute(placements=self.parameter.placements)
            return grad.to_local()
        return grad

    def as_global(self, local: Tensor) -> Tensor:
        """Wrap a tensor of the piece's shape, such as an optimizer state, as a piece of the whole."""
        return wrap_local_piece(self.parameter, local)


class Mesh:
    """The axes that are wider than one rank, as a torch DeviceMesh."""

    def __init__(self, plan: Plan, rank: int, device_type: str, precision: str) -> None:
        self.at = plan.degrees.coordinates(rank)
        self.dp_rank = plan.degrees.dp_rank(rank)
        sizes = dict(zip(AXES, plan.degrees.shape, strict=True))
        wide = [axis for axis in AXES if sizes[axis] > 1]
        # FSDP carries the shards and the mixed precision; replicas alone are cheaper without it.
        self.uses_fsdp = plan.dp_shard > 1 or precision == "bf16"
        if self.uses_fsdp and "dp_shard" not in wide:
            wide = [axis for axis in AXES if axis in wide or axis == "dp_shard"]
        self.torch_mesh: DeviceMesh | None = None
        if wide:
            self.torch_mesh = init_device_mesh(
                device_type, tuple(sizes[axis] for axis in wide), mesh_dim_names=tuple(wide)
            )

    def seen(self) -> dict[str, int]:
        """Return this rank's coordinate on the axes of torch's mesh."""
        mesh = self.torch_mesh
        if mesh is None:
            return {}
        return dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh along some axes, or None when this layout has none of them."""
        names = self.torch_mesh.mesh_dim_names if self.torch_mesh is not None else ()
        present = tuple(axis for axis in axes if axis in (names or ()))
        if self.torch_mesh is None or not present:
            return None
        return self.torch_mesh[present]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group along one axis, or None when it is one rank wide."""
        mesh = self.submesh(axis)
        return mesh.get_group() if mesh is not None else None


def build_stage(spec: ModelSpec, plan: Plan, train: TrainSpec, mesh: Mesh, index: int) -> Decoder:
    """Build one pipeline stage, parallelised, still on the meta device."""
    begin, end = plan.stage_layers[index]
    with torch.device("meta"):
        module = Decoder(
            spec,
            layers=range(begin, end),
            embed=index == 0,
            head=index == plan.stages - 1,
            recompute=train.recompute,
        ).to(TORCH_DTYPES["fp64" if train.precision == "fp64" else "fp32"])
    tp = mesh.submesh("tp")
    if tp is not None:
        _apply_tensor_parallel(module, tp)
    if train.compile:
        for block in module.layers.values():
            block.compile()
    if mesh.uses_fsdp:
        _apply_fsdp(module, plan, train, mesh)
    return module


def _apply_tensor_parallel(module: Decoder, tp: DeviceMesh) -> None:
    """Apply Megatron's split, with the sequence sharded between blocks so that residuals are local."""
    styles: dict[str, ParallelStyle] = {}
    if module.embed_tokens is not None:
        styles["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    for index in module.layers:
        styles |= {
            f"layers.{index}.{name}": style
            for name, style in {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            }.items()
        }
    if module.lm_head is not None:
        styles["norm"] = SequenceParallel()
        styles["lm_head"] = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        )
    parallelize_module(module, tp, styles)
    if module.embed_tokens is not None:
        # The output is a view that still waits for its collective, which compiled blocks and FSDP's
        # hooks cannot take.
        module.embed_tokens.register_forward_hook(lambda _module, _inputs, output: output.clone())
    module.seq_shards = tp.size()
    module.tie_weights()


def _apply_fsdp(module: Decoder, plan: Plan, train: TrainSpec, mesh: Mesh) -> None:
    """Apply FSDP2 block by block for shards and mixed precision, with replicas as its outer axis."""
    dp = mesh.submesh("dp_replicate", "dp_shard")
    policy = MixedPrecisionPolicy()
    if train.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(part: nn.Module | list[nn.Module], *, keep: bool = False) -> None:
        # Backward needs the last part first: keep it after forward.
        fully_shard(part, mesh=dp, mp_policy=policy, reshard_after_forward=plan.zero == 3 and not keep)

    tied_here = module.spec.tied and module.embed_tokens is not None and module.lm_head is not None
    if not tied_here:
        if module.embed_tokens is not None:
            shard(module.embed_tokens)
        if module.norm is not None and module.lm_head is not None:
            shard([module.norm, module.lm_head], keep=True)
    blocks = list(module.layers.values())
    for block in blocks:
        shard(block)
    # A tied weight stays with the root: its two users must share one gathered copy.
    shard(module, keep=True)
    if plan.zero == 3:
        for block, following in itertools.pairwise(blocks):
            assert isinstance(block, FSDPModule)
            assert isinstance(following, FSDPModule)
            block.set_modules_to_forward_prefetch([following])


def materialise_stage(module: Decoder, device: torch.device, values: ParameterValues) -> None:
    """Allocate a stage and set its first values; a rank computes or reads only what it holds."""
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            canonical = canonical_name(module.spec, name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            offset: tuple[int, ...] = (0,) * parameter.dim()
            if isinstance(parameter, DTensor):
                _, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            slices = tuple(
                slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True)
            )
            if local.numel():
                local.copy_(values(canonical, tuple(parameter.shape), slices))


def local_parameters(stages: list[Decoder], plan: Plan) -> Iterator[LocalParameter]:
    """Yield every parameter that this rank holds, in the order of the layers."""
    replicas = plan.degrees.dp * plan.degrees.cp * plan.degrees.tp
    for module in stages:
        for name, parameter in module.named_parameters():
            pieces = 1
            if isinstance(parameter, DTensor):
                pieces = math.prod(
                    parameter.device_mesh.size(dim)
                    for dim, placement in enumerate(parameter.placements)
                    if not placement.is_replicate()
                )
            canonical = canonical_name(module.spec, name)
            yield LocalParameter(canonical, parameter, replicas // pieces, canonical == name)


def loss_parallel_context(plan: Plan) -> AbstractContextManager[None]:
    """Return the context for forward and backward of a step, for a vocabulary sharded along tp."""
    return loss_parallel() if plan.tp > 1 else nullcontext()
