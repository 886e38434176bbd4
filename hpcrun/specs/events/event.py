"""The base class of events, their stamp and field types, and formatting that their texts share."""

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
    """One line without its stamp."""

    @abstractmethod
    def __str__(self) -> str:
        """One line for people; empty for events that they need not see."""


@dataclass(frozen=True)
class EventStamp:
    """When, where and in which attempt an event was recorded."""

    time: Seconds
    """Wall clock of `host`."""
    monotonic: float
    """Monotonic clock of `host`."""
    attempt: Count
    host: str

    @classmethod
    def now(cls, attempt: int) -> EventStamp:
        """A stamp with the current time and host."""
        return cls(time.time(), time.monotonic(), attempt, os.uname().nodename)


def shorten(text: str) -> str:
    """Cut a text to the length of an event line."""
    return text[:_MAX_TEXT_LENGTH]


def format_count(number: int, noun: str) -> str:
    """Number and noun, with an s for the plural."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_hosts(names: Sequence[str]) -> str:
    """A folded host list; names that are not host names are joined by commas."""
    try:
        return fold_hosts(names)
    except UsageError:
        return ", ".join(names)


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Format ranks as `0-2,4-7`."""
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
