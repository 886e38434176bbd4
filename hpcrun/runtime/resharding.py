"""Which rank writes which piece, and which saved chunks a rank reads: torch's planners, without its storage.

A plan to write holds for as long as the structure does. Making one gathers a few bytes for each piece, once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64_intdigest

from hpcrun.checkpoint.chunk_reader import ChunkReader, ChunkSource
from hpcrun.checkpoint.format import (
    CHUNK_BYTES,
    ITEM_BYTES,
    PART_ALIGN,
    ChunkLocation,
    ChunkSpec,
    Manifest,
    align_size,
    plan_part_layout,
)
from hpcrun.checkpoint.slices import split_slice
from hpcrun.errors import UsageError
from hpcrun.runtime.control import Control

_AS_NUMPY = frozenset({torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8})


@dataclass
class WritePlan:
    """What this rank writes of the state, and where; on rank 0 also what all have to write."""

    key: tuple[Any, ...]
    pieces: list[ChunkSpec]
    slices: list[tuple[slice, ...]]
    """Of this rank's own piece of the tensor."""
    file: int
    start: int
    part_bytes: int
    whole_bytes: int
    """Of the parts of all ranks together."""
    file_needs: tuple[int, int, int]
    """Of the file: its bytes, how many files there are, and how many ranks write to this one."""
    tensors: str | None = None
    """The manifest's list of tensors, known to rank 0 from the first save on."""
    structure: str = ""

    def contents(self, state: dict[str, Tensor]) -> Iterator[memoryview]:
        """The bytes of the pieces in turn; without a copy where they lie in order on the host."""
        for piece, slices in zip(self.pieces, self.slices, strict=True):
            taken = local_tensor(state[piece.tensor]).detach()[slices]
            # Torch also keeps a sign or a conjugate as a mark on the memory of another tensor.
            yield raw_bytes(taken.resolve_conj().resolve_neg().contiguous().cpu())


def structure_key(state: dict[str, Tensor]) -> tuple[Any, ...]:
    """Equal as long as a plan for this rank's state stays right; it costs far less than a plan."""
    tensors = state.values()
    cut = [one for one in tensors if isinstance(one, DTensor)]
    return (
        tuple(state),
        tuple([one.dtype for one in tensors]),
        tuple([one.shape for one in tensors]),
        tuple([(local_tensor(one).shape, one.placements, one.device_mesh) for one in cut]),
    )


