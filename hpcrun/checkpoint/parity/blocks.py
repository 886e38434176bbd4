"""A member's block: its parts one after the other, padded; and the records of what is made of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpcrun.checkpoint.format import PART_ALIGN, padded
from hpcrun.checkpoint.levels import HeldParity, Holding, Member, parse_holding
from hpcrun.checkpoint.parity.erasure import Geometry
from hpcrun.checkpoint.parity.files import ASIDE
from hpcrun.checkpoint.partrecord import parse_checked, render_checked
from hpcrun.specs.records import write_whole


class Span(NamedTuple):
    """Bytes of a block that are of one part."""

    number: int
    at: int
    """In the part."""
    begin: int
    """In what was asked for; what no span covers is zeros."""
    size: int


def spans(member: Member, at: int, size: int) -> Iterator[Span]:
    """Which bytes of which parts a range of a block is."""
    position = 0
    for number, part in member.parts:
        first, last = max(at, position), min(at + size, position + part.size_bytes)
        if first < last:
            yield Span(number, first - position, first - at, last - first)
        position += padded(part.size_bytes, PART_ALIGN)


def places(member: Member) -> dict[int, int]:
    """Where each part begins in the block, by number."""
    found, position = {}, 0
    for number, part in member.parts:
        found[number] = position
        position += padded(part.size_bytes, PART_ALIGN)
    return found


def geometry_of(parity: HeldParity) -> Geometry:
    """How the blocks of a set were cut."""
    return Geometry(tuple(member.size_bytes for member in parity.members), parity.parity)


def parity_path(folder: Path, generation: str) -> Path:
    """Where parity of a generation lies; its record beside it."""
    return folder / f"parity-{generation}.bin"


def rebuilt_path(folder: Path, generation: str, index: int) -> Path:
    """Where the block of a lost member lies that was made again."""
    return folder / f"rebuilt-{generation}-{index}.bin"


def write_holding(path: Path, holding: Holding) -> None:
    """The record beside a file: what in it is held."""
    write_whole(path.with_suffix(".json"), render_checked(holding.as_json()))


def parity_holdings(folder: Path) -> list[Holding]:
    """What lies whole in an arena of parity, and of parts that were made again, the newest last."""
    found = []
    for record in sorted((*folder.glob("parity-*.json"), *folder.glob("rebuilt-*.json"))):
        path = record.with_suffix(".bin")
        try:
            holding = parse_holding(parse_checked(json.loads(record.read_text(encoding="utf-8"))))
            size = path.stat().st_size
        except (OSError, ValueError):
            continue
        # The arena of a node may have another path than when the record was written.
        parts = tuple(replace(one, path=str(path)) for one in holding.parts)
        parity = replace(holding.parity, path=str(path)) if holding.parity is not None else None
        if parity is not None and size != parity.parity * geometry_of(parity).chunk_bytes:
            continue
        if any(one.at + one.part.size_bytes > size for one in parts):
            continue
        found.append(replace(holding, parts=parts, parity=parity))
    return sorted(found, key=lambda one: (one.stamp.attempt, one.stamp.step))


def remove_files(folder: Path, keep: set[str]) -> None:
    """Remove parity and rebuilt parts but of these generations, each record before its file."""
    for pattern in ("parity-*", "rebuilt-*"):
        found = [path for path in folder.glob(pattern) if path.name.split("-")[1].split(".")[0] not in keep]
        for path in sorted(found, key=lambda path: path.suffix != ".json"):
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a worker that was killed has left unfinished."""
    for pattern in ("parity-*", "rebuilt-*"):
        for path in folder.glob(pattern):
            if path.name.endswith(ASIDE) or (
                path.suffix == ".bin" and not path.with_suffix(".json").exists()
            ):
                path.unlink(missing_ok=True)
