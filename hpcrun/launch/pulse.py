"""A pulse: signs of life that go on while a process is busy, and stop when it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""A main loop that has not come by for so long hangs.

Slurm's commands may take a minute, and a file system that fails over two: neither is a reason to be given up.
"""


class Pulse:
    """Does something over and over, in a thread of its own, for as long as the main loop comes by.

    A thread, because the main loop waits for Slurm's commands and for the file system; and one that stops
    without the main loop, because whoever decides nothing any more must not look alive for ever.
    """

    def __init__(self, every_s: float, do: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
        self._every_s, self._do, self._patience_s = every_s, do, patience_s
        self._came_by = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def come_by(self) -> None:
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
