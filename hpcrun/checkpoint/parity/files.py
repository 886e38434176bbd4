"""Files of a node's arena that are filled piece by piece, aside, and appear whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ASIDE = ".aside"


def read_at(path: str | Path, at: int, into: memoryview) -> None:
    """Fill a buffer from a place in a file; OSError where the file ends before."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], at + done)
            if not count:
                raise OSError(f"{path}: ends at {at + done}, {len(into) - done} bytes too early")
            done += count
    finally:
        os.close(descriptor)


class AsideFile:
    """A new file, its space taken at once; it is removed unless it was put in its place."""

    def __init__(self, path: Path, size: int) -> None:
        """OSError: there is no space for it."""
        self.path, self.aside = path, path.with_name(path.name + ASIDE)
        self.aside.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.aside, flags, 0o600)
        try:
            if size:
                os.posix_fallocate(self._descriptor, 0, size)
        except OSError:
            self.close()
            raise

    def __enter__(self) -> AsideFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, at: int, data: memoryview) -> None:
        """Put bytes at their place."""
        while data:
            count = os.pwrite(self._descriptor, data, at)
            at, data = at + count, data[count:]

    def put_in_place(self) -> None:
        """All is written: from now on it is there."""
        self.aside.replace(self.path)

    def close(self) -> None:
        """Close it; aside, it is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            self.aside.unlink()