def plan_write(
    state: dict[str, Tensor], control: Control, key: tuple[Any, ...], node: str | None = None
) -> WritePlan:
    """Share the pieces out: what several ranks hold is written once, by the one that has least to write.

    Ranks that name the same node write to the same file; by default they go by the host they stand on.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), None, control.rank == 0)
    held = dict[str, tuple[ChunkSpec, tuple[slice, ...]]]()
    for item in planner.create_local_plan().items:
        for piece, slices in _split_write_item(item):
            held[f"{xxh3_64_intdigest(repr(piece).encode()):016x}"] = (piece, slices)
    told = [[digest, piece.size_bytes] for digest, (piece, _) in held.items()]
    plans = [SavePlan([_placeholder_item(*one) for one in other]) for other in control.allgather(told)]
    _check_same_shapes(state, control)
    shared, _ = planner.create_global_plan(plans)
    mine = [held[item.index.fqn] for item in shared[control.rank].items]
    pieces = [piece for piece, _ in mine]
    size, node = plan_part_layout(control.rank, pieces).size_bytes, node or control.node
    everyone = control.allgather([node, size])
    nodes = list(dict.fromkeys(other for other, _ in everyone))
    before = sum(align_size(s, PART_ALIGN) for other, s in everyone[: control.rank] if other == node)
    whole, beside = sum(s for _, s in everyone), [s for other, s in everyone if other == node]
    needs = (sum(align_size(s, PART_ALIGN) for s in beside), len(nodes), len(beside))
    cuts = [slices for _, slices in mine]
    return WritePlan(key, pieces, cuts, nodes.index(node), before, size, whole, needs)


def _check_same_shapes(state: dict[str, Tensor], control: Control) -> None:
    """UsageError on all ranks where two of them have another tensor under the same name."""
    mine = {name: f"{dtype_name(tensor)} {list(tensor.shape)}" for name, tensor in state.items()}
    mine = {name: form for name, form in mine.items() if not name.startswith(("rng.", "hpcrun."))}
    digest = f"{xxh3_64_intdigest(repr(sorted(mine.items())).encode()):016x}"
    if len(set(control.allgather(digest))) == 1:
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, forms in enumerate(control.allgather(mine)):
        for name, form in forms.items():
            other, its = first.setdefault(name, (rank, form))
            if its != form:
                where = f"{form} on rank {rank}, but {its} on rank {other}"
                raise UsageError(f"state: {name} is {where}; give what is a rank's own a name of its own")


def fill_from_chunks(source: ChunkSource, state: dict[str, Tensor], *, only_prove: bool = False) -> None:
    """Fill the state's tensors from a generation, whatever layout wrote it; a DamagedError may come late.

    `only_prove`: read what would fill them, and touch nothing.
    """
    direct, others = dict[tuple[ChunkSpec, ChunkLocation], Tensor](), dict[str, Tensor]()
    for name, tensor in state.items():
        chunk = _only_chunk(source.manifest, name, tensor)
        if chunk is None:
            others[name] = tensor
        else:
            direct[chunk] = tensor
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(others), _planner_metadata(source.manifest, others), False)
    items = planner.create_local_plan().items
    chunks: dict[tuple[ChunkSpec, ChunkLocation], list[ReadItem]] = {}
    for item in items:
        index = item.storage_index.index
        assert index is not None
        chunk = source.manifest.tensors[item.storage_index.fqn].chunks[index]
        chunks.setdefault(chunk, []).append(item)
    reader = (
        _ScratchDestinations(planner, direct, chunks)
        if only_prove
        else _ChunkDestinations(planner, direct, chunks)
    )
    if isinstance(source, ChunkReader):
        source.read_all(reader.wanted(), reader.arrived)
        return
    for piece, place, into in reader.wanted():
        source.read(piece, place, into)
        reader.arrived(piece, into)


def _only_chunk(manifest: Manifest, name: str, tensor: Tensor) -> tuple[ChunkSpec, ChunkLocation] | None:
    """The chunk that is all of a tensor and can be read right into it; most are so, and need no plan."""
    stored = manifest.tensors.get(name)
    if stored is None or len(stored.chunks) != 1 or isinstance(tensor, DTensor):
        return None
    is_alike = stored.shape == tuple(tensor.shape) and stored.dtype == dtype_name(tensor)
    return stored.chunks[0] if is_alike and _lies_as_stored(tensor) else None


def _lies_as_stored(tensor: Tensor) -> bool:
    """Whether its memory has the bytes of its elements in order; a conjugate's is that of another."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _ChunkDestinations:
    """Gives each chunk the memory it is read into, and puts it where it belongs."""

    def __init__(
        self,
        planner: DefaultLoadPlanner,
        direct: dict[tuple[ChunkSpec, ChunkLocation], Tensor],
        chunks: dict[tuple[ChunkSpec, ChunkLocation], list[ReadItem]],
    ) -> None:
        self._planner = planner
        wanted: list[tuple[tuple[ChunkSpec, ChunkLocation], Tensor | list[ReadItem]]] = [
            *direct.items(),
            *chunks.items(),
        ]
        self._chunks = sorted(wanted, key=lambda one: one[0][1])
        self._waiting: dict[ChunkSpec, tuple[Tensor, Tensor, list[ReadItem]]] = {}
        self._free: list[Tensor] = []

    def wanted(self) -> Iterator[tuple[ChunkSpec, ChunkLocation, memoryview]]:
        """Every chunk in the order of the files: straight into its tensor, or into a buffer."""
        for (piece, place), items in self._chunks:
            if isinstance(items, Tensor):
                yield piece, place, raw_bytes(items)
                continue
            target = self._planner.resolve_tensor(items[0])
            whole = len(items) == 1 and tuple(items[0].lengths) == piece.sizes
            if whole and _lies_as_stored(target):
                yield piece, place, raw_bytes(target)
                continue
            buffer = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8)
            if buffer.numel() < piece.size_bytes:
                buffer = torch.empty(piece.size_bytes, dtype=torch.uint8)
            used = buffer[: piece.size_bytes]
            source = used.view(getattr(torch, piece.dtype)).view(piece.sizes)
            self._waiting[piece] = (source, buffer, items)
            yield piece, place, raw_bytes(used)

    def arrived(self, piece: ChunkSpec, _into: memoryview) -> None:
        """Copy what was read into a buffer to where it is wanted."""
        waiting = self._waiting.pop(piece, None)
        if waiting is None:
            return
        source, buffer, items = waiting
        for item in items:
            part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            self._planner.resolve_tensor(item).copy_(source[part])
        self._free.append(buffer)


