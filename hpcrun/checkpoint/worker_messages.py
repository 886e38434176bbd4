"""What a checkpoint worker says to its host and to the ranks of its node, and what they ask of it.

The host is the agent of the node, which passes messages on between the worker and the supervisor; or the
supervisor itself on one machine; or the first rank of a node, for a script without a supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcrun.checkpoint.restore_plan import RebuildOrder
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry, StoreResult, TierName
from hpcrun.typed_json import Tagged, TaggedUnion


@dataclass(frozen=True)
class ConfigureWorker(Tagged):
    """For each attempt, and again when the peers are known; the first one opens the node's memory."""

    run: str
    node: str
    """By the agent's name."""
    attempt: int
    spec: dict[str, Any]
    """The section `checkpoint` of the job."""
    run_ids: tuple[str, ...] = ()
    """Of a script's directory, which gets its identity at the first save."""
    is_of_script: bool = False
    """A script has started the worker for itself: there is no agent, and the memory ends with the script."""
    set: tuple[str, ...] | None = None
    """The nodes of this node's erasure set, in order."""
    parity: int = 0
    """How many of them may be lost."""
    peers: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Where the workers of other nodes listen."""
    secret: str = ""
    """Of the run, in hexadecimal digits: what those who talk to each other prove to know."""
    interface: str | None = None
    suffix: str = ""
    nodes: tuple[str, ...] = ()
    """From these the host finds the address to listen at."""
    address: str = ""
    """Where the worker listens for others; empty: it does not."""


@dataclass(frozen=True)
class TakeInventory(Tagged):
    """Tell what is here; of the generations in `prove` only what proves itself when it is read."""

    id: int
    prove: tuple[str, ...] = ()


@dataclass(frozen=True)
class RebuildParts(Tagged):
    """Make the parts of lost members of an erasure set again."""

    id: int
    order: RebuildOrder


@dataclass(frozen=True)
class ReleaseGenerations(Tagged):
    """Let go of all generations but these."""

    keep: tuple[str, ...]


@dataclass(frozen=True)
class CopyParts(Tagged):
    """Copy what these nodes have in memory of a state."""

    id: int
    stamp: CheckpointId
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class DismissReplicas(Tagged):
    """Let go of all copies of others' parts but these of a generation."""

    generation: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class PingWorker(Tagged):
    """Give a sign of life."""


@dataclass(frozen=True)
class EndWorker(Tagged):
    """Begin nothing new, and end."""


WorkerOrder = (
    ConfigureWorker
    | TakeInventory
    | RebuildParts
    | ReleaseGenerations
    | CopyParts
    | DismissReplicas
    | PingWorker
    | EndWorker
)
"""What a host orders."""
WORKER_ORDERS = TaggedUnion[WorkerOrder](WorkerOrder)


@dataclass(frozen=True)
class WorkerReady(Tagged):
    """The worker is configured for an attempt."""

    address: str | None = None
    port: int | None = None
    """Where it listens for the workers of other nodes."""
    socket: str = ""
    tiers: tuple[str, ...] = ()
    """Those that the node has."""


@dataclass(frozen=True)
class WorkerPong(Tagged):
    """A sign of life."""


@dataclass(frozen=True)
class ReservingMemory(Tagged):
    """Memory is being filled, which may take minutes without another word."""


@dataclass(frozen=True)
class WorkerLog(Tagged):
    """A line that is worth a person's attention."""

    text: str


@dataclass(frozen=True)
class WorkerError(Tagged):
    """The worker could not do what it was ordered."""

    why: str


@dataclass(frozen=True)
class WritesProbed(Tagged):
    """Whether saves can get to each tier; why not, where they cannot."""

    problems: dict[str, str]


@dataclass(frozen=True)
class WorkerInventory(Tagged):
    """What the node holds, or a piece of that."""

    id: int
    holdings: tuple[Any, ...]
    """Each an InventoryEntry; InventoryReader parses them, and reports those that make no sense."""
    has_more: bool = False


@dataclass(frozen=True)
class PartsRebuilt(Tagged):
    """What came of an order to rebuild."""

    id: int
    holding: InventoryEntry | None = None
    problem: str | None = None


