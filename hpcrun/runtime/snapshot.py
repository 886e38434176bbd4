"""Copies this rank's part of a save into the memory of its node while training continues.

The trainer starts the copy and goes on; before it changes anything that is being saved, it calls the fence.
The fence detects tensors that were changed too early, and such an image is never sealed: torch counts
changes, and because it does not count those made by `.data` or numpy, some elements of each tensor are
compared as well. The smallest tensors are copied at once.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.format import HEADER_BYTES, ChunkSpec, PartLayout, plan_part_layout
from hpcrun.errors import SiteError
from hpcrun.runtime.resharding import WritePlan, local_tensor
from hpcrun.runtime.storage_guard import guard_until_read
from hpcrun.runtime.tensor_memory import TensorSamples

_MAX_INLINE_BYTES, _MAX_INLINE_TENSORS = 2 << 20, 512
"""The most that is copied at once, before training continues."""
_DIGEST_OFFSET = 48
"""The offset of the hash in a chunk's header."""


@dataclass(frozen=True)
class CopyResult:
    """Size and times of a copy."""

    size_bytes: int
    copy_s: float
    """Time of the copy itself, in its thread."""
    wait_s: float
    """Time that the trainer waited at the fence."""


@dataclass(frozen=True)
class _CopyJob:
    tensors: dict[str, Tensor]
    """All tensors that are copied, by name."""
    versions: list[int | None]
    deferred: list[Tensor]
    """Tensors copied in the thread, kept alive until the fence."""
    names: list[str]
    """Their names."""
    begins: list[int]
    """Their addresses."""
    samples: TensorSamples
    size_bytes: int
    copying: Future[float]

    def changed(self) -> list[str]:
        """Return the names of tensors that have changed since the copy began."""
        changed, versions = list[str](), _tensor_versions(self.tensors)
        if versions != self.versions:
            pairs = zip(self.tensors, versions, self.versions, strict=True)
            changed = [name for name, now, before in pairs if now != before]
        begins = [tensor.data_ptr() for tensor in self.deferred]
        moved = {number for number, begin in enumerate(begins) if begin != self.begins[number]}
        changed += [self.names[number] for number in self.samples.changed(moved)]
        return list(dict.fromkeys(changed))


class StateSnapshot:
    """The slots of this rank, and the thread that copies into them."""

    def __init__(self, paths: Sequence[Path], size_bytes: int, rank: int) -> None:
        """Map the reserved slots; SiteError where that fails."""
        self.size_bytes, self._rank = size_bytes, rank
        self._slots = [_map_slot(path, size_bytes) for path in paths]
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._layouts: dict[int, PartLayout] = {}
        self._names: list[str] = []
        self._cuts: list[tuple[str, tuple[slice, ...] | None]] = []
        """For each piece its tensor's name, and its slices if not all of it."""
        self._job: _CopyJob | None = None
        self._copy_stream: Any = None
        self._thread = _single_copy_thread()
        for slot in self._slots:
            _pin_slot(slot)

    def start(self, slot: int, key: int, plan: WritePlan, entries: dict[str, Tensor]) -> None:
        """Begin to copy the plan's pieces into a slot; the entries must not change until the fence."""
        assert self._job is None, "a copy is started before the fence of the one before"
        views = self._views_for(slot, key, plan)
        with torch.no_grad():
            locals_ = {name: local_tensor(entries[name]) for name in self._names}
            if not self._cuts:
                slices = zip(plan.pieces, plan.slices, strict=True)
                self._cuts = [
                    (piece.tensor, _proper_slices(locals_[piece.tensor], cut)) for piece, cut in slices
                ]
            sources = [locals_[name] if cut is None else locals_[name][cut] for name, cut in self._cuts]
        versions = _tensor_versions(locals_)
        at_once = _small_host_tensors(sources)
        _copy_tensors(
            [views[number] for number in at_once], [sources[number] for number in at_once], None, None
        )
        rest = [number for number in range(len(sources)) if number not in at_once]
        deferred, names = [sources[number] for number in rest], [self._cuts[number][0] for number in rest]
        samples, ready = TensorSamples(deferred), self._ready(sources)
        begins = [tensor.data_ptr() for tensor in deferred]
        copying = self._thread.submit(
            _copy_tensors, [views[number] for number in rest], deferred, ready, self._copy_stream
        )
        guard_until_read(copying, deferred)
        size = sum(piece.size_bytes for piece in plan.pieces)
        self._job = _CopyJob(locals_, versions, deferred, names, begins, samples, size, copying)

    def fence(self) -> CopyResult:
        """Wait for the copy; SiteError where a tensor was changed meanwhile."""
        job, self._job = self._job, None
        assert job is not None, "a fence without a copy"
        begin = time.monotonic()
        try:
            seconds = job.copying.result()
        except (RuntimeError, OSError, MemoryError, ValueError) as error:
            raise SiteError(f"the copy into memory failed: {error}") from error
        if changed := job.changed():
            rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise SiteError(f"{changed[0]}{rest} was changed while it was copied; call fence() before that")
        return CopyResult(job.size_bytes, seconds, time.monotonic() - begin)

    def content(self, slot: int, key: int, pieces: Sequence[ChunkSpec]) -> str:
        """Return a digest of a sealed slot's contents without random state, from the hashes of its chunks."""
        digests = bytearray()
        image = self._slots[slot].image
        for piece, at in zip(pieces, self._layouts[key].at, strict=True):
            if not piece.tensor.startswith("rng."):
                digests += image[at + _DIGEST_OFFSET : at + _DIGEST_OFFSET + 8]
        return xxh3_64_hexdigest(bytes(digests))

    def close(self) -> None:
        """Wait for a copy under way, and release the memory."""
        self._thread.shutdown(wait=True)
        self._job = None
        self._views.clear()
        for slot in self._slots:
            _unpin_slot(slot)
        self._slots.clear()

    def _views_for(self, slot: int, key: int, plan: WritePlan) -> list[Tensor]:
        """Return the place of each piece as a tensor; made once for a structure and a slot."""
        if (slot, key) in self._views:
            return self._views[slot, key]
        if key not in self._layouts:
            self._layouts = {key: plan_part_layout(self._rank, plan.pieces)}
            self._names = list(dict.fromkeys(piece.tensor for piece in plan.pieces))
            self._views, self._cuts = {}, []
        layout = self._layouts[key]
        assert layout.size_bytes <= self.size_bytes, "a part that is longer than its slot"
        whole = self._slots[slot].whole
        views = [
            whole[at + HEADER_BYTES : at + HEADER_BYTES + piece.size_bytes]
            .view(getattr(torch, piece.dtype))
            .view(piece.sizes)
            for piece, at in zip(plan.pieces, layout.at, strict=True)
        ]
        self._views[slot, key] = views
        return views

    def _ready(self, sources: list[Tensor]) -> Any:
        """Return an event after all work queued on the GPU so far; None without tensors there."""
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            return None
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event


