"""Parity of an erasure set: where which bytes lie, and the arithmetic that makes and uses them.

A set has G members, each with a block of bytes; all blocks count as long as the longest, with zeros behind
their own bytes that nobody stores or sends. A block is cut into D = G - parity chunks. There are G stripes:
stripe j has its parity on the members j, j+1, … (as many as there is parity, counted round), and one chunk
of each of the D others. So every member keeps `parity` chunks' worth of others' bytes, and whichever
`parity` members are lost, each stripe still has D of its G pieces, from which the others are made.

    G = 4, parity = 1      member 0   member 1   member 2   member 3
    stripe 0               parity     chunk 2    chunk 1    chunk 0
    stripe 1               chunk 0    parity     chunk 2    chunk 1
    stripe 2               chunk 1    chunk 0    parity     chunk 2
    stripe 3               chunk 2    chunk 1    chunk 0    parity

With D = 1 parity is a copy, with parity = 1 it is XOR, else Reed-Solomon over bytes (Cauchy, by ISA-L). All
three work byte by byte, so that blocks can be gone through in windows of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from hpcrun.checkpoint.format import align_size
from hpcrun.errors import SiteError

WINDOW_BYTES = 1 << 20
"""Of each piece of a stripe, so much is worked on at a time."""
_RS_BYTES = 1 << 20
"""What Reed-Solomon gets at a time, all chunks together: it stays in the cache."""
_ALIGN = 64
_FRAGMENT_HEADER_BYTES = 80

Buffer: TypeAlias = bytes | bytearray | memoryview


class NotEnoughBlocksError(SiteError):
    """Too little is left to make a block again."""


class BlockRead(NamedTuple):
    """Bytes of a piece of a stripe, and where they are to be put."""

    member: int
    parity: int | None
    """Which of the member's parity blocks; None: its own block."""
    at: int
    into: memoryview


FetchBlocks: TypeAlias = Callable[[Sequence[BlockRead]], Callable[[], None]]
"""Begins to fill the buffers, and gives what waits for the end of it."""
PutBlock: TypeAlias = Callable[[int, int, memoryview], None]
"""Takes the bytes of a parity (encode) or of a chunk (rebuild): which one, where in it, and the bytes."""


@dataclass(frozen=True)
class StripeGeometry:
    """Which bytes of which member belong to which stripe."""

    sizes: tuple[int, ...]
    """Of the members' blocks."""
    parity: int

    def __post_init__(self) -> None:
        if not 1 <= self.parity < len(self.sizes):
            raise ValueError(f"{len(self.sizes)} members cannot have parity {self.parity}")

    @property
    def members(self) -> int:
        """G."""
        return len(self.sizes)

    @property
    def data(self) -> int:
        """D: the chunks of a block, and of a stripe."""
        return self.members - self.parity

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk, and of a parity block; a multiple of 64."""
        return align_size(-(-max(self.sizes) // self.data), _ALIGN)

    def stripe(self, member: int, chunk: int) -> int:
        """The stripe of a chunk of a member's block."""
        return (member + 1 + chunk) % self.members

    def chunk(self, member: int, stripe: int) -> int | None:
        """The chunk that a member has in a stripe; None where it has parity there."""
        chunk = (stripe - member - 1) % self.members
        return chunk if chunk < self.data else None

    def holder(self, stripe: int, parity: int) -> int:
        """The member that keeps a parity of a stripe; it is the parity block of that number there."""
        return (stripe + parity) % self.members

    def kept(self, member: int, parity: int) -> int:
        """The stripe of which a member keeps the parity of this number."""
        return (member - parity) % self.members

    def owner(self, stripe: int, piece: int) -> int:
        """The member with a piece of a stripe: first the D chunks, in the code's order, then the parities."""
        return (stripe + self.parity + piece) % self.members

    def extent(self, member: int, chunk: int) -> tuple[int, int]:
        """(position in the block, bytes) of a chunk as far as it is not zeros behind the block's end."""
        at = min(chunk * self.chunk_bytes, self.sizes[member])
        return at, min(self.chunk_bytes, self.sizes[member] - at)


