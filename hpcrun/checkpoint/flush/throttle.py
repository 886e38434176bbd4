"""Slow the checkpoint worker down during training: short bursts with rests between, unless somebody waits.

Hashing and writing take memory bandwidth and a core from training. Spread over many steps, training does not
slow down; done at once, the steps at that time take longer. Spread, a save is durable later: `flush_duty`
limits the delay to a part of the time between saves, and rests end as soon as anybody waits for a save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MIN_DUTY_CYCLE = 0.1
"""Of its time that a thread works at least: more rest than that no training would notice."""
MIN_BURST_S = 0.002
"""What is shorter is not worth a rest."""
MAX_REST_S = 1.0
"""A write that took long has mostly waited itself, for a disk or a server, and training has not felt it."""


def compute_duty_cycle(worked_s: float, interval_s: float | None, flush_duty: float) -> float:
    """The share of its time that a thread is to work, for a save that takes so much work.

    `interval_s`: from the save before to this one; None: not known yet, so that nothing is put off.
    `flush_duty`: the part of that time over which the work may be spread; 0: no rests.
    """
    room_s = flush_duty * (interval_s or 0.0)
    return min(1.0, max(MIN_DUTY_CYCLE, worked_s / room_s)) if room_s > 0 else 1.0


class _WorkBurst(threading.local):
    """Of each thread."""

    since = 0.0
    rested_s = 0.0


class Throttle:
    """Keeps the threads of a worker to their shares; all methods may be called in any of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.flush_duty = 0.0
        """Of the job; see `compute_duty_cycle`."""
        self._clock, self._hasty = clock, threading.Event()
        self._lock, self._stint = threading.Lock(), _WorkBurst()
        self._share, self._worked_s = 1.0, 0.0
        self._begun: float | None = None
        self._calm = threading.Event()
        self._calm.set()

    def begin_save(self) -> None:
        """A save is to be stored: what the one before took, and how long ago it was, tell the share."""
        now = self._clock()
        self._calm.clear()
        with self._lock:
            interval_s = None if self._begun is None else now - self._begun
            self._share = compute_duty_cycle(self._worked_s, interval_s, self.flush_duty)
            self._begun, self._worked_s = now, 0.0

    def forget(self) -> None:
        """How far saves are apart is not known any more."""
        with self._lock:
            self._begun, self._worked_s = None, 0.0

    def start(self) -> None:
        """This thread begins to work."""
        self._stint.since, self._stint.rested_s = self._clock(), 0.0

    @property
    def rested_s(self) -> float:
        """How long this thread has rested since it began."""
        return self._stint.rested_s

    def rest(self, *_of: object) -> None:
        """Called between pieces of work, the smaller the better; waits as long as the share asks for."""
        begin = self._clock()
        worked_s = begin - self._stint.since
        if worked_s < MIN_BURST_S:
            return
        with self._lock:
            self._worked_s += worked_s
            share = self._share
        if share < 1.0 and not self._hasty.is_set():
            self._hasty.wait(min(MAX_REST_S, worked_s * (1 / share - 1)))
            self._stint.rested_s += self._clock() - begin
        self._stint.since = self._clock()

    def hasten(self) -> None:
        """No more rests: somebody waits."""
        self._hasty.set()

    def resume_throttling(self) -> None:
        """All that was on its way has come through: nobody waits any more."""
        self._hasty.clear()
        self._calm.set()

    def await_idle(self, seconds: float) -> bool:
        """Wait until no save is on its way, but no longer than this; whether it is so."""
        return self._calm.wait(seconds)
