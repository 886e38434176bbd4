"""Files in places where other users can write: opened without following links, proved to be ours, bounded.

Any user can take a name below /dev/shm, /tmp or a shared directory. `OwnedDirectory` walks down such a place
one level at a time by descriptors, so that what was checked is what is used; `read_regular` reads a file that
another user may have made without following a link, waiting for a pipe or filling memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from hpcrun.errors import UsageError

MAX_RECORD_BYTES = 64 << 20
"""No record of ours is larger."""
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)
_SAFE_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
_SUBSTITUTE_SUFFIX = re.compile(r"\.[0-9a-f]{16}")


class UntrustedFileError(UsageError):
    """A file or directory is another user's, a link, open to others, or of the wrong kind."""


def temporary_name(name: str) -> str:
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
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if follow and stat.S_ISDIR(mode):  # a person has named it, and is not to remove it
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise UntrustedFileError(f"{path}: is not a regular file; remove it")
    return descriptor


def read_regular(path: Path, most_bytes: int = MAX_RECORD_BYTES, *, follow: bool = False) -> bytes:
    """The content of a regular file of at most `most_bytes`; errors as open_regular raises them."""
    descriptor = open_regular(path, follow=follow)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UntrustedFileError(f"{path}: is larger than {most_bytes >> 10} KiB; remove it")
    return data


def allowed_file_directories(directory: Path) -> tuple[Path, ...]:
    """Where the files of a resolved directory may lie: in it, and in the `blobs` of Hugging Face's cache."""
    is_snapshot = directory.parent.name == "snapshots"
    return (directory, directory.parent.parent / "blobs") if is_snapshot else (directory,)


def read_filesystem_clock(directory: Path) -> float:
    """The time now by the clock that stamps new files in this directory: a file server's is not this host's.

    To be compared with time stamps of files there. OSError where nothing can be made.
    """
    path = directory / temporary_name("clock")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def open_own(path: Path) -> int:
    """A descriptor to read a regular file of ours; errors as open_regular raises them."""
    descriptor = open_regular(path)
    if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
        os.close(descriptor)
        raise UntrustedFileError(f"{path}: belongs to user {owner}, not to you; have it removed")
    return descriptor


