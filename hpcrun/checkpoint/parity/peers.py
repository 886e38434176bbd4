"""Peers: the checkpoint workers of a run read from one another what each has of a generation, over TCP.

Both ends first prove that they know the run's secret. Then the one that came asks, one thing after the
other, and the other answers with a message and, where bytes were asked for, with these in frames. Nobody
waits for ever, and a node that is gone is an error that names it.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.checkpoint.parity.blocks import make_geometry
from hpcrun.checkpoint.parity.files import read_file_at
from hpcrun.checkpoint.tier import TIER_NAMES, InventoryEntry
from hpcrun.errors import HpcrunError, SiteError
from hpcrun.messages.authentication import HANDSHAKE_S, Handshake, connect_authenticated, is_short_ascii
from hpcrun.messages.frames import FRAME_BYTES, FramedConnection, FrameError, RateLimiter
from hpcrun.messages.lines import render_json_line
from hpcrun.messages.listeners import AuthenticatingListener, shut_down_connection

FRAME_TIMEOUT_S = 20.0
"""For one frame."""
_IDLE_S = 300.0
_MAX_UNAUTHENTICATED = 32
_INVENTORY_CACHE_S = 2.0
_MAX_WAIT_S = 10.0


class PeerError(SiteError):
    """Another node cannot be reached, is not who it should be, or does not have what it is asked for."""


@dataclass(frozen=True)
class PeerCredentials:
    """Who we are, and what shows it."""

    run: str
    node: str
    secret: str = field(repr=False)

    def bound_to(self, asking: str, asked: str) -> tuple[str, ...]:
        """What proofs of a connection between these two nodes are bound to."""
        return "checkpoint", self.run, asking, asked


@dataclass(frozen=True)
class PeerReply:
    """What a request is answered with."""

    told: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    """Bytes that follow."""
    read: Callable[[int, memoryview], None] | None = None
    """Puts those from a position on into a buffer."""


PeerRequestHandler = Callable[[dict[str, Any]], PeerReply]


class PeerServer:
    """Answers other nodes; each connection has a thread, strangers are shown out."""

    def __init__(
        self,
        address: str,
        who: PeerCredentials,
        *,
        bytes_per_s: float | None = None,
        timeout_s: float = FRAME_TIMEOUT_S,
        refuse_version: Callable[[str, str], None] = lambda node, version: None,
    ) -> None:
        """`bytes_per_s`: no more is sent, all connections together. SiteError: cannot listen there.

        `refuse_version` gets the node and the version of each worker of another version that comes.
        """
        self._who, self._timeout_s, self._rate_limiter = who, timeout_s, RateLimiter(bytes_per_s)
        self._handlers: dict[str, PeerRequestHandler] = {}
        self._lock = threading.Lock()
        self._connections: dict[int, FramedConnection] = {}
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._door = AuthenticatingListener(
            address,
            _MAX_UNAUTHENTICATED,
            "other nodes",
            who.secret,
            self._identify,
            refuse_version,
            HANDSHAKE_S,
        )
        self.address, self.port = address, self._door.port
        self._thread = threading.Thread(target=self._accept_connections, name="peers", daemon=True)
        self._thread.start()

    def on(self, what: str, handler: PeerRequestHandler) -> None:
        """From now on answer requests for this so; what the handler raises is told to the other node."""
        self._handlers[what] = handler

    def close(self) -> None:
        """Nobody is answered any more."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            connections = [*self._connections.values()]
        self._door.wake()
        for connection in connections:
            connection.close()
        self._thread.join(timeout=HANDSHAKE_S)

    def _accept_connections(self) -> None:
        while not self._closed.is_set():
            self._door.await_connection()
            for connection in self._door.accept_authenticated():
                serve = threading.Thread(target=self._serve, args=connection, daemon=True)
                try:
                    serve.start()
                except RuntimeError:  # no more threads: it comes again
                    shut_down_connection(connection[0])
        self._door.close()

    def _identify(self, said: dict[str, Any]) -> tuple[str, tuple[str, ...]] | None:
        asking = said.get("node")
        return (asking, self._who.bound_to(asking, self._who.node)) if is_short_ascii(asking) else None

    def _serve(self, connection: socket.socket, asking: str, handshake: Handshake) -> None:
        keys, number = handshake.keys("listening"), next(self._numbers)
        frames = FramedConnection(connection, *keys, self._timeout_s, self._rate_limiter)
        with self._lock:
            self._connections[number] = frames
        try:
            connection.settimeout(self._timeout_s)
            connection.sendall(render_json_line({"proof": handshake.proof("listening", {})}))
            while not self._closed.is_set() and (request := frames.hear(_IDLE_S)) is not None:
                self._answer(frames, request)
        except OSError:
            pass  # the other end is gone, or speaks no sense: there is nobody to tell
        finally:
            frames.close()
            with self._lock:
                self._connections.pop(number, None)

    def _answer(self, frames: FramedConnection, request: dict[str, Any]) -> None:
        handler = self._handlers.get(str(request.get("do")))
        try:
            if handler is None:
                raise ValueError(f"{request.get('do')} is nothing that this node answers")
            reply = handler(request)
        except (HpcrunError, OSError) as error:
            frames.say({"problem": str(error)})
            return
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            frames.say({"problem": f"no such request: {error}"})
            return
        frames.say(reply.told | {"size": reply.size})
        if reply.read is None:
            return
        buffer = memoryview(bytearray(min(FRAME_BYTES, reply.size)))
        for at in range(0, reply.size, FRAME_BYTES):
            part = buffer[: reply.size - at]
            try:
                reply.read(at, part)
            except (HpcrunError, OSError) as error:
                frames.say({"problem": str(error)})
                return
            frames.send(part)


