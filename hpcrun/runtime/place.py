"""Every rank looks where it really stands, and compares that with where it was to stand."""

from __future__ import annotations

import os
from typing import Any

from hpcrun.errors import SiteError
from hpcrun.runtime.control import Control
from hpcrun.specs.placement import read_placement
from hpcrun.specs.rundir import Attempt

_TOLD = 8


def check_places(control: Control, attempt: Attempt, coordinate: dict[str, int]) -> None:
    """SiteError, on every rank, with both columns where what the ranks see differs from placement.json.

    Seen are the host's name, the place among the ranks that share its memory, and the coordinate in torch's
    mesh (of the axes that are wider than one rank). Without a placement, in a world that somebody else has
    started, there is nothing to compare with.
    """
    found = read_placement(attempt.placement)
    if found is None:
        return
    placement, mesh = found
    seen: dict[str, Any] = {"node": _short(os.uname().nodename), "local_rank": control.shared_rank()}
    seen["mesh"] = coordinate
    everyone = control.allgather(seen)
    lines = []
    for rank, (view, local) in enumerate(zip(everyone, placement.local_ranks(), strict=True)):
        wanted: dict[str, Any] = {"node": _short(placement.ranks[rank]), "local_rank": local}
        wanted["mesh"] = {axis: mesh[rank][axis] for axis in view["mesh"]} if mesh else view["mesh"]
        for what, value in wanted.items():
            # Who shares memory with whom is not known in every world.
            if view[what] != value and view[what] is not None:
                lines.append(f"rank {rank}: {what} is to be {value}, is {view[what]}")
    if lines:
        more = f" and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
        raise SiteError(
            f"the ranks do not stand where {attempt.placement} says: {'; '.join(lines[:_TOLD])}{more};"
            " the launcher has put them elsewhere: see mpi.launcher and mpi.pmi in the profile"
        )


def _short(host: str) -> str:
    return host.partition(".")[0]