def parity_memory_bytes(block_bytes: int, members: int, parity: int) -> int:
    """What parity takes of a node's memory, whose ranks write so much, in a set of so many members.

    The two newest generations have theirs, and what is made for other members lies here until they fetch it.
    """
    chunk_bytes = align_size(-(-block_bytes // (members - parity)), _ALIGN)
    return (2 * parity + parity - 1) * chunk_bytes


def encode_stripe(
    geometry: StripeGeometry, stripe: int, fetch: FetchBlocks, put: PutBlock, window: int = WINDOW_BYTES
) -> None:
    """Make all parities of a stripe; `put` gets each parity from its beginning to its end."""
    code = erasure_code_for(geometry.data, geometry.parity)
    pieces = range(geometry.data)
    ends = [_unpadded_size(geometry, stripe, piece) for piece in pieces]
    for at, buffers in _iterate_windows(geometry, stripe, pieces, max(ends), fetch, window):
        for number, made in enumerate(code.encode([buffers[piece] for piece in pieces])):
            put(number, at, made)
    rest = geometry.chunk_bytes - max(ends)
    zeros = memoryview(bytes(min(rest, window)))
    for at in range(max(ends), geometry.chunk_bytes, window):
        for number in range(geometry.parity):
            put(number, at, zeros[: geometry.chunk_bytes - at])


def rebuild_block(
    geometry: StripeGeometry,
    member: int,
    whole: Collection[int],
    kept: Mapping[int, Collection[int]],
    fetch: FetchBlocks,
    put: PutBlock,
    window: int = WINDOW_BYTES,
) -> None:
    """Make the block of a member again; `put` gets each chunk from its beginning to its end.

    `whole` are the members whose blocks can be read, `kept` the parity blocks that each member still has.
    Lack where too few pieces of a stripe are left.
    """
    code = erasure_code_for(geometry.data, geometry.parity)
    for chunk in range(geometry.data):
        size = geometry.extent(member, chunk)[1]
        if not size:
            continue
        stripe = geometry.stripe(member, chunk)
        pieces = _choose_readable_pieces(geometry, stripe, whole, kept)
        lost = next(p for p in range(geometry.data) if geometry.owner(stripe, p) == member)
        for at, buffers in _iterate_windows(geometry, stripe, pieces, size, fetch, window):
            put(chunk, at, code.rebuild(buffers, lost))


def _choose_readable_pieces(
    geometry: StripeGeometry, stripe: int, whole: Collection[int], kept: Mapping[int, Collection[int]]
) -> list[int]:
    """D pieces of a stripe that can be read, chunks first; Lack where there are fewer."""
    pieces = [piece for piece in range(geometry.data) if geometry.owner(stripe, piece) in whole]
    for number in range(geometry.parity):
        if number in kept.get(geometry.holder(stripe, number), ()):
            pieces.append(geometry.data + number)
    if len(pieces) < geometry.data:
        raise NotEnoughBlocksError(
            f"{len(pieces)} pieces of stripe {stripe} are left, and it takes {geometry.data}"
        )
    return pieces[: geometry.data]


def _unpadded_size(geometry: StripeGeometry, stripe: int, piece: int) -> int:
    """Bytes of a piece that are not zeros behind the end of its block."""
    if piece >= geometry.data:
        return geometry.chunk_bytes
    owner = geometry.owner(stripe, piece)
    chunk = geometry.chunk(owner, stripe)
    assert chunk is not None
    return geometry.extent(owner, chunk)[1]


def _iterate_windows(
    geometry: StripeGeometry, stripe: int, pieces: Sequence[int], size: int, fetch: FetchBlocks, window: int
) -> Iterator[tuple[int, dict[int, memoryview]]]:
    """Go through the first `size` bytes of some pieces; beside the work on a window the next is fetched."""
    window = min(window, max(size, 1))
    sets = [{piece: memoryview(bytearray(window)) for piece in pieces} for _ in range(1 + (size > window))]

    def begin(number: int) -> Callable[[], None]:
        at, reads = number * window, []
        for piece, buffer in sets[number % len(sets)].items():
            real = max(0, min(window, size - at, _unpadded_size(geometry, stripe, piece) - at))
            if real < min(window, size - at):
                buffer[real:] = bytes(window - real)
            if real:
                reads.append(_make_block_read(geometry, stripe, piece, at, buffer[:real]))
        return fetch(reads)

    count = -(-size // window)
    waiting = begin(0) if count else None
    for number in range(count):
        assert waiting is not None
        waiting()
        waiting = begin(number + 1) if number + 1 < count else None
        length = min(window, size - number * window)
        yield number * window, {p: buffer[:length] for p, buffer in sets[number % len(sets)].items()}


def _make_block_read(
    geometry: StripeGeometry, stripe: int, piece: int, at: int, into: memoryview
) -> BlockRead:
    owner = geometry.owner(stripe, piece)
    if piece >= geometry.data:
        return BlockRead(owner, piece - geometry.data, at, into)
    chunk = geometry.chunk(owner, stripe)
    assert chunk is not None
    return BlockRead(owner, None, chunk * geometry.chunk_bytes + at, into)


class ErasureCode:
    """Copies: one chunk to a stripe."""

    def __init__(self, data: int, parity: int) -> None:
        self.data, self.parity = data, parity

    def encode(self, chunks: Sequence[memoryview]) -> list[memoryview]:
        """The parities of chunks of one size."""
        return [chunks[0]] * self.parity

    def rebuild(self, pieces: Mapping[int, memoryview], lost: int) -> memoryview:
        """A chunk from `data` other pieces of its stripe, by number: chunks first, then parities."""
        return next(iter(pieces.values()))


class _XorCode(ErasureCode):
    def __init__(self, data: int, parity: int) -> None:
        super().__init__(data, parity)
        try:
            import numpy  # noqa: F401 - to be told before there is something to store
        except ImportError:
            raise SiteError(
                "checkpoint.parity: XOR needs numpy, which is not installed here; install"
                " hpcrun-slurm[parity] on every node, or set scheme: partner"
            ) from None

    def encode(self, chunks: Sequence[memoryview]) -> list[memoryview]:
        return [_xor(chunks)]

    def rebuild(self, pieces: Mapping[int, memoryview], lost: int) -> memoryview:
        return _xor(list(pieces.values()))


def _xor(buffers: Sequence[memoryview]) -> memoryview:
    import numpy

    first, second, *others = (numpy.frombuffer(buffer, numpy.uint8) for buffer in buffers)
    made = first ^ second
    for other in others:
        numpy.bitwise_xor(made, other, out=made)
    return made.data


class _ReedSolomonCode(ErasureCode):
    """Its library puts a header before each fragment, which depends on nothing but size and number.

    So headers are neither stored nor sent: they are taken from a stripe of zeros where they are needed, and
    what is stored does not depend on the library's version.
    """

    def __init__(self, data: int, parity: int) -> None:
        super().__init__(data, parity)
        self._driver = _make_driver(data, parity)
        self._step = max(_ALIGN, _RS_BYTES // data // _ALIGN * _ALIGN)
        self._headers: dict[int, list[bytes]] = {}

    def encode(self, chunks: Sequence[memoryview]) -> list[memoryview]:
        # Making the parities as if they were lost is quicker than encoding, which copies the chunks as well.
        return self._make(dict(enumerate(chunks)), range(self.data, self.data + self.parity))

    def rebuild(self, pieces: Mapping[int, memoryview], lost: int) -> memoryview:
        return self._make(pieces, [lost])[0]

    def _make(self, pieces: Mapping[int, memoryview], lost: Sequence[int]) -> list[memoryview]:
        length = len(next(iter(pieces.values())))
        made = [bytearray(length) for _ in lost]
        for begin, end, size in self._steps(length):
            headers = self._headers_of(size)
            # The library believes a header's size: each fragment must be just as long.
            fragments = [
                b"".join((headers[piece], _zero_padded(buffer[begin:end], size)))
                for piece, buffer in pieces.items()
            ]
            for into, fragment in zip(made, self._driver.reconstruct(fragments, list(lost)), strict=True):
                into[begin:end] = memoryview(fragment)[_FRAGMENT_HEADER_BYTES:][: end - begin]
        return [memoryview(fragment) for fragment in made]

    def _steps(self, length: int) -> Iterator[tuple[int, int, int]]:
        """(begin, end, size of a fragment) of the pieces that the library gets."""
        for begin in range(0, length, self._step):
            end = min(length, begin + self._step)
            yield begin, end, align_size(end - begin, _ALIGN)

    def _headers_of(self, size: int) -> list[bytes]:
        if size not in self._headers:
            fragments = self._driver.encode(bytes(self.data * size))
            if any(len(fragment) != _FRAGMENT_HEADER_BYTES + size for fragment in fragments):
                raise SiteError(
                    "pyeclib: its fragments are not laid out as those of 1.8; install that one, or set"
                    " checkpoint.parity.scheme: xor"
                )
            self._headers[size] = [fragment[:_FRAGMENT_HEADER_BYTES] for fragment in fragments]
        return self._headers[size]


def _zero_padded(data: memoryview, size: int) -> Buffer:
    return data if len(data) == size else bytes(data).ljust(size, b"\0")


def _make_driver(data: int, parity: int) -> Any:
    try:
        from pyeclib.ec_iface import ECDriver, ECDriverError
    except ImportError:
        raise SiteError(
            "checkpoint.parity: Reed-Solomon needs pyeclib, which is not installed here; install"
            " hpcrun-slurm[parity] on every node, or set scheme: xor"
        ) from None
    try:
        return ECDriver(k=data, m=parity, ec_type="isa_l_rs_cauchy")
    except ECDriverError as error:
        raise SiteError(f"pyeclib: cannot code {data} + {parity} blocks with ISA-L ({error})") from None


@lru_cache(maxsize=16)
def erasure_code_for(data: int, parity: int) -> ErasureCode:
    """The arithmetic of a stripe with so many chunks and parities; SiteError where a library is missing."""
    if data == 1:
        return ErasureCode(data, parity)
    return _XorCode(data, parity) if parity == 1 else _ReedSolomonCode(data, parity)
