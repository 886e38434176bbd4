"""The nodes of a run that goes on where its supervisor is: this one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrun import process
from hpcrun.checkpoint.worker_messages import WorkerMessage, WorkerOrder
from hpcrun.fabric.inventory import NodeInventory, try_read_node_inventory
from hpcrun.health.preflight import PreflightReport, PreflightRequest, answer_preflight
from hpcrun.launch.agents.local_ranks import NodeRanks
from hpcrun.launch.agents.local_workers import LocalWorkers
from hpcrun.launch.attempt_events import (
    AttemptEvent,
    NodeLost,
)
from hpcrun.launch.rendezvous import (
    NodeRendezvous,
    RendezvousPoint,
    RendezvousRequest,
)
from hpcrun.process import ProcessId
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir


class LocalNode:
    """All ranks stand on this host, below the launcher: nobody in between is needed."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ranks: NodeRanks | None = None
        self._hosts, self._meeting = LocalWorkers(run), NodeRendezvous()

    @property
    def alive(self) -> tuple[str, ...]:
        """This host."""
        return (os.uname().nodename,)

    @property
    def lost(self) -> list[NodeLost]:
        """Always empty: this process runs on the only node."""
        return []

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """Nobody is asked."""
        return {}

    @property
    def inventories(self) -> dict[str, NodeInventory]:
        """That of this host, where it can be had."""
        inventory = try_read_node_inventory()
        return {os.uname().nodename: inventory} if inventory else {}

    @property
    def _here(self) -> NodeRanks:
        assert self._ranks is not None
        return self._ranks

    def preflight(self, ask: PreflightRequest) -> dict[str, PreflightReport]:
        """Look at this host."""
        node = os.uname().nodename
        return {node: answer_preflight(self._run, ask.of(node))}

    def resolve_rendezvous(self, request: RendezvousRequest) -> dict[str, RendezvousPoint]:
        """All ranks stand here, so loopback it is."""
        here = replace(request, nodes=request.nodes[:1])
        return dict.fromkeys(request.nodes, self._meeting.answer(here))

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """There is nothing between ranks of one host."""
        return "", ()

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Look out for the ranks of an attempt."""
        self._ranks = NodeRanks(attempt, range(len(placement.ranks)), hears)

    def launcher_started(self, launcher: ProcessId) -> None:
        """The ranks are found below this process."""
        self._here.below = launcher

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Never called: the launcher starts all by itself."""
        raise AssertionError(f"there is no agent on {node}")

    def fileno(self) -> int:
        """Becomes readable when a rank ends."""
        return self._here.fileno()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen."""
        return self._here.is_complete

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have met and none has ended."""
        return self._here.is_calm

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""
        return self._here.is_over

    def news(self, *, look: bool) -> Iterator[AttemptEvent]:
        """Who has ended, and who has come up."""
        yield from self._here.ended()
        if look:
            yield from self._here.appeared()
            yield from self._here.heard()

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""
        self._here.signal(number, rank)

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        self._hosts.wait(seconds)

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks."""
        return self._here.dump(timeout_s)

    def kill(self) -> None:
        """End the ranks at once."""
        self._here.kill()

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """End whatever is left of the attempt below the launcher."""
        stuck = self._here.clear(timeout_s, self._hosts.pids)
        self._meeting.close()
        process.reap_orphans()
        return [f"process {pid}" for pid in stuck]

    def warm(self, spares: Sequence[str]) -> None:
        """There are none here."""

    def restart_lost_agents(self) -> None:
        """Always empty: this process runs on the only node."""

    def send_to_worker(self, node: str, order: WorkerOrder) -> None:
        """Tell the checkpoint worker of a node something."""
        self._hosts.send(node, order)

    def worker_messages(self) -> list[tuple[str, WorkerMessage]]:
        """What it has said."""
        return self._hosts.receive()

    def verify(self) -> None:
        """A run on one host dies with it: nobody takes it over."""

    def close(self) -> None:
        """End the checkpoint worker, and give its memory back."""
        self._hosts.close()
        self._meeting.close()
