"""The values that go from tier to tier: what a node holds of a generation, and what stores it further down.

Memory, a node's own disk, parity on other nodes, the run directory, an object store: whatever the tier, a
part of a generation is the same bytes (see `hpcrun.checkpoint.format`), so that it moves as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from hpcrun.checkpoint.format import PART_ALIGN, Part, align_size
from hpcrun.typed_json import Tagged

TierName = Literal["memory", "local", "parity", "durable", "object"]
TIER_NAMES: tuple[TierName, ...] = ("memory", "local", "parity", "durable", "object")
"""From the quickest to the safest."""
NODE_TIERS: tuple[TierName, ...] = ("memory", "local", "parity")
"""Those whose files a node keeps in places that other users may write as well."""


@dataclass(frozen=True)
class CheckpointId:
    """Which state a generation is of."""

    generation: str
    """16 random bytes, as 32 hexadecimal digits."""
    step: int
    position: int
    """Training samples consumed, all ranks together."""
    world_size: int
    """How many parts it has: one a rank, numbered as the ranks."""
    attempt: int
    descent: str = ""
    """What the attempt went on from; see `hpcrun.specs.descent`."""


@dataclass(frozen=True)
class SealedPart:
    """A part with all its headers and hashes, in memory."""

    number: int
    part: Part
    """Where it belongs in the run directory, and the hash that proves its tail."""
    image: memoryview
    """Its bytes from the first header to the last, `part.size_bytes` of them; they do not change."""
    path: str
    """The file that these bytes are the beginning of."""


@dataclass(frozen=True)
class NodeShards:
    """Everything that the ranks of this node have sealed of one generation."""

    stamp: CheckpointId
    parts: tuple[SealedPart, ...]
    """By number, each rank of the node just once."""


@dataclass(frozen=True)
class HeldPart:
    """A part that lies whole in a file of a node."""

    number: int
    path: str
    at: int
    """Where it begins in that file."""
    part: Part


@dataclass(frozen=True)
class SetMember:
    """What a node of an erasure set has put into it: its parts, one after the other, in this order."""

    node: str
    parts: tuple[tuple[int, Part], ...]

    @property
    def size_bytes(self) -> int:
        """Of all parts together, each of them padded to PART_ALIGN."""
        return sum(align_size(part.size_bytes, PART_ALIGN) for _, part in self.parts)


@dataclass(frozen=True)
class HeldParity:
    """Parity blocks of an erasure set that lie in a file of a node."""

    path: str
    members: tuple[SetMember, ...]
    parity: int
    """How many members of the set may be lost."""
    index: int
    """Which member of the set the node is."""
    hashes: tuple[str, ...]
    """xxh3 of each parity block in the file, in order."""


@dataclass(frozen=True)
class InventoryEntry:
    """What a node still has of a generation at one tier."""

    stamp: CheckpointId
    tier: TierName
    node: str
    parts: tuple[HeldPart, ...] = ()
    parity: HeldParity | None = None

    def as_json(self) -> dict[str, Any]:
        """As it is sent and written."""
        return asdict(self)


def parse_set_members(members: Sequence[Any]) -> tuple[SetMember, ...]:
    """The members of an erasure set as another process tells of them."""
    return tuple(
        SetMember(member["node"], tuple((number, Part(**part)) for number, part in member["parts"]))
        for member in members
    )


def parse_inventory_entry(
    values: dict[str, Any], members: Callable[[Sequence[Any]], tuple[SetMember, ...]] = parse_set_members
) -> InventoryEntry:
    """A holding as another process tells of it; ValueError where it makes no sense."""
    try:
        parity = values["parity"]
        return InventoryEntry(
            CheckpointId(**values["stamp"]),
            values["tier"],
            values["node"],
            tuple(HeldPart(**{**held, "part": Part(**held["part"])}) for held in values["parts"]),
            None
            if parity is None
            else HeldParity(
                **{**parity, "members": members(parity["members"]), "hashes": tuple(parity["hashes"])}
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no holding: {error}") from None


class Tier(Protocol):
    """A tier below memory, as the checkpoint worker of a node sees it."""

    name: TierName

    def store(self, load: NodeShards) -> dict[str, Any]:
        """Keep a load; it is safe at this tier when this returns, and what is returned tells how.

        OSError or SiteError: this tier has nothing of this generation, and left nothing half written.
        """

    def holdings(self) -> Sequence[InventoryEntry]:
        """What this node still has at this tier; nothing for tiers that all nodes see alike."""

    def retain(self, generations: Collection[str]) -> None:
        """Let go of all but these generations."""


@dataclass(frozen=True)
class StoreResult(Tagged):
    """What came of a load at a tier."""

    stamp: CheckpointId
    tier: TierName
    seconds: float
    """Of the work for it, without rests between."""
    size_bytes: int
    problem: str | None = None
    """Why the tier does not have it."""
    facts: dict[str, Any] = field(default_factory=dict)
