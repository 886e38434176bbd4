"""The control for the world that this process was started in."""

from __future__ import annotations

from hpcrun.launcher_world import World
from hpcrun.runtime.control import Control
from hpcrun.runtime.mpi_control import MPIControl
from hpcrun.runtime.store_control import StoreControl


def connect_ranks(world: World | None) -> Control:
    """The control for the world this process was started in (a lone process is a world of one)."""
    world = world or World(kind="single", rank=0, size=1, local_rank=0, local_size=1)
    if world.kind == "torchrun":
        return StoreControl(world)
    return MPIControl(world)
