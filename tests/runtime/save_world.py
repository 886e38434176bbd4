"""Ranks of tests/runtime/test_direct_checkpoint.py: a scenario is a function; prints what rank 0 has to tell.

Run as a program in a world of several ranks: `save_world.py DIRECTORY`.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.errors import SiteError, UsageError
from hpcrun.launcher_world import detect_world
from hpcrun.runtime import data_files, direct_checkpoint
from hpcrun.runtime.connect import connect_ranks
from hpcrun.runtime.control import Control
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer

SHAPES = {"model.even": (8, 6), "model.uneven": (7, 5), "model.few": (1, 3), "model.wide": (2, 9)}
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def wholes(seed: int = 0) -> dict[str, Tensor]:
    """The same whole tensors on every rank."""
    random = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randn(shape, generator=random).mul(100).to(dtype)
        for (name, shape), dtype in zip(SHAPES.items(), TYPES, strict=True)
    }
    return found | {"model.scalar": torch.tensor(float(seed)), "model.none": torch.empty(0, 4)}


def laid_out(whole: dict[str, Tensor], mesh: DeviceMesh, *placements: Any) -> dict[str, Tensor]:
    """The tensors with dimensions as DTensors, the others plain."""
    return {
        name: distribute_tensor(t.clone(), mesh, placements) if t.dim() else t.clone()
        for name, t in whole.items()
    }


def empty_like(whole: dict[str, Tensor], mesh: DeviceMesh, *placements: Any) -> dict[str, Tensor]:
    return laid_out({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, mesh, *placements)


def full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def shapes(whole: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Counted:
    """A control whose messages are counted."""

    def __init__(self, control: Control) -> None:
        self._control, self.size_bytes = control, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def allgather(self, value: Any) -> list[Any]:
        self.size_bytes += len(json.dumps(value))
        return self._control.allgather(value)


def reshard(root: Path, control: Control, mesh: DeviceMesh, square: DeviceMesh) -> Any:
    """Every layout into every other; uneven, empty, replicated, scalar."""
    layouts: dict[str, Any] = {
        "rows": (mesh, Shard(0)),
        "columns": (mesh, Shard(1)),
        "copies": (mesh, Replicate()),
        "rows of columns": (square, Shard(0), Shard(1)),
        "copies of columns": (square, Replicate(), Shard(1)),
    }
    whole, wrong = wholes(), []
    for number, (wrote, layout) in enumerate(layouts.items()):
        saver = DirectCheckpointer(root / str(number), control, attempt=1, keep=1)
        saver.save(1, 10, laid_out(whole, *layout))
        for reads, other in layouts.items():
            state = empty_like(whole, *other)
            restored = DirectCheckpointer(root / str(number), control, attempt=2, keep=1).restore(
                state, shapes(whole)
            )
            if restored is None or not same(full(state), whole):
                wrong.append([wrote, reads])
    return wrong


def replicas(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """What all ranks hold is written once, and each writes a share."""
    state = {f"model.{n}": torch.full((1000,), float(n)) for n in range(8 * control.size)}
    saver = DirectCheckpointer(root, control, attempt=1, keep=1)
    saver.save(1, 10, state)
    newest = saver.newest()
    assert newest is not None
    with GenerationReader(newest) as generation:
        counts = [0] * control.size
        for name, tensor in generation.manifest.tensors.items():
            if name.startswith("model."):
                assert len(tensor.chunks) == 1
                counts[tensor.chunks[0][1].part] += 1
        files = {part.file for part in generation.manifest.parts}
    return [counts, len(files)]


def steady(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """What a rank sends for a save, the first time and later, with few and with many tensors."""
    told = []
    for count in (10, 200):
        counted: Any = Counted(control)
        saver = DirectCheckpointer(root / str(count), counted, attempt=1, keep=2)
        sizes = []
        for step in (1, 2, 3):
            before = counted.size_bytes
            saver.save(step, 0, {f"model.{n}": torch.full((10,), float(step)) for n in range(count)})
            sizes.append(counted.size_bytes - before)
        # Another structure on one rank alone must be noticed by all.
        extra = {"model.extra": torch.ones(3)} if control.rank == 1 else {}
        state = {f"model.{n}": torch.full((10,), 4.0) for n in range(count)}
        saver.save(4, 0, state | extra)
        newest = saver.newest()
        assert newest is not None
        with GenerationReader(newest) as generation:
            told.append([*sizes, "model.extra" in generation.manifest.tensors])
    return told


def strict(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """A state that is not the saved one is refused, whichever way it differs."""
    state = {"model.a": torch.ones(4, 4), "model.b": torch.ones(3)}
    DirectCheckpointer(root, control, attempt=1, keep=1).save(1, 10, state)
    a, b, other = torch.ones(4, 4), torch.ones(3), torch.ones(2)
    cases: list[dict[str, Tensor]] = [
        {"model.a": a},
        {"model.a": a, "model.b": b, "model.c": other},
        {"model.a": a, "model.b": other},
        {"model.a": a.double(), "model.b": b},
    ]
    told = []
    for case in cases:
        try:
            DirectCheckpointer(root, control, attempt=2, keep=1).restore(case, shapes(case))
            told.append("loaded")
        except UsageError as error:
            told.append(str(error).partition(": ")[2].partition(";")[0])
    return told


def randomness(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """Each rank gets its own random state back, after everything else."""
    torch.manual_seed(control.rank)
    torch.rand(3)
    saver = DirectCheckpointer(root, control, attempt=1, keep=1)
    saver.save(1, 10, {"model.a": torch.ones(4)})
    expected = torch.rand(5)
    torch.manual_seed(99)
    DirectCheckpointer(root, control, attempt=2, keep=1).restore(
        {"model.a": torch.zeros(4)}, {"model.a": (4,)}
    )
    return all(control.allgather(bool(torch.equal(torch.rand(5), expected))))


def failing(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """One rank has no space: the save fails on all, leaves nothing, and the next one works."""
    saver = DirectCheckpointer(root, control, attempt=1, keep=2)
    state = {f"model.{n}": torch.ones(10) for n in range(10)}
    saver.save(1, 10, state)
    names = vars(data_files)
    true = names["write_part"]

    def full_disk(*_words: Any, **_options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if control.rank == control.size - 1:
        names["write_part"] = full_disk
    try:
        saver.save(2, 20, state)
        said = ["saved"]
    except SiteError as error:
        said = control.allgather(str(error).replace(f"{root}/", "").partition(" on /")[0])
    names["write_part"] = true
    left = sorted(path.name for path in root.iterdir())
    control.barrier()
    saver.save(3, 30, state)
    return [said, left, sorted(path.name for path in root.iterdir())]


def fallen_back(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """Bytes that only one rank reads are wrong: all go back together, and the step can be saved again."""
    whole = wholes()
    saver = DirectCheckpointer(root, control, attempt=1, keep=2)
    for step in (1, 2):
        saver.save(step, 10 * step, laid_out(wholes(step), mesh, Shard(0)))
    newest = saver.newest()
    assert newest is not None
    if control.rank == 0:
        with GenerationReader(newest) as generation:
            part = generation.manifest.parts[-1]
            # The last rank's random state is read by no other rank.
            place = generation.manifest.tensors[f"rng.{control.size - 1}"].chunks[0][1]
        path = newest.path / f"data-{part.file:05d}.bin"
        data = bytearray(path.read_bytes())
        data[part.start + place.at + 70] ^= 1
        path.write_bytes(data)
    control.barrier()
    state = empty_like(whole, mesh, Shard(0))
    again = DirectCheckpointer(root, control, attempt=2, keep=2)
    restored = again.restore(state, shapes(whole))
    assert restored is not None
    is_right = same(full(state), wholes(1))
    again.save(2, 20, state)
    names = sorted(path.name.partition(".")[0] for path in root.iterdir())
    return [restored.step, restored.lost_steps, len(restored.passed_over), is_right, names]


class View:
    """What one rank sees of a directory, otherwise than the others do."""

    def __init__(self, control: Control, folder: Path) -> None:
        self.is_odd, self.folder = control.rank == control.size - 1, str(folder)
        self.true = {name: getattr(os, name) for name in ("stat", "open", "preadv")}

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_error: object) -> None:
        for name, true in self.true.items():
            setattr(os, name, true)

    def fail(self, number: int, times: int) -> None:
        """So many calls for files of the directory end with this error."""
        left = times

        def seen(name: str) -> Any:
            def call(path: Any, *words: Any, **options: Any) -> Any:
                nonlocal left
                if left and str(path).startswith(self.folder) and str(path) != self.folder:
                    left -= 1
                    raise OSError(number, os.strerror(number), str(path))
                return self.true[name](path, *words, **options)

            return call

        if self.is_odd:
            os.stat, os.open = seen("stat"), seen("open")

    def spoil(self) -> None:
        """What is read has other bytes than the file, from the second kilobyte on."""

        def call(descriptor: int, buffers: Any, at: int) -> Any:
            count = self.true["preadv"](descriptor, buffers, at)
            path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if at > 4096 and path.startswith(self.folder):
                buffers[-1][0] ^= 1
            return count

        if self.is_odd:
            setattr(os, "preadv", call)  # noqa: B010 - it is another's to the types


def stale(root: Path, control: Control, mesh: DeviceMesh, _square: DeviceMesh) -> Any:
    """One rank does not see for a while, or for good, what is there: no good save is renamed."""
    whole = {"model.a": torch.arange(6000.0)}
    saver = DirectCheckpointer(root, control, attempt=1, keep=3)
    for step in (1, 2):
        saver.save(step, step, {name: tensor + step for name, tensor in whole.items()})
    vars(direct_checkpoint)["_PAUSE_S"] = 0.01
    told = []
    for error, times in (
        (errno.ENOENT, 3),
        (errno.ESTALE, 3),
        (errno.ENOENT, -1),
        (errno.ESTALE, -1),
        (0, 0),
    ):
        with View(control, root / "step-00000002") as view:
            if error:
                view.fail(error, times)
            else:
                view.spoil()
            state = {"model.a": torch.full((6000,), -1.0)}
            restored = DirectCheckpointer(root, control, attempt=2, keep=3).restore(state, shapes(whole))
        assert restored is not None
        is_right = bool((state["model.a"] == whole["model.a"] + restored.step).all())
        names = sorted(path.name for path in root.iterdir())
        every = control.allgather([restored.step, is_right, len(restored.passed_over), names])
        told.append([*every[0], all(one == every[0] for one in every)])
    return told


SCENARIOS = (reshard, replicas, steady, strict, randomness, failing, fallen_back, stale)


def main(directory: str) -> None:
    """All scenarios in one world."""
    control = connect_ranks(detect_world(os.environ))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=control.store(), rank=control.rank, world_size=control.size)
    mesh = init_device_mesh("cpu", (control.size,))
    square = init_device_mesh("cpu", (2, control.size // 2))
    told = {}
    for scenario in SCENARIOS:
        root = Path(directory) / scenario.__name__
        told[scenario.__name__] = scenario(root, control, mesh, square)
    control.barrier()
    if control.rank == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
