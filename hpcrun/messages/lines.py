"""Lines of JSON over pipes and sockets: never waiting for the other side, and never longer than allowed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpcrun import __version__
from hpcrun.files import OwnedDirectory
from hpcrun.typed_json import TaggedUnion, WrongValue, render_typed

T = TypeVar("T")

MAX_HANDSHAKE_BYTES = 4096
_MAX_LINE_BYTES = 256 << 20
"""A plan of a million pieces still fits."""
_BLOCK_BYTES = 1 << 20


class VersionMismatchError(ConnectionError):
    """The other end is of another version; the text names both."""


def describe_version_mismatch(theirs: str, version: str, ours: str) -> str:
    """Why an end of another version is refused; `theirs` and `ours`: what the two ends are called."""
    return f"{theirs} runs hpcrun {version}, {ours} {__version__}; install one version on all nodes"


def render_json_line(message: Any) -> bytes:
    """A message as a line; dataclasses are objects."""
    return (render_typed(message) + "\n").encode()


def parse_json_line(line: bytes | bytearray) -> dict[str, Any] | None:
    """The message in a line of UTF-8; None where there is none, for any bytes."""
    try:
        # Given bytes, json would take other encodings as well, and surrogates with them.
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def receive_json_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """One line of a handshake; not a byte behind it is taken. ConnectionError or TimeoutError without one."""
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:  # a byte now and then does not extend the time
            raise TimeoutError("it did not answer in time")
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte or len(data) > MAX_HANDSHAKE_BYTES:
            raise ConnectionError("it did not let us in")
        data += byte
    return parse_json_line(data) or {}


class LineStream:
    """What comes in by one descriptor and goes out by another, or by the same; never waits."""

    def __init__(
        self, reading: int, writing: int, max_line_bytes: int = _MAX_LINE_BYTES, max_unsent: int | None = None
    ) -> None:
        """`max_unsent`: bytes that may wait to be sent; an end that takes none of so many is gone."""
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        self.reading, self.writing = reading, writing
        self._max_line_bytes, self._max_unsent = max_line_bytes, max_unsent or max_line_bytes
        self._incoming, self._outgoing = bytearray(), bytearray()
        self.is_closed, self.why = False, ""
        """`why`: what was wrong with what came, where that has closed it."""
        self.is_broken = False
        """Nobody takes what is sent any more; what came before that can still be read."""

    @property
    def has_pending_output(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._outgoing) and not self.is_closed

    def fail(self, why: str) -> None:
        """Take nothing more of what comes: it is not what belongs here."""
        self.is_closed, self.why = True, self.why or why

    def receive_lines(self) -> list[bytes]:
        """The whole lines that have come; `is_closed` is set at the end of them, and by one too long."""
        if self.why:
            return []
        try:
            while data := os.read(self.reading, _BLOCK_BYTES):
                self._incoming += data
                if len(self._incoming) > max(self._max_unsent, self._max_line_bytes):
                    break
            else:
                self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        if any(len(line) > self._max_line_bytes for line in (*lines, rest)):
            self.fail("what came is longer than any message")
            return []
        return lines

    def put(self, data: bytes) -> None:
        """Send as much as can be sent now, and keep the rest; an end that is gone shows where one reads."""
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self.writing, self._outgoing[:_BLOCK_BYTES])]
        except BlockingIOError:
            self.is_closed |= len(self._outgoing) > self._max_unsent
        except OSError:
            self.is_broken = True
            self._outgoing.clear()

    def flush_all(self, timeout_s: float) -> None:
        """Send what is left, in this time at most."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._outgoing and (left := deadline - time.monotonic()) > 0:
            select.select([], [self.writing], [], left)
            self.flush()


class MessageStream(LineStream, Generic[T]):
    """Typed messages, a line each, behind a line in which each end names its version."""

    def __init__(self, reading: int, writing: int, kinds: TaggedUnion[T], *, ours: str, theirs: str) -> None:
        """`kinds`: what the other end may say; `ours` and `theirs`: what the ends are called in messages."""
        super().__init__(reading, writing)
        self._kinds, self._ours, self._theirs = kinds, ours, theirs
        self._is_greeted = False
        self.put(render_json_line({"hpcrun": __version__}))

    def receive(self) -> list[T | WrongValue]:
        """The messages that have come; in place of one that makes no sense, what is wrong with it.

        VersionMismatchError: the other end is of another version, and is not heard any more.
        """
        lines = [line for line in self.receive_lines() if line.strip()]
        if lines and not self._is_greeted:
            self._check_version(parse_json_line(lines.pop(0)))
        return [] if self.why else [self._parse(line) for line in lines]

    def _check_version(self, greeting: dict[str, Any] | None) -> None:
        self._is_greeted = True
        version = (greeting or {}).get("hpcrun")
        if not isinstance(version, str):
            self.fail(f"{self._theirs} does not say its version")
        elif version != __version__:
            self.fail(describe_version_mismatch(self._theirs, version[:40], self._ours))
            raise VersionMismatchError(self.why)

    def _parse(self, line: bytes) -> T | WrongValue:
        try:
            return self._kinds.parse(parse_json_line(line))
        except WrongValue as error:
            return error

    def send(self, message: Any) -> None:
        """Send a message; that the other side is gone is noticed where its messages are read."""
        self.put(render_json_line(message))


def connect_unix_socket(folder: Path, name: str, timeout_s: float | None = None) -> socket.socket:
    """To the Unix socket of this name in a folder; OSError where nobody listens, or takes us in in time."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with _short_socket_path(folder) as short:
            connection.connect(f"{short}/{name}")
    except OSError:
        connection.close()
        raise
    return connection


def listen_unix_socket(files: OwnedDirectory, name: str) -> socket.socket:
    """Never waiting, open to this user alone; what stood under this name is removed."""
    files.unlink(name)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listening.bind(short := f"/proc/self/fd/{files.fileno()}/{name}")
    Path(short).chmod(0o600)
    listening.listen(128)
    return listening


@contextlib.contextmanager
def _short_socket_path(folder: Path) -> Iterator[str]:
    """A socket's path may have 107 bytes at most, and names of runs and nodes are long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
