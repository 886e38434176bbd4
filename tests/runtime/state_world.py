"""Saves and loads random states in a world of ranks: `state_world.py DIRECTORY FIRST COUNT`; rank 0 tells.

Every state comes back equal, or is refused by a UsageError; through memory and at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hpcrun
from hpcrun.errors import UsageError
from hpcrun.launcher_world import detect_world
from hpcrun.runtime.connect import connect_ranks
from hpcrun.runtime.control import Control
from tests.runtime.random_states import Maker, difference, facts


def tell_of(saves: Any, step: int, seed: int, rank: int, mesh: Any) -> str:
    """What became of one state on this rank: equal, refused, or how it is different."""
    made, fresh = (Maker(seed, rank, mesh, is_fresh=is_fresh) for is_fresh in (False, True))
    state, other = made.state(), fresh.state()
    try:
        before = facts(state)
    except (RuntimeError, NotImplementedError):
        before = None  # of a tensor that cannot even be copied
    try:
        saves.save(step, state, wait=True)
        if saves.load(other) != step:
            return "different: another step"
    except UsageError as error:
        if not made.may_refuse and "shares its memory" not in str(error):
            return f"different: refused for {error}"
        return f"refused: {error}"
    found = difference(before, facts(other)) if before is not None else "what cannot be copied was saved"
    return f"different: {found}" if found else "equal"


def tell(folder: Path, control: Control, numbers: range, mesh: Any) -> list[Any]:
    """All states with both kinds of saves: [mode, number, what became of it on each rank]."""
    told = []
    for memory in (0, 2):
        with hpcrun.Checkpointer(folder / f"memory-{memory}", memory=memory, keep=1) as saves:
            for step, number in enumerate(numbers, 1):
                told.append(
                    [memory, number, control.allgather(tell_of(saves, step, number, control.rank, mesh))]
                )
    return told


def main(directory: str, first: str, count: str) -> None:
    """In the world that this process belongs to."""
    torch.set_num_threads(1)
    control = connect_ranks(detect_world(os.environ))
    mesh = None
    if control.size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=control.store(), rank=control.rank, world_size=control.size)
        mesh = init_device_mesh("cpu", (control.size,))
    told = tell(Path(directory), control, range(int(first), int(first) + int(count)), mesh)
    control.barrier()
    if control.rank == 0:
        print(json.dumps(told))
    if control.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
