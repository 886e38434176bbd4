"""Lines of JSON over pipes and sockets, never waiting for the other side."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrun.files import OwnedDirectory

_MAX_BUFFERED_BYTES = 256 << 20
"""A plan of a million pieces still fits; whoever sends more, or takes nothing of so much, is gone."""


class JsonLineStream:
    """What comes in by one descriptor and goes out by another, or by the same."""

    def __init__(self, reading: int, writing: int) -> None:
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        self.reading, self.writing = reading, writing
        self._incoming, self._outgoing = bytearray(), bytearray()
        self.is_closed = False

    @property
    def has_pending_output(self) -> bool:
        """Something could not be sent yet."""
        return bool(self._outgoing) and not self.is_closed

    def receive(self) -> list[Any]:
        """The whole values that have come; None for a line that is none."""
        with contextlib.suppress(BlockingIOError):
            try:
                while data := os.read(self.reading, 1 << 20):
                    self._incoming += data
                    if len(self._incoming) > _MAX_BUFFERED_BYTES:
                        break
                self.is_closed = True
            except BlockingIOError:
                raise
            except OSError:
                self.is_closed = True
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        return [_parse_json_line(line) for line in lines if line.strip()]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; that the other side is gone is noticed where its messages are read."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self.writing, self._outgoing[: 1 << 20])]
        except BlockingIOError:
            self.is_closed |= len(self._outgoing) > _MAX_BUFFERED_BYTES
        except OSError:
            self._outgoing.clear()

    def flush_all(self, timeout_s: float) -> None:
        """The last words, for whoever still listens."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._outgoing and (left := deadline - time.monotonic()) > 0:
            select.select([], [self.writing], [], left)
            self.flush()


def connect_unix_socket(folder: Path, name: str) -> socket.socket:
    """To the Unix socket of this name in a folder; OSError where nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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


def _parse_json_line(line: bytes | bytearray) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
