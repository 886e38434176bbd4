"""Ranks of tests/runtime/test_async_checkpoint_world.py: saves in one world, with a real worker.

Run as a program in a world of several ranks: `async_checkpoint_world.py DIRECTORY`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpcrun.checkpoint.compare import compare_generations
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.launcher_world import detect_world
from hpcrun.runtime.async_checkpoint import AsyncCheckpointer
from hpcrun.runtime.connect import connect_ranks
from hpcrun.runtime.control import Control
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.runtime.worker_endpoint import OwnWorker
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.metrics import metric_as_json
from hpcrun.specs.saves import SavedCheckpoint, resumable_checkpoints
from tests.runtime.save_world import Counted, empty_like, full, laid_out, same, shapes, wholes


class Desk:
    """What a scenario works with on each rank."""

    def __init__(self, root: Path, control: Control, **options: Any) -> None:
        self.root, self.control = root, control
        self.checkpoints = root / "checkpoints"
        spec = CheckpointSpec.model_validate({"memory": 2, **options})
        self.told: list[dict[str, Any]] = []
        tell = lambda metric: self.told.append(metric_as_json(metric))  # noqa: E731
        self.home = OwnWorker(root, spec, control, 1)
        self.direct = DirectCheckpointer(self.checkpoints, control, attempt=1, keep=9)
        self.saves = AsyncCheckpointer(spec, self.direct, control, self.home, tell)

    def saved(self, step: int) -> SavedCheckpoint:
        (found,) = [one for one in resumable_checkpoints(self.checkpoints) if one.step == step]
        return found

    def kinds(self) -> list[Any]:
        return [[one["kind"], one["step"]] for one in self.told if one["kind"] != "flush"]

    def signal(self, number: int) -> None:
        """To the worker, which the first rank has started."""
        child = self.home._child
        if child is not None:
            os.kill(child.pid, number)
            if number == signal.SIGKILL:
                child.wait()
        self.control.barrier()


def equal(root: Path, control: Control, mesh: DeviceMesh) -> Any:
    """The same bits as a save that all waited for: uneven pieces, none, and six rows over four ranks."""
    desk = Desk(root, control)
    whole = wholes() | {"model.six": torch.arange(6.0)}
    state = laid_out(whole, mesh, Shard(0))
    begun = desk.saves.save(1, 10, state)
    desk.saves.fence()
    desk.saves.settle()
    desk.direct.save(2, 20, state)
    found = []
    if control.rank == 0:
        with GenerationReader(desk.saved(1)) as one, GenerationReader(desk.saved(2)) as other:
            found = [one.name for one in compare_generations(one, other)] + list(one.damages())
    again = empty_like(whole, mesh, Shard(0))
    (root / "other").mkdir(exist_ok=True)
    if control.rank == 0:
        desk.saved(2).path.rename(root / "other" / "2")
    control.barrier()
    restored = DirectCheckpointer(desk.checkpoints, control, attempt=2, keep=1).restore(again, shapes(whole))
    desk.saves.close()
    return [begun, found, restored is not None and restored.step, same(full(again), whole)]


def changed(root: Path, control: Control, mesh: DeviceMesh) -> Any:
    """One rank changes its state too early: that save is lost for all, and no other."""
    desk = Desk(root, control)
    state: dict[str, Any] = {"model.a": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)])}
    for step in (1, 2):
        assert desk.saves.save(step, step, state)
        if control.rank == 2 and step == 1:
            state["model.a"].to_local().add_(1)
        desk.saves.fence()
    desk.saves.settle()
    steps = [one.step for one in resumable_checkpoints(desk.checkpoints)]
    desk.saves.close()
    why = [one["why"] for one in desk.told if one["kind"] == "save_failed"]
    return [desk.kinds(), steps, why]


def killed(root: Path, control: Control, mesh: DeviceMesh) -> Any:
    """The worker dies with a save in its hands: that one fails, the next one finds another worker."""
    desk = Desk(root, control)
    state: dict[str, Any] = {"model.a": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)])}
    assert desk.saves.save(1, 1, state)
    desk.signal(signal.SIGSTOP)
    desk.saves.fence()
    desk.signal(signal.SIGKILL)
    begun = desk.saves.save(2, 2, state)
    desk.saves.fence()
    desk.signal(signal.SIGSTOP)
    desk.signal(signal.SIGKILL)
    desk.saves.save_durably(3, 3, state)
    steps = [one.step for one in resumable_checkpoints(desk.checkpoints)]
    desk.saves.close()
    failed = [one for one in desk.kinds() if one[0] == "save_failed"]
    return [begun, failed[:1], steps[-1]]


def steady(root: Path, control: Control, mesh: DeviceMesh) -> Any:
    """What a rank sends for a save, besides a few bits, the first time and later."""
    counted: Any = Counted(control)
    desk = Desk(root, counted)
    sizes = []
    for step in (1, 2, 3, 4):
        before = counted.size_bytes
        assert desk.saves.save(step, step, {f"model.{n}": torch.full((10,), float(step)) for n in range(100)})
        desk.saves.fence()
        sizes.append(counted.size_bytes - before)
    desk.saves.settle()
    desk.saves.close()
    return sizes


def alike(root: Path, control: Control, mesh: DeviceMesh) -> Any:
    """One rank has no slot, the others have: all leave the save out, and all go on with the next one."""
    desk = Desk(root, control, on_backlog="skip")
    state = {"model.a": torch.zeros(64)}
    begun = [desk.saves.save(1, 1, state)]
    desk.saves.fence()
    link = desk.saves._session.link
    assert link is not None
    claim = link.claim
    if control.rank == 1:
        vars(link)["claim"] = lambda *_: "all slots are on their way"
    begun.append(desk.saves.save(2, 2, state))
    vars(link)["claim"] = claim
    state["model.a"].add_(1)
    begun.append(desk.saves.save(3, 3, state))
    desk.saves.fence()
    desk.saves.settle()
    desk.saves.close()
    skipped = [one for one in desk.kinds() if one[0] == "save_skipped"]
    return [control.allgather(begun), skipped, [one.step for one in resumable_checkpoints(desk.checkpoints)]]


SCENARIOS = (equal, changed, killed, steady, alike)


def main(directory: str) -> None:
    """All scenarios in one world."""
    control = connect_ranks(detect_world(os.environ))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=control.store(), rank=control.rank, world_size=control.size)
    mesh = init_device_mesh("cpu", (control.size,))
    told = {}
    for scenario in SCENARIOS:
        root = Path(directory) / scenario.__name__
        if control.rank == 0:
            root.mkdir()
        control.barrier()
        begin = time.monotonic()
        told[scenario.__name__] = scenario(root, control, mesh)
        sys.stderr.write(f"{scenario.__name__}: {time.monotonic() - begin:.1f} s\n")
    control.barrier()
    if control.rank == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
