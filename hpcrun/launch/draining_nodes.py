"""Which nodes of the job an admin is draining, as of a moment ago: nobody waits for Slurm's answer."""

from __future__ import annotations

from collections.abc import Mapping

from hpcrun.launch.heartbeat import Pulse
from hpcrun.slurm.allocation import Allocation

_EVERY_S = 60.0
"""Slurm's controller is everybody's: one question a minute and job."""
_PATIENCE_S = 1e9


class Drains:
    """Asks Slurm in a thread of its own; what it does not answer stays as it was known."""

    def __init__(self, allocation: Allocation, every_s: float = _EVERY_S) -> None:
        self._allocation = allocation
        self._known: Mapping[str, str] = {}
        self._pulse = Pulse(every_s, self._look, _PATIENCE_S)

    def _look(self) -> None:
        found = self._allocation.drained()
        if found is not None:
            self._known = found

    @property
    def known(self) -> Mapping[str, str]:
        """The nodes, and how they are drained."""
        return self._known

    def stop(self) -> None:
        """Ask no more."""
        self._pulse.stop()
