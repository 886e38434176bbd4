"""The checkpoint workers of all nodes, as the supervisor talks to them: all at once, and never for ever."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.flush.spare_replicas import is_spare_replica
from hpcrun.checkpoint.restore.inventory import InventoryReader
from hpcrun.checkpoint.restore_plan import RebuildOrder
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry
from hpcrun.launch.agents.nodes import NodeWorkers

READY_TIMEOUT_S = 30.0
INVENTORY_TIMEOUT_S = 20.0
VERIFY_TIMEOUT_S, REBUILD_TIMEOUT_S = 600.0, 900.0
"""Not to wait for ever: what a worker does it does as fast as it can."""
_POLL_S = 0.1

WorkerAddresses = dict[str, tuple[str, int]]
_A = TypeVar("_A", wire.WorkerInventory, wire.PartsRebuilt)


class WorkerClient:
    """One a node; those of lost nodes are silent."""

    def __init__(self, nodes: NodeWorkers) -> None:
        self._nodes = nodes
        self.peers: WorkerAddresses = {}
        """Where those that have come up are reached by the others."""
        self.news: list[tuple[str, wire.WorkerMessage]] = []
        """What was not asked for, in order; whoever reads it takes it out."""
        self._orders: dict[str, wire.ConfigureWorker] = {}
        self._ready: set[str] = set()
        self._refused: dict[str, str] = {}
        """Why the worker of a node cannot do as it was told."""
        self._told_peers: WorkerAddresses = {}
        self._answers: list[tuple[str, wire.WorkerInventory | wire.PartsRebuilt]] = []
        self._numbers = itertools.count(1)

    def open(
        self, orders: Mapping[str, wire.ConfigureWorker], timeout_s: float = READY_TIMEOUT_S
    ) -> list[str]:
        """Have a worker on each of these nodes, which knows its order; those where none came up in time.

        A worker is ready when it has its order; all are told again when all are known that are to be.
        """
        self._orders = dict(orders)
        self._ready, self._refused = set(), {}
        self._configure()
        deadline = time.monotonic() + timeout_s
        while any(node in self._nodes.alive and self._is_awaited(node) for node in orders):
            if time.monotonic() > deadline:
                break
            self._hear(_POLL_S)
        self.refresh()
        return [node for node in orders if node not in self._ready]

    def _is_awaited(self, node: str) -> bool:
        return node not in self._ready and node not in self._refused

    def refresh(self) -> None:
        """Tell all workers where the others are, if that has changed since they were told."""
        if self._told_peers != self.peers:
            self._configure()

    def _configure(self) -> None:
        self._told_peers = dict(self.peers)
        for node, order in self._orders.items():
            self._nodes.send_to_worker(node, replace(order, peers=dict(self.peers)))

    def inventory(
        self, nodes: Sequence[str], prove: Collection[str] = (), timeout_s: float | None = None
    ) -> tuple[list[InventoryEntry], list[str]]:
        """All that nodes hold, and which nodes did not answer: those have nothing.

        `prove`: of these generations only what each node has read and found to be as it was written.
        """
        number = next(self._numbers)
        timeout_s = timeout_s or (VERIFY_TIMEOUT_S if prove else INVENTORY_TIMEOUT_S)
        for node in nodes:
            self._nodes.send_to_worker(node, wire.TakeInventory(number, tuple(sorted(prove))))
        entries, open_ones, reader = list[InventoryEntry](), dict.fromkeys(nodes), InventoryReader()
        for node, message in self._await(wire.WorkerInventory, {number}, open_ones, timeout_s):
            for entry in reader.read({**entry, "node": node} for entry in message.holdings):
                if isinstance(entry, str):
                    self.news.append((node, wire.WorkerLog(f"it tells of a holding: {entry}")))
                else:
                    entries.append(entry)
            if not message.has_more:
                open_ones.pop(node, None)
        # Of two nodes that have a part, the one whose ranks have written it is mostly where it is needed.
        entries.sort(key=lambda entry: any(is_spare_replica(part.path) for part in entry.parts))
        return entries, list(open_ones)

    def rebuild(
        self, orders: Iterable[RebuildOrder], timeout_s: float = REBUILD_TIMEOUT_S
    ) -> list[tuple[RebuildOrder, InventoryEntry | str]]:
        """What came of each order: what is there now, or why it is not."""
        numbers = {next(self._numbers): order for order in orders}
        for number, order in numbers.items():
            self._nodes.send_to_worker(order.node, wire.RebuildParts(number, order))
        outcomes: list[tuple[RebuildOrder, InventoryEntry | str]] = []
        open_ones = dict.fromkeys(order.node for order in numbers.values())
        for node, message in self._await(wire.PartsRebuilt, numbers, open_ones, timeout_s):
            order = numbers.pop(message.id)
            holding = message.holding and replace(message.holding, node=node)
            outcomes.append((order, holding or message.problem or "it does not say what came of it"))
            if node not in {order.node for order in numbers.values()}:
                open_ones.pop(node, None)
        return outcomes + [(order, f"{order.node} did not do it in time") for order in numbers.values()]

    def release(self, keep: Collection[str]) -> None:
        """Let go of all but these generations, on all nodes."""
        for node in self.ready:
            self._nodes.send_to_worker(node, wire.ReleaseGenerations(tuple(sorted(keep))))

    def copy(self, node: str, stamp: CheckpointId, of: Sequence[str]) -> int:
        """Have a node copy what others have in memory of a state; the number by which it answers."""
        number = next(self._numbers)
        self._nodes.send_to_worker(node, wire.CopyParts(number, stamp, tuple(of)))
        return number

    def dismiss(self, node: str, generation: str, numbers: Collection[int]) -> None:
        """Have a node let go of all copies of others' parts but these of a generation."""
        self._nodes.send_to_worker(node, wire.DismissReplicas(generation, tuple(sorted(numbers))))

    @property
    def ready(self) -> list[str]:
        """The nodes whose worker does as it was told."""
        return [node for node in self._orders if node in self._ready]

    def look(self) -> None:
        """Take in what has been said, without waiting."""
        for node, message in self._nodes.worker_messages():
            self._take(node, message)

    def _await(
        self, kind: type[_A], numbers: Collection[int], open_ones: Collection[str], timeout_s: float
    ) -> Iterator[tuple[str, _A]]:
        """Answers to questions with these numbers, until no node that lives still has one to give."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(node in self._nodes.alive for node in open_ones):
            for node, message in self._hear(_POLL_S):
                if isinstance(message, kind) and message.id in numbers:
                    yield node, message

    def _hear(self, seconds: float) -> list[tuple[str, wire.WorkerInventory | wire.PartsRebuilt]]:
        """The answers that came in, after a moment at most."""
        self.look()
        if not self._answers:
            self._nodes.rest(seconds)
            self.look()
        answers, self._answers = self._answers, []
        return answers

    def _take(self, node: str, message: wire.WorkerMessage) -> None:
        match message:
            case wire.WorkerInventory() | wire.PartsRebuilt():
                self._answers.append((node, message))
                return
            case wire.WorkerReady(address, port):
                self._ready.add(node)
                if port:
                    self.peers[node] = (address or "", port)
            case wire.WorkerError(why) if node not in self._ready:
                if self._refused.get(node) == why:
                    return  # as it was told before
                self._refused[node] = why
            case wire.WorkerDied():
                self._ready.discard(node)
                self.peers.pop(node, None)
        self.news.append((node, message))
