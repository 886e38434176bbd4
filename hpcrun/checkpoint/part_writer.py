"""Writing a part: headers and raw bytes straight from the caller's memory, in large writes, then synced."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hpcrun.checkpoint.format import (
    TAIL_FRAME,
    BytesLike,
    ChunkSpec,
    Part,
    align_size,
    iterate_frames,
    plan_part_layout,
)

_BATCH_BYTES = 16 << 20
_BATCH_BUFFERS = 512
"""Below the 1024 buffers that one writev takes."""
_TRIES, _PAUSE_S = 5, 0.2
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


def write_part(
    path: Path,
    generation: bytes,
    part: int,
    pieces: Sequence[ChunkSpec],
    contents: Iterable[BytesLike],
    *,
    file: int = 0,
    start: int = 0,
) -> Part:
    """Write the pieces' bytes as a part at `start` of a file, beside others that write theirs; synced.

    `contents` are taken one by one; each must stay as it is until this returns.
    """
    layout = plan_part_layout(part, pieces)
    tail_hash = 0
    descriptor = open_shared_file(path)
    try:
        writer = _BatchWriter(descriptor, start)
        for frame in iterate_frames(generation, part, layout, _check_contents(pieces, contents)):
            writer.add(frame.header)
            if frame.content:
                writer.add(frame.content)
            if frame.kind == TAIL_FRAME:
                tail_hash = frame.digest
        writer.flush()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Part(file, start, layout.size_bytes, layout.tail_at, layout.tail_bytes, f"{tail_hash:016x}")


def write_image(
    descriptor: int, image: memoryview, position: int, written: Callable[[int], None] = lambda count: None
) -> None:
    """Write a sealed part as it is, in large writes; not synced. `written` gets the bytes of each."""
    at = 0
    while at < len(image):
        count = os.pwrite(descriptor, image[at : at + _BATCH_BYTES], position + at)
        _start_writeback(descriptor, position + at, count)
        written(count)
        at += count


def write_synced_file(path: Path, data: bytes) -> None:
    """Write a small new file and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, however much one call takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _check_contents(pieces: Sequence[ChunkSpec], contents: Iterable[BytesLike]) -> Iterator[BytesLike]:
    for piece, content in zip(pieces, contents, strict=True):
        assert len(content) == piece.size_bytes, f"{piece}: {len(content)} bytes"
        yield content


def open_shared_file(path: Path) -> int:
    """The file, made if need be, not truncated: others write their own parts of it.

    Where another node has just made the directory, a network file system may not show it at once.
    """
    for _ in range(_TRIES - 1):
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        time.sleep(_PAUSE_S)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _start_writeback(descriptor: int, position: int, size: int) -> None:
    """Let the disk begin while the next bytes are hashed and copied; where it cannot, the sync does all."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(position), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


class _BatchWriter:
    """Gathers buffers, pads each to a multiple of a header, and writes them without copying."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._position = descriptor, start
        self._buffers: list[BytesLike] = []
        self._size = 0

    def add(self, data: BytesLike) -> None:
        self._buffers.append(data)
        self._size += len(data)
        if rest := align_size(len(data)) - len(data):
            self._buffers.append(bytes(rest))
            self._size += rest
        if self._size >= _BATCH_BYTES or len(self._buffers) >= _BATCH_BUFFERS:
            self.flush()

    def flush(self) -> None:
        while self._buffers:
            count = os.pwritev(self._descriptor, self._buffers, self._position)
            _start_writeback(self._descriptor, self._position, count)
            self._position += count
            self._size -= count
            while self._buffers and count >= len(self._buffers[0]):
                count -= len(self._buffers.pop(0))
            if count:
                self._buffers[0] = memoryview(self._buffers[0])[count:]
