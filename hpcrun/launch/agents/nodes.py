"""What a supervisor sees of the nodes of its run, on one host or on many: a protocol for each use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hpcrun.checkpoint.worker_messages import WorkerMessage, WorkerOrder
from hpcrun.fabric.inventory import NodeInventory
from hpcrun.health.preflight import PreflightReport, PreflightRequest
from hpcrun.launch.attempt_events import AttemptEvent, NodeLost
from hpcrun.launch.rendezvous import RendezvousPoint, RendezvousRequest
from hpcrun.process import ProcessId
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt


class NodeStates(Protocol):
    """Which nodes answer."""

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes that answer."""

    @property
    def lost(self) -> list[NodeLost]:
        """The nodes that stopped answering, in that order."""

    def rest(self, seconds: float) -> None:
        """Wait at most this long between two attempts, and process what the nodes send."""


class NodeQueries(NodeStates, Protocol):
    """What nodes say about themselves and their network before ranks are started on them."""

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """Each node's place in the network, as Slurm told it: SLURM_TOPOLOGY_ADDR and its pattern."""

    @property
    def inventories(self) -> dict[str, NodeInventory]:
        """GPUs, NICs and CPUs of the nodes that have sent theirs."""

    def preflight(self, ask: PreflightRequest) -> dict[str, PreflightReport]:
        """Have every node check itself; the reports that arrive in time."""

    def resolve_rendezvous(self, request: RendezvousRequest) -> dict[str, RendezvousPoint]:
        """Each node's address for the others and a port on rank 0's node; the answers that come in time."""

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """Have the nodes with ranks connect to each other: a text about failures, and the nodes at fault."""


class AttemptRanks(Protocol):
    """The ranks of the current attempt, from their start to their end."""

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Watch for the ranks of an attempt, which are about to be started.

        `hears`: the name of the socket on each node to which ranks report their progress.
        """

    def launcher_started(self, launcher: ProcessId) -> None:
        """Note that the launcher runs on this host."""

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Start one of the launcher's processes on a node; only with agents."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `news` has something."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen, even if it has ended since."""

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have connected and none has ended."""

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""

    def news(self, *, look: bool) -> Iterator[AttemptEvent]:
        """What has happened since the last call; `look`: also search for new ranks."""

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all that run."""

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks; returns what is seen of each from outside."""

    def kill(self) -> None:
        """Kill the ranks at once."""

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """End what is left of the attempt, except the launcher; returns what could not be ended."""


class NodeWorkers(NodeStates, Protocol):
    """The checkpoint workers of the nodes."""

    def send_to_worker(self, node: str, order: WorkerOrder) -> None:
        """Send an order to a node's checkpoint worker; the first one starts it."""

    def worker_messages(self) -> list[tuple[str, WorkerMessage]]:
        """Messages of checkpoint workers since the last call, each with its node."""


class Nodes(NodeQueries, AttemptRanks, NodeWorkers, Protocol):
    """The nodes of a run: its attempts run on them, one after the other."""

    def warm(self, spares: Sequence[str]) -> None:
        """Have nodes without ranks load what training ranks load, to save that time later."""

    def restart_lost_agents(self) -> None:
        """Try to bring lost nodes back for a later attempt; returns at once."""

    def verify(self) -> None:
        """Raise FencedError if another supervisor has taken over the run."""

    def close(self) -> None:
        """Release the nodes."""
