"""Which CPUs, GPU and adapter each rank uses: decided once, by what the nodes say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpcrun.fabric.inventory import NodeInventory, gpus_visible_to_job
from hpcrun.hostlist import fold_hosts
from hpcrun.launch.rank_command import RANK_PREFIX_VARIABLE, SRUN_OPTIONS_VARIABLE
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.fields import set_variables
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Binding, BoundBy, Placement

_HYDRA_BIND_VARIABLES = ("HYDRA_BIND", "HYDRA_TOPOLIB")
"""Variables of a job that have Hydra bind the ranks; those of the shell do not reach it."""


@dataclass(frozen=True)
class BindingInputs:
    """What decides, besides the nodes themselves, which part of a node a rank can have."""

    bound_by: BoundBy = "rank"
    uses_gpus: bool = True
    may_assign_gpus: bool = True
    """Not Slurm's to give out rank by rank."""
    gpus_requested: int | None = None
    in_slurm: bool = False
    environ: Mapping[str, str] | None = None
    """The ranks', for what it says of GPUs; None: Slurm makes it."""
    hcas: tuple[str, ...] = ()


def binding_inputs(
    spec: JobSpec, cluster: ClusterSpec | None, launcher: str, environ: Mapping[str, str], *, in_slurm: bool
) -> BindingInputs:
    """Those of a job whose ranks a launcher starts with this environment."""
    bound_by: BoundBy = "rank"
    if launcher == "srun" and spec.resources.cpus_per_rank:
        bound_by = "launcher"
    elif launcher in ("srun", "mpirun") or _may_be_bound(spec, environ):
        bound_by = "either"
    gives_out = cluster is not None and cluster.gpus.request == "gpus-per-task"
    binds = launcher == "srun" and cluster is not None and cluster.gpus.bind not in (None, "none")
    return BindingInputs(
        bound_by,
        uses_gpus=spec.command is not None or spec.device != "cpu",
        may_assign_gpus=not (gives_out or binds),
        gpus_requested=spec.resources.gpus_per_node,
        in_slurm=in_slurm,
        environ=None if launcher == "srun" else dict(environ) | set_variables(spec.env),
        hcas=tuple(cluster.network.hcas) if cluster else (),
    )


def _may_be_bound(spec: JobSpec, environ: Mapping[str, str]) -> bool:
    """Whether words before the ranks, such as a container's, or Hydra by the job's wish may bind them."""
    before = any(environ.get(name) for name in (RANK_PREFIX_VARIABLE, SRUN_OPTIONS_VARIABLE))
    return before or any(name.startswith(_HYDRA_BIND_VARIABLES) for name in set_variables(spec.env))


def assign_devices(
    placement: Placement, inventories: Mapping[str, NodeInventory], around: BindingInputs
) -> tuple[Placement, list[str]]:
    """The placement with what every rank uses of its node, and notes on what is odd or not known there."""
    bindings: dict[int, Binding] = {}
    notes: dict[str, list[str]] = {}
    for node in placement.nodes:
        if node not in inventories:
            notes.setdefault("has not said what is inside it; its ranks are not bound", []).append(node)
            continue
        ranks = placement.on(node)
        node_bindings, odd = _assign_on_node(inventories[node], len(ranks), around)
        bindings.update(zip(ranks, node_bindings, strict=True))
        for text in odd:
            notes.setdefault(text, []).append(node)
    every = tuple(bindings.get(rank) for rank in range(len(placement.ranks)))
    lines = [f"{fold_hosts(nodes)}: {text}" for text, nodes in notes.items()]
    return replace(placement, bindings=every, bound_by=around.bound_by), lines


def _assign_on_node(
    node: NodeInventory, ranks: int, around: BindingInputs
) -> tuple[list[Binding], list[str]]:
    there, notes = node.inside.gpus, []
    gpus: list[int] | None = []
    if around.uses_gpus and there and not around.may_assign_gpus:
        gpus = None
    elif around.uses_gpus and there:
        gpus = gpus_visible_to_job(
            there, around.environ or {}, around.gpus_requested, in_slurm=around.in_slurm
        )
        if gpus is None:
            notes.append(f"which of its {len(there)} GPUs the job has is not known; ranks keep to NUMA nodes")
    bindings = list(node.inside.bind(ranks, gpus=gpus or (), allowed=node.cpus, hcas=around.hcas))
    if gpus is None:
        bindings = [replace(binding, nic=None) for binding in bindings]
    used = {binding.gpu for binding in bindings}
    far = [gpu for gpu in node.inside.gpus_far_from_cpus(node.cpus) if gpu in used]
    notes += [f"GPU {gpu}: none of the job's CPUs is near it; ask for whole nodes" for gpu in far]
    if around.bound_by == "launcher":
        bindings = [replace(binding, cpus="") for binding in bindings]
    return bindings, notes
