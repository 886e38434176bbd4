"""How two ends of a connection prove to each other that they know a run's secret, without showing it.

Each end sends its version and a number that was never used before. A proof is made of both numbers and of
everything that was said in the open before it, so that it is of use for no other connection, nor for the
other end. Both ends then make keys of the secret and the two numbers, one for each direction, and mark every
message with them. Ends of different versions refuse each other, and both name the two versions.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, TypeGuard

from hpcrun import __version__
from hpcrun.messages.lines import (
    VersionMismatchError,
    describe_version_mismatch,
    receive_json_line,
    render_json_line,
)

HANDSHAKE_S = 5.0
"""Time for a proof; a connection without one is then closed."""
MAC_BYTES = 16
_MAX_WORD_LENGTH = 256
_MAX_COUNT = 1 << 53

Side = Literal["connecting", "listening"]


class HandshakeError(ConnectionError):
    """What listens there is not what was looked for."""


def fresh_nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(16)


def verify_proof(received: Any, expected: str) -> bool:
    """Whether what the other end has sent is the proof; takes as long for a near miss as for any other."""
    return is_short_ascii(received) and hmac.compare_digest(received.encode(), expected.encode())


def is_short_ascii(value: Any) -> TypeGuard[str]:
    """Whether a stranger's value is a short text of visible ASCII characters."""
    return (
        type(value) is str and 0 < len(value) <= _MAX_WORD_LENGTH and value.isascii() and value.isprintable()
    )


def is_counting_number(value: Any) -> TypeGuard[int]:
    """Whether a stranger's value is a number to count with; true and false are none."""
    return type(value) is int and 0 <= value < _MAX_COUNT


@dataclass(frozen=True)
class Handshake:
    """What the proofs and the keys of one connection are made of."""

    secret: str = field(repr=False)
    bound_to: tuple[Any, ...]
    """What both ends agree about: the purpose of the connection, the run, and the two ends."""
    nonces: tuple[str, str]
    """Of the end that listens, and of the one that connects."""

    def proof(self, side: Side, *words: Any) -> str:
        """What only an end that knows the secret can make; `words`: what it says besides."""
        said = json.dumps([side, *self.bound_to, *words, *self.nonces])
        return hmac.new(self.secret.encode(), said.encode(), sha256).hexdigest()

    def keys(self, side: Side) -> tuple[bytes, bytes]:
        """The key for what this side sends, and the one for what it receives."""
        other: Side = "listening" if side == "connecting" else "connecting"
        words = [json.dumps(["key", one, *self.bound_to, *self.nonces]).encode() for one in (side, other)]
        ours, theirs = (hmac.digest(self.secret.encode(), one, "sha256") for one in words)
        return ours, theirs


def connect_authenticated(
    address: tuple[str, int],
    secret: str,
    identity: Mapping[str, Any],
    bound_to: tuple[Any, ...],
    *,
    ends: tuple[str, str],
    timeout_s: float = HANDSHAKE_S,
    connect_timeout_s: float = HANDSHAKE_S,
) -> tuple[socket.socket, Handshake, dict[str, Any]]:
    """Connect, and have both ends prove themselves; also gives what the other end said with its proof.

    `identity`: what this end says of itself; `ends`: what this end and the other are called in messages.
    OSError: nobody is there. HandshakeError: not the one that was meant. VersionMismatchError.
    """
    ours, theirs = ends
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout=min(timeout_s, connect_timeout_s))
    try:
        challenge = receive_json_line(connection, deadline)
        nonce, version = challenge.get("nonce"), challenge.get("version")
        if not (is_short_ascii(nonce) and is_short_ascii(version)):
            raise HandshakeError(f"what listens there is not {theirs}")
        handshake = Handshake(secret, bound_to, (nonce, fresh_nonce()))
        said = {**identity, "version": __version__, "nonce": handshake.nonces[1]}
        proof = handshake.proof("connecting", __version__)
        # Also to another version, which can then say whom it has refused.
        connection.sendall(render_json_line(said | {"proof": proof}))
        if version != __version__:
            raise VersionMismatchError(describe_version_mismatch(theirs, version, ours))
        answer = receive_json_line(connection, deadline)
        if not verify_proof(answer.pop("proof", None), handshake.proof("listening", answer)):
            raise HandshakeError(f"what listens there is not {theirs}, or does not know the run's secret")
    except OSError:
        connection.close()
        raise
    return connection, handshake, answer


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
