"""Catches the signals that ask a script to stop: SIGTERM, and SIGUSR2 near a time limit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hpcrun.errors import UsageError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopRequests:
    """Catches the signals from its construction on; `arrived` tells whether one has come."""

    def __init__(self) -> None:
        """UsageError outside the main thread, where Python cannot handle signals."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("Checkpointer.should_stop: call it in the main thread: no other hears signals")
        self.arrived = False
        self._owner = os.getpid()
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._take) for number in STOP_SIGNALS
        }

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        before: Callable[[int, FrameType | None], Any] | Any = self._before.get(signal.Signals(number))
        if os.getpid() != self._owner:
            # A forked child, such as a data worker, ends as it would without this handler.
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.arrived = True
        if callable(before):
            before(number, frame)
