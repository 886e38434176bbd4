"""This rank's part of a save as an image in the memory of its node, copied beside training.

The trainer plans, starts the copying and goes on; before it changes anything it has saved, it comes to the
fence. What was changed before is noticed there, and such an image is never sealed: torch counts changes, and
as it counts none that are made by `.data` or numpy, some elements of each tensor are compared as well. The
smallest tensors are copied at once, so that nothing can happen to them.
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
"""So much, and so many tensors, are copied before training goes on."""
_DIGEST_OFFSET = 48
"""Where in a chunk's header the hash of its bytes stands."""


@dataclass(frozen=True)
class CopyResult:
    """How a copy went."""

    size_bytes: int
    copy_s: float
    """That the copying itself took, beside training."""
    wait_s: float
    """That the trainer waited for it at the fence."""


@dataclass(frozen=True)
class _CopyJob:
    tensors: dict[str, Tensor]
    """All that is copied, by name."""
    versions: list[int | None]
    beside: list[Tensor]
    """What is copied beside training: held on to until the fence."""
    names: list[str]
    """Of what is copied beside."""
    begins: list[int]
    """Where in memory it begins."""
    samples: TensorSamples
    size_bytes: int
    copying: Future[float]

    def changed(self) -> list[str]:
        """Names of tensors that are others than when the copy was begun."""
        found, versions = list[str](), _tensor_versions(self.tensors)
        if versions != self.versions:
            pairs = zip(self.tensors, versions, self.versions, strict=True)
            found = [name for name, now, before in pairs if now != before]
        begins = [tensor.data_ptr() for tensor in self.beside]
        moved = {number for number, begin in enumerate(begins) if begin != self.begins[number]}
        found += [self.names[number] for number in self.samples.changed(moved)]
        return list(dict.fromkeys(found))


class StateSnapshot:
    """The slots of this rank, and the thread that copies into them."""

    def __init__(self, paths: Sequence[Path], size_bytes: int, rank: int) -> None:
        """SiteError where the memory that was reserved cannot be mapped."""
        self.size_bytes, self._rank = size_bytes, rank
        self._slots = [_map_slot(path, size_bytes) for path in paths]
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._layouts: dict[int, PartLayout] = {}
        self._names: list[str] = []
        self._cuts: list[tuple[str, tuple[slice, ...] | None]] = []
        """Of each piece: its tensor, and what of it, if not all; no tensor is kept from save to save."""
        self._job: _CopyJob | None = None
        self._copy_stream: Any = None
        self._thread = _single_copy_thread()
        for slot in self._slots:
            _pin_slot(slot)

    def start(self, slot: int, key: int, plan: WritePlan, entries: dict[str, Tensor]) -> None:
        """Begin to copy a plan's pieces of these entries into a slot; nothing may change until the fence."""
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
        beside, names = [sources[number] for number in rest], [self._cuts[number][0] for number in rest]
        samples, ready = TensorSamples(beside), self._ready(sources)
        begins = [tensor.data_ptr() for tensor in beside]
        copying = self._thread.submit(
            _copy_tensors, [views[number] for number in rest], beside, ready, self._copy_stream
        )
        guard_until_read(copying, beside)
        size = sum(piece.size_bytes for piece in plan.pieces)
        self._job = _CopyJob(locals_, versions, beside, names, begins, samples, size, copying)

    @property
    def is_copying(self) -> bool:
        """Whether a copy was started that has not come to its fence."""
        return self._job is not None

    def fence(self) -> CopyResult:
        """Wait for the copy; SiteError where the image is not that of the moment it was begun."""
        job, self._job = self._job, None
        assert job is not None, "a fence without a copy"
        begin = time.monotonic()
        try:
            seconds = job.copying.result()
        except (RuntimeError, OSError, MemoryError, ValueError) as error:
            raise SiteError(f"the copy into memory failed: {error}") from error
        if changed := job.changed():
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise SiteError(f"{changed[0]}{more} was changed while it was copied; call fence() before that")
        return CopyResult(job.size_bytes, seconds, time.monotonic() - begin)

    def content(self, slot: int, key: int, pieces: Sequence[ChunkSpec]) -> str:
        """A digest of what a sealed slot holds, random state left out, from the hashes of its chunks."""
        digests = bytearray()
        image = self._slots[slot].image
        for piece, at in zip(pieces, self._layouts[key].at, strict=True):
            if not piece.tensor.startswith("rng."):
                digests += image[at + _DIGEST_OFFSET : at + _DIGEST_OFFSET + 8]
        return xxh3_64_hexdigest(bytes(digests))

    def close(self) -> None:
        """Wait for what is being copied, and let go of the memory."""
        self._thread.shutdown(wait=True)
        self._job = None
        self._views.clear()
        for slot in self._slots:
            _unpin_slot(slot)
        self._slots.clear()

    def _views_for(self, slot: int, key: int, plan: WritePlan) -> list[Tensor]:
        """Where each piece goes, as a tensor of its type and sizes; made once for a structure and a slot."""
        known = self._views.get((slot, key))
        if known is not None:
            return known
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
        """An event behind everything that was queued on the GPU so far; None without tensors there."""
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            return None
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event


def _proper_slices(local: Tensor, slices: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """The slices, unless they take the tensor whole."""
    if all(one.start == 0 and one.stop == size for one, size in zip(slices, local.shape, strict=True)):
        return None
    return slices


def _tensor_versions(tensors: dict[str, Tensor]) -> list[int | None]:
    """How often torch has seen each changed; None where it does not count."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _small_host_tensors(sources: Sequence[Tensor]) -> set[int]:
    """Numbers of the smallest tensors of the host, as many as are copied at once."""
    sizes = sorted([(tensor.nbytes, number) for number, tensor in enumerate(sources) if tensor.is_cpu])
    found, total = set[int](), 0
    for size, number in sizes[:_MAX_INLINE_TENSORS]:
        total += size
        if total > _MAX_INLINE_BYTES:
            break
        found.add(number)
    return found


def _copy_tensors(views: list[Tensor], sources: list[Tensor], ready: Any, side: Any) -> float:
    """In the thread beside: all copies in few calls, during which Python is free for the trainer."""
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
    """A thread whose copies take one core: with torch's usual number they would take the trainer's."""
    usual = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix="hpcrun-snapshot", initializer=_use_one_core)
    thread.submit(torch.get_num_threads).result()
    # The initializer has also set what threads yet to come begin with.
    torch.set_num_threads(usual)
    return thread


def _use_one_core() -> None:
    torch.set_num_threads(1)


@dataclass
class _Slot:
    image: mmap.mmap
    whole: Tensor
    is_pinned: bool = False


def _map_slot(path: Path, size_bytes: int) -> _Slot:
    """Map a slot, its pages with it, so that no copy has to stop for one."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.getuid() or found.st_size < size_bytes:
                raise SiteError(f"{path}: is not the memory of {size_bytes} bytes that was asked for")
            image = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise SiteError(f"{path}: cannot be mapped: {error}") from None
    return _Slot(image, torch.frombuffer(image, dtype=torch.uint8))


def _pin_slot(slot: _Slot) -> None:
    """Register a slot with CUDA, once: copies from the GPU then need no detour; without it they work too."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(slot.whole.data_ptr(), slot.whole.numel(), 0)
        slot.is_pinned = int(code) == 0


def _unpin_slot(slot: _Slot) -> None:
    if slot.is_pinned:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(slot.whole.data_ptr())
        slot.is_pinned = False
