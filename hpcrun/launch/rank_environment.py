"""The environment of an attempt's ranks: inherited, chosen by us, said by the job, and who they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from zlib import crc32

from hpcrun.errors import SiteError
from hpcrun.launch.agents.nodes import NodeQueries
from hpcrun.launch.comm_settings import choose_comm_settings
from hpcrun.launch.rendezvous import RendezvousPoint, RendezvousRequest
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.watch.hang_probe import NCCL_PIPE_PREFIX, NCCL_TRACE_PREFIX
from hpcrun.launch.watch.progress import PROGRESS_SOCKET_VARIABLE, STACKS_VARIABLE
from hpcrun.specs.cluster import NetworkSpec
from hpcrun.specs.fields import set_variables, unset_variables
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.secrets import read_secrets


def build_rank_environment(
    attempt: Attempt,
    spec: JobSpec,
    site: RunContext,
    placement: Placement,
    nodes: NodeQueries,
    note: Callable[[str], None],
) -> dict[str, str]:
    """Everything that a rank finds in its environment; what the job says is stronger than what we choose."""
    cores = max(1, len(os.sched_getaffinity(0)) // placement.per_node)
    usual = {
        "OMP_NUM_THREADS": str(spec.resources.cpus_per_rank or cores),
        # Where torch's recorder of NCCL calls waits to be asked, and where it writes to.
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(attempt.stacks / NCCL_PIPE_PREFIX),
        "TORCH_FR_DUMP_TEMP_FILE": str(attempt.stacks / NCCL_TRACE_PREFIX),
    }
    own, unset = set_variables(spec.env), unset_variables(spec.env)
    environ = {k: v for k, v in usual.items() if k not in unset} | site.inherited_environment(spec)
    points = _collect_rendezvous_points(attempt, spec, site, placement, nodes, note)
    interfaces = {node: point.interface for node, point in points.items() if point.interface}
    ours = choose_comm_settings(attempt, spec, site.cluster, placement, environ | own, note, interfaces)
    meeting = _master_address(points, placement, nodes) if spec.command is not None else {}
    marks = {RUN_ID_VARIABLE: attempt.run.run_id, RUN_DIR_VARIABLE: str(attempt.run.path)}
    marks[ATTEMPT_VARIABLE] = str(attempt.number)
    # Nobody can take a name that nobody can guess.
    marks |= {
        PROGRESS_SOCKET_VARIABLE: f"hpcrun-{os.urandom(12).hex()}",
        STACKS_VARIABLE: str(attempt.stacks),
    }
    return ours | environ | own | meeting | read_secrets(spec.secrets) | marks


def _collect_rendezvous_points(
    attempt: Attempt,
    spec: JobSpec,
    site: RunContext,
    placement: Placement,
    nodes: NodeQueries,
    note: Callable[[str], None],
) -> dict[str, RendezvousPoint]:
    """Where the nodes of an attempt are reached; nobody is asked where there is nothing to be known."""
    is_program = spec.command is not None
    if not is_program and len(placement.nodes) < 2:
        return {}
    network = site.cluster.network if site.cluster else NetworkSpec()
    # Another job, and another attempt whose connections are just closing, hardly try the same port first.
    seed = crc32(f"{attempt.run.id}/{attempt.number}".encode())
    points = nodes.resolve_rendezvous(
        RendezvousRequest(
            attempt.number,
            placement.nodes,
            network.interface,
            network.fabric_suffix,
            seed,
            wants_port=is_program,
        )
    )
    for node, point in points.items():
        for text in (*point.notes, *filter(None, (point.problem,))):
            note(text if text.startswith(node) else f"{node}: {text}")
    return points


def _master_address(
    points: Mapping[str, RendezvousPoint], placement: Placement, nodes: NodeQueries
) -> dict[str, str]:
    """Where the ranks of a program meet; where rank 0's node is lost meanwhile, nothing will be started."""
    first = placement.ranks[0]
    point = points.get(first)
    if point is None and first not in nodes.alive:
        return {}
    if point is None or point.problem:
        why = "it gave no answer" if point is None else point.problem
        raise SiteError(f"the ranks have no address and port to meet at on {first}: {why}")
    return {"MASTER_ADDR": point.address, "MASTER_PORT": str(point.port)}
