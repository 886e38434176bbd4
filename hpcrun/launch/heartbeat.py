"""Pulses: signs of life that go on while a process is busy, and stop when it hangs; and a clock for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG_TIMEOUT_S = 120.0
"""A main loop that has not come by for so long hangs.

Slurm's commands may take a minute, and a file system that fails over two: neither is a reason to be given up.
"""
CLOCK_TICK_S = 0.5
_MAX_TICK_S = 1.5
"""Longer than this a tick takes only while the whole process stands."""


class AwakeClock:
    """A monotonic clock that stands while its process is stopped, as by `scontrol suspend`, or its machine.

    Whoever wakes has heard nothing of the others for as long, and must take none of them for lost. Time
    passes only where `tick` is called every TICK_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked, self._stood_s = clock(), 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds, of which only differences mean something."""
        with self._lock:
            return min(self._clock(), self._ticked + _MAX_TICK_S) - self._stood_s

    def tick(self) -> None:
        """The process runs."""
        with self._lock:
            now = self._clock()
            self._stood_s += max(0.0, now - self._ticked - _MAX_TICK_S)
            self._ticked = now


class Heartbeat:
    """Does something over and over, in a thread of its own, for as long as the main loop comes by.

    A thread, because the main loop waits for Slurm's commands and for the file system; and one that stops
    without the main loop, because whoever decides nothing any more must not look alive for ever.
    """

    def __init__(self, every_s: float, do: Callable[[], None], patience_s: float = HANG_TIMEOUT_S) -> None:
        self._every_s, self._do, self._patience_s = every_s, do, patience_s
        self._came_by = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """The main loop is here."""
        self._came_by = time.monotonic()

    def _beat(self) -> None:
        while not self._over.is_set():
            if time.monotonic() - self._came_by < self._patience_s:
                self._do()
            self._over.wait(self._every_s)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Beat no more; a thread that the file system holds is left to itself."""
        self._over.set()
        self._thread.join(timeout_s)
