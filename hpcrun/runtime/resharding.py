"""Plans which rank writes which piece and which saved chunks a rank reads, with torch's planners.

A write plan stays valid until the structure of the state changes. Making one gathers a few bytes for each
piece.
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
    """What this rank writes of the state, and where; on rank 0 also what all ranks write."""

    key: tuple[Any, ...]
    pieces: list[ChunkSpec]
    slices: list[tuple[slice, ...]]
    """For each piece, what of this rank's local tensor it holds."""
    file: int
    start: int
    part_bytes: int
    whole_bytes: int
    """The sum of all ranks' parts."""
    file_needs: tuple[int, int, int]
    """The size of the file, the number of files, and the number of ranks that write to this one."""
    tensors: str | None = None
    """The manifest's list of tensors, on rank 0 after the first save."""
    structure: str = ""

    def contents(self, state: dict[str, Tensor]) -> Iterator[memoryview]:
        """Yield the bytes of the pieces, without a copy where they are contiguous on the host."""
        for piece, slices in zip(self.pieces, self.slices, strict=True):
            taken = local_tensor(state[piece.tensor]).detach()[slices]
            # Torch may store a negative or conjugate as a flag on another tensor's memory.
            yield raw_bytes(taken.resolve_conj().resolve_neg().contiguous().cpu())


def structure_key(state: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return a key that is equal as long as a plan for this state stays valid; cheap to compute."""
    tensors = state.values()
    cut = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    return (
        tuple(state),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([tensor.shape for tensor in tensors]),
        tuple([(local_tensor(tensor).shape, tensor.placements, tensor.device_mesh) for tensor in cut]),
    )


def plan_write(
    state: dict[str, Tensor], control: Control, key: tuple[Any, ...], node: str | None = None
) -> WritePlan:
    """Assign each piece to one rank: of those that hold it, the one that has least to write.

    Ranks with the same `node` write to the same file; the default is their host.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), None, control.rank == 0)
    held = dict[str, tuple[ChunkSpec, tuple[slice, ...]]]()
    for item in planner.create_local_plan().items:
        for piece, slices in _split_write_item(item):
            held[f"{xxh3_64_intdigest(repr(piece).encode()):016x}"] = (piece, slices)
    sizes = [[digest, piece.size_bytes] for digest, (piece, _) in held.items()]
    plans = [SavePlan([_placeholder_item(*item) for item in other]) for other in control.allgather(sizes)]
    _check_same_shapes(state, control)
    shared, _ = planner.create_global_plan(plans)
    mine = [held[item.index.fqn] for item in shared[control.rank].items]
    pieces = [piece for piece, _ in mine]
    size, node = plan_part_layout(control.rank, pieces).size_bytes, node or control.node
    everyone = control.allgather([node, size])
    nodes = list(dict.fromkeys(other for other, _ in everyone))
    before = sum(align_size(s, PART_ALIGN) for other, s in everyone[: control.rank] if other == node)
    whole, node_sizes = sum(s for _, s in everyone), [s for other, s in everyone if other == node]
    needs = (sum(align_size(s, PART_ALIGN) for s in node_sizes), len(nodes), len(node_sizes))
    cuts = [slices for _, slices in mine]
    return WritePlan(key, pieces, cuts, nodes.index(node), before, size, whole, needs)


def _check_same_shapes(state: dict[str, Tensor], control: Control) -> None:
    """UsageError on all ranks where two have different tensors under the same name."""
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
                raise UsageError(
                    f"state: {name} is {where}; give tensors that differ between ranks different names"
                )


