"""Writing past the page cache (O_DIRECT): a save is not read again soon, and its pages push others out.

The kernel takes such a write only if its place in the file, its length and its memory are multiples of a
block. Parts begin at such places, and slots in memory too; only the rest of each part is copied into a
block of its own. Where a file system refuses (EINVAL), the bytes are written the usual way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.checkpoint.format import PART_ALIGN, align_size

BATCH_BYTES = 16 << 20
"""Of one write; writes end at multiples of it, as stripes do."""


@dataclass(frozen=True)
class DirectWriteResult:
    """How the bytes of a file were written."""

    direct_bytes: int
    buffered_bytes: int
    why_buffered: str | None
    """What the file system said to direct writes."""


def write_file_direct(
    path: Path,
    images: Sequence[tuple[int, memoryview]],
    *,
    written: Callable[[int], None] = lambda count: None,
) -> DirectWriteResult:
    """Write parts of a file, each at its place, a multiple of PART_ALIGN, and sync it.

    `written` is called with the bytes of each write, and may wait to keep a rate. OSError as `write` and
    `fsync` raise it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    why = None
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        why = "O_DIRECT: the file system does not know it"
        descriptor = os.open(path, flags, 0o600)
    try:
        writer = _DirectWriter(descriptor, why, written)
        for start, image in images:
            assert start % PART_ALIGN == 0, f"a part at {start}"
            writer.write(image, start)
        # The last block was filled up; where others have written behind it, it is not the end of the file.
        end = max(start + len(image) for start, image in images)
        if os.fstat(descriptor).st_size == align_size(end, PART_ALIGN):
            os.ftruncate(descriptor, end)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return DirectWriteResult(writer.direct, writer.buffered, writer.why)


class _DirectWriter:
    """Writes directly for as long as the file system takes it."""

    def __init__(self, descriptor: int, why: str | None, written: Callable[[int], None]) -> None:
        self._descriptor, self._written = descriptor, written
        # Not closed: an error's traceback may still hold a view of it.
        self._bounce = mmap.mmap(-1, BATCH_BYTES)
        self.why, self.direct, self.buffered = why, 0, 0

    def write(self, image: memoryview, start: int) -> None:
        """One part, in large writes."""
        data, at = image.cast("B"), 0
        while at < len(data):
            end = min(len(data), at + BATCH_BYTES - (start + at) % BATCH_BYTES)
            count = self._write_some(data[at:end], start + at)
            self._written(count)
            at += count

    def _write_some(self, data: memoryview, position: int) -> int:
        """Write some of the data; how much."""
        whole = len(data) // PART_ALIGN * PART_ALIGN
        if self.why is None and position % PART_ALIGN:
            self._go_buffered("a write ended inside a block")
        if self.why is None:
            # Memory that is not aligned, and what is less than a block, goes through memory that is.
            count = self._direct(data[:whole], position) or self._direct(self._copied(data), position)
            count = min(count, len(data))
            self.direct += count
            if count:
                return count
            self._go_buffered("O_DIRECT: the file system refuses the write")
        count = os.pwrite(self._descriptor, data, position)
        self.buffered += count
        return count

    def _direct(self, data: memoryview, position: int) -> int:
        """How much was written; 0 where the kernel does not take it."""
        try:
            return os.pwrite(self._descriptor, data, position) if data else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0

    def _copied(self, data: memoryview) -> memoryview:
        """The same bytes in aligned memory, with zeros up to a whole block."""
        size = align_size(len(data), PART_ALIGN)
        self._bounce[: len(data)] = data
        self._bounce[len(data) : size] = bytes(size - len(data))
        return memoryview(self._bounce)[:size]

    def _go_buffered(self, why: str) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.why = why
