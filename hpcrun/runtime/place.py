"""Every rank looks where it really stands, and compares that with where it was to stand."""

from __future__ import annotations

import os
import sys
from typing import Any

from hpcrun.errors import SiteError
from hpcrun.runtime.control import Control
from hpcrun.specs.placement import read_placement
from hpcrun.specs.rundir import Attempt

_TOLD = 8


def check_places(control: Control, attempt: Attempt, coordinate: dict[str, int]) -> None:
    """SiteError, on every rank, with both columns where what the ranks see differs from placement.json.

    Seen are the host's name, the place among the ranks that have the same one, and the coordinate in torch's
    mesh (of the axes that are wider than one rank). Without a placement, in a world that somebody else has
    started, there is nothing to compare with. That the MPI library does not see who shares memory costs speed
    and is told.
    """
    found = read_placement(attempt.placement)
    if found is None:
        return
    placement, mesh = found
    seen: dict[str, Any] = {"node": _short(os.uname().nodename), "local_rank": control.local_rank}
    seen |= {"mesh": coordinate, "shared": control.shared_rank()}
    everyone = control.allgather(seen)
    lines = []
    for rank, (view, local) in enumerate(zip(everyone, placement.local_ranks(), strict=True)):
        wanted: dict[str, Any] = {"node": _short(placement.ranks[rank]), "local_rank": local}
        wanted["mesh"] = {axis: mesh[rank][axis] for axis in view["mesh"]} if mesh else view["mesh"]
        for what, value in wanted.items():
            if view[what] != value:
                lines.append(f"rank {rank}: {what} is to be {value}, is {view[what]}")
    apart = [rank for rank, view in enumerate(everyone) if view["shared"] not in (None, view["local_rank"])]
    if apart and control.rank == 0:
        sys.stderr.write(
            "hpcrun: the MPI library does not see which ranks share memory, so its messages inside a node go"
            " over the network; Slurm's pmi2 tells it wrongly where the order of ranks is given\n"
        )
    if lines:
        more = f" and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
        raise SiteError(
            f"the ranks do not stand where {attempt.placement} says: {'; '.join(lines[:_TOLD])}{more};"
            " the launcher has put them elsewhere: see mpi.launcher and mpi.pmi in the profile"
        )


def _short(host: str) -> str:
    return host.partition(".")[0]
