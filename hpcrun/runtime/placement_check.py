"""Compares where each rank runs with its placement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hpcrun.errors import SiteError
from hpcrun.fabric.node_topology import format_cpu_list, parse_cpu_list
from hpcrun.runtime.control import Control
from hpcrun.runtime.device import Device, bare_uuid
from hpcrun.runtime.stderr_notes import write_stderr_line
from hpcrun.specs.placement import Placement, read_placement
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt

_MAX_REPORTED = 8


def check_rank_placement(
    control: Control, attempt: Attempt, coordinate: dict[str, int], device: Device | None = None
) -> None:
    """SiteError on every rank, with planned and actual values, where ranks differ from placement.json.

    Compares the host name, the place among the ranks of a host, the coordinate in torch's mesh (of axes wider
    than one rank), the CPUs at the start and now, and the UUID of the GPU. A world that another launcher has
    started has no placement to compare with. What that launcher or a container may have decided, and what
    only costs speed, is a note on stderr.
    """
    record = read_placement(attempt.placement)
    if record is None:
        return
    placement, mesh = record
    mine = read_json(attempt.rank_record(control.rank)) or {}
    seen: dict[str, Any] = {"node": _short_host_name(os.uname().nodename), "local_rank": control.local_rank}
    seen |= {"mesh": coordinate, "shared": control.shared_rank()}
    seen |= {"cpus": mine.get("binding", {}), "now": format_cpu_list(os.sched_getaffinity(0))}
    seen |= {"uuid": device.uuid if device else None, "uuids": list(device.visible) if device else []}
    everyone = control.allgather(seen)
    lines: list[str] = []
    notes: list[str] = []
    for rank, (view, local) in enumerate(zip(everyone, placement.local_ranks(), strict=True)):
        planned: dict[str, Any] = {"node": _short_host_name(placement.ranks[rank]), "local_rank": local}
        planned["mesh"] = {axis: mesh[rank][axis] for axis in view["mesh"]} if mesh else view["mesh"]
        for what, value in planned.items():
            if view[what] != value:
                lines.append(_line(rank, what, value, view[what]))
        binding = placement.binding(rank)
        if binding is not None:
            is_ours = placement.bound_by == "rank" and "refused" not in view["cpus"]
            (lines if is_ours else notes).extend(_cpus(rank, binding.cpus, view))
            for text in _gpu(rank, binding.uuid, view):
                (lines if _sees_assigned_gpus(placement, everyone, placement.ranks[rank]) else notes).append(
                    text
                )
    apart = [rank for rank, view in enumerate(everyone) if view["shared"] not in (None, view["local_rank"])]
    if apart:
        notes.insert(
            0,
            "the MPI library does not see which ranks share memory, so its messages inside a node go over the"
            " network; Slurm's pmi2 tells it wrongly where the order of ranks is given",
        )
    if control.rank == 0:
        for text in notes[:_MAX_REPORTED]:
            write_stderr_line(text)
    if lines:
        rest = f" and {len(lines) - _MAX_REPORTED} more" if len(lines) > _MAX_REPORTED else ""
        raise SiteError(
            f"the ranks do not run where {attempt.placement} says:"
            f" {'; '.join(lines[:_MAX_REPORTED])}{rest}; the launcher has placed or bound them differently:"
            " see mpi.launcher and mpi.pmi in the profile, and what in the job's environment binds processes"
        )


def _line(rank: int, what: str, planned: object, seen: object) -> str:
    return f"rank {rank}: {what} should be {planned}, is {seen}"


def _cpus(rank: int, planned: str, view: dict[str, Any]) -> Iterator[str]:
    """Report CPUs that were missing at the start, or others in use now; a library may use fewer."""
    placed, before = set(parse_cpu_list(planned)), view["cpus"].get("before")
    if not placed or before is None:
        return
    if not placed <= set(parse_cpu_list(before)):
        yield _line(rank, "cpus", planned, before)
    elif not set(parse_cpu_list(view["now"])) <= placed:
        yield _line(rank, "cpus", planned, view["now"])


def _gpu(rank: int, planned: str | None, view: dict[str, Any]) -> Iterator[str]:
    if planned is not None and view["uuid"] is not None and view["uuid"] != bare_uuid(planned):
        yield _line(rank, "GPU", bare_uuid(planned), view["uuid"])


def _sees_assigned_gpus(placement: Placement, everyone: list[dict[str, Any]], node: str) -> bool:
    """Whether each rank of a node sees its assigned GPU; otherwise something else assigns them."""
    ranks = placement.on(node)
    uuids = {rank: binding.uuid for rank in ranks if (binding := placement.binding(rank)) is not None}
    return all(uuid is None or bare_uuid(uuid) in everyone[rank]["uuids"] for rank, uuid in uuids.items())


def assigned_gpu(attempt: Attempt, rank: int) -> str | None:
    """Return the UUID of the GPU assigned to a rank, or None."""
    record = read_placement(attempt.placement)
    binding = record[0].binding(rank) if record else None
    return binding.uuid if binding else None


def _short_host_name(host: str) -> str:
    return host.partition(".")[0]
