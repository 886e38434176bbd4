"""Slow work of the supervisor's beside what it must not stop doing: hearing the nodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_POLL_S = 0.2
_T = TypeVar("_T")


def run_while_pumping(rest: Callable[[float], None], action: Callable[[], _T]) -> _T:
    """Do something in another thread, and listen to the nodes, in `rest`, until it is done."""
    with ThreadPoolExecutor(1, "meanwhile") as pool:
        doing = pool.submit(action)
        while not doing.done():
            rest(_POLL_S)
        return doing.result()
