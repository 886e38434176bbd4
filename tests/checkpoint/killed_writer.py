"""Changes a run's saves and is killed at one of its system calls: at each in turn, as often as there are.

Run as a program: `killed_writer.py DIRECTORY SCENARIO`; prints one line of JSON for each death. Where calls
cannot be traced it says why, with exit code 77.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpcrun.checkpoint.commit import apply_retention, delete_generation, find_garbage, quarantine_generation
from hpcrun.checkpoint.flush.durable_tier import DurableTier
from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.restore.exchange import copy_generation_in
from hpcrun.checkpoint.restore.repair import find_repair_candidates, repair_generation
from hpcrun.checkpoint.restore.sources import DirectoryCopy
from hpcrun.checkpoint.tier import HeldPart
from hpcrun.specs.saves import SavedCheckpoint, read_saved_checkpoint, read_saved_checkpoints
from tests.checkpoint import tracing
from tests.checkpoint.generations import content_of, save
from tests.checkpoint.loads import load_of


def _base(root: Path) -> None:
    root.mkdir()
    save(root, 2, files=2)
    save(root, 4, files=2)


def with_leftovers(root: Path) -> None:
    """Two saves, and what a broken one has left."""
    _base(root)
    (root / ".step-00000005.1").mkdir()
    (root / ".step-00000005.1" / "data-00000.bin").write_bytes(b"half")


def with_damage(root: Path) -> None:
    """Two saves and a damaged one, of which there is a copy elsewhere."""
    _base(root)
    damaged = save(root, 6, files=2)
    shutil.copytree(damaged.path, root.with_name("copy"), dirs_exist_ok=True)
    (damaged.path / "data-00001.bin").write_bytes(b"")


def save_and_retire(root: Path) -> None:
    """What training does: save, then delete the oldest of three."""
    save(root, 6, files=2)
    apply_retention(root, 2)


def drain_and_retire(root: Path) -> None:
    """The same by a checkpoint worker, over the node's own disk."""
    load = load_of(6, range(2), 2, 0)
    LocalTier(str(root / "disk"), "run", "n1").store(load)
    tier = DurableTier(root, keep=2)
    tier.store(load)
    tier.retain(())


def save_over_damage(root: Path) -> None:
    """A damaged save of the same step stands in the way."""
    save(root, 6, files=2)


def put_away(root: Path) -> None:
    """What a restart does with a damaged save."""
    quarantine_generation(root / "step-00000006")


def mend(root: Path) -> None:
    """Make a damaged save whole from a copy, wherever an earlier attempt has left it."""
    for path in find_repair_candidates(root, 6):
        repair_generation(path, [DirectoryCopy(root.with_name("copy"))])


def take_in(root: Path) -> None:
    """Import a copy of a save."""
    found = read_saved_checkpoint(root.with_name("copy"))
    assert isinstance(found, SavedCheckpoint)
    # In one thread, as a child that is traced has to be.
    copy_generation_in(found, root, jobs=1)


def clean_up(root: Path) -> None:
    """Delete all that is not wanted any more."""
    for one in find_garbage(root, 2, in_flight=False, damaged=True)[0]:
        delete_generation(one.path)


class Scenario(NamedTuple):
    """Something that is done to saves."""

    before: Callable[[Path], None]
    action: Callable[[Path], None]
    again: Callable[[Path], None] | None = None
    """What brings it to its end after a death; else the next save of training does."""


SCENARIOS = {
    "save_and_retire": Scenario(with_leftovers, save_and_retire),
    "drain_and_retire": Scenario(with_leftovers, drain_and_retire),
    "save_over_damage": Scenario(with_damage, save_over_damage),
    "put_away": Scenario(with_damage, put_away),
    "mend": Scenario(with_damage, mend, mend),
    "take_in": Scenario(with_damage, take_in, mend),
    "clean_up": Scenario(with_damage, clean_up, clean_up),
}


def whole_steps(root: Path) -> tuple[list[int], list[str]]:
    """The steps that a reader proves, and what it says of the others; AssertionError for wrong bytes."""
    whole, problems = [], []
    saves, unreadable = read_saved_checkpoints(root)
    problems += [one.problem for one in unreadable]
    for saved in saves:
        try:
            with GenerationReader(saved) as generation:
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
    """Whether a part on a node's own disk is there as its writer has it."""
    (whole,) = (one for one in load_of(6, range(2), 2, 0).parts if one.number == held.number)
    return Path(held.path).read_bytes()[held.at :][: held.part.size_bytes] == whole.image


def main(directory: str, name: str) -> None:
    """All deaths of a scenario."""
    top, scenario = Path(directory), SCENARIOS[name]
    base = top / "base"
    scenario.before(base)
    shutil.copytree(base, top / "undisturbed")
    undisturbed = tracing.run(lambda: scenario.action(top / "undisturbed"))
    assert undisturbed.said == "", undisturbed
    for at, call in enumerate(undisturbed.calls, start=1):
        for how in ("before", "halfway") if tracing.is_write(call) else ("before",):
            root = top / f"{at}{how}"
            shutil.copytree(base, root)
            died = tracing.run(lambda root=root: scenario.action(root), at, how)  # type: ignore[misc]
            assert died.killed, died
            whole, problems = whole_steps(root)
            local = LocalTier(str(root / "disk"), "run", "n1")
            assert all(prove(one) for holding in local.holdings() for one in holding.parts)
            shutil.rmtree(root / "disk", ignore_errors=True)
            if scenario.again is not None:
                scenario.again(root)
                left = [str(step) for step in whole_steps(root)[0]]
            else:
                save(root, 8, files=2)
                apply_retention(root, 1)
                left = sorted(path.name for path in root.iterdir() if not path.name.startswith("damaged-"))
            death = {"at": at, "call": call, "how": how, "whole": whole, "problems": problems, "left": left}
            print(json.dumps(death))
            shutil.rmtree(root)


if __name__ == "__main__":
    if reason := tracing.why_not():
        sys.stderr.write(reason)
        sys.exit(77)
    main(*sys.argv[1:])