def open_output(path: Path, flags: int = os.O_WRONLY | os.O_TRUNC, mode: int = 0o666) -> int:
    """A descriptor to write a file that the user has named, made where it is missing.

    OSError as open raises it; UntrustedFileError where another user has put a link, a pipe or a file there.
    """
    check_output(path)
    is_link = path.is_symlink()
    all_flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | (0 if is_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags & ~os.O_TRUNC | all_flags, mode)
    status = os.fstat(descriptor)
    if not stat.S_ISCHR(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        os.close(descriptor)
        raise UntrustedFileError(f"{path}: belongs to user {status.st_uid}, not to you; name another file")
    os.set_blocking(descriptor, True)
    if flags & os.O_TRUNC and stat.S_ISREG(status.st_mode):
        os.ftruncate(descriptor, 0)
    return descriptor


def open_multiuser(path: Path, flags: int, mode: int) -> int:
    """A descriptor of a regular file that several users may write, as the site or the user has named it.

    OSError as open raises it; UntrustedFileError for anything that is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UntrustedFileError(f"{path}: is not a regular file; remove it")
    return descriptor


def check_output(path: Path) -> None:
    """UntrustedFileError where what stands under a name for output is another user's, be it a link."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        status = path.lstat()
        if not stat.S_ISCHR(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise UntrustedFileError(
                f"{path}: belongs to user {status.st_uid}, not to you; name another file"
            )


def write_output(path: Path, text: str) -> None:
    """Write a text into a file that the user has named; errors as `open_output` raises them."""
    with os.fdopen(open_output(path), "w", encoding="utf-8") as file:
        file.write(text)


def make_directories(path: Path, mode: int = 0o700) -> None:
    """Make a directory and those above it that are missing, with this mode at most whatever the umask."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent, mode)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def is_tamper_proof_directory(status: os.stat_result) -> bool:
    """Whether other users cannot rename or replace what is ours in this directory."""
    may_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and not may_write


def read_tail(path: Path, most_bytes: int) -> bytes:
    """The last bytes of a regular file, nothing where there is none; errors as open_regular raises them."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - most_bytes))
        return file.read(most_bytes)


def open_for_append(path: Path) -> IO[bytes]:
    """A file of a run opened for more at its end; one that is made is nobody else's, whatever the umask."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "ab")


def is_private(status: os.stat_result) -> bool:
    """Whether this is ours and nobody else may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def require_private(path: Path, status: os.stat_result) -> None:
    """UntrustedFileError unless a pickle, or its folder, is ours and nobody else can write it."""
    if is_private(status):
        return
    if status.st_uid != os.geteuid():
        raise UntrustedFileError(f"{path}: belongs to user {status.st_uid}, not to you; it is not loaded")
    raise UntrustedFileError(
        f"{path}: can be written by others (mode {status.st_mode & 0o777:o}), so it is not loaded;"
        f" `chmod go-w` it if you trust what is in it"
    )


class OwnedDirectory:
    """A directory of ours in a shared place, held open.

    Every name in it is used through its descriptor: whoever renames a level above it changes nothing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def below(cls, base: Path, *names: str, make: bool = False) -> OwnedDirectory:
        """The directory base/name/…; `base` is taken as it was named, each level below it must be ours.

        `make` makes levels that are missing, mode 0700. FileNotFoundError; UntrustedFileError for a level
        that is a link, another user's, or writable by others.
        """
        try:
            descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:  # where files can be put, but not listed
            descriptor = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        folder = cls(base, descriptor)
        for name in names:
            with folder:
                below = folder.folder(name, make=make)
            folder = below
        return folder

    @classmethod
    def at(cls, path: Path) -> OwnedDirectory:
        """A directory that is ours, by a path that was proved before; errors as `below` raises them."""
        with cls.below(path.parent) as above:
            return above.folder(path.name)

    def folder(self, name: str, *, make: bool = False) -> OwnedDirectory:
        """The directory `name` in this one, opened; errors as `below` raises them."""
        path = self.path / _require_plain_name(name)
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            descriptor = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | _SAFE_OPEN_FLAGS, dir_fd=self._descriptor
            )
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
        return OwnedDirectory(path, descriptor)

    def owned_candidates(self, name: str) -> Iterator[OwnedDirectory]:
        """The directories of ours that may have been made for a name: `name`, and those that stand in for it.

        Each is closed when the next is asked for.
        """
        for entry in (name, *(other for other in self.names() if _is_substitute_name(other, name))):
            with contextlib.suppress(OSError, UntrustedFileError), self.folder(entry) as folder:
                yield folder

    def open_or_substitute(self, name: str, say: Callable[[str], None]) -> OwnedDirectory:
        """The directory `name`, made if need be; where others have taken that name, one of ours beside it.

        It has a random name that `candidates` finds; `say` is told why.
        """
        try:
            return self.folder(name, make=True)
        except UntrustedFileError as error:
            there = next((folder.path.name for folder in self.owned_candidates(name)), None)
            made = self.folder(there or f"{name}.{secrets.token_hex(8)}", make=True)
            say(f"{error}; {made.path} is used instead")
            return made

    def _owner(self, name: str) -> int:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_uid

    def fileno(self) -> int:
        """The descriptor of the directory, for calls with dir_fd."""
        return self._descriptor

    def status(self) -> os.stat_result:
        """What the directory is."""
        return os.fstat(self._descriptor)

    def status_of(self, name: str) -> os.stat_result:
        """What is under this name; a link is a link. FileNotFoundError."""
        return os.stat(_require_plain_name(name), dir_fd=self._descriptor, follow_symlinks=False)

    def is_own_file(self, name: str) -> bool:
        """Whether a regular file of ours has this name."""
        try:
            status = self.status_of(name)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()

    def size_of(self, name: str) -> int:
        """How large a file of ours is; errors as `open` raises them."""
        descriptor = self.open(name, os.O_RDONLY)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """Whether anything has this name."""
        try:
            self.status_of(name)
        except FileNotFoundError:
            return False
        return True

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, in place of what has it."""
        os.replace(
            _require_plain_name(name),
            _require_plain_name(new),
            src_dir_fd=self._descriptor,
            dst_dir_fd=self._descriptor,
        )

    def sync(self) -> None:
        """Make the names in it durable, as far as it can be read."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise

    def remove_empty(self, name: str) -> bool:
        """Remove a directory if nothing is in it; False where it stays."""
        try:
            os.rmdir(_require_plain_name(name), dir_fd=self._descriptor)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        """The names in it, sorted."""
        return sorted(os.listdir(self._descriptor))  # noqa: PTH208 - a Path takes no descriptor

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor of the regular file `name`, which is ours and has one name.

        OSError as open raises it, also where O_EXCL finds the name taken; UntrustedFileError for what is
        not such a file.
        """
        path = self.path / _require_plain_name(name)
        try:
            descriptor = os.open(
                name, flags | _SAFE_OPEN_FLAGS | os.O_NONBLOCK, mode, dir_fd=self._descriptor
            )
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise UntrustedFileError(f"{path}: is not a regular file; remove it") from None
            raise
        if flags & os.O_EXCL:  # made this moment, whomever a file server takes us for
            return descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            os.close(descriptor)
            raise UntrustedFileError(f"{path}: is not a file of yours alone; remove it")
        return descriptor

    def read(self, name: str, most_bytes: int = MAX_RECORD_BYTES) -> bytes:
        """The content of a file of ours; errors as `open` raises them."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise UntrustedFileError(f"{self.path / name}: is larger than {most_bytes >> 10} KiB; remove it")
        return data

    def write_whole(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file aside under a random name, sync it and rename it over `name`."""
        aside = temporary_name(_require_plain_name(name))
        descriptor = self.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.rename(aside, name)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(aside)
            raise
        self.sync()

    def unlink(self, name: str) -> bool:
        """Remove a name that is not a directory; False where there is none. A link goes, not its target."""
        try:
            os.unlink(_require_plain_name(name), dir_fd=self._descriptor)
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
                for entry, status in below._entries():
                    if stat.S_ISDIR(status.st_mode):
                        below.remove_tree(entry)
                    else:
                        with contextlib.suppress(OSError):
                            below.unlink(entry)
            return self.remove_empty(name)
        except FileNotFoundError:
            return True
        except (OSError, UntrustedFileError):
            return False

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> OwnedDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_substitute_name(name: str, original: str) -> bool:
    return name.startswith(original) and _SUBSTITUTE_SUFFIX.fullmatch(name, len(original)) is not None


def is_plain_name(name: str) -> bool:
    """Whether this names something in a directory and nowhere else: data from elsewhere never climbs."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _require_plain_name(name: str) -> str:
    if not is_plain_name(name):
        raise UntrustedFileError(f"{name!r}: is not a name of one file")
    return name
