"""What a supervisor sees of the nodes of its run, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hpcrun.checkpoint.worker_messages import WorkerMessage, WorkerOrder
from hpcrun.fabric.inventory import NodeInventory
from hpcrun.health.preflight import PreflightReport, PreflightRequest
from hpcrun.launch.attempt_events import (
    AttemptEvent,
    NodeLost,
)
from hpcrun.launch.rendezvous import (
    RendezvousPoint,
    RendezvousRequest,
)
from hpcrun.process import ProcessId
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt


class Nodes(Protocol):
    """Where the ranks of attempts stand, one attempt after the other."""

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes that still answer."""

    @property
    def lost(self) -> list[NodeLost]:
        """Those that do not any more, first one first."""

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """Where in the network the nodes say they are: SLURM_TOPOLOGY_ADDR and its pattern."""

    @property
    def inventories(self) -> dict[str, NodeInventory]:
        """What the nodes that have said so have inside."""

    def preflight(self, ask: PreflightRequest) -> dict[str, PreflightReport]:
        """Have every node look at itself; the answers of those that give one in time."""

    def resolve_rendezvous(self, request: RendezvousRequest) -> dict[str, RendezvousPoint]:
        """Where each node is reached by the others, and a port of rank 0's; of those that answer in time."""

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """Have the nodes with ranks connect to each other: what fails, in words, and the nodes to blame."""

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Look out for the ranks of an attempt, which are about to be started.

        `hears`: the name of the socket on each node through which they will report their progress.
        """

    def launcher_started(self, launcher: ProcessId) -> None:
        """The launcher on this host is running."""

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Start a process of the launcher's on a node; only where there are agents."""

    def fileno(self) -> int:
        """Becomes readable when there is something to be told."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen, if only as one that has gone."""

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have met and none has ended."""

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""

    def news(self, *, look: bool) -> Iterator[AttemptEvent]:
        """What has happened since the last call; `look`: also go and see who has come up."""

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""

    def rest(self, seconds: float) -> None:
        """Let time pass between two attempts, for so long at most; the nodes are still heard."""

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks; what is seen of each from outside, where its node answers."""

    def kill(self) -> None:
        """End the ranks at once."""

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """End whatever is left of the attempt, the launcher apart; says what could not be ended."""

    def warm(self, spares: Sequence[str]) -> None:
        """Have nodes without ranks load what ranks of ours load, so that they need no time for it later."""

    def restart_lost_agents(self) -> None:
        """Try to have lost nodes back for an attempt to come; takes no time."""

    def send_to_worker(self, node: str, order: WorkerOrder) -> None:
        """Tell the checkpoint worker of a node something; the first word starts it."""

    def worker_messages(self) -> list[tuple[str, WorkerMessage]]:
        """What checkpoint workers have said since the last call, each with its node."""

    def verify(self) -> None:
        """FencedError where another supervisor has taken the run over."""

    def close(self) -> None:
        """Let the nodes go."""