class PeerClient:
    """Asks other nodes, from as many threads at once as need be; connections are kept for the next time."""

    def __init__(
        self,
        who: PeerCredentials,
        addresses: Mapping[str, tuple[str, int]],
        *,
        timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        self._who, self._addresses, self._timeout_s = who, dict(addresses), timeout_s
        self._lock = threading.Lock()
        self._idle: dict[str, list[FramedConnection]] = {}

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, node: str, request: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        """What a node answers; `wait_s`: it may take so much longer. PeerError: it does not, or says no."""
        with self._asked(node, request, wait_s) as (_, told):
            return told

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        """Fill a buffer with what a node was asked for; PeerError unless it gets all of it, undamaged."""
        with self._asked(node, request | {"size": len(into)}) as (frames, told):
            if told.get("size") != len(into):
                raise FrameError(f"it has {told.get('size')} of {len(into)} bytes")
            for at in range(0, len(into), FRAME_BYTES):
                frames.receive(into[at : at + FRAME_BYTES])

    def update_addresses(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """From now on others are reached there; connections to where they were are let go of."""
        with self._lock:
            moved = [node for node in self._idle if self._addresses.get(node) != addresses.get(node)]
            left = [frames for node in moved for frames in self._idle.pop(node)]
            self._addresses = dict(addresses)
        for frames in left:
            frames.close()

    def close(self) -> None:
        """Let go of all connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for frames in itertools.chain(*idle.values()):
            frames.close()

    @contextlib.contextmanager
    def _asked(
        self, node: str, request: dict[str, Any], wait_s: float = 0.0
    ) -> Iterator[tuple[FramedConnection, dict[str, Any]]]:
        """The connection and the message of the answer; at the end of the block all of it must be read."""
        address = self._addresses.get(node)
        if address is None:
            raise PeerError(f"{node}: its address is not known here")
        frames: FramedConnection | None = None
        try:
            frames, told = self._exchange(node, address, request, wait_s)
            if "problem" not in told:
                yield frames, told
            with self._lock:
                self._idle.setdefault(node, []).append(frames)
            frames = None
        except OSError as error:
            why = (
                f"did not answer within {self._timeout_s + wait_s:g} s"
                if _is_timeout(error)
                else _error_text(error)
            )
            raise PeerError(f"{node} ({address[0]}:{address[1]}): {why}") from None
        finally:
            if frames is not None:
                frames.close()
        if "problem" in told:
            raise PeerError(f"{node}: {told['problem']}")

    def _exchange(
        self, node: str, address: tuple[str, int], request: dict[str, Any], wait_s: float
    ) -> tuple[FramedConnection, dict[str, Any]]:
        """Over a kept connection, where it still stands; else over a new one."""
        while True:
            with self._lock:
                kept = self._idle.get(node)
                frames = kept.pop() if kept else None
            is_new = frames is None
            if frames is None:
                frames = self._connect(node, address)
            try:
                frames.say(request)
                told = frames.hear(wait_s)
                if told is not None:
                    return frames, told
                error: OSError = ConnectionError("ended the connection")
            except OSError as found:
                error = found
            frames.close()
            if is_new or _is_timeout(error):
                raise error

    def _connect(self, node: str, address: tuple[str, int]) -> FramedConnection:
        ours = self._who.node
        connection, handshake, _ = connect_authenticated(
            address,
            self._who.secret,
            {"node": ours},
            self._who.bound_to(ours, node),
            ends=(f"that of {ours}", f"the checkpoint worker of {node}"),
            timeout_s=min(HANDSHAKE_S, self._timeout_s),
        )
        with contextlib.suppress(OSError):  # it has gone again, which shows at the first frame
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return FramedConnection(connection, *handshake.keys("connecting"), self._timeout_s)


def _is_timeout(error: OSError) -> bool:
    return isinstance(error, TimeoutError)


def _error_text(error: OSError) -> str:
    return error.strerror or str(error)


class PartServer:
    """Answers reads of parts and of parity, whatever tier has them.

    {"do": "part", "generation": g, "number": n, "at": position, "size": bytes}, and the same with "parity"
    and the number of a parity block; {"do": "share", "generation": g} for which parts there are, and
    {"do": "calm", "generation": g, "wait_s": seconds} for whether this node has time to give them.
    """

    def __init__(
        self,
        server: PeerServer,
        holdings: Callable[[], Iterable[InventoryEntry]],
        await_calm: Callable[[float], bool] = lambda _seconds: True,
    ) -> None:
        """`holdings`: all that this node has, looked up anew every few seconds.

        `await_idle` waits until nothing of this node's own is to be stored, but no longer than it is told.
        """
        self._holdings, self._await_idle = holdings, await_calm
        self._lock = threading.Lock()
        self._known: list[InventoryEntry] = []
        self._known_until = 0.0
        server.on("part", self._part)
        server.on("parity", self._parity)
        server.on("share", self._share)
        server.on("calm", self._calm)

    def _calm(self, request: dict[str, Any]) -> PeerReply:
        is_calm = self._await_idle(min(float(request["wait_s"]), _MAX_WAIT_S))
        if not any(one.parts for one in self._of(str(request["generation"]))):
            raise SiteError(f"has no part of generation {request['generation']} any more")
        return PeerReply({"is_calm": is_calm})

    def _share(self, request: dict[str, Any]) -> PeerReply:
        """Looked up anew: it may have been sealed this moment."""
        with self._lock:
            self._known_until = 0.0
        found = self._of(str(request["generation"]))
        parts = {held.number: held.part for holding in reversed(found) for held in holding.parts}
        if not parts:
            raise SiteError(f"has no part of generation {request['generation']}")
        told = [[number, asdict(part)] for number, part in sorted(parts.items())]
        return PeerReply({"stamp": asdict(found[0].stamp), "parts": told})

    def _part(self, request: dict[str, Any]) -> PeerReply:
        generation, number = str(request["generation"]), int(request["number"])
        for holding in self._of(generation):
            for held in holding.parts:
                if held.number == number:
                    return _range_reply(request, held.path, held.at, held.part.size_bytes)
        raise SiteError(f"has no part {number} of generation {generation}")

    def _parity(self, request: dict[str, Any]) -> PeerReply:
        generation, number = str(request["generation"]), int(request["number"])
        for holding in self._of(generation):
            if holding.parity is not None and 0 <= number < holding.parity.parity:
                size = make_geometry(holding.parity).chunk_bytes
                return _range_reply(request, holding.parity.path, number * size, size)
        raise SiteError(f"has no parity {number} of generation {generation}")

    def _of(self, generation: str) -> list[InventoryEntry]:
        """What there is of a generation, the quickest tier first."""
        with self._lock:
            if time.monotonic() > self._known_until:
                self._known = sorted(self._holdings(), key=lambda one: TIER_NAMES.index(one.tier))
                self._known_until = time.monotonic() + _INVENTORY_CACHE_S
            return [one for one in self._known if one.stamp.generation == generation]


def _range_reply(request: dict[str, Any], path: str, begin: int, most: int) -> PeerReply:
    at, size = int(request["at"]), int(request["size"])
    check_byte_range(at, size, most)
    return PeerReply({}, size, lambda more, into: read_file_at(path, begin + at + more, into))


def check_byte_range(at: int, size: int, most: int) -> None:
    """ValueError where there are no such bytes."""
    if at < 0 or size < 0 or at + size > most:
        raise ValueError(f"bytes {at} to {at + size} of {most}")
