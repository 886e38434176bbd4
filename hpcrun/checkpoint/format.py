"""The files of a saved step, format 2.

A generation is one saved state of one step. It has a random id of 16 bytes, and a directory of its own that
is never written to again once it is committed:

    checkpoints/step-00000016/
        data-00000.bin     one file a node: a part for each of its ranks, one after the other
        manifest.json      every tensor with type, whole shape and the places of its chunks; every part; how
                           the files lie on the file system, where that is known
        complete.json      the commit record, a few hundred bytes: all that listing needs

A part is what one rank has written, wherever it lies: it begins at a multiple of 4096 bytes in its file and
counts its positions from there, so that it can be moved to another file or level as it is.

    part    := PART header | chunk ... | TAIL header, JSON | END header
    chunk   := CHUNK header (64 bytes) | raw bytes | zeros up to a multiple of 64

A header says what it is, in which part and at which position, of which generation, how many bytes follow,
and their hash (xxh3, 64 bits); its last 8 bytes are the hash of the others. So a chunk cannot be taken for
one of another save, of another rank or of another place, and its hash travels with it. Bytes are little
endian.

The chunk of a tensor is a box of it (offsets and sizes), in C order, of at most CHUNK_BYTES; the boxes of a
tensor cover it exactly, without overlap. The tail lists the part's chunks with their hashes, which makes a
part readable without the manifest; END, the last 64 bytes, leads to the tail.

Each level proves the one below: the record holds a hash of itself and of the manifest, the manifest the
hash of every tail, a tail the hash of every chunk. Nothing is a pickle; nothing that is read is run.

Commit: data files written and synced; manifest, record and directory synced in `.step-00000016.<attempt>`;
one rename; the parent directory synced. Deletion begins with a rename out of the committed names.

Any other version is refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from hpcrun.checkpoint.slices import TensorSlice, find_coverage_problem
from hpcrun.errors import SiteError
from hpcrun.specs.saves import SAVE_FORMAT_VERSION

BytesLike: TypeAlias = bytes | memoryview

MANIFEST_NAME = "manifest.json"
CHUNK_BYTES = 32 << 20
"""Larger pieces are cut, so that no reader needs more memory than this to prove a chunk."""
PART_ALIGN = 4096
HEADER_BYTES = 64
PART_FRAME, CHUNK_FRAME, TAIL_FRAME, END_FRAME = range(1, 5)
_KIND_NAMES = {
    PART_FRAME: "beginning of a part",
    CHUNK_FRAME: "chunk",
    TAIL_FRAME: "tail",
    END_FRAME: "end of a part",
}
_HEADER = struct.Struct("<4sHHIIQQ16sQ")
_CHECK = struct.Struct("<Q")
_MAGIC = b"HPCK"

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
}
"""The types that a save may hold, by torch's names."""


class DamagedError(SiteError):
    """A save is not what was written; the message says which file, and what is wrong with it."""

    chunk: tuple[ChunkSpec, ChunkLocation] | None = None
    """Whose bytes are wrong, where it is those of a chunk."""


class MissingFileError(DamagedError):
    """Something of a save is not there as this node sees it, which proves nothing of what others see."""


class ChunkSpec(NamedTuple):
    """A box of a tensor, as its writer knows it."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Its raw bytes."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        ranges = (f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"{self.tensor}[{', '.join(ranges)}]"


class ChunkLocation(NamedTuple):
    """Where a chunk lies: its part, and the position of its header there."""

    part: int
    at: int


@dataclass(frozen=True)
class Part:
    """What one rank wrote: where it lies, and the hash that proves its tail."""

    file: int
    start: int
    size_bytes: int
    tail_at: int
    tail_bytes: int
    tail_hash: str


@dataclass
class TensorEntry:
    """A whole tensor, and where its chunks lie."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[ChunkSpec, ChunkLocation]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything that a reader of a generation needs to know."""

    generation: bytes
    parts: list[Part]
    tensors: dict[str, TensorEntry]
    layout: Mapping[str, Any] = field(default_factory=dict)
    """What the file system said of how each data file lies on it; empty where nobody asked."""


def data_file_name(number: int) -> str:
    """The name of a generation's data file."""
    return f"data-{number:05d}.bin"


