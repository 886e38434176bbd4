"""Messages between a supervisor and its agents: lines of JSON over TCP, after both have proved who they are.

A message is numbered and kept until the other side has seen it: a connection that breaks and is made anew
neither loses nor doubles anything.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hpcrun.messages.authentication import (
    HANDSHAKE_S,
    Handshake,
    HandshakeError,
    connect_authenticated,
    is_counting_number,
    is_short_ascii,
)
from hpcrun.messages.channel import Channel
from hpcrun.messages.lines import VersionMismatchError
from hpcrun.messages.listeners import AuthenticatingListener
from hpcrun.typed_json import TaggedUnion, WrongValue

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 1.5
"""A kernel answers at once, whatever its processes do; a lost packet is sent again after a second."""
_UNREACHABLE_ERRNOS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


class AgentConnectionError(Exception):
    """The other side cannot be reached, or is not who it should be."""


class ReliableSession(Generic[T]):
    """What two sides have told each other, over as many connections as it takes."""

    def __init__(self, kinds: TaggedUnion[T]) -> None:
        """`kinds`: what the other side may say."""
        self._kinds = kinds
        self.channel: Channel | None = None
        self.seen = 0
        """The number of the last message of the other side that came here."""
        self._number = 0
        self._kept: deque[tuple[int, Any]] = deque()
        self._lock = threading.RLock()

    def attach(self, channel: Channel, seen: int) -> None:
        """Go on over a new connection, behind the last message that the other side has seen."""
        with self._lock:
            self.detach()
            self.channel = channel
            self._forget(seen)
            for number, message in self._kept:
                channel.send({"number": number, "message": message})

    def detach(self) -> None:
        """The connection is over."""
        with self._lock:
            if self.channel is not None:
                self.channel.close()
            self.channel = None

    def send(self, message: Any) -> None:
        """Send a message that must arrive."""
        with self._lock:
            self._number += 1
            self._kept.append((self._number, message))
            if self.channel is not None:
                self.channel.send({"number": self._number, "message": message})

    def send_heartbeat(self) -> None:
        """Send a sign of life, which nobody misses, and say what was seen."""
        with self._lock:
            if self.channel is not None:
                self.channel.send({"heartbeat": self.seen})

    def receive(self) -> tuple[bool, list[T]]:
        """Whether anything came, if only a heartbeat, and the messages that had not been received before."""
        if self.channel is None:
            return False, []
        is_alive, messages = False, list[T]()
        for envelope in self.channel.receive():
            seen, number = envelope.get("heartbeat", 0), envelope.get("number", 0)
            if not (is_counting_number(number) and is_counting_number(seen)):
                self.channel.fail("what came has no number that can be")
                break
            is_alive = True
            self._forget(seen)
            if "heartbeat" in envelope or number <= self.seen:
                continue
            self.seen = number
            try:
                messages.append(self._kinds.parse(envelope.get("message")))
            except WrongValue as error:
                # It counts as seen: it would be no better over the next connection.
                self.channel.fail(str(error))
                break
        return is_alive, messages

    def _forget(self, seen: int) -> None:
        with self._lock:
            while self._kept and self._kept[0][0] <= seen:
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

    @property
    def bound_to(self) -> tuple[Any, ...]:
        """What the proofs of its connection are bound to."""
        return "agent", self.run, self.epoch, self.node, self.session, self.seen


def connect_to_supervisor(
    address: tuple[str, int], secret: str, identity: AgentIdentity, timeout_s: float = HANDSHAKE_S
) -> tuple[Channel, int]:
    """Connect to the supervisor: the connection, and what it has seen of ours.

    VersionMismatchError: it is of another version. AgentConnectionError: it cannot be reached, or is another.
    """
    try:
        connection, handshake, answer = connect_authenticated(
            address,
            secret,
            {name: getattr(identity, name) for name in ("node", "session", "epoch", "seen")},
            identity.bound_to,
            ends=(f"the agent on {identity.node}", "the supervisor"),
            timeout_s=timeout_s,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        if not is_counting_number(seen := answer.get("seen")):
            connection.close()
            raise HandshakeError("it does not say what it has seen")
    except VersionMismatchError:
        raise
    except OSError as error:
        raise AgentConnectionError(f"{address[0]}:{address[1]}: {error}") from None
    return Channel(connection, *handshake.keys("connecting")), seen


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

    connection: socket.socket
    identity: AgentIdentity
    _handshake: Handshake

    def admit(self, seen: int) -> Channel:
        """Let it in, and tell it what we have seen of its messages."""
        answer = {"seen": seen}
        proof = self._handshake.proof("listening", answer)
        return Channel(
            self.connection, *self._handshake.keys("listening"), greeting=answer | {"proof": proof}
        )

    def refuse(self) -> None:
        """Close the door."""
        self.connection.close()


class AgentListener:
    """Where agents come in; strangers are shown out and do no harm."""

    def __init__(
        self,
        address: str,
        secret: str,
        run: str,
        epoch: int,
        nodes: Collection[str],
        refuse_version: Callable[[AgentIdentity, str], None] = lambda identity, version: None,
    ) -> None:
        """`refuse_version` is called for each agent of another version, which is not let in."""
        self._run, self._epoch, self._nodes = run, epoch, frozenset(nodes)
        most = 2 * len(self._nodes) + 64
        self._door = AuthenticatingListener(
            address, most, "the agents", secret, self._identify, refuse_version, HANDSHAKE_S
        )
        self.address, self.port = address, self._door.port

    def fileno(self) -> int:
        """Becomes readable when somebody stands at the gate."""
        return self._door.fileno()

    def accept_authenticated(self) -> list[PendingAgent]:
        """Those who have proved that they are agents of this run; to be asked also when nobody comes."""
        return [PendingAgent(*accepted) for accepted in self._door.accept_authenticated()]

    def _identify(self, message: dict[str, Any]) -> tuple[AgentIdentity, tuple[Any, ...]] | None:
        node, session, seen, epoch = (message.get(name) for name in ("node", "session", "seen", "epoch"))
        if not (is_short_ascii(node) and is_short_ascii(session) and is_counting_number(seen)):
            return None
        if node not in self._nodes or type(epoch) is not int or epoch != self._epoch:
            return None
        identity = AgentIdentity(self._run, self._epoch, node, session, seen)
        return identity, identity.bound_to

    def close(self) -> None:
        """Nobody comes in any more."""
        self._door.close()
