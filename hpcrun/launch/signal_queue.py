"""Inbox: signals to the supervisor become messages that it reads when it is ready for them."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

SUPERVISOR_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def block_signals() -> None:
    """Let signals wait in the kernel until an Inbox opens: for the imports of a command that opens one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)


def unblock_signals() -> None:
    """Undo hold_back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISOR_SIGNALS)


class StopRequested(KeyboardInterrupt):
    """Somebody wants an end, while there is nothing yet that would have to be saved."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class SignalQueue:
    """Collects signals from its opening on; `fileno` becomes readable when there are any.

    An interrupt is still a KeyboardInterrupt until `queue_interrupts`: before there are ranks it ends us.
    """

    def __init__(self) -> None:
        self._collects_interrupts = self._raises_stops = False
        self._waiting: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in SUPERVISOR_SIGNALS:
            # Whoever ignores hang-ups (nohup) wants it so.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        unblock_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def queue_interrupts(self) -> None:
        """From now on an interrupt is a message like the others."""
        self._collects_interrupts, self._raises_stops = True, False

    def raise_stops(self) -> None:
        """From now on until `queue_interrupts` who wants an end interrupts, too; also who did before."""
        self._raises_stops = True
        for number in self._waiting:
            self._raise(number)

    def _raise(self, number: signal.Signals) -> None:
        if self._raises_stops and number in (signal.SIGTERM, signal.SIGHUP):
            self._raises_stops = False
            raise StopRequested(number)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._reader

    def read(self) -> list[signal.Signals]:
        """The signals that came since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        arrived, self._waiting = self._waiting, []
        return arrived

    def peek(self) -> list[signal.Signals]:
        """The same, which stay to be read."""
        return list(self._waiting)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self._collects_interrupts:
            raise KeyboardInterrupt
        self._waiting.append(signal.Signals(number))
        self._raise(signal.Signals(number))
        # A full pipe has woken the reader already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")
