"""Frames: what nodes send one another of a checkpoint, bytes with their length and hash, never without limit.

frame := kind (1: a message in JSON, 2: raw bytes), length, xxh3 of what follows, mark | so many bytes

The mark is made with a key of the connection: of what stands before it, and of a message also all of it. The
hash of raw bytes begins with a number that only the two ends know. That is no cryptographic proof of these
bytes, which would cost as much as sending them; it shows damage, and bytes that somebody else has made.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
import time
from typing import Any

from xxhash import xxh3_64_intdigest

from hpcrun.messages.authentication import MAC_BYTES, MessageAuthenticator
from hpcrun.messages.lines import parse_json_line
from hpcrun.messages.listeners import shut_down_connection

FRAME_BYTES = 1 << 20
"""No frame is longer, so that nobody needs more memory than this for one."""
_HEADER = struct.Struct("<IIQ")
_MESSAGE, _RAW = 1, 2


class FrameError(OSError):
    """What came is not what was sent, or not what belongs here."""


class RateLimiter:
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


class FramedConnection:
    """One connection; every frame comes or goes within `timeout_s`, or it is an OSError."""

    def __init__(
        self,
        connection: socket.socket,
        our_key: bytes,
        their_key: bytes,
        timeout_s: float,
        throttle: RateLimiter | None = None,
    ) -> None:
        with contextlib.suppress(OSError):  # it has gone again, which shows at the first frame
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._timeout_s, self._rate_limiter = (
            connection,
            timeout_s,
            throttle or RateLimiter(),
        )
        self._sending, self._hearing = MessageAuthenticator(our_key), MessageAuthenticator(their_key)
        self._our_seed, self._their_seed = _hash_seed(our_key), _hash_seed(their_key)

    def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._send(_MESSAGE, memoryview(json.dumps(message).encode()))

    def send(self, data: memoryview) -> None:
        """Send raw bytes, FRAME_BYTES at most."""
        self._rate_limiter.take(len(data))
        self._send(_RAW, data)

    def hear(self, extra_s: float = 0.0) -> dict[str, Any] | None:
        """The next message, for which there is so much more time; None at the end of the connection."""
        found = self._receive(None, extra_s)
        assert not isinstance(found, memoryview)
        return found

    def receive(self, into: memoryview) -> None:
        """Fill a buffer from the next frame; a message in its place is the other end's excuse."""
        found = self._receive(into, 0.0)
        if found is None:
            raise FrameError("the connection ended in the middle of the bytes")
        if isinstance(found, dict):
            raise FrameError(str(found.get("problem", "a message came where raw bytes belong")))

    def close(self) -> None:
        """Let go of it."""
        shut_down_connection(self.connection)

    def _send(self, kind: int, data: memoryview) -> None:
        assert len(data) <= FRAME_BYTES
        header = _HEADER.pack(kind, len(data), xxh3_64_intdigest(data, self._our_seed))
        header += self._sending.mark(header + data if kind == _MESSAGE else header)
        self.connection.settimeout(self._timeout_s)
        sent = self.connection.sendmsg([header, data])
        if sent < len(header):
            self.connection.sendall(header[sent:])
            sent = len(header)
        if sent < len(header) + len(data):
            self.connection.sendall(data[sent - len(header) :])

    def _receive(self, into: memoryview | None, extra_s: float) -> dict[str, Any] | memoryview | None:
        deadline = time.monotonic() + self._timeout_s + extra_s
        header = bytearray(_HEADER.size + MAC_BYTES)
        if not self._fill(memoryview(header), deadline):
            return None
        kind, length, digest = _HEADER.unpack_from(header)
        if kind not in (_MESSAGE, _RAW) or length > FRAME_BYTES:
            raise FrameError("what came is not a frame")
        # Nothing in a frame is believed, nor any buffer filled, before its mark.
        buffer = memoryview(bytearray(length)) if kind == _MESSAGE else memoryview(b"")
        if kind == _MESSAGE and length and not self._fill(buffer, deadline):
            raise FrameError("the connection ended in the middle of a frame")
        said, mark = bytes(header[: _HEADER.size]), bytes(header[_HEADER.size :])
        if not self._hearing.fits(mark, said + buffer):
            raise FrameError("what came is not what was sent next: damaged, or somebody is in between")
        if kind == _RAW:
            return self._receive_raw(into, length, digest, deadline)
        message = parse_json_line(bytes(buffer))
        if message is None:
            raise FrameError("what came is not a message")
        return message

    def _receive_raw(
        self, into: memoryview | None, length: int, digest: int, deadline: float
    ) -> memoryview | None:
        if into is None:
            raise FrameError("raw bytes came where a message belongs")
        if length != len(into):
            raise FrameError(f"{length} bytes came where {len(into)} belong")
        if length and not self._fill(into, deadline):
            raise FrameError("the connection ended in the middle of a frame")
        if xxh3_64_intdigest(into, self._their_seed) != digest:
            raise FrameError("bytes were damaged on the way")
        return into

    def _fill(self, buffer: memoryview, deadline: float) -> bool:
        """Whether the buffer could be filled; False at an end before its first byte."""
        done = 0
        while done < len(buffer):
            left = deadline - time.monotonic()
            if left <= 0:  # a byte now and then is no answer
                raise TimeoutError("timed out")
            self.connection.settimeout(left)
            count = self.connection.recv_into(buffer[done:])
            if not count:
                if done:
                    raise FrameError("the connection ended in the middle of a frame")
                return False
            done += count
        return True


def _hash_seed(key: bytes) -> int:
    """Where hashes of raw bytes begin; the key is used for nothing else in this way."""
    return int.from_bytes(hmac.digest(key, b"raw bytes", "sha256")[:8], "big")
