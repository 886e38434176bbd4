"""The door of everything that listens: who comes in costs nobody else anything before he has proved himself.

Strangers get one line and a few seconds. Where they are too many, or descriptors run out, the address with
the most of them loses its oldest: no address pushes others out. On Unix sockets the kernel says whose
process has come, and only our own user's is let in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from hpcrun import __version__
from hpcrun.errors import SiteError
from hpcrun.messages.authentication import HANDSHAKE_S, Handshake, fresh_nonce, is_short_ascii, verify_proof
from hpcrun.messages.lines import MAX_HANDSHAKE_BYTES, parse_json_line, render_json_line

_DESCRIPTOR_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_PAUSE_S = 0.1
"""So long nobody is taken in where there are no descriptors and no strangers to take them from."""
_MAX_ACCEPTS_PER_CALL = 64
"""Connections that are taken in a row; those that have spoken are heard in between."""
_MIN_UNAUTHENTICATED = 16
_CREDENTIALS = struct.Struct("3i")

T = TypeVar("T")


class OutOfDescriptorsError(OSError):
    """There is no descriptor left for one that stands outside."""


def accept_connection(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """The next connection and its host; None where none waits, or it has gone. OutOfDescriptorsError."""
    try:
        connection, address = listener.accept()
    except OSError as error:
        if error.errno in _DESCRIPTOR_ERRNOS:
            raise OutOfDescriptorsError(error.errno, os.strerror(error.errno)) from None
        if listener.fileno() < 0 or error.errno in (errno.EINVAL, errno.EBADF):
            raise  # it does not listen any more
        return None
    return connection, str(address[0]) if isinstance(address, tuple) and address else ""


def accept_own_user(listener: socket.socket) -> Iterator[tuple[socket.socket, int]]:
    """Some of those at a Unix socket that never waits, each with its pid; other users' are shown out.

    Where there are no descriptors nobody is taken in: they wait outside.
    """
    for _ in range(_MAX_ACCEPTS_PER_CALL):
        try:
            found = accept_connection(listener)
        except OutOfDescriptorsError:
            return
        if found is None:
            return
        connection, _ = found
        pid = own_user_peer_pid(connection)
        if pid is None:
            connection.close()
            continue
        connection.setblocking(False)
        yield connection, pid


def own_user_peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket; None where it is another user's, or not to be told."""
    pid, user = _peer_credentials(connection)
    return pid if user == os.getuid() else None


def peer_user(connection: socket.socket) -> int | None:
    """The user id of the process at the other end of a Unix socket; None where the kernel does not tell."""
    return _peer_credentials(connection)[1]


def _peer_credentials(connection: socket.socket) -> tuple[int | None, int | None]:
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None, None
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def shut_down_connection(connection: socket.socket) -> None:
    """Close a connection, also under a thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def open_listening_socket(address: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there; OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def unauthenticated_limit(wanted: int) -> int:
    """How many strangers a listener may hold: the wanted number, if that leaves descriptors for the work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_MIN_UNAUTHENTICATED, soft // 4))


