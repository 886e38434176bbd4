"""Messages between a supervisor and its agents: lines of JSON over TCP, after both have proved who they are.

Each side sends a number that was never used before, and proves with it that it knows the run's secret,
without showing it. A message is numbered and kept until the other side has seen it: a connection that breaks
and is made anew neither loses nor doubles anything.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrun.errors import SiteError
from hpcrun.proof import (
    HANDSHAKE_S,
    MOST_BYTES_OF_A_STRANGER,
    await_line,
    fresh_nonce,
    parse_line,
    proof_of,
    proves,
    render_line,
)

MOST_BYTES = 1 << 20
"""A line is no longer; whoever sends more does not speak our language."""
_MOST_WAITING = 16 << 20
"""So many bytes may wait to be sent; who takes none of them any more is gone."""
_CONNECT_S = 1.5
"""A kernel answers at once, whatever its processes do; a lost packet is sent again after a second."""
_NOBODY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


class WireError(Exception):
    """The other side cannot be reached, or is not who it should be."""


class Channel:
    """One connection: whole messages in and out, never waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._incoming, self._outgoing = b"", b""
        self._lock = threading.Lock()
        self.is_closed = False

    def fileno(self) -> int:
        """Becomes readable when there are messages, or the end."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that is gone is noticed where its messages are read."""
        with self._lock:
            self._outgoing += render_line(message)
            if len(self._outgoing) > _MOST_WAITING:
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
                if len(self._incoming) > _MOST_WAITING:
                    break
            else:
                self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._incoming = self._incoming.split(b"\n")
        if any(len(line) > MOST_BYTES for line in (*lines, self._incoming)):
            self.is_closed = True
            return []
        found = [parse_line(line) for line in lines]
        self.is_closed |= None in found
        return [message for message in found if message is not None]

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            self.is_closed = True
            self._connection.close()


class Session:
    """What two sides have told each other, over as many connections as it takes."""

    def __init__(self) -> None:
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
            number, seen = message.pop("n", None), message.pop("seen", None)
            if isinstance(seen, int):
                self._forget(seen)
            if isinstance(number, int):
                if number <= self.seen:
                    continue
                self.seen = number
            heard.append(message)
        return heard

    def _forget(self, seen: int) -> None:
        with self._lock:
            while self._kept and self._kept[0]["n"] <= seen:
                self._kept.popleft()


@dataclass(frozen=True)
class Badge:
    """Who an agent says it is, and which run and epoch it wants to work for."""

    run: str
    epoch: int
    node: str
    session: str
    """Of one process of an agent, and of one supervisor."""
    seen: int

    def proof(self, secret: str, side: str, nonces: Sequence[str], seen: int = 0) -> str:
        """What only somebody who knows the secret can make of these nonces."""
        mine = (self.run, self.epoch, self.node, self.session, self.seen)
        return proof_of(secret, [side, *mine, seen, *nonces])


def join(
    address: tuple[str, int], secret: str, badge: Badge, timeout_s: float = HANDSHAKE_S
) -> tuple[Channel, int]:
    """Connect to the supervisor: the connection, and what it has seen of ours; WireError when that fails."""
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection(address, timeout=min(timeout_s, _CONNECT_S))
    except OSError as error:
        raise WireError(f"{address[0]}:{address[1]}: {error}") from None
    try:
        nonce = fresh_nonce()
        challenge = await_line(connection, deadline).get("nonce")
        nonces = (str(challenge), nonce)
        mine = {"node": badge.node, "session": badge.session, "epoch": badge.epoch, "seen": badge.seen}
        connection.sendall(
            render_line(mine | {"nonce": nonce, "proof": badge.proof(secret, "agent", nonces)})
        )
        answer = await_line(connection, deadline)
        seen = answer.get("seen")
        if not isinstance(seen, int) or not proves(
            answer.get("proof"), badge.proof(secret, "leader", nonces, seen)
        ):
            raise WireError(f"{address[0]}:{address[1]}: does not know the run's secret")
    except (OSError, WireError) as error:
        connection.close()
        raise WireError(f"{address[0]}:{address[1]}: {error}") from None
    return Channel(connection), seen


