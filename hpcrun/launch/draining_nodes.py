"""Which nodes of the job an admin is draining, as of a moment ago: nobody waits for Slurm's answer."""

from __future__ import annotations

from collections.abc import Mapping

from hpcrun.launch.failover.heartbeat import Heartbeat
from hpcrun.slurm.allocation import Allocation

_POLL_S = 60.0
"""Slurm's controller is everybody's: one question a minute and job."""
_NEVER_HANGS_S = 1e9


class DrainPoller:
    """Asks Slurm in a thread of its own; what it does not answer stays as it was known."""

    def __init__(self, allocation: Allocation, every_s: float = _POLL_S) -> None:
        self._allocation = allocation
        self._known: Mapping[str, str] = {}
        self._heartbeat = Heartbeat(every_s, self._look, _NEVER_HANGS_S)

    def _look(self) -> None:
        nodes = self._allocation.draining_nodes()
        if nodes is not None:
            self._known = nodes

    @property
    def known(self) -> Mapping[str, str]:
        """The nodes, and how they are drained."""
        return self._known

    def stop(self) -> None:
        """Ask no more."""
        self._heartbeat.stop()
