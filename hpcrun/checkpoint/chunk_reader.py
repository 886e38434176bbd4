"""Reading chunks and proving them, wherever the parts of the generation lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from xxhash import xxh3_64_intdigest

from hpcrun.checkpoint.format import (
    CHUNK_FRAME,
    END_FRAME,
    HEADER_BYTES,
    TAIL_FRAME,
    ChunkLocation,
    ChunkSpec,
    DamagedError,
    Manifest,
    Part,
    align_size,
    parse_tail,
    unpack_header,
)

Buffers: TypeAlias = list[bytearray | memoryview]
ChunkRead: TypeAlias = tuple[ChunkSpec, ChunkLocation, memoryview]
"""A chunk, and a buffer of just its size."""
_FetchedChunk: TypeAlias = tuple[ChunkSpec, ChunkLocation, memoryview, memoryview]
_RUN_BYTES, _RUN_CHUNKS = 8 << 20, 256
"""Read by one call, which takes 1024 buffers at most; a chunk takes up to three."""


class ChunkSource(Protocol):
    """Anything that can give the chunks of one generation, proved."""

    manifest: Manifest

    def read(self, piece: ChunkSpec, place: ChunkLocation, into: memoryview) -> None:
        """Fill a buffer of exactly the chunk's size; DamagedError if what is there is not that chunk."""


class PartFetcher(Protocol):
    """Where the bytes of the parts are."""

    def fetch(self, number: int, part: Part, at: int, buffers: Buffers) -> int:
        """Fill the buffers from a place in a part; how many bytes there were."""

    def where(self, number: int, part: Part, at: int) -> str:
        """The same place, for people."""

    def close(self) -> None:
        """Let go of everything."""


