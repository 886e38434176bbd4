"""Authenticated lines of JSON over a socket: each message bears a mark that only the two ends can make."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from typing import Any

from hpcrun.messages.authentication import MAC_BYTES, MessageAuthenticator
from hpcrun.messages.lines import LineStream, parse_json_line, render_json_line

MAX_MESSAGE_BYTES = 1 << 20
"""The longest line; an end that sends more does not speak this protocol."""
_MAC_CHARS = 2 * MAC_BYTES
_MAX_UNSENT_BYTES = 16 << 20
"""So many bytes may wait to be sent; an end that takes none of them is gone."""


class Channel:
    """One connection: whole messages in and out, each with its mark, never waiting."""

    def __init__(
        self,
        connection: socket.socket,
        our_key: bytes,
        their_key: bytes,
        greeting: dict[str, Any] | None = None,
    ) -> None:
        """`greeting`: goes before all messages, without a mark."""
        with contextlib.suppress(OSError):  # it has gone again, which shows where its messages are read
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number, longest = connection.fileno(), MAX_MESSAGE_BYTES + _MAC_CHARS
        self._lines = LineStream(number, number, longest, _MAX_UNSENT_BYTES)
        self._connection = connection
        self._sending, self._receiving = MessageAuthenticator(our_key), MessageAuthenticator(their_key)
        self._lock = threading.Lock()
        if greeting is not None:
            self._lines.put(render_json_line(greeting))

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes, or nothing of what came can be believed."""
        return self._lines.is_closed

    @property
    def why(self) -> str:
        """What was wrong with what came, where that has closed it."""
        return self._lines.why

    def fileno(self) -> int:
        """Becomes readable when there are messages, or the end."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; that the other end is gone is noticed where its messages are read."""
        with self._lock:
            line = render_json_line(message)
            marked = self._sending.mark(line).hex().encode() + line
            if not self.is_closed:
                self._lines.put(marked)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; `is_closed` is set at the end of them, and by nonsense."""
        received = []
        for line in self._lines.receive_lines():
            mark, text = line[:_MAC_CHARS], line[_MAC_CHARS:]
            if not hmac.compare_digest(mark, self._receiving.mark(text + b"\n").hex().encode()):
                self.fail("what came is not what the other end has sent next: somebody is in between")
                break
            message = parse_json_line(text)
            if message is None:
                self.fail("what came is not a message")
                break
            received.append(message)
        return received

    def fail(self, why: str) -> None:
        """Take nothing more of what comes: it is not what belongs here."""
        self._lines.fail(why)

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            self._lines.is_closed = True
            self._connection.close()
