"""Messages between a supervisor and its agents: lines of JSON over TCP, after both have proved who they are.

Each side sends a number that was never used before, and proves with it that it knows the run's secret,
without showing it. From then on each message bears a mark that only the two can make. A message is numbered
and kept until the other side has seen it: a connection that breaks and is made anew neither loses nor doubles
anything.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrun.authentication import (
    HANDSHAKE_S,
    MAC_BYTES,
    MessageAuthenticator,
    compute_proof,
    derive_message_keys,
    fresh_nonce,
    is_counting_number,
    is_short_ascii,
    parse_json_line,
    receive_json_line,
    render_json_line,
    verify_proof,
)
from hpcrun.listeners import AuthenticatingListener

MAX_AGENT_MESSAGE_BYTES = 1 << 20
"""A line is no longer; whoever sends more does not speak our language."""
_MAC_CHARS = 2 * MAC_BYTES
_MAX_UNSENT_BYTES = 16 << 20
"""So many bytes may wait to be sent; who takes none of them any more is gone."""
_CONNECT_TIMEOUT_S = 1.5
"""A kernel answers at once, whatever its processes do; a lost packet is sent again after a second."""
_UNREACHABLE_ERRNOS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


class AgentConnectionError(Exception):
    """The other side cannot be reached, or is not who it should be."""


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
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has gone again, which shows where its messages are read
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending, self._hearing = MessageAuthenticator(our_key), MessageAuthenticator(their_key)
        self._incoming, self._outgoing = b"", b""
        self._lock = threading.Lock()
        self.is_closed, self.why = False, ""
        """`why`: what was wrong with what came, where that has closed it."""
        if greeting is not None:
            self._put(render_json_line(greeting))

    def fileno(self) -> int:
        """Becomes readable when there are messages, or the end."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that is gone is noticed where its messages are read."""
        with self._lock:
            line = render_json_line(message)
            self._put(self._sending.mark(line).hex().encode() + line)

    def _put(self, data: bytes) -> None:
        self._outgoing += data
        if len(self._outgoing) > _MAX_UNSENT_BYTES:
            self.is_closed = True
        if self.is_closed:
            return
        with contextlib.suppress(OSError):
            self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; `is_closed` is set at the end of them, and by nonsense."""
        try:
            while data := self._connection.recv(65536):
                self._incoming += data
                if len(self._incoming) > _MAX_UNSENT_BYTES:
                    break
            else:
                self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._incoming = self._incoming.split(b"\n")
        if any(len(line) > MAX_AGENT_MESSAGE_BYTES + _MAC_CHARS for line in (*lines, self._incoming)):
            self.fail("what came is longer than any message")
            return []
        found = []
        for line in lines:
            message = self._opened(line)
            if message is None:
                break
            found.append(message)
        return found

    def _opened(self, line: bytes) -> dict[str, Any] | None:
        """The message in a line, which nobody in between has touched."""
        if self.why:
            return None
        mark, text = line[:_MAC_CHARS], line[_MAC_CHARS:]
        if not hmac.compare_digest(mark, self._hearing.mark(text + b"\n").hex().encode()):
            self.fail("what came is not what the other end has sent next: somebody is in between")
            return None
        message = parse_json_line(text)
        if message is None:
            self.fail("what came is no message")
        return message

    def fail(self, why: str) -> None:
        """Take nothing more of what comes: it is not what belongs here."""
        self.is_closed, self.why = True, self.why or why

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            self.is_closed = True
            self._connection.close()


class ReliableSession:
    """What two sides have told each other, over as many connections as it takes."""

    def __init__(self, problem_of: Callable[[dict[str, Any]], str] = lambda _: "") -> None:
        """`tensor_problem`: what is wrong with a message of the other side; empty where nothing is."""
        self._problem_of = problem_of
        self.channel: Channel | None = None
        self.seen = 0
        """The number of the last message of the other side that came here."""
        self._number = 0
        self._kept: deque[dict[str, Any]] = deque()
        self._lock = threading.RLock()

    def attach(self, channel: Channel, seen: int) -> None:
        """Go on over a new connection, behind the last message that the other side has seen."""
        with self._lock:
            self.detach()
            self.channel = channel
            self._forget(seen)
            for message in self._kept:
                channel.send(message)

    def detach(self) -> None:
        """The connection is over."""
        with self._lock:
            if self.channel is not None:
                self.channel.close()
            self.channel = None

    def say(self, **message: Any) -> None:
        """Send a message that must arrive."""
        with self._lock:
            self._number += 1
            self._kept.append({**message, "n": self._number})
            if self.channel is not None:
                self.channel.send(self._kept[-1])

    def beat(self, **message: Any) -> None:
        """Send a sign of life, which nobody misses, and say what was seen."""
        with self._lock:
            if self.channel is not None:
                self.channel.send({**message, "seen": self.seen})

    def hear(self) -> list[dict[str, Any]]:
        """What the other side has said and was not heard before; signs of life too."""
        if self.channel is None:
            return []
        heard = []
        for message in self.channel.receive():
            number, seen = message.pop("n", 0), message.pop("seen", 0)
            if not (is_counting_number(number) and is_counting_number(seen)):
                self.channel.fail("what came has no number that can be")
                break
            self._forget(seen)
            if number:
                if number <= self.seen:
                    continue
                self.seen = number
            if problem := self._problem_of(message):
                # It counts as seen: it would be no better over the next connection.
                self.channel.fail(problem)
                break
            heard.append(message)
        return heard

    def _forget(self, seen: int) -> None:
        with self._lock:
            while self._kept and self._kept[0]["n"] <= seen:
                self._kept.popleft()


@dataclass(frozen=True)
class AgentIdentity:
    """Who an agent says it is, and which run and epoch it wants to work for."""

    run: str
    epoch: int
    node: str
    session: str
    """Of one process of an agent, and of one supervisor."""
    seen: int

    def proof(self, secret: str, side: str, nonces: Sequence[str], seen: int = 0) -> str:
        """What only somebody who knows the secret can make of these nonces."""
        return compute_proof(secret, [side, *self._words, seen, *nonces])

    def keys(self, secret: str, sides: tuple[str, str], nonces: Sequence[str]) -> tuple[bytes, bytes]:
        """What each side marks its messages with, in a connection of these nonces."""
        return derive_message_keys(secret, sides, [*self._words, *nonces])

    @property
    def _words(self) -> list[Any]:
        return [self.run, self.epoch, self.node, self.session, self.seen]


def connect_to_supervisor(
    address: tuple[str, int], secret: str, badge: AgentIdentity, timeout_s: float = HANDSHAKE_S
) -> tuple[Channel, int]:
    """Connect to the supervisor: the connection, and what it has seen of ours; or AgentConnectionError."""
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection(address, timeout=min(timeout_s, _CONNECT_TIMEOUT_S))
    except OSError as error:
        raise AgentConnectionError(f"{address[0]}:{address[1]}: {error}") from None
    try:
        nonce = fresh_nonce()
        challenge = receive_json_line(connection, deadline).get("nonce")
        if not is_short_ascii(challenge):
            raise AgentConnectionError("what listens there is no supervisor")
        nonces = (challenge, nonce)
        mine = {"node": badge.node, "session": badge.session, "epoch": badge.epoch, "seen": badge.seen}
        connection.sendall(
            render_json_line(mine | {"nonce": nonce, "proof": badge.proof(secret, "agent", nonces)})
        )
        answer = receive_json_line(connection, deadline)
        seen = answer.get("seen")
        if not is_counting_number(seen) or not verify_proof(
            answer.get("proof"), badge.proof(secret, "leader", nonces, seen)
        ):
            raise AgentConnectionError("it does not know the run's secret")
    except (OSError, AgentConnectionError) as error:
        connection.close()
        raise AgentConnectionError(f"{address[0]}:{address[1]}: {error}") from None
    return Channel(connection, *badge.keys(secret, ("agent", "leader"), nonces)), seen


def is_host_reachable(address: tuple[str, int]) -> bool:
    """Whether there is a kernel at an address, with or without somebody who listens."""
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return not (isinstance(error, TimeoutError) or error.errno in _UNREACHABLE_ERRNOS)
    return True


@dataclass
class PendingAgent:
    """An agent that has proved that it knows the secret, and waits to be let in."""

    identity: AgentIdentity
    connection: socket.socket
    _secret: str = field(repr=False)
    _nonces: tuple[str, str]

    def admit(self, seen: int) -> Channel:
        """Let it in, and tell it what we have seen of its messages."""
        proof = self.identity.proof(self._secret, "leader", self._nonces, seen)
        keys = self.identity.keys(self._secret, ("leader", "agent"), self._nonces)
        return Channel(self.connection, *keys, greeting={"seen": seen, "proof": proof})

    def refuse(self) -> None:
        """Close the door."""
        self.connection.close()


class AgentListener:
    """Where agents come in; strangers are shown out and do no harm."""

    def __init__(self, address: str, secret: str, run: str, epoch: int, nodes: Collection[str]) -> None:
        self._secret, self._run, self._epoch, self._nodes = secret, run, epoch, frozenset(nodes)
        most = 2 * len(self._nodes) + 64
        self._door = AuthenticatingListener(address, most, "the agents", self._recognise, HANDSHAKE_S)
        self.address, self.port = address, self._door.port

    def fileno(self) -> int:
        """Becomes readable when somebody stands at the gate."""
        return self._door.fileno()

    def accept_authenticated(self) -> list[PendingAgent]:
        """Those who have proved that they are agents of this run; to be asked also when nobody comes."""
        return [
            PendingAgent(badge, connection, self._secret, nonces)
            for connection, (badge, nonces) in self._door.accept_authenticated()
        ]

    def _recognise(self, nonce: str, said: dict[str, Any]) -> tuple[AgentIdentity, tuple[str, str]] | None:
        node, session, seen, theirs = (
            said.get("node"),
            said.get("session"),
            said.get("seen"),
            said.get("nonce"),
        )
        if not (
            is_short_ascii(node)
            and is_short_ascii(session)
            and is_short_ascii(theirs)
            and is_counting_number(seen)
        ):
            return None
        epoch = said.get("epoch")
        if node not in self._nodes or type(epoch) is not int or epoch != self._epoch:
            return None
        badge, nonces = AgentIdentity(self._run, self._epoch, node, session, seen), (nonce, theirs)
        wanted = badge.proof(self._secret, "agent", nonces)
        return (badge, nonces) if verify_proof(said.get("proof"), wanted) else None

    def close(self) -> None:
        """Nobody comes in any more."""
        self._door.close()
