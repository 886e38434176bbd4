"""Proof of a part in whatever file it lies: nothing but its own headers, tail and hashes is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from xxhash import xxh3_64_intdigest

from hpcrun.checkpoint.format import (
    CHUNK_BYTES,
    CHUNK_FRAME,
    END_FRAME,
    HEADER_BYTES,
    PART_FRAME,
    TAIL_FRAME,
    ChunkLocation,
    ChunkSpec,
    DamagedError,
    parse_tail,
    unpack_header,
)
from hpcrun.checkpoint.parity.files import read_file_at
from hpcrun.checkpoint.tier import NODE_TIERS, HeldPart, InventoryEntry

DamagedPart = tuple[str, str, int]
"""A file, the generation and the number of the part in it that is not what it should be."""


def verify_part(held: HeldPart, generation: bytes, *, ends_only: bool = False, shared: bool = False) -> None:
    """Read all of a part; DamagedError unless every chunk is what its rank has written.

    `ends_only`: just what is quick to look at, its first and last headers and its list of chunks. `shared`:
    it lies in the run directory; what nodes keep for themselves must be a file of ours.
    """
    proof = _PartVerifier(held, generation, shared=shared)
    try:
        proof.check_ends()
        for piece, place, digest in proof.tail():
            if not ends_only:
                proof.check_chunk(piece, place, digest)
    except (DamagedError, OSError) as error:
        raise DamagedError(f"{held.path}: part {held.number}: {error}") from None


def find_damaged_parts(
    holdings: Iterable[InventoryEntry], generations: Collection[str]
) -> dict[DamagedPart, str]:
    """The parts of these generations that do not prove themselves, and what is wrong with each."""
    damages = dict[DamagedPart, str]()
    for entry in holdings:
        for held in entry.parts if entry.stamp.generation in generations else ():
            try:
                verify_part(held, bytes.fromhex(entry.stamp.generation), shared=entry.tier not in NODE_TIERS)
            except DamagedError as error:
                damages[held.path, entry.stamp.generation, held.number] = str(error)
    return damages


def exclude_damaged_parts(
    holdings: Iterable[InventoryEntry], damages: Mapping[DamagedPart, str]
) -> list[InventoryEntry]:
    """The holdings as if these parts were not there; what parity or another tier has takes their place."""
    problems = []
    for entry in holdings:
        name = entry.stamp.generation
        parts = tuple(held for held in entry.parts if (held.path, name, held.number) not in damages)
        if parts or entry.parity is not None:
            problems.append(entry if len(parts) == len(entry.parts) else replace(entry, parts=parts))
    return problems


class _PartVerifier:
    def __init__(self, held: HeldPart, generation: bytes, *, shared: bool) -> None:
        self._held, self._generation, self._shared = held, generation, shared
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, held.part.size_bytes)))

    def check_ends(self) -> None:
        part = self._held.part
        size, _ = self._header(PART_FRAME, 0)
        tail_at, _ = self._header(END_FRAME, part.size_bytes - HEADER_BYTES)
        if (size, tail_at) != (part.size_bytes, part.tail_at):
            raise DamagedError(f"it is of {size} bytes, not {part.size_bytes}, or its tail is elsewhere")

    def tail(self) -> list[tuple[ChunkSpec, ChunkLocation, int]]:
        part = self._held.part
        length, digest = self._header(TAIL_FRAME, part.tail_at)
        if length != part.tail_bytes:
            raise DamagedError(f"its tail is of {length} bytes, not {part.tail_bytes}")
        data = bytearray(length)
        self._read(part.tail_at + HEADER_BYTES, memoryview(data))
        if xxh3_64_intdigest(data) != digest or f"{digest:016x}" != part.tail_hash:
            raise DamagedError("its tail does not match its hash")
        return parse_tail(bytes(data), self._held.number)

    def check_chunk(self, piece: ChunkSpec, place: ChunkLocation, digest: int) -> None:
        length, stated = self._header(CHUNK_FRAME, place.at)
        if length != piece.size_bytes or stated != digest:
            raise DamagedError(f"{piece}: is not the chunk that the tail lists")
        if length > len(self._buffer):
            self._buffer = memoryview(bytearray(length))
        into = self._buffer[:length]
        self._read(place.at + HEADER_BYTES, into)
        if xxh3_64_intdigest(into) != digest:
            raise DamagedError(f"{piece}: its bytes do not match their hash")

    def _header(self, kind: int, at: int) -> tuple[int, int]:
        header = bytearray(HEADER_BYTES)
        self._read(at, memoryview(header))
        return unpack_header(header, kind, ChunkLocation(self._held.number, at), self._generation)

    def _read(self, at: int, into: memoryview) -> None:
        if at + len(into) > self._held.part.size_bytes:
            raise DamagedError(f"it ends at {self._held.part.size_bytes}, and not after {at + len(into)}")
        read_file_at(self._held.path, self._held.at + at, into, shared=self._shared)