class ChunkReader:
    """Gives the chunks of a generation, proved; nothing leaves here that is not what was written."""

    def __init__(self, name: str, manifest: Manifest, fetcher: PartFetcher) -> None:
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

    def read(self, piece: ChunkSpec, place: ChunkLocation, into: memoryview) -> None:
        """Fill a buffer of exactly the chunk's size; DamagedError if what is there is not that chunk."""
        for fetched in self._fetch([(piece, place, into)]):
            self._prove(*fetched)

    def read_all(self, reads: Iterable[ChunkRead], then: Callable[[ChunkSpec, memoryview], None]) -> None:
        """Read many chunks, proved beside the reading of others, and hand each on when it is proved.

        Neighbours that are asked for one after the other are read together.
        """
        with ThreadPoolExecutor(1) as beside:
            pending = beside.submit(self._prove_all, [], then)
            for run in _group_adjacent(reads):
                fetched = self._fetch(run)
                pending.result()
                pending = beside.submit(self._prove_all, fetched, then)
            pending.result()

    def _prove_all(self, fetched: list[_FetchedChunk], then: Callable[[ChunkSpec, memoryview], None]) -> None:
        for chunk in fetched:
            self._prove(*chunk)
            then(chunk[0], chunk[2])

    def _fetch(self, run: list[ChunkRead]) -> list[_FetchedChunk]:
        """Read chunks that lie one behind the other; what there was of each one's header and bytes."""
        headers = memoryview(bytearray(HEADER_BYTES * len(run)))
        buffers, begins, size = Buffers(), list[int](), 0
        for number, (piece, _, into) in enumerate(run):
            assert len(into) == piece.size_bytes, f"{piece}: a buffer of {len(into)} bytes"
            begins.append(size)
            buffers += [headers[number * HEADER_BYTES :][:HEADER_BYTES], into]
            if (rest := align_size(len(into)) - len(into)) and number + 1 < len(run):
                buffers.append(bytearray(rest))
            size += HEADER_BYTES + align_size(len(into))
        place = run[0][1]
        count = self._bytes(place.part, place.at, buffers)
        fetched = []
        for number, (begin, (piece, place, into)) in enumerate(zip(begins, run, strict=True)):
            there = max(0, count - begin)
            header = headers[number * HEADER_BYTES :][: min(there, HEADER_BYTES)]
            fetched.append((piece, place, into[: max(0, there - HEADER_BYTES)], header))
        return fetched

    def _prove(self, piece: ChunkSpec, place: ChunkLocation, data: memoryview, header: memoryview) -> int:
        """DamagedError unless this is the chunk that belongs there; its hash."""
        try:
            length, digest = unpack_header(bytes(header), CHUNK_FRAME, place, self.manifest.generation)
            if length != piece.size_bytes:
                raise DamagedError(f"it holds {length} bytes, not {piece.size_bytes}")
            if len(data) < length:
                raise DamagedError(f"the file ends after {len(data)} of its {length} bytes")
            if xxh3_64_intdigest(data) != digest:
                raise DamagedError("its bytes do not match their hash")
        except DamagedError as error:
            wrong = DamagedError(f"{self._where(place)}: {piece}: {error}")
            wrong.chunk = piece, place
            raise wrong from None
        return digest

    def _where(self, place: ChunkLocation) -> str:
        return self._fetcher.where(place.part, self._part(place.part), place.at)

    def _part(self, number: int) -> Part:
        if not 0 <= number < len(self.manifest.parts):
            raise DamagedError(f"{self.name}: names part {number} of {len(self.manifest.parts)}")
        return self.manifest.parts[number]

    def _bytes(self, number: int, at: int, buffers: Buffers) -> int:
        """Fill the buffers from a place in a part; how many bytes there were."""
        return self._fetcher.fetch(number, self._part(number), at, buffers)

    def header(self, kind: int, place: ChunkLocation) -> tuple[int, int]:
        """(length, hash) of what follows a header; DamagedError unless it is the one that belongs here."""
        header = bytearray(HEADER_BYTES)
        count = self._bytes(place.part, place.at, [header])
        try:
            return unpack_header(header[:count], kind, place, self.manifest.generation)
        except DamagedError as error:
            raise DamagedError(f"{self._where(place)}: {error}") from None

    def tail(self, number: int) -> list[tuple[ChunkSpec, ChunkLocation, int]]:
        """A part's own list of its chunks; DamagedError where it is not the one that the manifest knows."""
        part = self._part(number)
        place = ChunkLocation(number, part.tail_at)
        length, digest = self.header(TAIL_FRAME, place)
        end = ChunkLocation(number, part.size_bytes - HEADER_BYTES)
        if length != part.tail_bytes or self.header(END_FRAME, end)[0] != part.tail_at:
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
        chunks: list[tuple[ChunkSpec, ChunkLocation]],
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
            place = ChunkLocation(number, self._part(number).tail_at)
            yield f"{self._where(place)}: the tail lists other chunks than the manifest"
        for piece, place in chunks:
            into = memoryview(buffers)[: piece.size_bytes]
            try:
                (fetched,) = self._fetch([(piece, place, into)])
                digest = self._prove(*fetched)
                if listed is not None and listed.get((piece, place), digest) != digest:
                    raise DamagedError(f"{self._where(place)}: {piece}: is not the chunk that the tail lists")
            except (DamagedError, OSError) as error:
                yield str(error)
            progress(piece.size_bytes)

    def chunks_by_part(self) -> list[list[tuple[ChunkSpec, ChunkLocation]]]:
        """The chunks of each part, in the order in which they lie there."""
        chunks: list[list[tuple[ChunkSpec, ChunkLocation]]] = [[] for _ in self.manifest.parts]
        for tensor in self.manifest.tensors.values():
            for piece, place in tensor.chunks:
                self._part(place.part)
                chunks[place.part].append((piece, place))
        return [sorted(own, key=lambda item: item[1]) for own in chunks]


def _group_adjacent(reads: Iterable[ChunkRead]) -> Iterator[list[ChunkRead]]:
    """Chunks that lie one behind the other, no more than are to be read at once."""
    run, size, following = list[ChunkRead](), 0, (0, 0)
    for read in reads:
        _, place, into = read
        if run and (place != following or size + len(into) > _RUN_BYTES or len(run) == _RUN_CHUNKS):
            yield run
            run, size = [], 0
        run.append(read)
        size += len(into)
        following = (place.part, place.at + HEADER_BYTES + align_size(len(into)))
    if run:
        yield run
