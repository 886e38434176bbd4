"""Files of a node's arena that are filled piece by piece, aside, and appear whole."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrun.files import OwnedDirectory, UntrustedFileError, open_own, open_regular

ASIDE_SUFFIX = ".aside"


def read_file_at(path: str | Path, at: int, into: memoryview, *, shared: bool = False) -> None:
    """Fill a buffer from a place in a file; OSError where the file ends before, or is not ours.

    `shared`: it lies in the run directory, which was proved before.
    """
    try:
        descriptor = (open_regular if shared else open_own)(Path(path))
    except UntrustedFileError as error:
        raise OSError(str(error)) from None
    try:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], at + done)
            if not count:
                raise OSError(f"{path}: ends at {at + done}, {len(into) - done} bytes too early")
            done += count
    finally:
        os.close(descriptor)


class AtomicFile:
    """A new file, its space taken at once; it is removed unless it was put in its place."""

    def __init__(self, files: OwnedDirectory, name: str, size: int) -> None:
        """OSError: there is no space for it."""
        self._files, self._name, self._aside = files, name, name + ASIDE_SUFFIX
        self.path, self.aside = files.path / name, files.path / self._aside
        files.unlink(self._aside)
        self._descriptor = files.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if size:
                os.posix_fallocate(self._descriptor, 0, size)
        except OSError:
            self.close()
            raise

    def __enter__(self) -> AtomicFile:
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
        self._files.rename(self._aside, self._name)

    def close(self) -> None:
        """Close it; aside, it is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._files.unlink(self._aside)
