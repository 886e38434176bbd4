"""Files that stages on different machines read: whole files appear at once, .jsonl files grow by lines."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from hpcrun.errors import UsageError, warn_once
from hpcrun.files import open_regular, read_regular, temporary_name
from hpcrun.typed_json import WrongValue
from hpcrun.units import format_bytes

T = TypeVar("T")

_MOST_LINES_BYTES, _PIECE_BYTES = 4 << 30, 16 << 20
_MAX_NOTES = 3
"""So many wrong lines of a file are told of; a damaged file may have a million."""


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file aside, sync it and rename it, so that a reader sees the old or the new, never a part."""
    aside = path.with_name(temporary_name(path.name))
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value as a whole file."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file, or None when it does not exist (yet).

    UsageError when it is not JSON, not a regular file, or larger than any record of ours.
    """
    try:
        return json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is damaged: {error}; remove it") from None


class JsonLineWriter:
    """The one writer of a .jsonl file: each record is one write of one whole line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._descriptor).st_size
        # A line torn by a crash would swallow the next one: that one ends it first.
        self._is_torn = bool(size) and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; OSError when it did not fit."""
        line = b"\n" * self._is_torn + (json.dumps(record) + "\n").encode()
        written = os.write(self._descriptor, line)
        self._is_torn = written < len(line) and line[written - 1 : written] != b"\n"
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Sync and close."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)


class TypedLineReader(Generic[T]):
    """Follows a .jsonl file of typed records as it grows; wrong lines are noted, with their number.

    `parse` makes a record of a JSON object, or raises WrongValue.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[Any], T],
        offset: int = 0,
        note: Callable[[str], None] = warn_once,
    ) -> None:
        self.path, self.offset = path, offset
        self._parse, self._note, self._notes_left = parse, note, _MAX_NOTES

    def read(self, most: int = -1) -> list[T]:
        """The whole records that came since the last call, of `most` bytes at most where that is given."""
        try:
            descriptor = open_regular(self.path)
        except FileNotFoundError:
            return []
        records: list[T] = []
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size - self.offset > _MOST_LINES_BYTES:
                raise UsageError(f"{self.path}: is larger than {format_bytes(_MOST_LINES_BYTES)}; remove it")
            piece = most if most >= 0 else _PIECE_BYTES
            while True:
                file.seek(self.offset)
                data = file.read(piece)
                # What is longer than all that may be read at once is not a record of ours.
                end = data.rfind(b"\n") + 1 or (len(data) if len(data) == piece else 0)
                records += self._parse_lines(file, data[:end])
                self.offset += end
                if len(data) < piece or most >= 0:
                    break
        return records

    def _parse_lines(self, file: BinaryIO, data: bytes) -> Iterator[T]:
        for index, line in enumerate(data.split(b"\n")):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):  # torn by a crash: the next writer ended it
                continue
            try:
                yield self._parse(values)
            except WrongValue as error:
                if self._notes_left:
                    self._notes_left -= 1
                    number = _count_lines(file, self.offset) + index + 1
                    rest = "" if self._notes_left else "; further wrong lines are passed over silently"
                    self._note(f"{self.path}:{number} {error}; the line is passed over{rest}")


def _count_lines(file: BinaryIO, end: int) -> int:
    """How many lines there are before a place; read again, since readers may begin anywhere."""
    file.seek(0)
    count = 0
    while end > 0 and (data := file.read(min(end, _PIECE_BYTES))):
        count += data.count(b"\n")
        end -= len(data)
    return count


def file_size(path: Path) -> int:
    """The bytes of a file, 0 where it is not there (yet): where a reader of new lines begins."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class JsonLineReader(TypedLineReader[dict[str, Any]]):
    """Follows a .jsonl file as it grows."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        super().__init__(path, _require_object, offset)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a .jsonl file; torn lines are dropped."""
    yield from JsonLineReader(path).read()


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongValue(f"expected an object, not {str(value)[:60]}")
    return value
