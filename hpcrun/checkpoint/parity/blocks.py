"""A member's block: its parts one after the other, padded; and the records of what is made of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hpcrun.checkpoint.format import PART_ALIGN, align_size
from hpcrun.checkpoint.parity.erasure import StripeGeometry
from hpcrun.checkpoint.parity.files import ASIDE_SUFFIX
from hpcrun.checkpoint.part_record import parse_checksummed, render_checksummed
from hpcrun.checkpoint.tier import HeldParity, InventoryEntry, SetMember, parse_inventory_entry
from hpcrun.files import OwnedDirectory, UntrustedFileError


class BlockSpan(NamedTuple):
    """Bytes of a block that are of one part."""

    number: int
    at: int
    """In the part."""
    begin: int
    """In what was asked for; what no span covers is zeros."""
    size: int


def map_block_range(member: SetMember, at: int, size: int) -> Iterator[BlockSpan]:
    """Which bytes of which parts a range of a block is."""
    position = 0
    for number, part in member.parts:
        first, last = max(at, position), min(at + size, position + part.size_bytes)
        if first < last:
            yield BlockSpan(number, first - position, first - at, last - first)
        position += align_size(part.size_bytes, PART_ALIGN)


def compute_part_offsets(member: SetMember) -> dict[int, int]:
    """Where each part begins in the block, by number."""
    spans, position = {}, 0
    for number, part in member.parts:
        spans[number] = position
        position += align_size(part.size_bytes, PART_ALIGN)
    return spans


def make_geometry(parity: HeldParity) -> StripeGeometry:
    """How the blocks of a set were cut."""
    return StripeGeometry(tuple(member.size_bytes for member in parity.members), parity.parity)


def parity_file_name(generation: str) -> str:
    """The file with the parity of a generation; its record beside it."""
    return f"parity-{generation}.bin"


def rebuilt_file_name(generation: str, index: int) -> str:
    """The file with the block of a lost member that was made again."""
    return f"rebuilt-{generation}-{index}.bin"


def record_file_name(name: str) -> str:
    """The record beside a file."""
    return f"{name.removesuffix('.bin')}.json"


def write_inventory_entry(files: OwnedDirectory, name: str, holding: InventoryEntry) -> None:
    """The record beside a file: what in it is held."""
    files.write_whole(record_file_name(name), render_checksummed(holding.as_json()).encode())


def list_parity_entries(files: OwnedDirectory) -> list[InventoryEntry]:
    """What lies whole in an arena of parity, and of parts that were made again, the newest last."""
    entries = []
    for record in (name for name in _parity_file_names(files) if name.endswith(".json")):
        name = f"{record.removesuffix('.json')}.bin"
        try:
            holding = parse_inventory_entry(parse_checksummed(json.loads(files.read(record))))
            size = files.status_of(name).st_size
        except (OSError, ValueError, UntrustedFileError):
            continue
        # The arena of a node may have another path than when the record was written.
        path = str(files.path / name)
        parts = tuple(replace(part, path=path) for part in holding.parts)
        parity = replace(holding.parity, path=path) if holding.parity is not None else None
        if parity is not None and size != parity.parity * make_geometry(parity).chunk_bytes:
            continue
        if any(part.at + part.part.size_bytes > size for part in parts):
            continue
        entries.append(replace(holding, parts=parts, parity=parity))
    return sorted(entries, key=lambda entry: (entry.stamp.attempt, entry.stamp.step))


def _parity_file_names(files: OwnedDirectory) -> list[str]:
    return [name for name in files.names() if name.startswith(("parity-", "rebuilt-"))]


def remove_parity_files(files: OwnedDirectory, keep: set[str]) -> None:
    """Remove parity and rebuilt parts but of these generations, each record before its file."""
    stale = [name for name in _parity_file_names(files) if name.split("-")[1].split(".")[0] not in keep]
    for name in sorted(stale, key=lambda name: not name.endswith(".json")):
        files.unlink(name)


def remove_unfinished_parity(files: OwnedDirectory) -> None:
    """Remove what a worker that was killed has left unfinished."""
    for name in _parity_file_names(files):
        if name.endswith(ASIDE_SUFFIX) or (name.endswith(".bin") and not files.has(record_file_name(name))):
            files.unlink(name)
