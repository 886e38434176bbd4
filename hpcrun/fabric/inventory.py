"""A node's devices, and the CPUs that the job has there."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrun.fabric.node_topology import (
    Gpu,
    Nic,
    NodeTopology,
    format_cpu_list,
    gpu_nic_proximity,
    parse_cpu_list,
    read_node_topology,
)


@dataclass(frozen=True)
class NodeInventory:
    """A node's inside and the job's share of its CPUs; travels as JSON."""

    inside: NodeTopology
    cpus: frozenset[int]
    """Those that this process may run on: where Slurm confines the job, those of the job."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cpus": format_cpu_list(self.cpus),
            "numa": {str(node): cpus for node, cpus in self.inside.numa.items()},
            "gpus": [asdict(gpu) for gpu in self.inside.gpus],
            "nics": [asdict(nic) for nic in self.inside.nics],
        }


def read_node_inventory(root: Path = Path("/")) -> NodeInventory:
    """Look at this node, or at the captured tree of one; the CPUs are those of this process."""
    return NodeInventory(read_node_topology(root), frozenset(os.sched_getaffinity(0)))


def try_read_node_inventory(limit_s: float = 3.0) -> NodeInventory | None:
    """The inventory of this node; None when it takes too long: a stuck driver blocks its readers."""
    inventories: list[NodeInventory] = []
    look = threading.Thread(
        target=lambda: inventories.append(read_node_inventory()), name="inventory", daemon=True
    )
    look.start()
    look.join(limit_s)
    return inventories[0] if inventories else None


def parse_node_inventory(values: Any) -> NodeInventory | None:
    """What `as_json` has made; None for what is no inventory of this version."""
    try:
        gpus = [Gpu(**{**gpu, "path": tuple(gpu["path"])}) for gpu in values["gpus"]]
        nics = [
            Nic(**{**nic, "path": tuple(nic["path"]), "interfaces": tuple(nic["interfaces"])})
            for nic in values["nics"]
        ]
        numa = {int(node): str(cpus) for node, cpus in values["numa"].items()}
        cpus = frozenset(parse_cpu_list(values["cpus"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return NodeInventory(NodeTopology(tuple(gpus), tuple(nics), numa, gpu_nic_proximity(gpus, nics)), cpus)


def gpus_visible_to_job(
    there: Sequence[Gpu], environ: Mapping[str, str], requested: int | None, *, in_slurm: bool
) -> list[int] | None:
    """The GPUs, by index, that a job's ranks see on a node, in their order; None where that is not known.

    An index in CUDA_VISIBLE_DEVICES counts what Slurm's cgroup leaves over, so in a job that has a part of a
    node only a UUID says which GPU is meant. MIG instances are no GPUs of the PCI bus.
    """
    count, visible = len(there), environ.get("CUDA_VISIBLE_DEVICES")
    if not there or visible in ("", "-1"):
        return []
    if visible is None or visible == "NoDevFiles":
        return list(range(count)) if requested == count or not in_slurm else None
    words = [word.strip() for word in visible.split(",")]
    if all(word.isascii() and word.isdigit() for word in words):
        listed = [int(word) for word in words]
        whole = sorted(listed) == list(range(count))
        within = len(set(listed)) == len(listed) and max(listed) < count
        return listed if whole or (within and not in_slurm) else None
    # CUDA takes any beginning of a UUID that only one GPU has.
    named = [[gpu.index for gpu in there if gpu.uuid and gpu.uuid.startswith(word)] for word in words]
    is_clear = all(
        word.startswith("GPU-") and len(matches) == 1 for word, matches in zip(words, named, strict=True)
    )
    return [matches[0] for matches in named] if is_clear else None
