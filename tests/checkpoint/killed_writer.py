"""Saves a step and is killed at one of its system calls: at each in turn, as often as there are.

Run as a program: `killed_writer.py DIRECTORY SCENARIO`; prints one line of JSON for each death. The calls are
found by counting them as they come, so that none is forgotten when the way of a save changes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import retire, set_aside
from hpcrun.checkpoint.durable import DurableStation
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.levels import HeldPart
from hpcrun.checkpoint.local import LocalStation
from hpcrun.checkpoint.read import Generation
from hpcrun.specs.saves import read_saves
from tests.checkpoint.generations import content_of, save
from tests.checkpoint.loads import load_of

CALLS = (
    "open",
    "write",
    "pwrite",
    "pwritev",
    "fsync",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "mkdir",
)


def save_and_retire(root: Path) -> None:
    """What training does: save, then delete the oldest of three."""
    save(root, 6, files=2)
    retire(root, 2)


def drain_and_retire(root: Path) -> None:
    """The same by a drain worker, over the node's own disk."""
    load = load_of(6, range(2), 2, 0)
    LocalStation(str(root.with_name("disk")), "run", "n1").store(load)
    station = DurableStation(root, keep=2)
    station.store(load)
    station.retain(())


def save_over_damage(root: Path) -> None:
    """A damaged save of the same step stands in the way."""
    save(root, 6, files=2)


def put_away(root: Path) -> None:
    """What a restart does with a damaged save."""
    set_aside(root / "step-00000006")


def before(scenario: str, root: Path) -> None:
    """The state that the scenario begins with."""
    root.mkdir()
    save(root, 2, files=2)
    save(root, 4, files=2)
    if not scenario.endswith("_and_retire"):
        damaged = save(root, 6, files=2)
        (damaged.path / "data-00001.bin").write_bytes(b"")
    else:
        (root / ".step-00000005.1").mkdir()
        (root / ".step-00000005.1" / "data-00000.bin").write_bytes(b"half")


class Trap:
    """Notes the calls, and dies at one of them: before it, or for a write when half of it is done."""

    def __init__(self, at: int | None, halfway: bool) -> None:
        self.calls: list[str] = []
        self._at, self._halfway = at, halfway
        self._true = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self._at:
                if self._halfway:
                    self._write_half(*words)
                os.kill(os.getpid(), signal.SIGKILL)
            return self._true[name](*words, **options)

        return call

    def _write_half(self, descriptor: int, data: Any, position: int | None = None) -> None:
        data = b"".join(data) if isinstance(data, list) else bytes(data)
        half = data[: len(data) // 2]
        if position is None:
            self._true["write"](descriptor, half)
        else:
            self._true["pwritev"](descriptor, [half], position)


def in_child(
    action: Callable[[Path], None], root: Path, at: int | None, halfway: bool
) -> tuple[int, list[str]]:
    """Run the action in a fork with the trap set; its wait status, and which calls it made if it lived."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        trap = Trap(at, halfway)
        action(root)
        told = json.dumps(trap.calls).encode()
        os.write(writing, told)
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as told_by_child:
        calls = told_by_child.read()
    return status, json.loads(calls or "[]")


def whole_steps(root: Path) -> tuple[list[int], list[str]]:
    """The steps that a reader proves, and what it says of the others; AssertionError for wrong bytes."""
    whole, problems = [], []
    saves, unreadable = read_saves(root)
    problems += [one.problem for one in unreadable]
    for saved in saves:
        try:
            with Generation(saved) as generation:
                problems += (found := list(generation.damages()))
                for tensor in generation.manifest.tensors.values():
                    for piece, place in tensor.chunks:
                        into = bytearray(piece.size_bytes)
                        generation.read(piece, place, memoryview(into))
                        assert bytes(into) == content_of(piece, saved.step)
            if not found:
                whole.append(saved.step)
        except DamagedError as error:
            problems.append(str(error))
    return whole, problems


def prove(held: HeldPart) -> bool:
    """Whether a part is there as its writer has it."""
    (whole,) = (one for one in load_of(6, range(2), 2, 0).parts if one.number == held.number)
    return Path(held.path).read_bytes()[held.at :][: held.part.size_bytes] == whole.image


def main(directory: str, scenario: str) -> None:
    """All deaths of a scenario."""
    top, action = Path(directory), globals()[scenario]
    base = top / "base"
    before(scenario, base)
    shutil.copytree(base, top / "undisturbed")
    status, calls = in_child(action, top / "undisturbed", None, False)
    assert status == 0
    for at, name in enumerate(calls, start=1):
        for halfway in (False, True) if "write" in name else (False,):
            root = top / f"{at}{'h' * halfway}"
            shutil.copytree(base, root)
            status, _ = in_child(action, root, at, halfway)
            assert os.WIFSIGNALED(status)
            whole, problems = whole_steps(root)
            local = LocalStation(str(top / "disk"), "run", "n1")
            assert all(prove(one) for holding in local.holdings() for one in holding.parts)
            save(root, 8, files=2)
            retire(root, 1)
            left = sorted(path.name for path in root.iterdir() if not path.name.startswith("damaged-"))
            death = {"at": at, "call": name, "halfway": halfway, "whole": whole, "problems": problems}
            print(json.dumps(death | {"left": left}))
            shutil.rmtree(root)
            shutil.rmtree(top / "disk", ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
