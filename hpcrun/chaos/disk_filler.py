"""A file without a name that takes a file system's space; the end of its process gives the space back."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcrun.errors import SiteError, UsageError
from hpcrun.mounts import find_mount

_CHUNK_BYTES = 2**30
_MIN_CHUNK_BYTES = 4096
_NODE_FILESYSTEMS = ("tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay")
"""File systems of one node; others may be shared by other nodes."""


class DiskFiller:
    """Takes the free space of the file system of a directory, inside the block.

    UsageError for a file system that also holds the run or that others may share, unless `force` is set.
    """

    def __init__(self, where: Path, run: Path, *, force: bool) -> None:
        if not where.is_dir():
            raise UsageError(f"{where}: is not a directory on {os.uname().nodename}")
        kind = find_mount(where).kind
        self.description = f"a file system of type {kind or 'unknown'}"
        if not force and where.stat().st_dev == run.stat().st_dev:
            raise UsageError(
                f"{where}: is on the file system that holds the run ({run}); name a node's scratch or tmpfs,"
                " or use --force"
            )
        if not force and kind not in _NODE_FILESYSTEMS:
            raise UsageError(
                f"{where}: is {self.description}, which other nodes may share; name a node's scratch or"
                " tmpfs, or use --force"
            )
        try:
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - see __exit__
        except OSError as error:
            raise SiteError(f"{where}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def fill(self, leave_bytes: int, is_over: Callable[[], bool]) -> int:
        """Take all but the last bytes, piece by piece; return the bytes taken, which a quota may limit."""
        status = os.fstatvfs(self._file.fileno())
        free, taken, piece = status.f_bavail * status.f_frsize - leave_bytes, 0, _CHUNK_BYTES
        while free > taken and piece >= _MIN_CHUNK_BYTES and not is_over():
            size = min(piece, free - taken)
            try:
                os.posix_fallocate(self._file.fileno(), taken, size)
                taken += size
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                piece = min(piece, size) // 2
        return taken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
