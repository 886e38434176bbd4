"""What may still hold the bytes of a generation: directories, and what nodes have kept of it.

A copy may be damaged or incomplete itself. Nothing that it gives is taken on trust: whoever asks has a hash,
and the hash of a chunk is the same at every tier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import (
    CHUNK_FRAME,
    END_FRAME,
    HEADER_BYTES,
    MANIFEST_NAME,
    PART_ALIGN,
    PART_FRAME,
    TAIL_FRAME,
    ChunkLocation,
    ChunkSpec,
    DamagedError,
    Part,
    align_size,
    collect_tensors,
    data_file_name,
    parse_header_owner,
    parse_tail,
    render_manifest,
    render_tensors,
    unpack_header,
)
from hpcrun.checkpoint.generation import MAX_MANIFEST_BYTES
from hpcrun.checkpoint.tier import InventoryEntry
from hpcrun.files import UntrustedFileError, open_own, open_regular, read_regular
from hpcrun.specs.saves import SavedCheckpoint, read_saved_checkpoint


class GenerationCopy(Protocol):
    """A place where parts of one generation may lie."""

    @property
    def name(self) -> str:
        """What a person is told: a directory, a tier of a node."""

    @property
    def generation(self) -> str | None:
        """Which generation it is of; None where that is not known."""

    def manifest(self) -> bytes | None:
        """The manifest, as it is found there; None where there is none."""

    def record(self) -> SavedCheckpoint | None:
        """The commit record, where the copy has one."""

    def read(self, number: int, part: Part, at: int, into: memoryview) -> bool:
        """Fill a buffer from a place in a part; False where there are not as many bytes."""

    def parts(self, generation: bytes) -> Iterator[tuple[int, Part]]:
        """The parts that it has, as far as it can tell without a manifest."""


class DirectoryCopy:
    """A directory with the files of a generation: committed, set aside, exported."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or str(path)

    @property
    def generation(self) -> str | None:
        """Which generation the files are of."""
        return identify_generation(self.path)

    def manifest(self) -> bytes | None:
        """The manifest, as it is found there."""
        try:
            return read_regular(self.path / MANIFEST_NAME, MAX_MANIFEST_BYTES, follow=True)
        except (OSError, UntrustedFileError):
            return None

    def record(self) -> SavedCheckpoint | None:
        """The commit record, where it is whole."""
        saved = read_saved_checkpoint(self.path)
        return saved if isinstance(saved, SavedCheckpoint) else None

    def read(self, number: int, part: Part, at: int, into: memoryview) -> bool:
        """Fill a buffer from a place in a part."""
        return try_read_file_at(self.path / data_file_name(part.file), part.start + at, into)

    def parts(self, generation: bytes) -> Iterator[tuple[int, Part]]:
        """The parts of all data files, from one header to the next."""
        for path in sorted(self.path.glob("data-*.bin")):
            digits = path.stem.removeprefix("data-")
            if digits.isdecimal():
                yield from _scan_parts(path, int(digits), generation)


class NodeCopy:
    """What a node has kept of a generation at a tier of its own, where its files can be read from here."""

    def __init__(self, holding: InventoryEntry) -> None:
        self.name = f"{holding.tier} of {holding.node}"
        self.generation: str | None = holding.stamp.generation
        self._held = {held.number: held for held in holding.parts}

    def manifest(self) -> bytes | None:
        """Nothing: a node keeps parts."""
        return None

    def record(self) -> SavedCheckpoint | None:
        """Nothing; the stamp tells as much."""
        return None

    def read(self, number: int, part: Part, at: int, into: memoryview) -> bool:
        """Fill a buffer from a place in a part."""
        held = self._held.get(number)
        return held is not None and try_read_file_at(Path(held.path), held.at + at, into, is_own=True)

    def parts(self, generation: bytes) -> Iterator[tuple[int, Part]]:
        """The parts that the node has recorded."""
        for number, held in self._held.items():
            yield number, held.part


