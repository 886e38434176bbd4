"""Heartbeats that continue while a process is busy and stop when it hangs, and a clock for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG_TIMEOUT_S = 120.0
"""A main loop that has not called `beat` for this long counts as hung.

Slurm's commands may take one minute, a file system that fails over two; neither is a reason to give up.
"""
CLOCK_TICK_S = 0.5
_MAX_TICK_S = 1.5
"""A longer gap between two ticks means that the whole process was stopped."""


class AwakeClock:
    """A monotonic clock that pauses while its process or machine is suspended, as by `scontrol suspend`.

    A process that wakes up has heard nothing from the others for that time, and must not take them for lost.
    Time passes only while `tick` is called every CLOCK_TICK_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked, self._stood_s = clock(), 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds; only differences are meaningful."""
        with self._lock:
            return min(self._clock(), self._ticked + _MAX_TICK_S) - self._stood_s

    def tick(self) -> None:
        """Note that the process is running."""
        with self._lock:
            now = self._clock()
            self._stood_s += max(0.0, now - self._ticked - _MAX_TICK_S)
            self._ticked = now


class Heartbeat:
    """Calls a function periodically in a thread, as long as the main loop keeps calling `beat`.

    A thread, because the main loop waits for Slurm's commands and for the file system; it stops with the main
    loop, because a process that no longer makes decisions must not look alive.
    """

    def __init__(
        self, every_s: float, action: Callable[[], None], patience_s: float = HANG_TIMEOUT_S
    ) -> None:
        self._every_s, self._action, self._patience_s = every_s, action, patience_s
        self._last_beat = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Note that the main loop is running."""
        self._last_beat = time.monotonic()

    def _beat(self) -> None:
        while not self._over.is_set():
            if time.monotonic() - self._last_beat < self._patience_s:
                self._action()
            self._over.wait(self._every_s)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop; a thread that is blocked by the file system is abandoned."""
        self._over.set()
        self._thread.join(timeout_s)
