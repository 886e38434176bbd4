"""Several nodes for tests, each with an arena, a server and a parity tier, as threads on loopback."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.parity.parity_tier import ParityTier
from hpcrun.checkpoint.parity.peers import PartServer, PeerClient, PeerCredentials, PeerServer
from hpcrun.checkpoint.part_check import DamagedPart, exclude_damaged_parts
from hpcrun.checkpoint.tier import HeldPart, InventoryEntry, NodeShards
from tests.checkpoint.loads import load_of

HERE = "127.0.0.1"


class Node:
    """One node: what its ranks have sealed lies in files, as in a real arena."""

    def __init__(self, folder: Path, name: str, secret: str = "s3cret") -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir(parents=True)
        self.who = PeerCredentials("run-1", name, secret)
        self.server = PeerServer(HERE, self.who, timeout_s=5.0)
        self.memory: list[InventoryEntry] = []
        self.damages: dict[DamagedPart, str] = {}
        self.tier: ParityTier | None = None
        self.peers: PeerClient | None = None
        self.hurry = threading.Event()
        PartServer(self.server, self.held)

    def join(self, members: Sequence[Node], parity: int, patience_s: float = 20.0) -> None:
        """Become a member of a set."""
        if self.peers is not None:
            self.peers.close()
        addresses = {one.name: (one.server.address, one.server.port) for one in members}
        self.peers = PeerClient(self.who, addresses, timeout_s=5.0)
        names = [one.name for one in members]
        self.tier = ParityTier(
            self.folder,
            self.name,
            names,
            parity,
            self.peers,
            self.server,
            hurry=self.hurry,
            patience_s=patience_s,
        )

    def seal(self, load: NodeShards) -> NodeShards:
        """Put what the ranks have sealed into files, as slots are."""
        parts = []
        for one in load.parts:
            path = self.folder / f"slot-{one.number}-{load.stamp.step}.bin"
            path.write_bytes(one.image)
            parts.append(HeldPart(one.number, str(path), 0, one.part))
        self.memory.append(InventoryEntry(load.stamp, "memory", self.name, tuple(parts)))
        return load

    def held(self) -> list[InventoryEntry]:
        """All that is on this node."""
        found = [*self.memory, *(self.tier.holdings() if self.tier else [])]
        return exclude_damaged_parts(found, self.damages)

    def die(self) -> None:
        """Nothing of it answers any more."""
        self.hurry.set()
        self.server.close()
        if self.peers is not None:
            self.peers.close()


class Nodes:
    """A set of them."""

    def __init__(self, folder: Path, count: int, parity: int, patience_s: float = 20.0) -> None:
        self.folder, self.parity = folder, parity
        self.every = [Node(folder, f"n{number}") for number in range(count)]
        for node in self.every:
            node.join(self.every, parity, patience_s)
        self.pool = ThreadPoolExecutor(count + 1)

    def loads(self, step: int, ranks: Sequence[int]) -> list[NodeShards]:
        """What each has sealed of a step: so many ranks a node."""
        found, first = [], 0
        for number, count in enumerate(ranks):
            found.append(load_of(step, range(first, first + count), sum(ranks), number))
            first += count
        return found

    def store(self, loads: Sequence[NodeShards | None]) -> list[Future[dict[str, Any]]]:
        """Each stores its own at once; None: this one does not come."""
        return [
            self.pool.submit(node.tier.store, node.seal(load))
            for node, load in zip(self.every, loads, strict=True)
            if load is not None and node.tier is not None
        ]

    def holdings(self, generation: str, without: Sequence[int] = ()) -> list[InventoryEntry]:
        """What is left of a generation."""
        left = [node for number, node in enumerate(self.every) if number not in without]
        return [one for node in left for one in node.held() if one.stamp.generation == generation]

    def close(self) -> None:
        """All of it."""
        for node in self.every:
            node.die()
        self.pool.shutdown()


def flip(path: str | Path, at: int, count: int = 1) -> None:
    """Damage bytes; twice is not at all."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.pread(descriptor, count, at)
        os.pwrite(descriptor, bytes(byte ^ 0x40 for byte in found), at)
    finally:
        os.close(descriptor)


def with_stamp(load: NodeShards, **changes: Any) -> NodeShards:
    """The same parts of another state."""
    return replace(load, stamp=replace(load.stamp, **changes))
