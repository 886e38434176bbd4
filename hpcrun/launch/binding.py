"""A rank keeps to the CPUs near to its GPU, or to its share of the NUMA nodes, from its first moment on."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.fabric.host import fold_cpus, inside, parse_cpus
from hpcrun.specs.placement import Placement


def bind(placement: Placement, rank: int, root: Path = Path("/")) -> dict[str, Any]:
    """Bind this process as a rank of a placement; what was chosen, for the rank's record.

    Nothing is changed where the launcher has bound the rank already, to less than its neighbours have, or
    where the node has one NUMA node and no GPU.
    """
    allowed = os.sched_getaffinity(0)
    host = inside(root)
    local_ranks = len(placement.on(placement.ranks[rank]))
    local_rank = placement.local_ranks()[rank]
    unbound: dict[str, Any] = {"cpus": fold_cpus(allowed)}
    if local_ranks > 1 and len(allowed) * local_ranks <= (os.cpu_count() or 1):
        return unbound
    if not host.gpus and len(host.numa) < 2:
        return unbound
    chosen = host.bind(local_ranks, allowed=allowed)[local_rank]
    cpus = set(parse_cpus(chosen.cpus)) & allowed
    if cpus:
        os.sched_setaffinity(0, cpus)
    far = host.far_from_its_cpus(allowed)
    notes = [f"GPU {one}: none of the job's CPUs is near it; ask for whole nodes" for one in far]
    return {**asdict(chosen), "cpus": fold_cpus(cpus or allowed), "notes": notes}
