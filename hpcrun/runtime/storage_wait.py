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
FIRST_S = 5.0
"""Until it is told for the first time; then again after twice as long, and so on."""
_TURN_S = 0.5

Say = Callable[[str, float], None]
"""Takes what is waited for, and for how many seconds it has been."""


class Errand(Generic[_T]):
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


def patiently(what: str, action: Callable[[], _T], say: Say, limit_s: float | None = None) -> _T:
    """Do something with storage and wait for it, telling now and then; SiteError where that is too long."""
    errand, begin, told_s = Errand(action), time.monotonic(), FIRST_S
    while not errand.wait(_TURN_S):
        seconds = time.monotonic() - begin
        if limit_s is not None and seconds > limit_s:
            raise SiteError(f"{what}: has not answered for {seconds:.0f} s, and is not waited for any more")
        if seconds >= told_s:
            told_s = 2 * seconds
            say(what, seconds)
    return errand.result()


class Glimpse(Generic[_T]):
    """A look that is taken again and again beside, and never waited for."""

    def __init__(self, look: Callable[..., _T]) -> None:
        self._look = look
        self._errand: Errand[_T] | None = None

    def latest(self, *of: Any) -> _T | None:
        """What the last look has seen; None where there is none, or it has failed."""
        found: _T | None = None
        if self._errand is not None and self._errand.wait(0):
            try:
                found = self._errand.result()
            except OSError:
                found = None
        if self._errand is None or self._errand.wait(0):
            self._errand = Errand(lambda: self._look(*of))
        return found