def _proper_slices(local: Tensor, slices: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """Return the slices, or None where they select the whole tensor."""
    if all(cut.start == 0 and cut.stop == size for cut, size in zip(slices, local.shape, strict=True)):
        return None
    return slices


def _tensor_versions(tensors: dict[str, Tensor]) -> list[int | None]:
    """Return torch's change counts; None where it does not count."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _small_host_tensors(sources: Sequence[Tensor]) -> set[int]:
    """Return the numbers of the smallest tensors on the host, which are copied at once."""
    sizes = sorted([(tensor.nbytes, number) for number, tensor in enumerate(sources) if tensor.is_cpu])
    small, total = set[int](), 0
    for size, number in sizes[:_MAX_INLINE_TENSORS]:
        total += size
        if total > _MAX_INLINE_BYTES:
            break
        small.add(number)
    return small


def _copy_tensors(views: list[Tensor], sources: list[Tensor], ready: Any, side: Any) -> float:
    """Copy everything in a few calls, which release Python's lock for the trainer."""
    begin = time.monotonic()
    pairs = list(zip(views, sources, strict=True))
    with torch.no_grad():
        if ready is not None:
            there = [(view, source) for view, source in pairs if source.is_cuda]
            with torch.cuda.stream(side):
                side.wait_event(ready)
                torch._foreach_copy_([v for v, _ in there], [s for _, s in there], non_blocking=True)
        here = [(view, source) for view, source in pairs if not source.is_cuda]
        if here:
            torch._foreach_copy_([v for v, _ in here], [s for _, s in here])
        if ready is not None:
            side.synchronize()
    return time.monotonic() - begin


def _single_copy_thread() -> ThreadPoolExecutor:
    """Start a thread whose copies use one core; with torch's usual number they would slow the trainer."""
    usual = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, "hpcrun-snapshot", torch.set_num_threads, (1,))
    thread.submit(torch.get_num_threads).result()
    # The initializer has also set the number for new threads.
    torch.set_num_threads(usual)
    return thread


@dataclass
class _Slot:
    image: mmap.mmap
    whole: Tensor
    is_pinned: bool = False


def _map_slot(path: Path, size_bytes: int) -> _Slot:
    """Map a slot and populate its pages, so that copies cause no page faults."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or status.st_size < size_bytes:
                raise SiteError(f"{path}: is not the memory of {size_bytes} bytes that was asked for")
            image = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise SiteError(f"{path}: cannot be mapped: {error}") from None
    return _Slot(image, torch.frombuffer(image, dtype=torch.uint8))


def _pin_slot(slot: _Slot) -> None:
    """Register a slot with CUDA, so that copies from the GPU go there directly; they work without it too."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(slot.whole.data_ptr(), slot.whole.numel(), 0)
        slot.is_pinned = int(code) == 0


def _unpin_slot(slot: _Slot) -> None:
    if slot.is_pinned:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(slot.whole.data_ptr())
        slot.is_pinned = False