def identify_generation(path: Path, step: int | None = None) -> str | None:
    """Whose files a directory has: by its record, else by its manifest, else by a data file's first bytes.

    The record of another step than the expected one has come there by mistake.
    """
    saved = read_saved_checkpoint(path)
    if isinstance(saved, SavedCheckpoint) and step in (None, saved.step):
        return saved.generation
    copy = DirectoryCopy(path)
    try:
        generation = json.loads(copy.manifest() or b"")["generation"]
        if isinstance(generation, str) and len(bytes.fromhex(generation)) == 16:
            return generation
    except (ValueError, KeyError, TypeError):
        pass  # the manifest is damaged too
    for file in sorted(path.glob("data-*.bin")):
        header = bytearray(HEADER_BYTES)
        owner = parse_header_owner(bytes(header)) if try_read_file_at(file, 0, memoryview(header)) else None
        if owner is not None:
            return owner[2].hex()
    return None


def rebuild_manifest(generation: bytes, copies: list[GenerationCopy], digest: str | None) -> bytes | None:
    """The manifest that was written with these parts, from what the parts say of themselves.

    `digest` is the hash that the commit record has of it, where there is one: any other is not the one.
    """
    parts: dict[int, tuple[Part, list[tuple[ChunkSpec, ChunkLocation]]]] = {}
    for copy in copies:
        for number, part in copy.parts(generation):
            if number not in parts and (tail := read_verified_tail(copy, number, part)) is not None:
                listed = [(piece, place) for piece, place, _ in parse_tail(tail, number)]
                parts[number] = part, listed
    if sorted(parts) != list(range(len(parts))) or not parts:
        return None
    rows = [parts[number] for number in range(len(parts))]
    try:
        tensors = render_tensors(collect_tensors(listed for _, listed in rows))
    except DamagedError:
        return None
    manifest = render_manifest(generation, [part for part, _ in rows], tensors)
    return manifest if digest in (None, xxh3_64_hexdigest(manifest)) else None


def read_verified_tail(copy: GenerationCopy, number: int, part: Part) -> bytes | None:
    """A part's list of its chunks, proved; None where the copy has another, or none."""
    tail = bytearray(part.tail_bytes)
    if not copy.read(number, part, part.tail_at + HEADER_BYTES, memoryview(tail)):
        return None
    return bytes(tail) if xxh3_64_hexdigest(tail) == part.tail_hash else None


def read_chunk_digests(
    copy: GenerationCopy,
    generation: bytes,
    number: int,
    part: Part,
    chunks: list[tuple[ChunkSpec, ChunkLocation]],
) -> dict[ChunkLocation, int]:
    """The hashes that the chunks' own headers have, of those that are whole."""
    locations, header = dict[ChunkLocation, int](), bytearray(HEADER_BYTES)
    for piece, place in chunks:
        if not copy.read(number, part, place.at, memoryview(header)):
            continue
        try:
            length, digest = unpack_header(header, CHUNK_FRAME, place, generation)
        except DamagedError:
            continue
        if length == piece.size_bytes:
            locations[place] = digest
    return locations


def try_read_file_at(path: Path, at: int, into: memoryview, *, is_own: bool = False) -> bool:
    """Fill a buffer from a file, which must be ours where `is_own`; False where it cannot be filled."""
    try:
        descriptor = open_own(path) if is_own else open_regular(path, follow=True)
    except (OSError, UntrustedFileError):
        return False
    try:
        count = 0
        while count < len(into):
            count_read = os.preadv(descriptor, [into[count:]], at + count)
            if not count_read:
                return False
            count += count_read
    except OSError:  # a bad block
        return False
    finally:
        os.close(descriptor)
    return True


def _scan_parts(path: Path, file: int, generation: bytes) -> Iterator[tuple[int, Part]]:
    start, header = 0, memoryview(bytearray(HEADER_BYTES))

    def unpacked(kind: int, place: ChunkLocation) -> tuple[int, int]:
        if not try_read_file_at(path, start + place.at, header):
            raise DamagedError(f"{path}: ends early")
        return unpack_header(bytearray(header), kind, place, generation)

    while try_read_file_at(path, start, header):
        owner = parse_header_owner(bytes(header))
        if owner is None or owner[0] != PART_FRAME or owner[2] != generation:
            return
        number, size = owner[1], 0
        try:
            size, _ = unpacked(PART_FRAME, ChunkLocation(number, 0))
            tail_at, _ = unpacked(END_FRAME, ChunkLocation(number, size - HEADER_BYTES))
            tail_bytes, digest = unpacked(TAIL_FRAME, ChunkLocation(number, tail_at))
            yield number, Part(file, start, size, tail_at, tail_bytes, f"{digest:016x}")
        except DamagedError:
            if size <= 0:
                return
        start += align_size(size, PART_ALIGN)
