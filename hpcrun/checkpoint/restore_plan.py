"""The plan of a restore: which generation, from where each of its parts comes, and what was passed over.

It is made before the ranks start, written down with its digest, and read by every rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.tier import CheckpointId, SetMember, TierName
from hpcrun.typed_json import WrongValue, parse_typed

SHARED_NODE = ""
"""The node of what lies on a file system that all nodes see."""


@dataclass(frozen=True)
class PartSource:
    """Where the bytes of a part are."""

    number: int
    node: str
    path: str
    at: int
    """Where it begins in that file."""
    part: Part
    tier: TierName


@dataclass(frozen=True)
class SurvivingMember:
    """What is left of a member of an erasure set: its parts, and its parity blocks."""

    index: int
    parts: tuple[PartSource, ...]
    node: str
    """Which node has the parity blocks; its own, or where they have come to."""
    path: str
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class RebuildOrder:
    """The order to make the parts of lost members of an erasure set again."""

    stamp: CheckpointId
    node: str
    """Whose worker does it, and keeps what comes of it."""
    members: tuple[SetMember, ...]
    parity: int
    lost: tuple[int, ...]
    """Which of the members, by their place."""
    survivors: tuple[SurvivingMember, ...]


@dataclass(frozen=True)
class RestorePlan:
    """The newest generation that is whole, and how to get it."""

    stamp: CheckpointId | None
    """None: there is nothing to go on from."""
    tiers: tuple[TierName, ...] = ()
    """Those that something of it comes from, the quickest first."""
    sources: tuple[PartSource, ...] = ()
    """By number; those of parts that are yet to be rebuilt are missing."""
    rebuilds: tuple[RebuildOrder, ...] = ()
    save: str | None = None
    """The directory of a committed save, where all comes from it."""
    is_mendable: bool = False
    """Nodes hold parts of the save: if it is damaged after all, they may make it whole."""
    copy: str | None = None
    """The URL of a copy in an object store, which has to be fetched first."""
    lost_steps: int = 0
    """Steps between this generation and the newest one that is known of."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with those that are newer, newest first, in words."""
    poisoned: tuple[str, ...] = ()
    """Generations that are not used any more: what went on from them has failed too often."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, the digest of all others among them."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values | {"digest": _plan_digest(values)}

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        return str(self.as_json()["digest"])


def parse_restore_plan(values: Mapping[str, Any]) -> RestorePlan:
    """A plan as it was written; ValueError if it is malformed or does not match its digest."""
    try:
        if values["digest"] != _plan_digest(values):
            raise ValueError("the restore plan does not match its digest")
        return parse_typed(RestorePlan, {name: value for name, value in values.items() if name != "digest"})
    except KeyError as error:
        raise ValueError(f"not a restore plan: {error.args[0]} is missing") from None
    except WrongValue as error:
        raise ValueError(f"not a restore plan: {error}") from None


def _plan_digest(values: Mapping[str, Any]) -> str:
    declared = {field.name: values[field.name] for field in fields(RestorePlan)}
    return xxh3_64_hexdigest(json.dumps(declared, sort_keys=True, separators=(",", ":")).encode())
