"""Stacks of ranks that hang: read, and grouped so that the rank that stands alone is seen at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# faulthandler's threads, then py-spy's.
_THREAD_LINE = re.compile(
    r'^(?:(?P<current>Current thread|Thread) 0x[0-9a-f]+.*:|Thread \d+ \(.*\)(?:: "(?P<name>.*)")?)$'
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<file>[^()]*):(?P<line>\d+)\)$")
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waits for a disk or a device"}
_SHOWN = 3
_POLLING_FRAME = ("mpi_control.py", "_wait")
"""Where our ranks wait for each other they look and nap in turn: the line says nothing."""
StackFrame = tuple[str, str]
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
    frames: tuple[StackFrame, ...] = ()
    """Python's frames of the main thread, innermost first; none where the rank could not write them."""
    lines: tuple[int, ...] = ()
    """The line of each frame, as far as they are known."""

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

    @property
    def distinguishing_lines(self) -> tuple[int, ...]:
        """The lines that tell one rank from another at the same place; none of one that is stopped."""
        if self.state in _STATES:
            return ()
        pairs = zip(self.frames, self.lines, strict=False)
        return tuple(0 if frame == _POLLING_FRAME else line for frame, line in pairs)

    def place_at(self, depth: int) -> str:
        """As `place`, with the lines, down to a frame that differs between ranks."""
        if not self.distinguishing_lines:
            return self.place
        lines = [
            f"{function} ({file}:{line})"
            for (file, function), line in zip(self.frames, self.lines, strict=False)
        ]
        between = ["…"] if depth > _SHOWN else []
        return " < ".join([*lines[:_SHOWN], *between, *lines[max(depth, _SHOWN) : depth + 1]])


@dataclass(frozen=True)
class StackGroup:
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    place: str

    def __str__(self) -> str:
        """In words."""
        who = ", ".join(map(str, self.ranks[:8])) + (", …" if len(self.ranks) > 8 else "")
        return f"rank{'s' * (len(self.ranks) > 1)} {who}: {self.place}"


def parse_stack_frames(text: str) -> tuple[StackFrame, ...]:
    """The main thread's frames of the newest dump in a text, faulthandler's or py-spy's."""
    return tuple(frame for frame, _ in _newest_dump(text))


def parse_stack_lines(text: str) -> tuple[int, ...]:
    """The lines of the same frames."""
    return tuple(line for _, line in _newest_dump(text))


def _newest_dump(text: str) -> list[tuple[StackFrame, int]]:
    threads: list[tuple[bool, list[tuple[StackFrame, int]]]] = []
    for line in text.splitlines():
        if head := _THREAD_LINE.match(line):
            threads.append((head["current"] == "Current thread" or head["name"] == "MainThread", []))
        elif threads and (frame := _FRAME.match(line) or _PY_SPY_FRAME.match(line)):
            place = (frame["file"].rpartition("/")[2], frame["function"])
            threads[-1][1].append((place, int(frame["line"])))
    # The signal is handled in the main thread, which is written last.
    current = [frames for is_current, frames in threads if is_current]
    if current:
        return current[-1]
    return threads[-1][1] if threads else []


def group_stacks(stacks: Sequence[RankStack]) -> list[StackGroup]:
    """Ranks by where they stand, the smallest group first.

    By their functions, unless nobody stands apart by these: then lines are told as well, where those differ.
    """
    by_place: dict[tuple[Any, ...], list[RankStack]] = {}
    for stack in stacks:
        by_place.setdefault(stack.signature, []).append(stack)
    groups = _sort_groups(_make_group(alike, alike[0].place) for alike in by_place.values())
    if find_outlier(groups) is not None:
        return groups
    by_line = _sort_groups(group for alike in by_place.values() for group in _group_by_line(alike))
    return by_line if len(groups) == 1 or find_outlier(by_line) is not None else groups


def _group_by_line(alike: Sequence[RankStack]) -> list[StackGroup]:
    """Ranks in the same functions, by the lines that they are at."""
    by_lines: dict[tuple[int, ...], list[RankStack]] = {}
    for stack in alike:
        by_lines.setdefault(stack.distinguishing_lines, []).append(stack)
    if len(by_lines) == 1:
        return [_make_group(alike, alike[0].place)]
    # The outermost frame in which they differ says most: the further in, the more it is chance.
    columns = [len(set(column)) > 1 for column in zip(*by_lines, strict=False)]
    depth = max((at for at, differs in enumerate(columns) if differs), default=0)
    return [_make_group(of, of[0].place_at(depth)) for of in by_lines.values()]


def _make_group(alike: Sequence[RankStack], place: str) -> StackGroup:
    nodes = dict.fromkeys(stack.node for stack in alike)
    return StackGroup(tuple(stack.rank for stack in alike), tuple(nodes), place)


def _sort_groups(groups: Iterable[StackGroup]) -> list[StackGroup]:
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def find_outlier(groups: Sequence[StackGroup]) -> StackGroup | None:
    """The group that stands apart from the many; None where nobody does, or several do alike."""
    stopped = [group for group in groups if group.place.startswith(tuple(_STATES.values()))]
    if len(stopped) == 1 and len(groups) > 1:
        return stopped[0]
    if len(groups) < 2 or len(groups[0].ranks) * 2 >= sum(len(group.ranks) for group in groups):
        return None
    rivals = [group for group in groups[1:] if len(group.ranks) == len(groups[0].ranks)]
    return None if rivals else groups[0]
