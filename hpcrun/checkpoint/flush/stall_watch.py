"""What the worker's storing is at, and for how long nothing has moved: a file system that hangs says nothing.

What hangs in the kernel can be neither ended nor asked; but another thread can tell of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

FIRST_STALL_S = 5.0
"""Without a byte written; told again after twice as long, and so on."""


class StallWatch:
    """Of one thread that stores; asked in another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._what, self._since, self._told_s = "", 0.0, FIRST_STALL_S

    def at(self, what: str | Path) -> None:
        """It turns to this now: a file, with its file system, or what it waits for."""
        with self._lock:
            self._what, self._since, self._told_s = str(what), self._clock(), FIRST_STALL_S

    def note_progress(self, *_of: object) -> None:
        """It gets on."""
        with self._lock:
            self._since, self._told_s = self._clock(), FIRST_STALL_S

    def done(self) -> None:
        """It is at nothing."""
        self.at("")

    @property
    def is_on(self) -> bool:
        """Whether it is at something."""
        return bool(self._what)

    def stuck(self) -> tuple[str, float] | None:
        """What it is at and for how many seconds without getting on, when that is to be told (again)."""
        with self._lock:
            seconds = self._clock() - self._since
            if not self._what or seconds < self._told_s:
                return None
            self._told_s = 2 * seconds
            return self._what, seconds