def host_answers(address: tuple[str, int]) -> bool:
    """Whether there is a kernel at an address, with or without somebody who listens."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError as error:
        return not (isinstance(error, TimeoutError) or error.errno in _NOBODY)
    return True


@dataclass
class Guest:
    """An agent that has proved that it knows the secret, and waits to be let in."""

    badge: Badge
    connection: socket.socket
    _answer: Any = field(repr=False)

    def admit(self, seen: int) -> Channel:
        """Let it in, and tell it what we have seen of its messages."""
        channel = Channel(self.connection)
        channel.send({"seen": seen, "proof": self._answer(seen)})
        return channel

    def refuse(self) -> None:
        """Close the door."""
        self.connection.close()


@dataclass
class _Stranger:
    connection: socket.socket
    nonce: str
    since: float
    said: bytes = b""


class Gate:
    """Where agents come in; strangers are shown out and do no harm."""

    def __init__(self, address: str, secret: str, run: str, epoch: int, nodes: Collection[str]) -> None:
        self._secret, self._run, self._epoch, self._nodes = secret, run, epoch, frozenset(nodes)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(max(128, 2 * len(self._nodes)))
        except OSError as error:
            self._listener.close()
            raise SiteError(f"{address}: cannot listen here for the agents: {error.strerror}") from None
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._strangers: dict[int, _Stranger] = {}
        self._most = 2 * len(self._nodes) + 64
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Becomes readable when somebody stands at the gate."""
        return self._selector.fileno()

    def arrivals(self) -> list[Guest]:
        """Those who have proved that they are agents of this run."""
        guests = []
        for key, _ in self._selector.select(0):
            if key.fd == self._listener.fileno():
                self._let_speak()
            elif (one := self._strangers.get(key.fd)) and (guest := self._hear(one)):
                guests.append(guest)
        late = time.monotonic() - HANDSHAKE_S
        for one in [one for one in self._strangers.values() if one.since < late]:
            self._drop(one)
        return guests

    def _let_speak(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                one = _Stranger(connection, fresh_nonce(), time.monotonic())
                if len(self._strangers) >= self._most:
                    # Dicts keep their order: the first has had the most time.
                    self._drop(next(iter(self._strangers.values())))
                self._strangers[connection.fileno()] = one
                self._selector.register(connection, selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    connection.send(render_line({"nonce": one.nonce}))

    def _hear(self, one: _Stranger) -> Guest | None:
        try:
            data = one.connection.recv(MOST_BYTES_OF_A_STRANGER)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        one.said += data
        if data and not one.said.endswith(b"\n") and len(one.said) < MOST_BYTES_OF_A_STRANGER:
            return None
        said = parse_line(one.said) if data else None
        badge = self._badge(said or {})
        if badge is None or said is None:
            self._drop(one)
            return None
        nonces = (one.nonce, str(said.get("nonce")))
        if not proves(said.get("proof"), badge.proof(self._secret, "agent", nonces)):
            self._drop(one)
            return None
        self._forget(one)
        return Guest(badge, one.connection, lambda seen: badge.proof(self._secret, "leader", nonces, seen))

    def _badge(self, said: dict[str, Any]) -> Badge | None:
        node, session, seen = said.get("node"), said.get("session"), said.get("seen")
        if not (isinstance(node, str) and isinstance(session, str) and isinstance(seen, int)):
            return None
        is_ours = node in self._nodes and said.get("epoch") == self._epoch
        return Badge(self._run, self._epoch, node, session, seen) if is_ours else None

    def _forget(self, one: _Stranger) -> None:
        self._selector.unregister(one.connection)
        del self._strangers[one.connection.fileno()]

    def _drop(self, one: _Stranger) -> None:
        self._forget(one)
        one.connection.close()

    def close(self) -> None:
        """Nobody comes in any more."""
        for one in list(self._strangers.values()):
            self._drop(one)
        self._selector.close()
        self._listener.close()
