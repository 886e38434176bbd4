"""The environment of an attempt's ranks: inherited, chosen by us, said by the job, and who they are."""

from __future__ import annotations

import os
from collections.abc import Callable

from hpcrun.launch.settings import settle
from hpcrun.launch.shim import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from hpcrun.launch.site import Site, with_our_package
from hpcrun.launch.watch.probe import NCCL_PIPE, NCCL_TRACE
from hpcrun.launch.watch.progress import SOCKET_VARIABLE, STACKS_VARIABLE
from hpcrun.launch.world import without_world
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.secrets import read_secrets

_FIRST_PORT, _PORTS = 20000, 10000
"""Below those that the kernel gives out by itself (from 32768 on)."""


def environment_of_ranks(
    attempt: Attempt, spec: JobSpec, site: Site, placement: Placement, note: Callable[[str], None]
) -> dict[str, str]:
    """Everything that a rank finds in its environment; what the job says is stronger than what we choose."""
    environ = with_our_package(without_world(os.environ))
    cores = max(1, len(os.sched_getaffinity(0)) // placement.per_node)
    environ.setdefault("OMP_NUM_THREADS", str(spec.resources.cpus_per_rank or cores))
    # Where torch's recorder of NCCL calls waits to be asked, and where it writes to.
    environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(attempt.stacks / NCCL_PIPE))
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(attempt.stacks / NCCL_TRACE))
    ours = settle(attempt, spec, site.cluster, placement, environ | spec.env, note)
    meeting = _meeting(attempt, site, placement) if spec.command is not None else {}
    marks = {RUN_ID_VARIABLE: attempt.run.id, ATTEMPT_VARIABLE: str(attempt.number)}
    # Nobody can take a name that nobody can guess.
    marks |= {SOCKET_VARIABLE: f"hpcrun-{os.urandom(12).hex()}", STACKS_VARIABLE: str(attempt.stacks)}
    return ours | environ | spec.env | meeting | read_secrets(spec.secrets) | marks


def _meeting(attempt: Attempt, site: Site, placement: Placement) -> dict[str, str]:
    """Where the ranks of a program meet."""
    number = site.allocation.job if site.allocation else os.getpid()
    port = _FIRST_PORT + (number * 7 + attempt.number) % _PORTS
    suffix = site.cluster.network.fabric_suffix if site.cluster else ""
    return {"MASTER_ADDR": f"{placement.ranks[0]}{suffix}", "MASTER_PORT": str(port)}
