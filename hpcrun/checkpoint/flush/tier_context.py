"""What tiers are built from, and what they may offer beside storing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpcrun.checkpoint.flush.stall_watch import StallWatch
from hpcrun.checkpoint.flush.throttle import Throttle
from hpcrun.checkpoint.restore_plan import RebuildOrder
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry, Tier
from hpcrun.checkpoint.worker_messages import ConfigureWorker
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.rundir import RunDir


@dataclass(frozen=True)
class TierContext:
    """Everything that a tier may need to know."""

    run: RunDir
    node: str
    """By the agent's name."""
    spec: CheckpointSpec
    attempt: int
    arena: Path
    """The folder of this node's arena; a tier's own files in it begin with its name."""
    set: tuple[str, ...] | None = None
    """The nodes of this node's erasure set, in order."""
    parity: int = 0
    """How many of them may be lost."""
    peers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Where the workers of other nodes listen."""
    secret: bytes = b""
    """Of the run: what those who talk to each other prove to know."""
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set when the attempt is over: nobody is waited for any more."""
    throttle: Throttle = field(default_factory=Throttle)
    """Of this worker: what has to be kept to between writes."""
    watch: StallWatch = field(default_factory=StallWatch)
    """Of this worker: what its storing is at."""
    address: str = ""
    """Of this node, where its worker listens for the others; empty: it does not."""
    say: Callable[[str], None] = lambda text: None
    """Tells the host a line that is worth a person's attention."""
    peer_service: PeerServiceProtocol | None = None
    """This worker's own side of the talk between nodes."""

    def on_write(self, count: int) -> None:
        """A tier has written something: it gets on, and may have to rest."""
        self.watch.note_progress()
        self.throttle.rest(count)


def make_tier_context(order: ConfigureWorker, arena: Path) -> TierContext:
    """The context that the host's order gives; ValueError where the order makes no sense."""
    return TierContext(
        RunDir(Path(order.run)),
        order.node,
        CheckpointSpec.model_validate(order.spec),
        order.attempt,
        arena,
        order.set,
        order.parity,
        order.peers,
        bytes.fromhex(order.secret),
        address=order.address,
    )


@runtime_checkable
class SupportsAbandon(Protocol):
    """A tier where other nodes wait for this one's parts."""

    def abandon(self, stamp: CheckpointId, numbers: Sequence[int], why: str) -> None:
        """Tell them that these parts will not come."""


@runtime_checkable
class UsesNodeMemory(Protocol):
    """A tier that keeps something in the memory of this node, beside the slots."""

    def memory_bytes(self, block_bytes: int) -> int:
        """How much at most, where the ranks of the node write so much."""


@runtime_checkable
class SupportsWriteProbe(Protocol):
    """A tier that can be tried before there is anything to store."""

    def prove(self) -> None:
        """Write and remove next to nothing where saves will go; OSError or SiteError where that fails."""


class PeerServiceProtocol(Protocol):
    """Answers other nodes' workers, and fetches from them; it has threads of its own."""

    address: str
    port: int

    def reconfigure(self, around: TierContext) -> None:
        """The set, the peers or the attempt are others now."""

    def tier(self, around: TierContext) -> Tier | None:
        """The tier that keeps parity, where this node is in a set; SiteError where it cannot."""

    def rebuild(self, order: RebuildOrder) -> InventoryEntry:
        """Make again what an order `rebuild` asks for; OSError or SiteError where it cannot be made."""

    def ask(self, node: str, request: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        """What another node answers; SiteError where it does not, or says no."""

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        """Fill a buffer with what another node was asked for; SiteError unless it gets all of it."""

    def close(self) -> None:
        """Listen no more."""
