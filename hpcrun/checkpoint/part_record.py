"""Small records beside parts: which state they are of, with a hash of the record itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.typed_json import WrongValue, parse_typed

_CHECK = "check"


@dataclass(frozen=True)
class PartRecord:
    """A part that lies whole somewhere."""

    stamp: CheckpointId
    number: int
    part: Part


def render_checksummed(values: dict[str, Any]) -> str:
    """A record as JSON, with a hash of itself."""
    return json.dumps(values | {_CHECK: _json_hash(values)}) + "\n"


def parse_checksummed(value: Any) -> dict[str, Any]:
    """The values that render_checksummed was given; ValueError if they do not match their hash."""
    if not isinstance(value, dict) or _CHECK not in value:
        raise ValueError("not a record")
    rest = {key: entry for key, entry in value.items() if key != _CHECK}
    if value[_CHECK] != _json_hash(rest):
        raise ValueError("the record does not match the hash in it")
    return rest


def render_part_record(record: PartRecord) -> str:
    """As it is written."""
    return render_checksummed(asdict(record))


def parse_part_record(value: Any) -> PartRecord:
    """From the JSON value of a record; ValueError if it is not one."""
    try:
        return parse_typed(PartRecord, parse_checksummed(value))
    except WrongValue as error:
        raise ValueError(f"not a part record: {error}") from None


def _json_hash(values: dict[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
