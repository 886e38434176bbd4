"""What a job's ranks send each other in a step, axis by axis.

A flow is one axis of the mesh: the pattern that all its groups follow at the same time, the bytes of a rank,
and how many messages have to wait for each other. Rings follow the order of the ranks in the mesh, as the
ring algorithms of gloo and MPI do, and NCCL's between nodes; hierarchical collectives are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpcrun.formulas import layer_parameters
from hpcrun.mesh import AXES, ParallelDegrees
from hpcrun.units import format_bytes

if TYPE_CHECKING:  # they bring pydantic, which a look at the fabric does without
    from hpcrun.specs.job import JobSpec
    from hpcrun.specs.model import ModelSpec
    from hpcrun.specs.plan import Plan

TrafficPattern = Literal["ring", "chain", "loop", "all_to_all"]
"""ring: to the next, the last to the first; chain: to both neighbours; loop: a closed chain."""

ALL_RANKS = "all ranks"
"""The axis of a job that declares none."""

ASSUMED_BYTES = 1 << 20
"""What a rank of a foreign command is taken to send along every axis: only the comparison counts."""

_WEIGHT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
_GRAD_BYTES = {"bf16": 4, "fp32": 4, "fp64": 8}
"""Gradients are reduced in fp32 under bf16."""


@dataclass(frozen=True)
class TrafficFlow:
    """The traffic along one axis in one step."""

    axis: str
    pattern: TrafficPattern
    size: int
    """Ranks of a group."""
    bytes: int
    """ring: from a rank to its next; chain, loop: to each neighbour; all_to_all: to all others together."""
    messages: int
    """Messages of a rank that wait for each other; each costs the latency once."""

    def edges(self, degrees: ParallelDegrees, ranks: int) -> Iterator[tuple[int, int, int]]:
        """(sender, receiver, bytes) over all groups of the axis, a pair twice where it meets twice."""
        size, stride = self.size, axis_stride(degrees, self.axis)
        whole = stride * size
        if size < 2:
            return
        back = stride * (size - 1)
        share = -(-self.bytes // (size - 1))
        for rank in range(ranks - ranks % whole):
            last = rank // stride % size == size - 1
            if self.pattern == "all_to_all":
                first = rank - rank // stride % size * stride
                yield from (
                    (rank, other, share) for other in range(first, first + whole, stride) if other != rank
                )
            elif self.pattern == "ring" or not last or self.pattern == "loop":
                following = rank - back if last else rank + stride
                yield rank, following, self.bytes
                if self.pattern != "ring":
                    yield following, rank, self.bytes


@dataclass(frozen=True)
class Traffic:
    """All flows of a job; prints and dumps to JSON."""

    flows: tuple[TrafficFlow, ...]
    notes: tuple[str, ...] = ()
    """What was assumed, one line each."""

    def flow(self, axis: str) -> TrafficFlow | None:
        """The flow along an axis, None where nothing is sent."""
        return next((flow for flow in self.flows if flow.axis == axis), None)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [
            f"{flow.axis} {format_bytes(flow.bytes)} ({flow.pattern} of {flow.size})" for flow in self.flows
        ]
        return ", ".join(parts) or "no traffic"


def estimate_traffic(model: ModelSpec | None, plan: Plan | None, job: JobSpec) -> Traffic:
    """Bytes per step from model and layout; of a foreign command, equal ones along its declared degrees."""
    if model is None or plan is None or job.command is not None:
        return declared_traffic(job.degrees, job.ranks, ep=job.parallel.ep)
    flows = (
        _pipeline_flow(model, plan, job),
        _replica_flow(model, plan, job),
        _shard_flow(model, plan, job),
        _context_flow(model, plan, job),
        _tensor_flow(model, plan, job),
    )
    return Traffic(tuple(flow for flow in flows if flow.size > 1))


def declared_traffic(
    degrees: ParallelDegrees, ranks: int, *, ep: int = 1, size_bytes: int = ASSUMED_BYTES
) -> Traffic:
    """Equal bytes along every declared axis; without any, one ring over all ranks."""
    flows = [
        TrafficFlow(axis, "chain" if axis == "pp" else "ring", size, size_bytes, 1)
        for axis, size in zip(AXES, degrees.shape, strict=True)
        if size > 1
    ]
    if ep > 1:
        flows.append(TrafficFlow("ep", "all_to_all", ep, size_bytes, ep - 1))
    if flows:
        names = ", ".join(flow.axis for flow in flows)
        note = f"a command's traffic is not known: equal bytes along {names} are assumed"
        return Traffic(tuple(flows), (note,) if len(flows) > 1 else ())
    if ranks < 2:
        return Traffic(())
    note = "a command that declares no degrees: one ring over all ranks is assumed"
    return Traffic((TrafficFlow(ALL_RANKS, "ring", ranks, size_bytes, 1),), (note,))


def axis_stride(degrees: ParallelDegrees, axis: str) -> int:
    """The distance in ranks of neighbours on an axis; experts are dealt over neighbours in dp · cp."""
    if axis == "ep":
        return degrees.tp
    return 1 if axis == ALL_RANKS else math.prod(degrees.shape[AXES.index(axis) + 1 :])


def _pipeline_flow(model: ModelSpec, plan: Plan, job: JobSpec) -> TrafficFlow:
    """2 s b h bytes (16-bit) each way a boundary and microbatch, over tp with sequence parallel, × v.

    Megatron-LM (Narayanan et al., 2021), 3.2. Stages that are dealt in turns close the chain: the last rank
    hands on to the first. The way back is counted like the way there, one chunk too many.
    """
    turns = plan.virtual_stages
    pattern: TrafficPattern = "loop" if turns > 1 and plan.schedule != "zero_bubble" else "chain"
    size_bytes = _residual_bytes(model, plan, job) // plan.tp * plan.grad_accum * turns
    return TrafficFlow("pp", pattern, plan.pp, size_bytes, 2 * plan.grad_accum * turns)


def _replica_flow(model: ModelSpec, plan: Plan, job: JobSpec) -> TrafficFlow:
    """2 (n-1)/n of the gradients that a rank holds, once a step: a ring all-reduce."""
    n = plan.dp_replicate
    gradients = _parameters(model, plan) * _GRAD_BYTES[job.train.precision] // plan.dp_shard
    size_bytes = -(-2 * (n - 1) * gradients // n)
    return TrafficFlow("dp_replicate", "ring", n, size_bytes, 2 * (n - 1) * _max_units_per_rank(plan))


def _shard_flow(model: ModelSpec, plan: Plan, job: JobSpec) -> TrafficFlow:
    """Ring all-gather of weights and reduce-scatter of gradients, (n-1)/n of the whole each.

    ZeRO-3 gathers twice a microbatch (forward, backward), below it once a step; ZeRO-2 and 3 scatter every
    microbatch, ZeRO-1 once a step (Rajbhandari et al., 2020, 7; runtime.parallel and runtime.pipeline). On
    CPUs gloo scatters by an all-reduce, which is twice as much (as the counters of links have shown).
    """
    n, count = plan.dp_shard, plan.grad_accum
    gathers = 2 * count if plan.zero == 3 else 1
    scatters = (count if plan.zero >= 2 else 1) * (2 if job.device == "cpu" else 1)
    per_parameter = gathers * _WEIGHT_BYTES[job.train.precision] + scatters * _GRAD_BYTES[job.train.precision]
    size_bytes = -(-(n - 1) * _parameters(model, plan) * per_parameter // n)
    messages = (n - 1) * (gathers + scatters) * _max_units_per_rank(plan)
    return TrafficFlow("dp_shard", "ring", n, size_bytes, messages)


def _context_flow(model: ModelSpec, plan: Plan, job: JobSpec) -> TrafficFlow:
    """Ring attention: keys and values of (c-1)/c of the sequence forward, twice that back (Liu et al., 2023).

    Besides, the all-reduce of the gradients over the ranks of a sequence.
    """
    n, layers = plan.cp, _max_blocks_per_rank(plan)
    kv = 2 * model.kv_heads * model.head_dim * _WEIGHT_BYTES[job.train.precision] // plan.tp
    exchanged = 3 * (n - 1) * (plan.seq_len // n) * plan.mbs * kv * layers * plan.grad_accum
    gradients = _parameters(model, plan) * _GRAD_BYTES[job.train.precision] // plan.dp_shard
    size_bytes = exchanged + -(-2 * (n - 1) * gradients // n)
    messages = (n - 1) * (3 * layers * plan.grad_accum + 2 * _max_units_per_rank(plan))
    return TrafficFlow("cp", "ring", n, size_bytes, messages)


def _tensor_flow(model: ModelSpec, plan: Plan, job: JobSpec) -> TrafficFlow:
    """With sequence parallel: a layer has 9 ring gathers or scatters of the residual a microbatch.

    That is 2 forward and 2 backward all-reduces, each as a scatter and a gather, and one more gather in
    backward; 13 where the forward is run again (Korthikanti et al., 2022, 4). Embedding and head left out.
    """
    n = plan.tp
    collectives = (13 if job.train.recompute == "full" else 9) * _max_blocks_per_rank(plan) * plan.grad_accum
    size_bytes = -(-(n - 1) * collectives * _residual_bytes(model, plan, job) // n)
    return TrafficFlow("tp", "ring", n, size_bytes, (n - 1) * collectives)


def _residual_bytes(model: ModelSpec, plan: Plan, job: JobSpec) -> int:
    """The residual stream of one microbatch on one rank of cp: s b h in the precision of compute."""
    return plan.seq_len // plan.cp * plan.mbs * model.hidden * _WEIGHT_BYTES[job.train.precision]


def _max_blocks_per_rank(plan: Plan) -> int:
    """Blocks of the pipeline rank that has the most."""
    return max(
        sum(plan.stage_layers[stage][1] - plan.stage_layers[stage][0] for stage in plan.stages_of(pp_rank))
        for pp_rank in range(plan.pp)
    )


def _max_units_per_rank(plan: Plan) -> int:
    """What is gathered or reduced at one time: the blocks, embedding and head."""
    return _max_blocks_per_rank(plan) + 2


def _parameters(model: ModelSpec, plan: Plan) -> int:
    """Parameters of a rank before sharding, on the pipeline rank that has the most."""
    embedding = model.vocab * model.hidden

    def of(stages: list[int]) -> int:
        blocks = sum(plan.stage_layers[stage][1] - plan.stage_layers[stage][0] for stage in stages)
        first, last = 0 in stages, plan.stages - 1 in stages
        tables = 1 if model.tied and first and last else first + last
        return blocks * layer_parameters(model) + tables * embedding + last * model.hidden

    return max(of(plan.stages_of(pp_rank)) for pp_rank in range(plan.pp)) // plan.tp
