"""How two ends of a connection prove to each other that they know a run's secret, without showing it.

Each end sends a number that was never used before. A proof is made of both numbers and of everything that
was said in the open before it, so that it is of use for no other connection, nor for the other end.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

HANDSHAKE_S = 5.0
"""Whoever has proved nothing by then is shown out."""
MOST_BYTES_OF_A_STRANGER = 4096


def fresh_nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(16)


def proof_of(secret: str, words: Sequence[Any]) -> str:
    """What only somebody who knows the secret can make of these words."""
    return hmac.new(secret.encode(), json.dumps(list(words)).encode(), sha256).hexdigest()


def proves(found: Any, wanted: str) -> bool:
    """Whether what the other end has sent is the proof; takes as long for a near miss as for any other."""
    return isinstance(found, str) and hmac.compare_digest(found.encode(), wanted.encode())


def render_line(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return (json.dumps(message) + "\n").encode()


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The message in a line; None where it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def await_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """One line of a handshake; not a byte behind it is taken. ConnectionError or TimeoutError without one."""
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(data) > MOST_BYTES_OF_A_STRANGER:
            raise ConnectionError("it did not let us in")
        data += byte
    return parse_line(data) or {}
