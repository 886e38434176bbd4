"""Frames: what nodes send one another of a checkpoint, bytes with their length and hash, never without limit.

frame := kind (1: a message in JSON, 2: raw bytes), length, xxh3 of what follows | so many bytes
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from typing import Any

from xxhash import xxh3_64_intdigest

FRAME_BYTES = 1 << 20
"""No frame is longer, so that nobody needs more memory than this for one."""
_HEADER = struct.Struct("<IIQ")
_MESSAGE, _RAW = 1, 2


class FrameError(OSError):
    """What came is not what was sent, or not what belongs here."""


def hang_up(connection: socket.socket) -> None:
    """Close a connection, also under a thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Throttle:
    """Lets so many bytes a second pass, all connections together; None: no limit."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Wait until it is the turn of so many bytes."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + size / self._bytes_per_s
        if begin > now:
            time.sleep(begin - now)


class Frames:
    """One connection; every frame comes or goes within `timeout_s`, or it is an OSError."""

    def __init__(self, connection: socket.socket, timeout_s: float, throttle: Throttle | None = None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._timeout_s, self._throttle = connection, timeout_s, throttle or Throttle()

    def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._send(_MESSAGE, memoryview(json.dumps(message).encode()))

    def send(self, data: memoryview) -> None:
        """Send raw bytes, FRAME_BYTES at most."""
        self._throttle.take(len(data))
        self._send(_RAW, data)

    def hear(self, extra_s: float = 0.0) -> dict[str, Any] | None:
        """The next message, for which there is so much more time; None at the end of the connection."""
        found = self._receive(None, extra_s)
        if found is None or isinstance(found, dict):
            return found
        raise FrameError("raw bytes came where a message belongs")

    def receive(self, into: memoryview) -> None:
        """Fill a buffer from the next frame; a message in its place is the other end's excuse."""
        found = self._receive(into, 0.0)
        if found is None:
            raise FrameError("the connection ended in the middle of the bytes")
        if isinstance(found, dict):
            raise FrameError(str(found.get("problem", "a message came where raw bytes belong")))

    def close(self) -> None:
        """Let go of it."""
        hang_up(self.connection)

    def _send(self, kind: int, data: memoryview) -> None:
        assert len(data) <= FRAME_BYTES
        header = _HEADER.pack(kind, len(data), xxh3_64_intdigest(data))
        self.connection.settimeout(self._timeout_s)
        sent = self.connection.sendmsg([header, data])
        if sent < len(header):
            self.connection.sendall(header[sent:])
            sent = len(header)
        if sent < len(header) + len(data):
            self.connection.sendall(data[sent - len(header) :])

    def _receive(self, into: memoryview | None, extra_s: float) -> dict[str, Any] | memoryview | None:
        deadline = time.monotonic() + self._timeout_s + extra_s
        header = bytearray(_HEADER.size)
        if not self._fill(memoryview(header), deadline):
            return None
        kind, length, digest = _HEADER.unpack(header)
        if kind not in (_MESSAGE, _RAW) or length > FRAME_BYTES:
            raise FrameError("what came is no frame")
        if kind == _RAW and into is not None and length != len(into):
            raise FrameError(f"{length} bytes came where {len(into)} belong")
        buffer = into if kind == _RAW and into is not None else memoryview(bytearray(length))
        if length and not self._fill(buffer, deadline):
            raise FrameError("the connection ended in the middle of a frame")
        if xxh3_64_intdigest(buffer) != digest:
            raise FrameError("bytes were damaged on the way")
        if kind == _RAW:
            return buffer
        try:
            message = json.loads(bytes(buffer))
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise FrameError("what came is no message")
        return message

    def _fill(self, buffer: memoryview, deadline: float) -> bool:
        """Whether the buffer could be filled; False at an end before its first byte."""
        done = 0
        while done < len(buffer):
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            count = self.connection.recv_into(buffer[done:])
            if not count:
                if done:
                    raise FrameError("the connection ended in the middle of a frame")
                return False
            done += count
        return True