@dataclass(frozen=True)
class PartsCopied(Tagged):
    """What came of an order to copy."""

    id: int
    step: int
    generation: str
    nodes: tuple[str, ...]
    """Those whose parts are all here."""
    no_room: tuple[str, ...]
    problems: dict[str, str]
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class GenerationSealed(Tagged):
    """All ranks of the node have a generation in memory."""

    stamp: CheckpointId
    size_bytes: int = 0


@dataclass(frozen=True)
class SaveFailed(Tagged):
    """A tier does not get what the node has of a generation."""

    stamp: CheckpointId
    tier: TierName
    why: str


@dataclass(frozen=True)
class WorkerDied(Tagged):
    """The host's word that the process of its worker has ended, and that another one is started."""

    status: int | None
    again_s: float
    why: str


WorkerMessage = (
    WorkerReady
    | WorkerPong
    | ReservingMemory
    | WorkerLog
    | WorkerError
    | WritesProbed
    | WorkerInventory
    | PartsRebuilt
    | PartsCopied
    | GenerationSealed
    | StoreResult
    | SaveFailed
    | WorkerDied
)
"""What a worker tells its host, and this the supervisor."""
WORKER_MESSAGES = TaggedUnion[WorkerMessage](WorkerMessage)


@dataclass(frozen=True)
class RankRequest(Tagged):
    """What a rank asks of the worker."""

    rank: int


@dataclass(frozen=True)
class ReserveSlots(RankRequest):
    """Memory for this rank's parts; decided when all ranks of the node have asked, for all alike."""

    size_bytes: int
    slots: int
    ranks: tuple[int, ...]
    """All ranks of the node."""


@dataclass(frozen=True)
class PlanSlot(RankRequest):
    """What the rank will put into its slots, once for each structure of the state."""

    key: int
    pieces: tuple[Any, ...]
    """The values of each ChunkSpec."""
    file: int
    start: int


@dataclass(frozen=True)
class ClaimSlot(RankRequest):
    """A slot for the next save; refused as busy where none can be given without losing something."""

    generation: str
    published: str | None
    """The generation that all nodes are known to have sealed."""


@dataclass(frozen=True)
class SlotFilled(RankRequest):
    """The bytes are in place."""

    slot: int
    key: int
    stamp: CheckpointId
    tiers: tuple[TierName, ...]


@dataclass(frozen=True)
class SlotLost(RankRequest):
    """The bytes will not come: nobody needs to wait for this rank's part."""

    stamp: CheckpointId
    why: str


@dataclass(frozen=True)
class DegradeSaves(RankRequest):
    """The save that was just refused a slot is wanted more than the oldest one's next tiers."""


@dataclass(frozen=True)
class HastenFlush(RankRequest):
    """Somebody waits for what is on its way."""


@dataclass(frozen=True)
class PingFromRank(RankRequest):
    """Give a sign of life."""


AnyRankRequest = (
    ReserveSlots | PlanSlot | ClaimSlot | SlotFilled | SlotLost | DegradeSaves | HastenFlush | PingFromRank
)
RANK_REQUESTS = TaggedUnion[AnyRankRequest](AnyRankRequest)


@dataclass(frozen=True)
class SlotsReserved(Tagged):
    """The files of the slots, and the tiers below memory."""

    slots: tuple[str, ...]
    tiers: tuple[TierName, ...]


@dataclass(frozen=True)
class SlotPlanned(Tagged):
    """The worker knows the plan."""


@dataclass(frozen=True)
class SlotClaimed(Tagged):
    """The slot that the rank may fill, by its place among those that were reserved."""

    slot: int


@dataclass(frozen=True)
class SlotsBusy(Tagged):
    """No slot is free for now."""

    why: str


@dataclass(frozen=True)
class RequestRefused(Tagged):
    """The worker does not do what was asked."""

    why: str


@dataclass(frozen=True)
class PartSealed(Tagged):
    """This rank's part of a generation has all its headers and hashes, in memory."""

    stamp: CheckpointId


@dataclass(frozen=True)
class SaveStalled(Tagged):
    """Nothing has moved for a while."""

    stamp: CheckpointId
    tier: TierName
    why: str
    seconds: float


RankAnswer = SlotsReserved | SlotPlanned | SlotClaimed | SlotsBusy | RequestRefused
"""What comes because it was asked for."""
RankNews = PartSealed | StoreResult | SaveFailed | SaveStalled | WorkerPong
RANK_MESSAGES = TaggedUnion[RankAnswer | RankNews](RankAnswer | RankNews)
"""What a worker tells a rank."""
