"""Faults of what is seen, and of what may be changed: nothing good is renamed, and nothing half filled."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrun.errors import HpcrunError
from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.faults import Case, SkippedError, Told
from tests.checkpoint.injuries import flip

SIZE = 20_000
_OTHER_USER = 54_321


def _saved(folder: Path, *steps: int) -> Path:
    """Saves of a script; gives the directory that they lie in."""
    import torch

    import hpcrun

    with hpcrun.Checkpointer(folder, memory=0, keep=9) as saves:
        for step in steps:
            saves.save(step, {"a": torch.full((SIZE,), float(step)), "b": torch.full((SIZE,), float(step))})
    return folder / "checkpoints"


def _load(folder: Path) -> tuple[int | None, str, list[float]]:
    """As a script does: the step, the error, and what its tensors hold then; -1 is what they held before."""
    import torch

    import hpcrun

    state = {"a": torch.full((SIZE,), -1.0), "b": torch.full((SIZE,), -1.0)}
    step, said = None, ""
    with hpcrun.Checkpointer(folder, memory=0) as saves:
        try:
            step = saves.load(state)
        except HpcrunError as error:
            said = str(error)
    return step, said, sorted({value for tensor in state.values() for value in tensor.tolist()})


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _damage(root: Path, step: int) -> None:
    """In the last bytes that are read."""
    path = root / f"step-{step:08d}" / "data-00000.bin"
    flip(path, path.read_bytes().rindex(b"\0\0\x80\x3f" if step == 1 else b"\0\0\0\x40"))


def _whole(folder: Path, told: Told, step: int | None, *, renames: bool) -> None:
    """Load, and count what is not as it should be."""
    root = folder / "checkpoints"
    before = _names(root)
    found, said, values = _load(folder)
    told.faults += 1
    told.silent += found != step or values != [float(step) if step is not None else -1.0]
    told.silent += renames != (_names(root) != before)
    told.happened = told.happened or said
    told.loaded(f"step {found} from durable" if found is not None else "nothing, and says so")


def none_whole(root: Path, _quick: bool) -> Told:
    """The only save is damaged in its last bytes: the state is as it was before."""
    told = Told("")
    _damage(_saved(root / "run", 1), 1)
    _whole(root / "run", told, None, renames=False)
    return told


def read_only(root: Path, _quick: bool) -> Told:
    """The newest save is damaged, in a directory that nobody can write to."""
    told = Told("a damaged save in a directory that is mounted read-only stays where it is")
    checkpoints = _saved(root / "run", 1, 2)
    _damage(checkpoints, 2)
    mount = ["mount", "--bind", str(root / "run"), str(root / "run")]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise SkippedError("a read-only mount needs root")
    try:
        again = ["mount", "-o", "remount,bind,ro", str(root / "run")]
        subprocess.run(again, check=True, capture_output=True)
        _whole(root / "run", told, 1, renames=False)
    finally:
        subprocess.run(["umount", str(root / "run")], check=True)
    return told


def foreign(root: Path, _quick: bool) -> Told:
    """The newest save is damaged, in a directory of another user."""
    if os.getuid() != 0:
        raise SkippedError("giving a directory away needs root")
    told = Told("a damaged save in another user's directory stays where it is")
    checkpoints = _saved(root / "run", 1, 2)
    _damage(checkpoints, 2)
    os.chown(checkpoints, _OTHER_USER, _OTHER_USER)
    _whole(root / "run", told, 1, renames=False)
    os.chown(checkpoints, os.getuid(), os.getgid())
    _whole(root / "run", told, 1, renames=True)
    return told


def late(root: Path, quick: bool) -> Told:
    """A lone rank sees a file of the newest save a little later, or not at all."""
    from hpcrun.runtime import direct_checkpoint

    told = Told("what is not seen for a while is waited for; what is not seen at all is not renamed")
    checkpoints, true, pause = _saved(root / "run", 1, 2), os.stat, vars(direct_checkpoint)["_PAUSE_S"]
    vars(direct_checkpoint)["_PAUSE_S"] = 0.01
    for number in (errno.ENOENT, errno.ESTALE):
        for times in (1, 2, -1) if quick else (1, 2, 3, -1):
            os.stat = _failing(true, str(checkpoints / "step-00000002" / "data"), number, times)
            try:
                _whole(root / "run", told, 2 if 0 < times < 3 else 1, renames=False)
            finally:
                os.stat = true
    vars(direct_checkpoint)["_PAUSE_S"] = pause
    if [one.step for one in resumable_checkpoints(checkpoints)] != [1, 2]:
        told.silent += 1
    return told


def _failing(true: Callable[..., Any], begin: str, number: int, times: int) -> Any:
    left = times

    def call(path: Any, *words: Any, **options: Any) -> Any:
        nonlocal left
        if left and str(path).startswith(begin):
            left -= 1
            raise OSError(number, os.strerror(number), str(path))
        return true(path, *words, **options)

    return call


def stale(root: Path, _quick: bool) -> Told:
    """One of four ranks has another view than the others."""
    from tests.runtime.test_direct_checkpoint import RANKS, STALE
    from tests.runtime.worlds import told_by

    told = Told("one rank of four does not see what the others see, or sees other bytes")
    (root / "world").mkdir()
    for found, right in zip(told_by("save_world.py", root / "world", RANKS)["stale"], STALE, strict=True):
        told.faults += 1
        told.silent += found != right
        told.loaded(f"step {found[0]} from durable")
    return told


VIEW_CASES: dict[str, Case] = {
    "no save is whole": none_whole,
    "damaged in a read-only directory": read_only,
    "damaged in another user's directory": foreign,
    "seen late": late,
    "stale view of one rank": stale,
}