class UnauthenticatedPeers(Generic[T]):
    """Those who have come and are not known yet, in the order of their coming, with their hosts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: dict[T, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._here))

    def __contains__(self, one: T) -> bool:
        return one in self._here

    def add(self, one: T, host: str) -> T | None:
        """One more; who has to go for it, where they are too many."""
        self._here[one] = host, time.monotonic()
        return self.eviction_candidate() if len(self._here) > self._most else None

    def eviction_candidate(self) -> T | None:
        """The oldest one of the host that has the most of them."""
        counts = Counter(host for host, _ in self._here.values())
        most = max(counts.values(), default=0)
        return next((one for one, (host, _) in self._here.items() if counts[host] == most), None)

    def late(self, limit_s: float) -> list[T]:
        """Those who have been here for longer."""
        before = time.monotonic() - limit_s
        return [one for one, (_, since) in self._here.items() if since < before]

    def remove(self, one: T) -> None:
        """It is no stranger any more, or gone."""
        self._here.pop(one, None)


class _UnauthenticatedPeer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.nonce, self.said = connection, fresh_nonce(), b""


class AuthenticatingListener(Generic[T]):
    """Where others of the run come in over TCP; strangers are shown out and do no harm.

    Each is given a number that was never used before, and has one line to prove with it who it is.
    """

    def __init__(
        self,
        address: str,
        most: int,
        whom: str,
        secret: str,
        identify: Callable[[dict[str, Any]], tuple[T, tuple[Any, ...]] | None],
        refuse_version: Callable[[T, str], None] = lambda peer, version: None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """`whom`: those we listen for, in words; `most`: strangers at a time.

        `identify`: who a stranger's line says that it is, if we let such in, and what its proof is bound to.
        `refuse_version` is called for each that has proved itself and is of another version.
        SiteError: cannot listen.
        """
        self._secret, self._identify, self._refuse_version = secret, identify, refuse_version
        self._handshake_s = handshake_s
        try:
            self._listener = open_listening_socket(address, 0, max(128, most))
        except OSError as error:
            raise SiteError(f"{address}: cannot listen here for {whom}: {error.strerror}") from None
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._unauthenticated = UnauthenticatedPeers[_UnauthenticatedPeer](unauthenticated_limit(most))
        self._accept_paused_until: float | None = None
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_descriptor, selectors.EVENT_READ, self._wake_descriptor)

    def fileno(self) -> int:
        """Becomes readable when somebody stands at the door."""
        return self._selector.fileno()

    def await_connection(self) -> None:
        """Wait until somebody stands at the door, or there is something else to see to there."""
        if self._accept_paused_until is not None:
            self._selector.select(_ACCEPT_PAUSE_S)
        else:
            self._selector.select(self._handshake_s if len(self._unauthenticated) else None)

    def wake(self) -> None:
        """Wake, for good, whoever waits for somebody."""
        os.eventfd_write(self._wake_descriptor, 1)

    def accept_authenticated(self) -> list[tuple[socket.socket, T, Handshake]]:
        """Those who have proved who they are; to be asked now and then, also when nobody comes."""
        known = []
        ready = self._selector.select(0)
        # Who has spoken comes before those who have only come: a crowd does not push him out.
        for key, _ in ready:
            if isinstance(one := key.data, _UnauthenticatedPeer) and (found := self._hear(one)) is not None:
                known.append((one.connection, *found))
        for one in self._unauthenticated.late(self._handshake_s):
            self._drop(one)
        if self._accept_paused_until is not None and time.monotonic() > self._accept_paused_until:
            self._accept_paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if any(key.data is None for key, _ in ready):
            self._accept_pending()
        return known

    def _accept_pending(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_CALL):
            try:
                found = accept_connection(self._listener)
            except OutOfDescriptorsError:
                late = self._unauthenticated.eviction_candidate()
                if late is None:
                    self._selector.unregister(self._listener)
                    self._accept_paused_until = time.monotonic() + _ACCEPT_PAUSE_S
                    return
                self._drop(late)
                continue
            if found is None:
                return
            connection, host = found
            connection.setblocking(False)
            one = _UnauthenticatedPeer(connection)
            self._selector.register(connection, selectors.EVENT_READ, one)
            late = self._unauthenticated.add(one, host)
            if late is not None:
                self._drop(late)
            with contextlib.suppress(OSError):
                connection.send(render_json_line({"nonce": one.nonce, "version": __version__}))

    def _hear(self, one: _UnauthenticatedPeer) -> tuple[T, Handshake] | None:
        try:
            data = one.connection.recv(MAX_HANDSHAKE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        one.said += data
        if data and b"\n" not in one.said and len(one.said) < MAX_HANDSHAKE_BYTES:
            return None
        # One line and nothing behind it: who is let in waits for our answer.
        said = parse_json_line(one.said) if one.said.endswith(b"\n") and one.said.count(b"\n") == 1 else None
        found = self._recognise(one.nonce, said) if said is not None else None
        if found is None:
            self._drop(one)
            return None
        self._forget(one)
        return found

    def _recognise(self, nonce: str, said: dict[str, Any]) -> tuple[T, Handshake] | None:
        theirs, version, claimed = said.get("nonce"), said.get("version"), self._identify(said)
        if claimed is None or not (is_short_ascii(theirs) and is_short_ascii(version)):
            return None
        peer, bound_to = claimed
        handshake = Handshake(self._secret, bound_to, (nonce, theirs))
        if not verify_proof(said.get("proof"), handshake.proof("connecting", version)):
            return None
        if version != __version__:
            self._refuse_version(peer, version)
            return None
        return peer, handshake

    def _forget(self, one: _UnauthenticatedPeer) -> None:
        self._selector.unregister(one.connection)
        self._unauthenticated.remove(one)

    def _drop(self, one: _UnauthenticatedPeer) -> None:
        self._forget(one)
        one.connection.close()

    def close(self) -> None:
        """Nobody comes in any more."""
        if self._listener.fileno() < 0:
            return
        for one in self._unauthenticated:
            self._drop(one)
        self._selector.close()
        os.close(self._wake_descriptor)
        self._listener.close()
