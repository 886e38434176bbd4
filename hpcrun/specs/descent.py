"""Which saves a run goes on from: the line of starts that led to the newest of them.

A start (an attempt of a run, or of a script) goes on from a save of an earlier one, and its own saves say so
in `descent`: "1@400 3@650" is a start that went on from step 650 of start 3, which had gone on from step 400
of start 1. What start 1 saved later than step 400 is of a branch that was left: it is not gone on from again,
does not count among the newest, and makes nothing else go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

_DESCENT = re.compile(r"(?:[0-9]+@[0-9]+(?: [0-9]+@[0-9]+)*)?")
_MAX_STARTS = 200
"""What is descended from longer ago has long been deleted."""


class HasDescent(Protocol):
    """A save, wherever it is kept."""

    @property
    def step(self) -> int:
        """What it is of."""

    @property
    def attempt(self) -> int:
        """The number of the start that saved it."""

    @property
    def descent(self) -> str:
        """What that start went on from."""


_Save = TypeVar("_Save", bound=HasDescent)


def is_descent(text: object) -> bool:
    """Whether a value from a file is a descent."""
    return isinstance(text, str) and _DESCENT.fullmatch(text) is not None


def descent_after(save: HasDescent, attempt: int) -> str:
    """The descent of what a start saves after it has gone on from this save."""
    if save.attempt == attempt:  # it has gone back to a save of its own
        return save.descent
    starts = [*save.descent.split(), f"{save.attempt}@{save.step}"]
    return " ".join(starts[-_MAX_STARTS:])


def is_in_lineage(save: HasDescent, tip: HasDescent) -> bool:
    """Whether a save is `tip`, or one that `tip` has come from."""
    if save.attempt == tip.attempt:
        return save.step <= tip.step and save.descent == tip.descent
    return any(
        save.attempt == int(attempt) and save.step <= int(step)
        for attempt, _, step in (entry.partition("@") for entry in tip.descent.split())
    )


def lineage_order(save: HasDescent) -> tuple[int, int]:
    """What a later save has more of: starts are numbered as they begin, and steps of one only grow."""
    return save.attempt, save.step


def select_lineage(saves: Iterable[_Save]) -> list[_Save]:
    """Of saves of one run: the newest and what it has come from, oldest first; the others were left."""
    ordered = sorted(saves, key=lineage_order)
    return [save for save in ordered if is_in_lineage(save, ordered[-1])]
