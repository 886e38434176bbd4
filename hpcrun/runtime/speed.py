"""A fixed piece of work, done now and then on every rank: what it takes tells slow nodes from others.

Steps cannot tell: ranks wait for one another, so all of them take as long as the slowest.
"""

from __future__ import annotations

import time

import torch

from hpcrun.launch.watch.progress import probed
from hpcrun.runtime.device import Device

_EVERY_S = 1.0
_SIZE = {"cpu": 192, "cuda": 2048}
_ROUNDS = 3


class SpeedProbe:
    """Multiplies two matrices about once a second, the best of three: far below a percent of the time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        size = _SIZE["cuda" if device.is_cuda else "cpu"]
        # Made without random numbers: the run's own must not depend on us.
        line = torch.arange(size, device=device.torch_device, dtype=torch.float32) / size
        self._matrix = line[:, None] * line[None, :]
        self._product = torch.empty_like(self._matrix)
        self._done = time.monotonic()

    def step(self, step: int) -> None:
        """At the beginning of a step, where nobody waits for this rank yet."""
        if time.monotonic() - self._done < _EVERY_S:
            return
        with torch.no_grad():
            best = min(self._round() for _ in range(_ROUNDS))
        probed(best, step)
        self._done = time.monotonic()

    def _round(self) -> float:
        self._device.synchronize()
        begin = time.perf_counter()
        torch.matmul(self._matrix, self._matrix, out=self._product)
        self._device.synchronize()
        return time.perf_counter() - begin
