"""Small records beside parts: which state they are of, with a hash of the record itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.levels import GenerationId

_CHECK = "check"


@dataclass(frozen=True)
class PartRecord:
    """A part that lies whole somewhere."""

    stamp: GenerationId
    number: int
    part: Part


def render_checksummed(told: dict[str, Any]) -> str:
    """A value as JSON, with a hash of itself."""
    return json.dumps(told | {_CHECK: _json_hash(told)}) + "\n"


def parse_checksummed(told: Any) -> dict[str, Any]:
    """What render_checked was given, out of the JSON value; ValueError where it does not match its hash."""
    if not isinstance(told, dict) or _CHECK not in told:
        raise ValueError("no record")
    rest = {key: value for key, value in told.items() if key != _CHECK}
    if told[_CHECK] != _json_hash(rest):
        raise ValueError("the record does not match the hash in it")
    return rest


def render_part_record(record: PartRecord) -> str:
    """As it is written."""
    return render_checksummed(asdict(record))


def parse_part_record(told: Any) -> PartRecord:
    """From the JSON value of a record; ValueError where it is none."""
    rest = parse_checksummed(told)
    try:
        return PartRecord(GenerationId(**rest["stamp"]), rest["number"], Part(**rest["part"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a part: {error}") from None


def _json_hash(told: dict[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(told, sort_keys=True).encode())
