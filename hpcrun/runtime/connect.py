"""Chooses how the ranks that this process belongs to agree: over MPI, over torch's store, or alone."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hpcrun.launcher_world import World, detect_world
from hpcrun.runtime.control import Control, LoneControl
from hpcrun.runtime.mpi_control import MPIControl
from hpcrun.runtime.store_control import StoreControl

_control_numbers = itertools.count()


def connect_ranks(world: World | None) -> Control:
    """Return the control of the world that this process was started in; a lone process is a world of one."""
    world = world or World(kind="single", rank=0, size=1, local_rank=0, local_size=1)
    return StoreControl(world) if world.kind == "torchrun" else MPIControl(world)


def open_control(environ: Mapping[str, str]) -> Control:
    """Return a control for the ranks of a script, which may use MPI or torch's process groups itself."""
    number = next(_control_numbers)
    world = detect_world(environ)
    # A launcher that sets an address for torch's ranks may have started them without MPI.
    by_mpi = world is not None and world.kind != "torchrun" and "MASTER_ADDR" not in environ
    if world is not None and by_mpi and world.size > 1 and importlib.util.find_spec("mpi4py"):
        return MPIControl(world, private=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        size, rank = dist.get_world_size(), dist.get_rank()
        group = World("torchrun", rank, size, None, None)
        return StoreControl(group, store=_get_default_store(), prefix=f"hpcrun-saves-{number}")
    if world is not None and world.size > 1:
        return StoreControl(world, prefix=f"hpcrun-saves-{number}")
    return LoneControl()
