"""Faults of people: a fresh run in a used directory, and two runs that save into one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.faults import Case, Told


def _trains(place: Path, first: int, value: float, *, load: bool, steps: int = 3) -> tuple[Any, float]:
    """A start that saves a few steps; the step and the value that it has loaded."""
    import torch

    import hpcrun

    with hpcrun.Checkpointer(place, memory=0) as saves:
        state: dict[str, Any] = {"w": torch.full((4,), -1.0)}
        loaded = saves.load(state) if load else None
        for step in range(first, first + steps):
            saves.save(step, {"w": torch.full((4,), step * value)})
        return loaded, float(state["w"][0])


def _note(told: Told, root: Path, outcome: Any, expected: tuple[int, float]) -> None:
    """A refusal is told and must leave the saves; what is loaded must be what the run saved."""
    if isinstance(outcome, str):
        told.happened = told.happened or outcome.replace(f"{root}/", "")
        told.silent += not outcome.startswith("UsageError")
    else:
        told.silent += outcome != expected


def fresh_run_in_a_used_directory(root: Path, quick: bool) -> Told:
    """A run that does not load begins where another one has saved; then the first one is resumed."""
    import hpcrun.runtime.checkpointer  # noqa: F401 - each start is forked
    from tests.runtime.starts import start

    told, place = Told(""), root / "mine"
    start(functools.partial(_trains, place, 1, 1.0, load=False))
    for first in (1, 2, 3, 4, 100)[: 2 if quick else 5]:
        told.faults += 1
        before = resumable_checkpoints(place / "checkpoints")
        _note(told, root, start(functools.partial(_trains, place, first, 7.0, load=False)), (-1, -1.0))
        told.silent += resumable_checkpoints(place / "checkpoints") != before
        newest = before[-1].step
        outcome = start(functools.partial(_trains, place, newest + 1, 1.0, load=True))
        _note(told, root, outcome, (newest, float(newest)))
        told.loaded("the first run's newest")
    return told


def two_writers(root: Path, quick: bool) -> Told:
    """A second run begins to save while one does; the first is killed, and the second tries again."""
    import hpcrun
    import hpcrun.runtime.checkpointer
    from tests.runtime.starts import running, start

    told, place = Told(""), root / "mine"
    start(functools.partial(_trains, place, 1, 1.0, load=False))

    def first(step: int) -> Any:
        import torch

        saves = hpcrun.Checkpointer(place, memory=0)
        saves.load({"w": torch.zeros(4)})
        saves.save(step, {"w": torch.full((4,), float(step))})
        return saves

    for _ in range(1 if quick else 4):
        told.faults += 1
        newest = resumable_checkpoints(place / "checkpoints")[-1].step + 1
        second = functools.partial(_trains, place, newest + 1, 1.0, load=True)
        with running(functools.partial(first, newest)):
            before = resumable_checkpoints(place / "checkpoints")
            _note(told, root, start(second), (-1, -1.0))
            told.silent += resumable_checkpoints(place / "checkpoints") != before
        _note(told, root, start(second), (newest, float(newest)))
        told.loaded("what the killed one had saved")
    return told


DESCENT_CASES: dict[str, Case] = {
    "fresh run in a used directory": fresh_run_in_a_used_directory,
    "two writers": two_writers,
}
