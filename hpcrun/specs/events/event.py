"""What an event is: its stamp, the types of its fields, and the words that texts of events share."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from hpcrun.errors import UsageError
from hpcrun.hostlist import fold_hosts
from hpcrun.typed_json import Count, Seconds

WaitStatus = Annotated[int, (0, 2**16)]
Texts = tuple[str, ...]
_MAX_TEXT_LENGTH = 300


class Event(ABC):
    """What one line says besides its stamp."""

    @abstractmethod
    def __str__(self) -> str:
        """The event in words, in one line; empty where it is not worth one."""


@dataclass(frozen=True)
class EventStamp:
    """When and where an event was written down, and in which attempt."""

    time: Seconds
    """Wall clock of `host`."""
    monotonic: float
    """Monotonic clock of `host`."""
    attempt: Count
    host: str

    @classmethod
    def now(cls, attempt: int) -> EventStamp:
        """This moment, on this host."""
        return cls(time.time(), time.monotonic(), attempt, os.uname().nodename)


def shorten(text: str) -> str:
    """The beginning of a text whose length nobody limits."""
    return text[:_MAX_TEXT_LENGTH]


def format_count(number: int, noun: str) -> str:
    """The number with the noun, which has an s where it is not one."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_hosts(names: Sequence[str]) -> str:
    """A host list, or the names where they are no host names."""
    try:
        return fold_hosts(names)
    except UsageError:
        return ", ".join(names)


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks as 0-2,4-7."""
    return ",".join(
        f"{low}-{high}" if low < high else str(low) for low, high in _consecutive_ranges(sorted(set(ranks)))
    )


def _consecutive_ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    low = high = numbers[0]
    for number in numbers[1:]:
        if number > high + 1:
            yield low, high
            low = number
        high = number
    yield low, high
