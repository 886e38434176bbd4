"""Plan: the parallel layout of a run, worked out once and read by every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import gcd
from typing import Any

from pydantic import BaseModel, ConfigDict

from hpcrun.errors import SpecProblem
from hpcrun.formulas import head_flops_per_token, layer_flops_per_token
from hpcrun.hostlist import expand_hosts, fold_hosts
from hpcrun.mesh import ParallelDegrees, partition_layers
from hpcrun.specs.checkpoint import CheckpointSpec, check_checkpoint, check_spare_replicas
from hpcrun.specs.data import DataSpec
from hpcrun.specs.elastic_layout import check_elastic
from hpcrun.specs.job import JobSpec, ParallelSpec, PipelineSchedule, TrainSpec
from hpcrun.specs.model import ModelSpec
from hpcrun.specs.resources import ResourcesSpec
from hpcrun.specs.timing import check_times

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 24
"""Sizes beyond these are typing mistakes; the arithmetic below stays exact and quick within them."""

_VIRTUAL = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}


class Plan(BaseModel):
    """Degrees, batch and pipeline of a run; prints, dumps to JSON and reads back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    zero: int
    schedule: PipelineSchedule
    virtual_stages: int
    stage_layers: list[tuple[int, int]]
    """First layer and one past the last of every pipeline stage, in the order of the layers."""
    mbs: int
    gbs: int
    grad_accum: int
    """Microbatches that every rank runs in a step, empty ones included where they do not come out even."""
    seq_len: int
    whole_dp: int | None = None
    """How many replicas the job has, where this is a plan with fewer."""

    @property
    def degrees(self) -> ParallelDegrees:
        """The mesh."""
        return ParallelDegrees(
            pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp
        )

    @property
    def stages(self) -> int:
        """Pipeline stages, all ranks together."""
        return self.pp * self.virtual_stages

    @property
    def is_uneven(self) -> bool:
        """Whether the replicas take different numbers of microbatches, or all run empty ones."""
        return self.gbs != self.mbs * self.grad_accum * self.degrees.dp

    @property
    def replicas(self) -> str:
        """In words how many replicas there are where some are missing, else nothing."""
        return "" if self.whole_dp is None else f"{self.degrees.dp} of {self.whole_dp} replicas"

    def stages_of(self, pp_rank: int) -> list[int]:
        """Which stages a pipeline rank holds: strided, or folded like a V for the zero-bubble schedule."""
        if self.schedule == "zero_bubble" and self.pp > 1:
            return [pp_rank, self.stages - 1 - pp_rank]
        return list(range(pp_rank, self.stages, self.pp))

    def describe(self) -> str:
        """One line for people."""
        world = self.degrees.world_size
        parts = [f"{self.degrees} ({world} ranks)" if world > 1 else "one rank", f"ZeRO {self.zero}"]
        if self.pp > 1:
            cut = "+".join(str(end - begin) for begin, end in self.stage_layers)
            parts.append(f"{self.schedule} over {cut} layers")
        parts += [self.replicas] if self.replicas else []
        if self.is_uneven:
            most = -(-self.gbs // self.mbs // self.degrees.dp)
            parts.append(f"{self.gbs} sequences a step = up to {self.mbs} × {most} on dp {self.degrees.dp}")
        else:
            parts.append(
                f"{self.gbs} sequences a step = {self.mbs} × {self.grad_accum} × dp {self.degrees.dp}"
            )
        return ", ".join(parts)


def make_plan(job: JobSpec) -> Plan:
    """The plan of a job that names its layout and in which `contradictions` finds nothing."""
    p, model, data = job.parallel, job.model, job.data
    assert model is not None
    assert data is not None
    # The embedding is a look-up: it costs memory traffic, not FLOPs; the head is a full matmul.
    cuts = partition_layers(
        [layer_flops_per_token(model, data.seq_len)] * model.layers,
        p.pp * _virtual_stages(p),
        first=2.0 * model.hidden,
        last=head_flops_per_token(model),
    )
    grad_accum = _grad_accum(p, job.train)
    return Plan(
        pp=p.pp,
        dp_replicate=p.dp_replicate,
        dp_shard=p.dp_shard,
        cp=p.cp,
        tp=p.tp,
        zero=p.zero if p.zero is not None else _default_zero(p),
        schedule=p.schedule,
        virtual_stages=_virtual_stages(p),
        stage_layers=[(cut.start, cut.stop) for cut in cuts],
        mbs=job.train.mbs,
        gbs=job.train.mbs * _degrees(p).dp * grad_accum,
        grad_accum=grad_accum,
        seq_len=data.seq_len,
    )


def with_layout(job: JobSpec, plan: Plan) -> JobSpec:
    """The job with the figures that the plan settled written into it."""
    parallel: dict[str, Any] = {
        "zero": plan.zero,
        "virtual_stages": plan.virtual_stages,
        "microbatches": plan.grad_accum,
    }
    return job.model_copy(
        update={
            "parallel": job.parallel.model_copy(update=parallel),
            "train": job.train.model_copy(update={"gbs": plan.gbs}),
        }
    )


def find_plan_problems(job: JobSpec, broken: Collection[str] = ()) -> list[SpecProblem]:
    """Everything in a job that does not go together; what needs a broken or absent section is left out."""
    absent = {name for name in ("model", "data") if getattr(job, name) is None} | set(broken)
    # A command trains by itself: of its layout only the number of ranks concerns us.
    absent |= set() if job.command is None else {"train", "model", "data"}
    return [
        problem
        for check, sections in _CHECKS
        if absent.isdisjoint(sections)
        for problem in check(*(getattr(job, section) for section in sections))
    ]


def _degrees(p: ParallelSpec) -> ParallelDegrees:
    return ParallelDegrees(pp=p.pp, dp_replicate=p.dp_replicate, dp_shard=p.dp_shard, cp=p.cp, tp=p.tp)


def _default_zero(p: ParallelSpec) -> int:
    if p.dp_shard == 1:
        return 0
    # Under pp every microbatch would gather the parameters again; keeping them is the usual choice.
    return 3 if p.pp == 1 else 1


def _virtual_stages(p: ParallelSpec) -> int:
    return p.virtual_stages or (_VIRTUAL[p.schedule] if p.pp > 1 else 1)


def _grad_accum(p: ParallelSpec, train: TrainSpec) -> int:
    """Microbatches a step and data rank; 0 when gbs does not come out even."""
    if train.gbs is None:
        return p.microbatches or p.pp
    count, rest = divmod(train.gbs, train.mbs * _degrees(p).dp)
    return 0 if rest else count


def _check_ranks(p: ParallelSpec, resources: ResourcesSpec, command: list[str] | None) -> list[SpecProblem]:
    world, per_node, nodes = _degrees(p).world_size, resources.ranks_per_node, resources.nodes
    if command is not None and world == 1:
        return []
    layout = f"{_degrees(p)} is {world} ranks" if world > 1 else "no degree is above 1, that is 1 rank"
    if per_node is None and world % nodes:
        count = f"{world} rank{'s' * (world > 1)}"
        text = f"{nodes} nodes cannot share {count} evenly ({layout}); use {_divisors(world)}"
        return [SpecProblem("resources.nodes", text)]
    if per_node is None or per_node * nodes == world:
        return []
    text = (
        f"{layout}, but resources asks for nodes {nodes} × ranks_per_node {per_node} = {nodes * per_node};"
        " change a degree, or leave out ranks_per_node"
    )
    return [SpecProblem("parallel", text)]


def _check_gpus(p: ParallelSpec, resources: ResourcesSpec, device: str) -> list[SpecProblem]:
    per_node = resources.ranks_per_node or max(1, _degrees(p).world_size // resources.nodes)
    if device != "cuda" or resources.gpus_per_node is None or resources.gpus_per_node >= per_node:
        return []
    text = (
        f"{resources.gpus_per_node} is less than the {per_node} ranks on each node, and device cuda gives"
        f" each a GPU of its own; use {per_node} or more, or more nodes"
    )
    return [SpecProblem("resources.gpus_per_node", text)]


def _check_placement(resources: ResourcesSpec) -> list[SpecProblem]:
    problems = []
    policy, pinned = resources.placement, set(expand_hosts(resources.nodelist or ""))
    if policy == "pin" and not pinned:
        problems.append(
            SpecProblem("resources.nodelist", "is missing; placement pin needs it, such as n[01-04]")
        )
    if policy != "pin" and pinned:
        text = f"needs placement pin, which is {policy}; write placement: pin, or leave the list out"
        problems.append(SpecProblem("resources.nodelist", text))
    both = sorted(pinned.intersection(expand_hosts(resources.exclude or "")))
    if both:
        text = f"{fold_hosts(both)} stands in exclude too; leave it in one of the two"
        problems.append(SpecProblem("resources.nodelist", text))
    for key in ("switches", "segment"):
        if getattr(resources, key) is not None and policy != "pack":
            text = f"needs placement pack, which is {policy}; leave one of the two out"
            problems.append(SpecProblem(f"resources.{key}", text))
    if resources.topo_exclusive and resources.exclusive is False:
        text = "true keeps every other job away, but exclusive is false; leave one of the two out"
        problems.append(SpecProblem("resources.topo_exclusive", text))
    return problems or _check_placement_sizes(resources)


def _check_placement_sizes(resources: ResourcesSpec) -> list[SpecProblem]:
    nodes = resources.nodes + resources.spares
    problems = []
    if resources.switches is not None and resources.switches > nodes:
        text = f"{resources.switches} is more than the job has nodes; use at most {nodes}"
        problems.append(SpecProblem("resources.switches", text))
    if resources.segment is not None and nodes % resources.segment:
        text = f"{resources.segment} does not divide the {nodes} nodes; use {_divisors(nodes)}"
        problems.append(SpecProblem("resources.segment", text))
    return problems


def _check_secrets(env: dict[str, str], secrets: dict[str, str]) -> list[SpecProblem]:
    text = "stands in env too; leave it in one of the two"
    return [SpecProblem(f"secrets.{name}", text) for name in secrets if name in env]


def _check_zero(p: ParallelSpec) -> list[SpecProblem]:
    if p.zero == 0 and p.dp_shard > 1:
        text = f"0 shards nothing, but dp_shard is {p.dp_shard}; use dp_replicate instead, or zero 1, 2 or 3"
        return [SpecProblem("parallel.zero", text)]
    if p.zero and p.dp_shard == 1:
        text = f"{p.zero} needs dp_shard above 1, which is 1; raise dp_shard, or leave zero out"
        return [SpecProblem("parallel.zero", text)]
    return []


def _check_model(model: ModelSpec) -> list[SpecProblem]:
    problems = []
    limits = dict.fromkeys(("vocab", "hidden", "ffn", "heads", "kv_heads", "head_dim", "context"), MAX_WIDTH)
    for name, limit in (limits | {"layers": MAX_LAYERS}).items():
        if getattr(model, name) > limit:
            problems.append(SpecProblem(f"model.{name}", f"must be at most {limit}"))
    if model.heads % model.kv_heads:
        text = f"{model.kv_heads} does not divide heads {model.heads}; use one of {_divisors(model.heads)}"
        problems.append(SpecProblem("model.kv_heads", text))
    if model.head_dim % 2:
        text = f"{model.head_dim} is odd; rotary positions need an even width"
        problems.append(SpecProblem("model.head_dim", text))
    return problems


def _check_seq_len(model: ModelSpec, data: DataSpec) -> list[SpecProblem]:
    if data.seq_len <= model.context:
        return []
    text = f"{data.seq_len} is longer than model.context {model.context}; use at most {model.context}"
    return [SpecProblem("data.seq_len", text)]


def _check_tp(p: ParallelSpec, model: ModelSpec, data: DataSpec) -> list[SpecProblem]:
    sizes = {
        f"model.{name}": getattr(model, name) for name in ("heads", "kv_heads", "hidden", "ffn", "vocab")
    }
    sizes["data.seq_len"] = data.seq_len  # sequence parallel cuts it between the blocks
    odd = [f"{name} {size}" for name, size in sizes.items() if size % p.tp]
    if not odd:
        return []
    return [
        SpecProblem(
            "parallel.tp", f"{p.tp} does not divide {', '.join(odd)}; use {_divisors(gcd(*sizes.values()))}"
        )
    ]


def _check_layers(p: ParallelSpec, model: ModelSpec) -> list[SpecProblem]:
    virtual = _virtual_stages(p)
    if p.pp * virtual <= model.layers:
        return []
    stages = f"pp {p.pp} × virtual_stages {virtual} = {p.pp * virtual}" if virtual > 1 else f"pp {p.pp}"
    text = f"{stages} stages need as many layers, but the model has {model.layers}; use fewer stages"
    return [SpecProblem("parallel.pp", text)]


def _check_batch(p: ParallelSpec, train: TrainSpec) -> list[SpecProblem]:
    if train.gbs is None:
        return []
    dp = _degrees(p).dp
    unit, count = train.mbs * dp, _grad_accum(p, train)
    if not count:
        nearest = max(1, (train.gbs + unit // 2) // unit) * unit
        text = (
            f"{train.gbs} is not a multiple of mbs {train.mbs} × dp {dp} = {unit}; the nearest is {nearest}"
        )
        return [SpecProblem("train.gbs", text)]
    if p.microbatches not in (None, count):
        text = (
            f"{p.microbatches} contradicts train.gbs {train.gbs} = mbs {train.mbs} × dp {dp} × {count};"
            f" use {count}, or leave one of the two out"
        )
        return [SpecProblem("parallel.microbatches", text)]
    return []


def _check_virtual_stages(p: ParallelSpec) -> list[SpecProblem]:
    virtual = _virtual_stages(p)
    if p.pp == 1:
        suits, allowed = virtual == 1, "1 under pp 1"
    elif p.schedule == "interleaved":
        suits, allowed = virtual > 1, "2 or more for interleaved"
    else:
        suits, allowed = virtual == _VIRTUAL[p.schedule], f"{_VIRTUAL[p.schedule]} for {p.schedule}"
    return [] if suits else [SpecProblem("parallel.virtual_stages", f"must be {allowed}, not {virtual}")]


def _check_microbatches(p: ParallelSpec, train: TrainSpec) -> list[SpecProblem]:
    count, schedule = _grad_accum(p, train), p.schedule
    if count == 0 or schedule == "gpipe":
        return []
    if count < p.pp:
        text = f"{schedule} needs at least pp {p.pp} microbatches a step, there are {count}"
    elif count != next_even_rounds(schedule, p.pp, count):
        text = f"interleaved cannot cut {count} microbatches into equal rounds; use a multiple of pp {p.pp}"
    else:
        return []
    return [SpecProblem("parallel.schedule", f"{text}; change train.gbs, train.mbs or parallel.microbatches")]


def next_even_rounds(schedule: PipelineSchedule, pp: int, count: int) -> int:
    """The next number of microbatches, from `count` >= pp on, that the schedule can cut into equal rounds."""
    while schedule == "interleaved" and count % (count // pp):
        count += 1
    return count


def _check_zero_bubble(p: ParallelSpec, train: TrainSpec) -> list[SpecProblem]:
    if p.schedule != "zero_bubble" or p.pp == 1:
        return []
    problems = []
    if train.recompute != "none":
        text = (
            f"{train.recompute} under zero_bubble would run every block's forward twice more (its backward"
            " is split in two); use recompute none, or another schedule"
        )
        problems.append(SpecProblem("train.recompute", text))
    if train.compile:
        text = "a compiled block cannot split its backward as zero_bubble does; use another schedule"
        problems.append(SpecProblem("train.compile", text))
    if (p.zero if p.zero is not None else 0) >= 2:
        text = (
            f"{p.zero} reduces gradients after every whole backward, which zero_bubble splits in two;"
            " use zero 1, or another schedule"
        )
        problems.append(SpecProblem("parallel.zero", text))
    return problems


def _check_steps(p: ParallelSpec, train: TrainSpec) -> list[SpecProblem]:
    problems = []
    if train.warmup > train.steps:
        text = f"{train.warmup} is more than train.steps {train.steps}; use at most {train.steps}"
        problems.append(SpecProblem("train.warmup", text))
    if train.profile is not None:
        if train.profile.start > train.steps:
            text = f"{train.profile.start} comes after the last step {train.steps}; start earlier"
            problems.append(SpecProblem("train.profile.start", text))
        world = _degrees(p).world_size
        if max(train.profile.ranks) >= world:
            text = f"{max(train.profile.ranks)} is not a rank of this job; use 0 to {world - 1}"
            problems.append(SpecProblem("train.profile.ranks", text))
    return problems


def _check_saves(checkpoint: CheckpointSpec, train: TrainSpec) -> list[SpecProblem]:
    return check_checkpoint(checkpoint, train.steps)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)


_CHECKS: tuple[tuple[Callable[..., list[SpecProblem]], tuple[str, ...]], ...] = (
    (_check_ranks, ("parallel", "resources", "command")),
    (_check_gpus, ("parallel", "resources", "device")),
    (_check_placement, ("resources",)),
    (_check_secrets, ("env", "secrets")),
    (_check_zero, ("parallel",)),
    (_check_model, ("model",)),
    (_check_seq_len, ("model", "data")),
    (_check_tp, ("parallel", "model", "data")),
    (_check_layers, ("parallel", "model")),
    (_check_batch, ("parallel", "train")),
    (_check_virtual_stages, ("parallel",)),
    (_check_microbatches, ("parallel", "train")),
    (_check_zero_bubble, ("parallel", "train")),
    (_check_steps, ("parallel", "train")),
    (_check_saves, ("checkpoint", "train")),
    (check_spare_replicas, ("checkpoint", "resources", "elastic")),
    (check_elastic, ("elastic", "parallel", "command")),
    (check_times, ("resources", "retry", "watch", "checkpoint")),
)
