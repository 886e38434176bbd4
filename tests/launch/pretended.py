"""Several nodes that are all this host: their ranks are real, and a node is lost when a test says so."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.health.preflight import PreflightReport, PreflightRequest
from hpcrun.launch.agents.local_node import LocalNode
from hpcrun.launch.agents.nodes import Nodes
from hpcrun.launch.attempt_events import AttemptEvent, NodeLost
from hpcrun.launch.attempt_monitor import AttemptLimits, AttemptOutcome
from hpcrun.launch.failover.state import FailoverState
from hpcrun.launch.launchers import HydraLauncher, Launcher
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement, place_in_blocks
from hpcrun.specs.plan import Plan
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.submission.prepare import PreparedJob

LIMITS = AttemptLimits(start_s=120, stop_s=20, settle_s=0.3, leave_s=0.5, finish_s=20)


class PretendedNodes(LocalNode):
    """Nodes by their names alone."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(RunDir(Path()))
        self.names = list(names)
        self.where: tuple[str, ...] = ()
        """The pretended node of each rank."""
        self._lost: list[NodeLost] = []
        self._gone: set[str] = set()
        self._told = 0

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self._gone)

    @property
    def lost(self) -> list[NodeLost]:
        return self._lost

    def lose(self, node: str) -> None:
        """Take a node away, and its ranks with it; without a name rank 0 alone falls."""
        if not node:
            self.signal(signal.SIGKILL, 0)
            return
        self._lost.append(NodeLost(node, "its plug was pulled", time.time()))
        self._gone.add(node)
        for rank, where in enumerate(self.where):
            if where == node:
                self.signal(signal.SIGKILL, rank)

    def preflight(self, ask: PreflightRequest) -> dict[str, PreflightReport]:
        return {name: PreflightReport(ask.attempt, time.time(), 0.0, ()) for name in self.alive}

    def come_back(self, nodes: str) -> None:
        """Nodes of one letter each answer again."""
        self._gone -= set(nodes)

    def news(self, *, look: bool) -> Iterator[AttemptEvent]:
        yield from self._lost[self._told :]
        self._told = len(self._lost)
        yield from super().news(look=look)


class PretendedPlacement(Placement):
    """To the supervisor the nodes are what they are called; the ranks find the host that they stand on."""

    def as_json(self) -> dict[str, Any]:
        return Placement((os.uname().nodename,) * len(self.ranks)).as_json()


@dataclass(frozen=True)
class PretendedSite(RunContext):
    """A place with such nodes."""

    pretended: PretendedNodes = field(default_factory=lambda: PretendedNodes(()))

    def launcher(self, spec: JobSpec) -> Launcher:
        return HydraLauncher(agents=False, interface=None)

    @contextmanager
    def nodes(self, run: RunDir, spec: JobSpec, succession: FailoverState | None = None) -> Iterator[Nodes]:
        yield self.pretended

    def place(
        self, spec: JobSpec, plan: Plan | None, nodes: Nodes, excluded: Collection[str] = ()
    ) -> Placement:
        ranks = plan.degrees.world_size if plan else spec.ranks
        usable = [node for node in nodes.alive if node not in excluded]
        self.pretended.where = place_in_blocks(usable, ranks, self.per_node(spec)).ranks
        return PretendedPlacement(self.pretended.where)


def pretend(names: Sequence[str]) -> PretendedSite:
    """An allocation of these nodes."""
    return PretendedSite(Allocation(1, tuple(names), "1", is_batch=False), pretended=PretendedNodes(names))


def supervise(
    site: PretendedSite, prepared: PreparedJob, observer: Any, program: Sequence[str] = ()
) -> AttemptOutcome:
    """Run a job there: its own ranks, or `program` RUN_DIR ATTEMPT as each of them."""

    def command(attempt: Attempt) -> list[str]:
        return [sys.executable, *program, str(attempt.run.path), str(attempt.number)]

    with SignalQueue() as inbox:
        given = command if program else None
        return Supervisor(prepared, inbox, observer, site=site, command=given, limits=LIMITS).run()
