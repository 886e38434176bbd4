"""Writing a part: headers and raw bytes straight from the caller's memory, in large writes, then synced."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from hpcrun.checkpoint.format import (
    CHUNK,
    END,
    HEADER_BYTES,
    PART,
    TAIL,
    Part,
    Piece,
    Place,
    lay_out,
    pack_header,
    padded,
    render_tail,
)

Bytes: TypeAlias = bytes | memoryview

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
    pieces: Sequence[Piece],
    contents: Iterable[Bytes],
    *,
    file: int = 0,
    start: int = 0,
) -> Part:
    """Write the pieces' bytes as a part at `start` of a file, beside others that write theirs; synced.

    `contents` are taken one by one; each must stay as it is until this returns.
    """
    layout = lay_out(part, pieces)
    descriptor = _open(path)
    try:
        writer = _Writer(descriptor, start)
        writer.add(pack_header(PART, Place(part, 0), generation, layout.size_bytes, 0))
        hashes = []
        for piece, at, content in zip(pieces, layout.at, contents, strict=True):
            assert len(content) == piece.size_bytes, f"{piece}: {len(content)} bytes"
            hashes.append(xxh3_64_intdigest(content))
            writer.add(pack_header(CHUNK, Place(part, at), generation, len(content), hashes[-1]))
            writer.add(content)
        tail = render_tail(part, pieces, layout.at, hashes)
        digest = xxh3_64_intdigest(tail)
        writer.add(pack_header(TAIL, Place(part, layout.tail_at), generation, len(tail), digest))
        writer.add(tail)
        at = layout.size_bytes - HEADER_BYTES
        writer.add(pack_header(END, Place(part, at), generation, layout.tail_at, 0))
        writer.flush()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Part(file, start, layout.size_bytes, layout.tail_at, len(tail), xxh3_64_hexdigest(tail))


def write_file(path: Path, data: bytes) -> None:
    """Write a small new file and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
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


class _Writer:
    """Gathers buffers, pads each to a multiple of a header, and writes them without copying."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._position = descriptor, start
        self._buffers: list[Bytes] = []
        self._size = 0

    def add(self, data: Bytes) -> None:
        self._buffers.append(data)
        self._size += len(data)
        if rest := padded(len(data)) - len(data):
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
