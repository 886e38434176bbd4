"""Reading a generation: nothing leaves here that was not proved to be what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeAlias

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from hpcrun.checkpoint.format import (
    CHUNK,
    END,
    HEADER_BYTES,
    MANIFEST,
    PART,
    TAIL,
    DamagedError,
    Manifest,
    Part,
    Piece,
    Place,
    file_name,
    parse_manifest,
    parse_tail,
    structure_digest,
    unpack_header,
)
from hpcrun.specs.saves import Saved

_Fetched: TypeAlias = tuple[Piece, Place, memoryview, int]
_BATCH_BYTES = 8 << 20


class ChunkSource(Protocol):
    """Anything that can give the chunks of one generation, proved."""

    manifest: Manifest

    def read(self, piece: Piece, place: Place, into: memoryview) -> None:
        """Fill a buffer of exactly the chunk's size; DamagedError if what is there is not that chunk."""


class Generation:
    """A committed step that is opened for reading; opening it makes the cheap checks."""

    def __init__(self, saved: Saved) -> None:
        """DamagedError unless record, manifest, sizes and the beginnings of all parts belong together."""
        self.saved = saved
        self._descriptors: dict[int, int] = {}
        check_sizes(saved)
        data = _content(saved.path / MANIFEST)
        if len(data) != saved.manifest_bytes or xxh3_64_hexdigest(data) != saved.manifest_hash:
            raise DamagedError(f"{saved.path / MANIFEST}: does not match the hash in the commit record")
        try:
            self.manifest = parse_manifest(data)
            if self.manifest.generation.hex() != saved.generation:
                raise DamagedError(f"it belongs to generation {self.manifest.generation.hex()}")
            if structure_digest(self.manifest.tensors) != saved.structure:
                raise DamagedError("its tensors are not those of the commit record")
        except DamagedError as error:
            raise DamagedError(f"{saved.path / MANIFEST}: {error}") from None
        try:
            for number in range(len(self.manifest.parts)):
                self._header(PART, Place(number, 0))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, piece: Piece, place: Place, into: memoryview) -> None:
        """Fill a buffer of exactly the chunk's size; DamagedError if what is there is not that chunk."""
        self._prove(piece, place, into, self._fetch(piece, place, into))

    def read_all(
        self,
        wanted: Iterator[tuple[Piece, Place, memoryview]],
        then: Callable[[Piece, memoryview], None],
    ) -> None:
        """Read many chunks, proved beside the reading of others, and hand each on when it is proved."""
        batch, size = list[_Fetched](), 0
        with ThreadPoolExecutor(1) as beside:
            pending = beside.submit(self._prove_all, [], then)
            for piece, place, into in wanted:
                batch.append((piece, place, into, self._fetch(piece, place, into)))
                size += len(into)
                if size >= _BATCH_BYTES:
                    pending.result()
                    pending = beside.submit(self._prove_all, batch, then)
                    batch, size = [], 0
            pending.result()
            self._prove_all(batch, then)

    def _prove_all(self, batch: list[_Fetched], then: Callable[[Piece, memoryview], None]) -> None:
        for piece, place, into, digest in batch:
            self._prove(piece, place, into, digest)
            then(piece, into)

    def _fetch(self, piece: Piece, place: Place, into: memoryview) -> int:
        """Read a chunk; what its hash should be."""
        assert len(into) == piece.size_bytes, f"{piece}: a buffer of {len(into)} bytes"
        header = bytearray(HEADER_BYTES)
        part = self._part(place.part)
        count = self._pread(part, place.at, [header, into], HEADER_BYTES + len(into))
        try:
            length, digest = unpack_header(header[:count], CHUNK, place, self.manifest.generation)
            if length != len(into):
                raise DamagedError(f"it holds {length} bytes, not {len(into)}")
            if count < HEADER_BYTES + length:
                raise DamagedError(f"the file ends after {count - HEADER_BYTES} of its {length} bytes")
        except DamagedError as error:
            raise DamagedError(f"{self._where(place)}: {piece}: {error}") from None
        return digest

    def _prove(self, piece: Piece, place: Place, into: memoryview, digest: int) -> None:
        if xxh3_64_intdigest(into) != digest:
            raise DamagedError(f"{self._where(place)}: {piece}: its bytes do not match their hash")

    def _where(self, place: Place) -> str:
        part = self._part(place.part)
        return f"{self.saved.path / file_name(part.file)} at {part.start + place.at}"

    def _part(self, number: int) -> Part:
        if not 0 <= number < len(self.manifest.parts):
            raise DamagedError(
                f"{self.saved.path / MANIFEST}: names part {number} of {len(self.manifest.parts)}"
            )
        return self.manifest.parts[number]

    def _pread(self, part: Part, at: int, buffers: list[bytearray | memoryview], wanted: int) -> int:
        """Fill the buffers from a place in a part; how many bytes there were."""
        descriptor = self._open(part.file)
        count = os.preadv(descriptor, buffers, part.start + at)
        while 0 < count < wanted:  # one call gives 2 GiB at most, and some file systems less
            rest = [memoryview(buffer) for buffer in buffers]
            skip = count
            while skip >= len(rest[0]):
                skip -= len(rest.pop(0))
            rest[0] = rest[0][skip:]
            more = os.preadv(descriptor, rest, part.start + at + count)
            if not more:
                break
            count += more
        return count

    def _open(self, file: int) -> int:
        if file not in self._descriptors:
            path = self.saved.path / file_name(file)
            try:
                self._descriptors[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise DamagedError(f"{path}: is missing") from None
        return self._descriptors[file]

    def _header(self, kind: int, place: Place) -> tuple[int, int]:
        header = bytearray(HEADER_BYTES)
        count = self._pread(self._part(place.part), place.at, [header], HEADER_BYTES)
        try:
            return unpack_header(header[:count], kind, place, self.manifest.generation)
        except DamagedError as error:
            raise DamagedError(f"{self._where(place)}: {error}") from None

    def _tail(self, number: int) -> list[tuple[Piece, Place, int]]:
        """A part's own list of its chunks; DamagedError where it is not the one that the manifest knows."""
        part = self._part(number)
        place = Place(number, part.tail_at)
        length, digest = self._header(TAIL, place)
        end = Place(number, part.size_bytes - HEADER_BYTES)
        if length != part.tail_bytes or self._header(END, end)[0] != part.tail_at:
            raise DamagedError(f"{self._where(place)}: the tail is not where the manifest has it")
        data = bytearray(length)
        self._pread(part, place.at + HEADER_BYTES, [data], length)
        if xxh3_64_intdigest(data) != digest or f"{digest:016x}" != part.tail_hash:
            raise DamagedError(f"{self._where(place)}: the tail does not match its hash")
        try:
            return parse_tail(bytes(data), number)
        except DamagedError as error:
            raise DamagedError(f"{self._where(place)}: {error}") from None

    def damages(self, progress: Callable[[int], None] = lambda _size: None) -> Iterator[str]:
        """Everything that is wrong with this generation; reads all of it, and tells how much each time."""
        for number, chunks in enumerate(self.chunks_by_part()):
            yield from self.damages_of_part(number, chunks, progress)

    def damages_of_part(
        self,
        number: int,
        chunks: list[tuple[Piece, Place]],
        progress: Callable[[int], None] = lambda _size: None,
    ) -> Iterator[str]:
        """Everything that is wrong with one part; several threads may each look at one."""
        buffers = bytearray(max((piece.size_bytes for piece, _ in chunks), default=0))
        try:
            listed = {(piece, place): digest for piece, place, digest in self._tail(number)}
        except (DamagedError, OSError) as error:
            yield str(error)
            listed = None
        if listed is not None and listed.keys() != set(chunks):
            place = Place(number, self._part(number).tail_at)
            yield f"{self._where(place)}: the tail lists other chunks than the manifest"
        for piece, place in chunks:
            into = memoryview(buffers)[: piece.size_bytes]
            try:
                digest = self._fetch(piece, place, into)
                self._prove(piece, place, into, digest)
                if listed is not None and listed.get((piece, place), digest) != digest:
                    raise DamagedError(f"{self._where(place)}: {piece}: is not the chunk that the tail lists")
            except (DamagedError, OSError) as error:
                yield str(error)
            progress(piece.size_bytes)

    def chunks_by_part(self) -> list[list[tuple[Piece, Place]]]:
        """The chunks of each part, in the order in which they lie there."""
        chunks: list[list[tuple[Piece, Place]]] = [[] for _ in self.manifest.parts]
        for tensor in self.manifest.tensors.values():
            for piece, place in tensor.chunks:
                self._part(place.part)
                chunks[place.part].append((piece, place))
        return [sorted(own, key=lambda one: one[1]) for own in chunks]


def check_sizes(saved: Saved) -> None:
    """DamagedError unless the files of a generation are there in the sizes that its record has."""
    expected = {MANIFEST: saved.manifest_bytes}
    expected |= {file_name(number): size for number, size in enumerate(saved.file_bytes)}
    for name, size in expected.items():
        try:
            found = os.stat(saved.path / name).st_size  # noqa: PTH116 - a thousand generations of many files
        except FileNotFoundError:
            raise DamagedError(f"{saved.path / name}: is missing") from None
        except OSError as error:
            raise DamagedError(f"{saved.path / name}: cannot be looked at: {error.strerror}") from None
        if found != size:
            raise DamagedError(f"{saved.path / name}: has {found} bytes instead of {size}")


def read_tail(path: Path, part: Part, number: int, generation: bytes) -> list[tuple[Piece, Place]]:
    """The chunks of a part that was just written, from its file alone; DamagedError if it is not there."""
    with path.open("rb") as file:
        file.seek(part.start + part.size_bytes - HEADER_BYTES)
        end = Place(number, part.size_bytes - HEADER_BYTES)
        at, _ = unpack_header(file.read(HEADER_BYTES), END, end, generation)
        file.seek(part.start + at)
        length, digest = unpack_header(file.read(HEADER_BYTES), TAIL, Place(number, at), generation)
        data = file.read(length)
    if xxh3_64_intdigest(data) != digest or f"{digest:016x}" != part.tail_hash:
        raise DamagedError(f"{path}: the tail of part {number} does not match its hash")
    return [(piece, place) for piece, place, _ in parse_tail(data, number)]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path}: is missing") from None