def align_size(size: int, to: int = HEADER_BYTES) -> int:
    """The next multiple."""
    return -(-size // to) * to


def pack_header(kind: int, place: ChunkLocation, generation: bytes, length: int, digest: int) -> bytes:
    """64 bytes that say what follows them."""
    part, at = place
    head = _HEADER.pack(_MAGIC, SAVE_FORMAT_VERSION, kind, part, 0, at, length, generation, digest)
    return head + _CHECK.pack(xxh3_64_intdigest(head))


def unpack_header(
    data: bytes | bytearray, kind: int, place: ChunkLocation, generation: bytes
) -> tuple[int, int]:
    """(length, hash) of what follows a header; DamagedError unless it is the one that belongs here."""
    what = _KIND_NAMES[kind]
    if len(data) < HEADER_BYTES:
        raise DamagedError(f"the file ends in the header of the {what}")
    head, (check,) = bytes(data[: _HEADER.size]), _CHECK.unpack_from(data, _HEADER.size)
    if check != xxh3_64_intdigest(head):
        raise DamagedError(f"the header of the {what} is damaged")
    magic, version, generation_bytes, part, _, at, length, owner, digest = _HEADER.unpack(head)
    if magic != _MAGIC or version != SAVE_FORMAT_VERSION or generation_bytes != kind:
        raise DamagedError(f"there is no header of a {what} of format {SAVE_FORMAT_VERSION}")
    if owner != generation:
        raise DamagedError(f"the {what} belongs to generation {owner.hex()}, not {generation.hex()}")
    if (part, at) != tuple(place):
        raise DamagedError(
            f"the {what} belongs at {at} in part {part}, not at {place.at} in part {place.part}"
        )
    return length, digest


def parse_header_owner(header: bytes) -> tuple[int, int, bytes] | None:
    """(kind, part, generation) that a header itself names; None where it is none, or damaged."""
    head = header[: _HEADER.size]
    if len(header) < HEADER_BYTES or _CHECK.unpack_from(header, _HEADER.size)[0] != xxh3_64_intdigest(head):
        return None
    magic, version, kind, part, _, _, _, owner, _ = _HEADER.unpack(head)
    return (kind, part, owner) if magic == _MAGIC and version == SAVE_FORMAT_VERSION else None


class PartLayout(NamedTuple):
    """How a part is laid out; known before its bytes are."""

    at: tuple[int, ...]
    """The position of each chunk's header."""
    tail_at: int
    tail_bytes: int
    size_bytes: int
    listed: tuple[str, ...]
    """Each chunk as the tail lists it, up to its hash."""


def plan_part_layout(part: int, pieces: Sequence[ChunkSpec]) -> PartLayout:
    """Where the chunks of a part will lie."""
    at, listed, position = [], [], HEADER_BYTES
    for piece in pieces:
        at.append(position)
        listed.append(json.dumps([*piece, position], separators=(",", ":"))[:-1])
        position += HEADER_BYTES + align_size(piece.size_bytes)
    tail_bytes = len(render_tail(part, listed, [0] * len(pieces)))
    size = position + HEADER_BYTES + align_size(tail_bytes) + HEADER_BYTES
    return PartLayout(tuple(at), position, tail_bytes, size, tuple(listed))


class PartFrame(NamedTuple):
    """A header of a part, and what follows it."""

    kind: int
    at: int
    header: bytes
    content: BytesLike
    digest: int
    """Of the content."""


def iterate_frames(
    generation: bytes, part: int, layout: PartLayout, contents: Iterable[BytesLike]
) -> Iterator[PartFrame]:
    """All that a part is made of, in order; each hash is computed here, and nowhere again.

    `contents` are taken one by one, as they are asked for.
    """

    def frame(kind: int, at: int, content: BytesLike, length: int, digest: int) -> PartFrame:
        return PartFrame(
            kind, at, pack_header(kind, ChunkLocation(part, at), generation, length, digest), content, digest
        )

    yield frame(PART_FRAME, 0, b"", layout.size_bytes, 0)
    hashes = []
    for at, content in zip(layout.at, contents, strict=True):
        hashes.append(digest := xxh3_64_intdigest(content))
        yield frame(CHUNK_FRAME, at, content, len(content), digest)
    tail = render_tail(part, layout.listed, hashes)
    yield frame(TAIL_FRAME, layout.tail_at, tail, len(tail), xxh3_64_intdigest(tail))
    yield frame(END_FRAME, layout.size_bytes - HEADER_BYTES, b"", layout.tail_at, 0)


def render_tail(part: int, listed: Iterable[str], hashes: Iterable[int]) -> bytes:
    """A part's own list of its chunks; its length does not depend on the hashes."""
    chunks = ",".join(
        f'{fields_json},"{digest:016x}"]' for fields_json, digest in zip(listed, hashes, strict=True)
    )
    return f'{{"part":{part},"chunks":[{chunks}]}}'.encode()


def parse_tail(data: bytes, part: int) -> list[tuple[ChunkSpec, ChunkLocation, int]]:
    """The chunks of a part with their hashes; DamagedError where it makes no sense."""
    try:
        values = json.loads(data)
        if values["part"] != part:
            raise DamagedError(f"it is the tail of part {values['part']}, not {part}")
        return [
            (
                ChunkSpec(name, dtype, tuple(shape), tuple(o), tuple(s)),
                ChunkLocation(part, at),
                int(digest, 16),
            )
            for name, dtype, shape, o, s, at, digest in values["chunks"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the tail is not a list of chunks ({error})") from None


def collect_tensors(tails: Iterable[Iterable[tuple[ChunkSpec, ChunkLocation]]]) -> dict[str, TensorEntry]:
    """All tensors of a generation, from what its parts hold; DamagedError unless each is there just once."""
    tensors: dict[str, TensorEntry] = {}
    for tail in tails:
        for piece, place in tail:
            tensor = tensors.setdefault(piece.tensor, TensorEntry(piece.dtype, piece.shape))
            if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
                raise DamagedError(
                    f"{piece.tensor} is {piece.dtype} {list(piece.shape)} in part {place.part}, but"
                    f" {tensor.dtype} {list(tensor.shape)} elsewhere"
                )
            tensor.chunks.append((piece, place))
    check_coverage(tensors)
    return dict(sorted(tensors.items()))


def check_coverage(tensors: dict[str, TensorEntry]) -> None:
    """DamagedError unless the chunks of each tensor cover it exactly."""
    for name, tensor in tensors.items():
        problem = find_coverage_problem(
            tensor.shape, [TensorSlice(piece.offsets, piece.sizes) for piece, _ in tensor.chunks]
        )
        if problem:
            raise DamagedError(f"the chunks of {name} do not make up the whole tensor: {problem}")


def compute_structure_digest(tensors: dict[str, TensorEntry]) -> str:
    """The same for all states with these names, types and whole shapes, whatever their layout."""
    signature = sorted([name, tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items())
    return xxh3_64_hexdigest(json.dumps(signature, separators=(",", ":")).encode())


def render_tensors(tensors: dict[str, TensorEntry]) -> str:
    """The part of a manifest that stays the same for as long as the layout does."""
    signature = [
        [
            name,
            tensor.dtype,
            tensor.shape,
            [[*place, piece.offsets, piece.sizes] for piece, place in tensor.chunks],
        ]
        for name, tensor in tensors.items()
    ]
    return json.dumps(signature, separators=(",", ":"))


def render_manifest(
    generation: bytes, parts: Sequence[Part], tensors: str, layout: Mapping[str, Any] | None = None
) -> bytes:
    """A manifest, with its tensors already rendered."""
    rows = [[p.file, p.start, p.size_bytes, p.tail_at, p.tail_bytes, p.tail_hash] for p in parts]
    head = {"format_version": SAVE_FORMAT_VERSION, "generation": generation.hex(), "parts": rows}
    if layout:
        head["layout"] = dict(layout)
    return f'{json.dumps(head)[:-1]}, "tensors": {tensors}}}\n'.encode()


def parse_manifest(data: bytes) -> Manifest:
    """A manifest, every tensor of which is wholly there; DamagedError otherwise."""
    try:
        values = json.loads(data)
        if values["format_version"] != SAVE_FORMAT_VERSION:
            raise DamagedError(f"it is of format {values['format_version']}, not {SAVE_FORMAT_VERSION}")
        parts = [Part(*row) for row in values["parts"]]
        tensors = {row[0]: _parse_tensor(row) for row in values["tensors"]}
        generation = bytes.fromhex(values["generation"])
        layout = dict(values.get("layout", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"it is not a manifest ({error})") from None
    check_coverage(tensors)
    return Manifest(generation, parts, tensors, layout)


def _parse_tensor(row: list[Any]) -> TensorEntry:
    name, dtype, whole, chunks = row
    shape = tuple(whole)
    if dtype not in ITEM_BYTES:
        raise DamagedError(f"{name} is of type {dtype}; known: {', '.join(sorted(ITEM_BYTES))}")
    places = [
        (ChunkSpec(name, dtype, shape, tuple(offsets), tuple(sizes)), ChunkLocation(part, at))
        for part, at, offsets, sizes in chunks
    ]
    return TensorEntry(dtype, shape, places)
