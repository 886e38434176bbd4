"""Stacks of ranks that hang: read, and grouped so that the rank that stands alone is seen at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# faulthandler's threads, then py-spy's.
_HEAD = re.compile(
    r'^(?:(?P<current>Current thread|Thread) 0x[0-9a-f]+.*:|Thread \d+ \(.*\)(?:: "(?P<name>.*)")?)$'
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line \d+ in (?P<function>.*)$')
_SPIED = re.compile(r"^    (?P<function>\S.*) \((?P<file>[^()]*):\d+\)$")
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waits for a disk or a device"}
_SHOWN = 3
Frame = tuple[str, str]
"""File (its name alone) and function."""


@dataclass(frozen=True)
class RankStack:
    """What is known of one rank at the moment when it was asked."""

    rank: int
    node: str
    state: str = ""
    """The process's state as /proc has it: R, S, D, T, Z; empty where nobody answered."""
    waits_in: str = ""
    """The kernel's function that it waits in, where the kernel tells."""
    frames: tuple[Frame, ...] = ()
    """Python's frames of the main thread, innermost first; none where the rank could not write them."""

    @property
    def place(self) -> str:
        """In words: where it stands."""
        if self.state in _STATES:
            return _STATES[self.state] + (f" ({self.waits_in})" if self.waits_in else "")
        if self.frames:
            return " < ".join(f"{function} ({file})" for file, function in self.frames[:_SHOWN])
        return "gave no stack" if self.state else "its node gave no answer"

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for ranks that stand at the same place."""
        return (self.state if self.state in _STATES else "", self.frames, bool(self.state))


@dataclass(frozen=True)
class Group:
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    place: str

    def __str__(self) -> str:
        """In words."""
        who = ", ".join(map(str, self.ranks[:8])) + (", …" if len(self.ranks) > 8 else "")
        return f"rank{'s' * (len(self.ranks) > 1)} {who}: {self.place}"


def parse_stacks(text: str) -> tuple[Frame, ...]:
    """The main thread's frames of the newest dump in a text, faulthandler's or py-spy's."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            threads.append((head["current"] == "Current thread" or head["name"] == "MainThread", []))
        elif threads and (frame := _FRAME.match(line) or _SPIED.match(line)):
            threads[-1][1].append((frame["file"].rpartition("/")[2], frame["function"]))
    # The signal is handled in the main thread, which is written last.
    current = [frames for is_current, frames in threads if is_current]
    if current:
        return tuple(current[-1])
    return tuple(threads[-1][1]) if threads else ()


def group(stacks: Sequence[RankStack]) -> list[Group]:
    """Ranks by where they stand, the smallest group first."""
    by_place: dict[tuple[Any, ...], list[RankStack]] = {}
    for one in stacks:
        by_place.setdefault(one.signature, []).append(one)
    groups = [
        Group(
            tuple(one.rank for one in alike),
            tuple(dict.fromkeys(one.node for one in alike)),
            alike[0].place,
        )
        for alike in by_place.values()
    ]
    return sorted(groups, key=lambda one: (len(one.ranks), one.ranks))


def odd_ones(groups: Sequence[Group]) -> Group | None:
    """The group that stands apart from the many; None where nobody does, or several do alike."""
    stopped = [one for one in groups if one.place.startswith(tuple(_STATES.values()))]
    if len(stopped) == 1 and len(groups) > 1:
        return stopped[0]
    if len(groups) < 2 or len(groups[0].ranks) * 2 >= sum(len(one.ranks) for one in groups):
        return None
    rivals = [one for one in groups[1:] if len(one.ranks) == len(groups[0].ranks)]
    return None if rivals else groups[0]


def as_json(groups: Sequence[Group]) -> list[Mapping[str, Any]]:
    """Plain values, the smallest group first."""
    return [{"ranks": list(one.ranks), "nodes": list(one.nodes), "place": one.place} for one in groups]
