"""Waiting for storage that may hang: in a thread beside, so that what waits can tell, give up, and be ended.

A call that hangs in the kernel cannot be ended. The thread that made it is left to itself: nobody waits for
it at the end, and what it still gives is not used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hpcrun.errors import SiteError

_T = TypeVar("_T")
FIRST_REPORT_S = 5.0
"""Until it is told for the first time; then again after twice as long, and so on."""
_POLL_S = 0.5

SlowWaitReporter = Callable[[str, float], None]
"""Takes what is waited for, and for how many seconds it has been."""


class BackgroundCall(Generic[_T]):
    """Something that is done in a thread beside."""

    def __init__(self, action: Callable[[], _T]) -> None:
        self._action, self._done = action, threading.Event()
        self._found: list[_T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="hpcrun-errand", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found.append(self._action())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after so long at most."""
        return self._done.wait(seconds)

    def result(self) -> _T:
        """What came of it; raises what it has raised."""
        if self._error is not None:
            raise self._error
        return self._found[0]


def wait_for_storage(
    what: str, action: Callable[[], _T], say: SlowWaitReporter, limit_s: float | None = None
) -> _T:
    """Do something with storage and wait for it, telling now and then; SiteError where that is too long."""
    errand, begin, told_s = BackgroundCall(action), time.monotonic(), FIRST_REPORT_S
    while not errand.wait(_POLL_S):
        seconds = time.monotonic() - begin
        if limit_s is not None and seconds > limit_s:
            raise SiteError(f"{what}: has not answered for {seconds:.0f} s, and is not waited for any more")
        if seconds >= told_s:
            told_s = 2 * seconds
            say(what, seconds)
    return errand.result()


class BackgroundPoll(Generic[_T]):
    """A look that is taken again and again beside, and never waited for."""

    def __init__(self, look: Callable[..., _T]) -> None:
        self._look = look
        self._background_call: BackgroundCall[_T] | None = None

    def latest(self, *of: Any) -> _T | None:
        """What the last look has seen; None where there is none, or it has failed."""
        found: _T | None = None
        if self._background_call is not None and self._background_call.wait(0):
            try:
                found = self._background_call.result()
            except OSError:
                found = None
        if self._background_call is None or self._background_call.wait(0):
            self._background_call = BackgroundCall(lambda: self._look(*of))
        return found
