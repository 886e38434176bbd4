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
from hpcrun.checkpoint.levels import CheckpointLevel, GenerationId, SetMember

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
    level: CheckpointLevel


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

    stamp: GenerationId
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

    stamp: GenerationId | None
    """None: there is nothing to go on from."""
    levels: tuple[CheckpointLevel, ...] = ()
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
        told: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return told | {"digest": _plan_digest(told)}

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        return str(self.as_json()["digest"])


def parse_restore_plan(told: Mapping[str, Any]) -> RestorePlan:
    """A plan as it was written; ValueError where it makes no sense, or is not what its digest says."""
    try:
        values = dict(told)
        if values.pop("digest") != _plan_digest(values):
            raise ValueError("the plan of the restore does not match its digest")
        stamp = values.pop("stamp")
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        known["stamp"] = None if stamp is None else GenerationId(**stamp)
        known["sources"] = tuple(_parse_source(one) for one in values["sources"])
        known["rebuilds"] = tuple(parse_rebuild_order(one) for one in values["rebuilds"])
        return RestorePlan(**known)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no plan of a restore: {error}") from None


def parse_rebuild_order(told: Mapping[str, Any]) -> RebuildOrder:
    """An order to rebuild as another process sends it; ValueError where it makes no sense."""
    try:
        members = tuple(
            SetMember(one["node"], tuple((number, Part(**part)) for number, part in one["parts"]))
            for one in told["members"]
        )
        survivors = tuple(
            SurvivingMember(
                **{**one, "parts": tuple(map(_parse_source, one["parts"])), "hashes": tuple(one["hashes"])}
            )
            for one in told["survivors"]
        )
        lost = tuple(told["lost"])
        return RebuildOrder(
            GenerationId(**told["stamp"]), told["node"], members, told["parity"], lost, survivors
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no order to rebuild: {error}") from None


def _parse_source(told: Mapping[str, Any]) -> PartSource:
    return PartSource(**{**told, "part": Part(**told["part"])})


def _plan_digest(told: Mapping[str, Any]) -> str:
    known = {one.name: told[one.name] for one in fields(RestorePlan)}
    return xxh3_64_hexdigest(json.dumps(known, sort_keys=True, separators=(",", ":")).encode())
