"""What one save of a job holds, on each node and altogether, and whether the memory of a node has room."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.checkpoint.parity.erasure import parity_memory_bytes
from hpcrun.checkpoint.parity.sets import ErasureSets
from hpcrun.formulas import layer_parameters, model_parameters
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.plan import Plan
from hpcrun.units import parse_memory

STATE_COPIES = 3
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


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a node, and what saves take of it; in bytes."""

    slots: SourcedValue
    parity: SourcedValue
    there: SourcedValue
    """That the job may use on a node."""

    @property
    def left(self) -> float | None:
        """For everything else; None where one of them is not known."""
        parts = (self.there.value, self.slots.value, self.parity.value)
        return None if None in parts else parts[0] - parts[1] - parts[2]  # type: ignore[operator]


def compute_save_sizes(spec: JobSpec, plan: Plan | None) -> SaveSizes:
    """By the formulas of the model and the layout; headers and hashes are a thousandth and left out.

    What several ranks hold is written once and shared out evenly among them, so that each rank of a pipeline
    rank's group writes as much; ranks stand on nodes in blocks.
    """
    if spec.model is None or plan is None:
        unknown = SourcedValue(None, "a program of one's own: what it saves is not known to us")
        return SaveSizes(unknown, unknown)
    width = (8 if spec.train.precision == "fp64" else 4) * STATE_COPIES
    whole = model_parameters(spec.model) * width
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
    return SaveSizes(SourcedValue(whole, words), SourcedValue(max(loads.values()), share))


def count_stage_parameters(spec: JobSpec, plan: Plan) -> list[int]:
    """Parameters that each pipeline rank's group holds, once."""
    model = spec.model
    assert model is not None
    embedding, sizes = model.vocab * model.hidden, []
    for pp_rank in range(plan.pp):
        total = 0
        for stage in plan.stages_of(pp_rank):
            first, end = plan.stage_layers[stage]
            total += (end - first) * layer_parameters(model)
            total += embedding if stage == 0 else 0
            if stage == plan.stages - 1:
                total += model.hidden + (0 if model.tied else embedding)
        sizes.append(total)
    return sizes


def compute_memory_budget(
    spec: JobSpec, cluster: ClusterSpec | None, sizes: SaveSizes, sets: ErasureSets | None
) -> MemoryBudget:
    """What the slots and the parity of a node take, against the memory that the job may use there."""
    wanted, node = spec.checkpoint.memory, sizes.node.value
    if not wanted:
        slots = SourcedValue(0.0, "checkpoint.memory: 0, so ranks write by themselves")
    else:
        source = f"checkpoint.memory: {wanted}, of what a node writes"
        slots = SourcedValue(None if node is None else wanted * node, source)
    return MemoryBudget(slots, _parity_bytes(sizes, sets), node_memory(spec, cluster))


def _parity_bytes(sizes: SaveSizes, sets: ErasureSets | None) -> SourcedValue:
    if sets is None or not sets.sets:
        return SourcedValue(0.0, "no parity")
    if sizes.node.value is None:
        return SourcedValue(None, sizes.node.source)
    node = int(sizes.node.value)
    most = max(
        parity_memory_bytes(node, len(nodes), k) for nodes, k in zip(sets.sets, sets.parity, strict=True)
    )
    words = f"{sets.scheme}: {most / max(node, 1):.0%} of what a node writes, for two saves of other nodes"
    return SourcedValue(float(most), words)


def node_memory(spec: JobSpec, cluster: ClusterSpec | None) -> SourcedValue:
    """The memory that a job may use on each node: what it asks for, else all that a node has."""
    resources = spec.resources
    if resources.mem is not None and (amount := parse_memory(resources.mem)) > 0:
        return SourcedValue(amount * 2.0**20, f"resources.mem: {resources.mem}")
    if cluster is None:
        return SourcedValue(None, "no profile, and the job asks for none (resources.mem)")
    name = resources.partition or cluster.default_partition
    partition = cluster.partitions.get(name) if name else None
    if partition is None or partition.mem_per_node is None:
        return SourcedValue(None, f"profile {cluster.name} has no mem_per_node for partition {name}")
    source = f"profile {cluster.name}: mem_per_node of {name}"
    return SourcedValue(parse_memory(partition.mem_per_node) * 2.0**20, source)
