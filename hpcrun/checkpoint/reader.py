"""Reading chunks and proving them, wherever the parts of the generation lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from xxhash import xxh3_64_intdigest

from hpcrun.checkpoint.format import (
    CHUNK,
    END,
    HEADER_BYTES,
    TAIL,
    DamagedError,
    Manifest,
    Part,
    Piece,
    Place,
    parse_tail,
    unpack_header,
)

Buffers: TypeAlias = list[bytearray | memoryview]
_Fetched: TypeAlias = tuple[Piece, Place, memoryview, int]
_BATCH_BYTES = 8 << 20


class ChunkSource(Protocol):
    """Anything that can give the chunks of one generation, proved."""

    manifest: Manifest

    def read(self, piece: Piece, place: Place, into: memoryview) -> None:
        """Fill a buffer of exactly the chunk's size; DamagedError if what is there is not that chunk."""


class Fetcher(Protocol):
    """Where the bytes of the parts are."""

    def fetch(self, number: int, part: Part, at: int, buffers: Buffers) -> int:
        """Fill the buffers from a place in a part; how many bytes there were."""

    def where(self, number: int, part: Part, at: int) -> str:
        """The same place, for people."""

    def close(self) -> None:
        """Let go of everything."""


class ChunkReader:
    """Gives the chunks of a generation, proved; nothing leaves here that is not what was written."""

    def __init__(self, name: str, manifest: Manifest, fetcher: Fetcher) -> None:
        """`name`: what to call the list of the parts."""
        self.name, self.manifest, self._fetcher = name, manifest, fetcher

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._fetcher.close()

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
        count = self._bytes(place.part, place.at, [header, into])
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
        return self._fetcher.where(place.part, self._part(place.part), place.at)

    def _part(self, number: int) -> Part:
        if not 0 <= number < len(self.manifest.parts):
            raise DamagedError(f"{self.name}: names part {number} of {len(self.manifest.parts)}")
        return self.manifest.parts[number]

    def _bytes(self, number: int, at: int, buffers: Buffers) -> int:
        """Fill the buffers from a place in a part; how many bytes there were."""
        return self._fetcher.fetch(number, self._part(number), at, buffers)

    def header(self, kind: int, place: Place) -> tuple[int, int]:
        """(length, hash) of what follows a header; DamagedError unless it is the one that belongs here."""
        header = bytearray(HEADER_BYTES)
        count = self._bytes(place.part, place.at, [header])
        try:
            return unpack_header(header[:count], kind, place, self.manifest.generation)
        except DamagedError as error:
            raise DamagedError(f"{self._where(place)}: {error}") from None

    def tail(self, number: int) -> list[tuple[Piece, Place, int]]:
        """A part's own list of its chunks; DamagedError where it is not the one that the manifest knows."""
        part = self._part(number)
        place = Place(number, part.tail_at)
        length, digest = self.header(TAIL, place)
        end = Place(number, part.size_bytes - HEADER_BYTES)
        if length != part.tail_bytes or self.header(END, end)[0] != part.tail_at:
            raise DamagedError(f"{self._where(place)}: the tail is not where the manifest has it")
        data = bytearray(length)
        self._bytes(number, place.at + HEADER_BYTES, [data])
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
            listed = {(piece, place): digest for piece, place, digest in self.tail(number)}
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