def fill_from_chunks(source: ChunkSource, state: dict[str, Tensor], *, only_verify: bool = False) -> None:
    """Fill tensors from a generation of any layout; DamagedError may come after some are filled.

    `only_verify`: read and verify what would fill them, and change nothing.
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
        if only_verify
        else _ChunkDestinations(planner, direct, chunks)
    )
    if isinstance(source, ChunkReader):
        source.read_all(reader.wanted(), reader.arrived)
        return
    for piece, place, into in reader.wanted():
        source.read(piece, place, into)
        reader.arrived(piece, into)


def _only_chunk(manifest: Manifest, name: str, tensor: Tensor) -> tuple[ChunkSpec, ChunkLocation] | None:
    """Return the one chunk of a tensor that can be read into it directly; most tensors need no plan."""
    stored = manifest.tensors.get(name)
    if stored is None or len(stored.chunks) != 1 or isinstance(tensor, DTensor):
        return None
    is_alike = stored.shape == tuple(tensor.shape) and stored.dtype == dtype_name(tensor)
    return stored.chunks[0] if is_alike and _lies_as_stored(tensor) else None


def _lies_as_stored(tensor: Tensor) -> bool:
    """Whether its memory holds its elements in order; a conjugate shares another tensor's memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _ChunkDestinations:
    """Provides the memory that chunks are read into, and copies them to their tensors."""

    def __init__(
        self,
        planner: DefaultLoadPlanner,
        direct: dict[tuple[ChunkSpec, ChunkLocation], Tensor],
        chunks: dict[tuple[ChunkSpec, ChunkLocation], list[ReadItem]],
    ) -> None:
        self._planner = planner
        destinations: list[tuple[tuple[ChunkSpec, ChunkLocation], Tensor | list[ReadItem]]] = [
            *direct.items(),
            *chunks.items(),
        ]
        self._chunks = sorted(destinations, key=lambda item: item[0][1])
        self._waiting: dict[ChunkSpec, tuple[Tensor, Tensor, list[ReadItem]]] = {}
        self._free: list[Tensor] = []

    def wanted(self) -> Iterator[tuple[ChunkSpec, ChunkLocation, memoryview]]:
        """Yield every chunk in the order of the files, with its tensor's memory or a buffer."""
        for (piece, place), items in self._chunks:
            if isinstance(items, Tensor):
                yield piece, place, raw_bytes(items)
                continue
            target = self._planner.resolve_tensor(items[0])
            whole = len(items) == 1 and tuple(items[0].lengths) == piece.sizes
            if whole and _lies_as_stored(target):
                yield piece, place, raw_bytes(target)
                continue
            buffer = self._take_buffer(piece.size_bytes)
            used = buffer[: piece.size_bytes]
            source = used.view(getattr(torch, piece.dtype)).view(piece.sizes)
            self._waiting[piece] = (source, buffer, items)
            yield piece, place, raw_bytes(used)

    def _take_buffer(self, size_bytes: int) -> Tensor:
        buffer = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8)
        return buffer if buffer.numel() >= size_bytes else torch.empty(size_bytes, dtype=torch.uint8)

    def arrived(self, piece: ChunkSpec, _into: memoryview) -> None:
        """Copy a chunk from its buffer to its tensors, and free the buffer."""
        waiting = self._waiting.pop(piece, None)
        if waiting is None:
            return
        source, buffer, items = waiting
        for item in items:
            part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            self._planner.resolve_tensor(item).copy_(source[part])
        self._free.append(buffer)


class _ScratchDestinations(_ChunkDestinations):
    """Provides scratch memory for chunks that are only verified."""

    def wanted(self) -> Iterator[tuple[ChunkSpec, ChunkLocation, memoryview]]:
        """Yield every chunk in the order of the files, with a buffer."""
        for (piece, place), _ in self._chunks:
            buffer = self._take_buffer(piece.size_bytes)
            self._waiting[piece] = (buffer, buffer, [])
            yield piece, place, raw_bytes(buffer[: piece.size_bytes])


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    # Detaching releases Python's lock, which other threads would take for a while.
    memory: Any = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype in _AS_NUMPY and tensor.numel():  # the faster way
        return memoryview(memory.numpy()).cast("B")
    return memoryview(memory.reshape(-1).view(torch.uint8).numpy())


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type in the save format; UsageError for one that cannot be saved."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise UsageError(f"a tensor of type {name} cannot be saved; use one of {', '.join(ITEM_BYTES)}")
    return name


@functools.cache
def is_storable_dtype(dtype: torch.dtype) -> bool:
    """Whether the save format has this type."""
    return str(dtype).removeprefix("torch.") in ITEM_BYTES


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split_write_item(item: WriteItem) -> Iterator[tuple[ChunkSpec, tuple[slice, ...]]]:
    """Cut a write item of torch's into pieces that a reader can verify one by one; skip empty ones."""
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
    """Return a stand-in for another rank's piece: its identity and size are all that planning needs."""
    size = torch.Size([size_bytes])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), size)
    index = MetadataIndex(digest, torch.Size([0]))
    return WriteItem(index, WriteItemType.TENSOR, tensor_data=data)


def _planner_metadata(manifest: Manifest, names: dict[str, Tensor]) -> Metadata:
    """Return a generation's metadata of these tensors, for the planner."""
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
