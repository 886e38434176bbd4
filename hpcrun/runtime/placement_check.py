"""Every rank looks where it really stands, and compares that with where it was to stand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from hpcrun.errors import SiteError
from hpcrun.fabric.node_topology import format_cpu_list, parse_cpu_list
from hpcrun.runtime.control import Control
from hpcrun.runtime.device import Device, bare_uuid
from hpcrun.specs.placement import Placement, read_placement
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt

_MAX_REPORTED = 8


def check_rank_placement(
    control: Control, attempt: Attempt, coordinate: dict[str, int], device: Device | None = None
) -> None:
    """SiteError, on every rank, with both columns where what the ranks see differs from placement.json.

    Seen are the host's name, the place among the ranks that have the same one, the coordinate in torch's mesh
    (of the axes that are wider than one rank), the CPUs that the rank has come up with and has now, and the
    UUID of its GPU. Without a placement, in a world that somebody else has started, there is nothing to
    compare with. What a launcher or a container may have decided is told, as is what costs speed alone.
    """
    found = read_placement(attempt.placement)
    if found is None:
        return
    placement, mesh = found
    mine = read_json(attempt.rank_record(control.rank)) or {}
    seen: dict[str, Any] = {"node": _short_host_name(os.uname().nodename), "local_rank": control.local_rank}
    seen |= {"mesh": coordinate, "shared": control.shared_rank()}
    seen |= {"cpus": mine.get("binding", {}), "now": format_cpu_list(os.sched_getaffinity(0))}
    seen |= {"uuid": device.uuid if device else None, "uuids": list(device.visible) if device else []}
    everyone = control.allgather(seen)
    lines: list[str] = []
    told: list[str] = []
    for rank, (view, local) in enumerate(zip(everyone, placement.local_ranks(), strict=True)):
        wanted: dict[str, Any] = {"node": _short_host_name(placement.ranks[rank]), "local_rank": local}
        wanted["mesh"] = {axis: mesh[rank][axis] for axis in view["mesh"]} if mesh else view["mesh"]
        for what, value in wanted.items():
            if view[what] != value:
                lines.append(_line(rank, what, value, view[what]))
        binding = placement.binding(rank)
        if binding is not None:
            is_ours = placement.bound_by == "rank" and "refused" not in view["cpus"]
            (lines if is_ours else told).extend(_cpus(rank, binding.cpus, view))
            for text in _gpu(rank, binding.uuid, view):
                (lines if _sees_assigned_gpus(placement, everyone, placement.ranks[rank]) else told).append(
                    text
                )
    apart = [rank for rank, view in enumerate(everyone) if view["shared"] not in (None, view["local_rank"])]
    if apart:
        told.insert(
            0,
            "the MPI library does not see which ranks share memory, so its messages inside a node go over the"
            " network; Slurm's pmi2 tells it wrongly where the order of ranks is given",
        )
    if control.rank == 0:
        for text in told[:_MAX_REPORTED]:
            sys.stderr.write(f"hpcrun: {text}\n")
    if lines:
        more = f" and {len(lines) - _MAX_REPORTED} more" if len(lines) > _MAX_REPORTED else ""
        raise SiteError(
            f"the ranks do not stand where {attempt.placement} says:"
            f" {'; '.join(lines[:_MAX_REPORTED])}{more}; the launcher has"
            " put or bound them otherwise: see mpi.launcher and mpi.pmi in the profile, and what in the job's"
            " environment binds processes"
        )


def _line(rank: int, what: str, wanted: object, seen: object) -> str:
    return f"rank {rank}: {what} is to be {wanted}, is {seen}"


def _cpus(rank: int, wanted: str, view: dict[str, Any]) -> Iterator[str]:
    """Where it came up without some of the wanted ones, or uses others now; a library may use fewer."""
    placed, before = set(parse_cpu_list(wanted)), view["cpus"].get("before")
    if not placed or before is None:
        return
    if not placed <= set(parse_cpu_list(before)):
        yield _line(rank, "cpus", wanted, before)
    elif not set(parse_cpu_list(view["now"])) <= placed:
        yield _line(rank, "cpus", wanted, view["now"])


def _gpu(rank: int, wanted: str | None, view: dict[str, Any]) -> Iterator[str]:
    if wanted is not None and view["uuid"] is not None and view["uuid"] != bare_uuid(wanted):
        yield _line(rank, "GPU", bare_uuid(wanted), view["uuid"])


def _sees_assigned_gpus(placement: Placement, everyone: list[dict[str, Any]], node: str) -> bool:
    """Whether each rank of a node can see the GPU that it is to have: else somebody else gives them out."""
    ranks = placement.on(node)
    wanted = {rank: one.uuid for rank in ranks if (one := placement.binding(rank)) is not None}
    return all(uuid is None or bare_uuid(uuid) in everyone[rank]["uuids"] for rank, uuid in wanted.items())


def assigned_gpu(attempt: Attempt, rank: int) -> str | None:
    """The UUID of the GPU that a rank is to have; None where that was not decided."""
    found = read_placement(attempt.placement)
    binding = found[0].binding(rank) if found else None
    return binding.uuid if binding else None


def _short_host_name(host: str) -> str:
    return host.partition(".")[0]
