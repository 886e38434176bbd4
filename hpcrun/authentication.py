"""How two ends of a connection prove to each other that they know a run's secret, without showing it.

Each end sends a number that was never used before. A proof is made of both numbers and of everything that
was said in the open before it, so that it is of use for no other connection, nor for the other end. Both ends
then make keys of the secret and the two numbers, one for each direction, and mark every message with them.
What comes before the proof is a stranger's: it is parsed here, and whatever it is, it is taken or it is not.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeGuard

HANDSHAKE_S = 5.0
"""Whoever has proved nothing by then is shown out."""
MAX_HANDSHAKE_BYTES = 4096
MAC_BYTES = 16
_MAX_WORD_LENGTH = 256
_MAX_COUNT = 1 << 53


def fresh_nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(16)


def compute_proof(secret: str, words: Sequence[Any]) -> str:
    """What only somebody who knows the secret can make of these words."""
    return hmac.new(secret.encode(), json.dumps(list(words)).encode(), sha256).hexdigest()


def verify_proof(proof: Any, expected: str) -> bool:
    """Whether what the other end has sent is the proof; takes as long for a near miss as for any other."""
    return is_short_ascii(proof) and hmac.compare_digest(proof.encode(), expected.encode())


def is_short_ascii(value: Any) -> TypeGuard[str]:
    """Whether a stranger's value is a short text of visible ASCII characters."""
    return (
        type(value) is str and 0 < len(value) <= _MAX_WORD_LENGTH and value.isascii() and value.isprintable()
    )


def is_counting_number(value: Any) -> TypeGuard[int]:
    """Whether a stranger's value is a number to count with; true and false are none."""
    return type(value) is int and 0 <= value < _MAX_COUNT


def derive_message_keys(secret: str, sides: tuple[str, str], words: Sequence[Any]) -> tuple[bytes, bytes]:
    """A key for what each side of one connection sends; `words`: all that their proofs were made of."""
    ours, theirs = (json.dumps(["key", side, *words]).encode() for side in sides)
    return hmac.digest(secret.encode(), ours, "sha256"), hmac.digest(secret.encode(), theirs, "sha256")


class MessageAuthenticator:
    """Marks the messages of one direction of a connection, or finds out whether they bear the mark.

    A mark is made of the message and of its place in the order, so that nobody in between can change,
    invent, repeat, reorder or leave out any without being noticed.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def mark(self, message: bytes) -> bytes:
        """The mark of the next message."""
        numbered = self._count.to_bytes(8, "big") + message
        self._count += 1
        return hmac.digest(self._key, numbered, "sha256")[:MAC_BYTES]

    def fits(self, mark: bytes, message: bytes) -> bool:
        """Whether this is the next message, as it was sent."""
        return hmac.compare_digest(mark, self.mark(message))


def render_json_line(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return (json.dumps(message) + "\n").encode()


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The message in a line of UTF-8; None where it is none, whatever the bytes."""
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
        if left <= 0:  # a byte now and then keeps nobody here
            raise TimeoutError("it did not answer in time")
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte or len(data) > MAX_HANDSHAKE_BYTES:
            raise ConnectionError("it did not let us in")
        data += byte
    return parse_json_line(data) or {}
