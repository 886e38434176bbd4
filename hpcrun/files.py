"""Files in places where other users can write: opened without following links, proved to be ours, bounded.

Any user can take a name below /dev/shm, /tmp or a shared directory. `Folder` walks down such a place one
level at a time by descriptors, so that what was checked is what is used; `read_regular` reads a file that
another user may have made without following a link, waiting for a pipe or filling memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from hpcrun.errors import UsageError

MOST_RECORD_BYTES = 64 << 20
"""No record of ours is larger."""
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)
_CLOSED = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY


class UntrustedFileError(UsageError):
    """A file or directory is another user's, a link, open to others, or of the wrong kind."""


def aside_name(name: str) -> str:
    """A hidden name beside `name` that nobody can foresee, for what is written before it is renamed."""
    return f".{name}.{secrets.token_hex(8)}"


def open_regular(path: Path, *, follow: bool = False) -> int:
    """A descriptor to read a regular file; never waits for a pipe.

    OSError as open raises it; UntrustedFileError for anything that is not a regular file, and for a link
    unless `follow`.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedFileError(
                f"{path}: is a symbolic link, which is not followed; remove it"
            ) from None
        if error.errno == errno.ENXIO:  # a socket
            raise UntrustedFileError(f"{path}: is not a regular file; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UntrustedFileError(f"{path}: is not a regular file; remove it")
    return descriptor


def read_regular(path: Path, most_bytes: int = MOST_RECORD_BYTES, *, follow: bool = False) -> bytes:
    """The content of a regular file of at most `most_bytes`; errors as open_regular raises them."""
    descriptor = open_regular(path, follow=follow)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UntrustedFileError(f"{path}: is larger than {most_bytes >> 10} KiB; remove it")
    return data


def clock_of(directory: Path) -> float:
    """The time now by the clock that stamps new files in this directory: a file server's is not this host's.

    To be compared with time stamps of files there. OSError where nothing can be made.
    """
    path = directory / aside_name("clock")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def is_private(status: os.stat_result) -> bool:
    """Whether this is ours and nobody else may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


class Folder:
    """A directory of ours in a shared place, held open.

    Every name in it is used through its descriptor: whoever renames a level above it changes nothing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def below(cls, base: Path, *names: str, make: bool = False) -> Folder:
        """The directory base/name/…; `base` is taken as it was named, each level below it must be ours.

        `make` makes levels that are missing, mode 0700. FileNotFoundError; UntrustedFileError for a level
        that is a link, another user's, or writable by others.
        """
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        folder = cls(base, descriptor)
        for name in names:
            with folder:
                below = folder.folder(name, make=make)
            folder = below
        return folder

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """The directory `name` in this one, opened; errors as `below` raises them."""
        path = self.path / _plain(name)
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _CLOSED, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in _LINK_ERRORS:
                raise UntrustedFileError(f"{path}: is not a directory; remove it") from None
            if error.errno == errno.EACCES and (owner := self._owner(name)) != os.geteuid():
                raise UntrustedFileError(
                    f"{path}: belongs to user {owner}, not to you; have it removed"
                ) from None
            raise
        status = os.fstat(descriptor)
        if not is_private(status):
            os.close(descriptor)
            if status.st_uid != os.geteuid():
                raise UntrustedFileError(
                    f"{path}: belongs to user {status.st_uid}, not to you; have it removed"
                )
            raise UntrustedFileError(
                f"{path}: others can write it (mode {stat.S_IMODE(status.st_mode):o}); run: chmod go-w {path}"
            )
        return Folder(path, descriptor)

    def _owner(self, name: str) -> int:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_uid

    def fileno(self) -> int:
        """The descriptor of the directory, for calls with dir_fd."""
        return self._descriptor

    def status(self) -> os.stat_result:
        """What the directory is."""
        return os.fstat(self._descriptor)

    def names(self) -> list[str]:
        """The names in it, sorted."""
        return sorted(os.listdir(self._descriptor))  # noqa: PTH208 - a Path takes no descriptor

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor of the regular file `name`, which is ours and has one name.

        OSError as open raises it, also where O_EXCL finds the name taken; UntrustedFileError for what is
        not such a file.
        """
        path = self.path / _plain(name)
        try:
            descriptor = os.open(name, flags | _CLOSED | os.O_NONBLOCK, mode, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise UntrustedFileError(f"{path}: is not a regular file; remove it") from None
            raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            os.close(descriptor)
            raise UntrustedFileError(f"{path}: is not a file of yours alone; remove it")
        return descriptor

    def read(self, name: str, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
        """The content of a file of ours; errors as `open` raises them."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise UntrustedFileError(f"{self.path / name}: is larger than {most_bytes >> 10} KiB; remove it")
        return data

    def write_whole(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file aside under a random name, sync it and rename it over `name`."""
        aside = aside_name(_plain(name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSED
        descriptor = os.open(aside, flags, mode, dir_fd=self._descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=self._descriptor)
            raise
        os.fsync(self._descriptor)

    def unlink(self, name: str) -> bool:
        """Remove a name that is not a directory; False where there is none. A link goes, not its target."""
        try:
            os.unlink(_plain(name), dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        return True

    def size_bytes(self) -> int:
        """What the regular files of the tree hold."""
        total = 0
        for name, status in self._entries():
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
            elif stat.S_ISDIR(status.st_mode):
                with contextlib.suppress(OSError, UntrustedFileError), self.folder(name) as below:
                    total += below.size_bytes()
        return total

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):
                yield name, os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def remove_tree(self, name: str) -> bool:
        """Remove the directory `name` and what is in it, links as links; False where something stays.

        Directories that are not ours, or that others can write, stay with everything in them.
        """
        try:
            with self.folder(name) as below:
                for one, status in below._entries():
                    if stat.S_ISDIR(status.st_mode):
                        below.remove_tree(one)
                    else:
                        with contextlib.suppress(OSError):
                            below.unlink(one)
            os.rmdir(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return True
        except (OSError, UntrustedFileError):
            return False
        return True

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._descriptor)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(name: str) -> str:
    """A name of one level: data from elsewhere never climbs."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise UntrustedFileError(f"{name!r}: is not a name of one file")
    return name
