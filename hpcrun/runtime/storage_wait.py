"""Waits for storage that may hang, in a thread, so that the caller can report it, give up and be ended.

A call that hangs in the kernel cannot be ended. Its thread is abandoned: nothing waits for it at the end, and
its result is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

from hpcrun.errors import SiteError

_T = TypeVar("_T")
FIRST_REPORT_S = 5.0
"""Until the wait is first reported; then again after twice as long, and so on."""
_POLL_S = 0.5

SlowWaitReporter = Callable[[str, float], None]
"""Takes what is waited for, and the seconds waited so far."""


def _start_in_thread(action: Callable[[], _T]) -> Future[_T]:
    """Run an action in a daemon thread, which an executor's would not be: it may never end."""
    future = Future[_T]()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="hpcrun-errand", daemon=True).start()
    return future


def wait_for_storage(
    path: str, action: Callable[[], _T], report: SlowWaitReporter, limit_s: float | None = None
) -> _T:
    """Return the result of an action on storage, reporting a slow one; SiteError after `limit_s` seconds."""
    future, begin, report_s = _start_in_thread(action), time.monotonic(), FIRST_REPORT_S
    while not wait([future], _POLL_S).done:
        seconds = time.monotonic() - begin
        if limit_s is not None and seconds > limit_s:
            raise SiteError(f"{path}: has not answered for {seconds:.0f} s, and is not waited for any more")
        if seconds >= report_s:
            report_s = 2 * seconds
            report(path, seconds)
    return future.result()


class BackgroundPoll(Generic[_T]):
    """Repeats a look at storage in a thread, and never waits for it."""

    def __init__(self, look: Callable[..., _T]) -> None:
        self._look = look
        self._future: Future[_T] | None = None

    def latest(self, *arguments: Any) -> _T | None:
        """Return what the last look has seen, or None, and begin the next."""
        value: _T | None = None
        if self._future is not None and self._future.done():
            with suppress(OSError):
                value = self._future.result()
        if self._future is None or self._future.done():
            self._future = _start_in_thread(lambda: self._look(*arguments))
        return value
