"""Measures a fixed piece of work on every rank from time to time, which tells slow nodes from others.

The time of steps does not: ranks wait for one another, so all take as long as the slowest.
"""

from __future__ import annotations

import contextlib
import os
import time

import torch

from hpcrun.launch.watch.progress import report_probe
from hpcrun.runtime.device import Device

_PROBE_EVERY_S = 1.0
_MAX_TIME_SHARE = 0.001
"""The share of the time since the last probe that the next one may take."""
_MAX_PROBE_S = 0.01
_FIRST_ROUNDS = 3
_MATRIX_SIZE = {"cpu": 192, "cuda": 2048}


class SpeedProbe:
    """Multiplies two matrices repeatedly, about once a second, for a thousandth of the time.

    All rounds count: a rank that is interrupted every few milliseconds is as slow as one with a low clock.
    Time spent waiting for a core does not count, because other processes cause it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        size = _MATRIX_SIZE["cuda" if device.is_cuda else "cpu"]
        # Without random numbers, which would change those of the run.
        line = torch.arange(size, device=device.torch_device, dtype=torch.float32) / size
        self._matrix = line[:, None] * line[None, :]
        self._product = torch.empty_like(self._matrix)
        self._done, self._least = time.monotonic(), 0.0
        self._waits: int | None = None
        with contextlib.suppress(OSError):  # a kernel that does not count it
            self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def step(self, step: int) -> None:
        """Probe, if it is time, at the beginning of a step, when no rank waits for this one."""
        passed = time.monotonic() - self._done
        if passed < _PROBE_EVERY_S:
            return
        rounds = (
            int(min(_MAX_TIME_SHARE * passed, _MAX_PROBE_S) / self._least) if self._least else _FIRST_ROUNDS
        )
        with torch.no_grad():
            times = [self._round() for _ in range(max(1, rounds))]
        self._least = min(self._least or times[0], *times)
        report_probe(sum(times) / len(times), step)
        self._done = time.monotonic()

    def _round(self) -> float:
        self._device.synchronize()
        begin, waited = time.perf_counter(), self._waited_s()
        torch.matmul(self._matrix, self._matrix, out=self._product)
        self._device.synchronize()
        return time.perf_counter() - begin - (self._waited_s() - waited)

    def _waited_s(self) -> float:
        """Return how long this thread was ready to run without a core."""
        if self._waits is None:
            return 0.0
        return int(os.pread(self._waits, 64, 0).split()[1]) / 1e9