class _ScratchDestinations(_ChunkDestinations):
    """Gives each chunk memory that nobody needs, and uses it again when the chunk is proved."""

    def wanted(self) -> Iterator[tuple[ChunkSpec, ChunkLocation, memoryview]]:
        """Every chunk in the order of the files."""
        for (piece, place), _ in self._chunks:
            size = piece.size_bytes
            buffer = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8)
            if buffer.numel() < size:
                buffer = torch.empty(size, dtype=torch.uint8)
            self._waiting[piece] = (buffer, buffer, [])
            yield piece, place, raw_bytes(buffer[:size])


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    # Detaching lets go of Python for a moment, for which the threads beside have been waiting.
    memory: Any = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype in _AS_NUMPY and tensor.numel():  # the shorter way, for one of very many
        return memoryview(memory.numpy()).cast("B")
    return memoryview(memory.reshape(-1).view(torch.uint8).numpy())


def dtype_name(tensor: Tensor) -> str:
    """A type as the format writes it; UsageError for one that it does not know."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise UsageError(f"a tensor of type {name} cannot be saved; use one of {', '.join(ITEM_BYTES)}")
    return name


@functools.cache
def is_storable_dtype(dtype: torch.dtype) -> bool:
    """Whether the format has this type."""
    return str(dtype).removeprefix("torch.") in ITEM_BYTES


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split_write_item(item: WriteItem) -> Iterator[tuple[ChunkSpec, tuple[slice, ...]]]:
    """What torch would write at once, in pieces that a reader can prove one by one; no empty ones."""
    data = item.tensor_data
    assert data is not None
    dtype = dtype_name(torch.empty(0, dtype=data.properties.dtype))
    begin = tuple(data.chunk.offsets)
    for box in split_slice(tuple(data.chunk.sizes), ITEM_BYTES[dtype], CHUNK_BYTES):
        offsets = tuple(a + b for a, b in zip(begin, box.offsets, strict=True))
        piece = ChunkSpec(item.index.fqn, dtype, tuple(data.size), offsets, box.sizes)
        if piece.size_bytes or 0 in data.size:
            yield piece, tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def _placeholder_item(digest: str, size_bytes: int) -> WriteItem:
    """An item that is all that sharing out needs of a piece: an identity and a size."""
    size = torch.Size([size_bytes])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), size)
    index = MetadataIndex(digest, torch.Size([0]))
    return WriteItem(index, WriteItemType.TENSOR, tensor_data=data)


def _planner_metadata(manifest: Manifest, names: dict[str, Tensor]) -> Metadata:
    """What the planner needs to know of the tensors of a generation."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, tensor.dtype)),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                    for piece, _ in tensor.chunks
                ],
            )
            for name, tensor in manifest.tensors.items()
            if name in names
        }
    )
