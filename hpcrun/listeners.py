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

from hpcrun.authentication import HANDSHAKE_S, MOST_BYTES_OF_A_STRANGER, fresh_nonce, parse_line, render_line
from hpcrun.errors import SiteError

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 0.1
"""So long nobody is taken in where there are no descriptors and no strangers to take them from."""
_AT_ONCE = 64
"""Connections that are taken in a row; those that have spoken are heard in between."""
_FEWEST = 16
_CREDENTIALS = struct.Struct("3i")

T = TypeVar("T")


class ScarceError(OSError):
    """There is no descriptor left for one that stands outside."""


def take_in(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """The next connection of a listener and its host; None where none waits, or it has gone. ScarceError."""
    try:
        connection, address = listener.accept()
    except OSError as error:
        if error.errno in _SCARCE:
            raise ScarceError(error.errno, os.strerror(error.errno)) from None
        if listener.fileno() < 0 or error.errno in (errno.EINVAL, errno.EBADF):
            raise  # it does not listen any more
        return None
    return connection, str(address[0]) if isinstance(address, tuple) and address else ""


def take_in_ours(listener: socket.socket) -> Iterator[tuple[socket.socket, int]]:
    """Some of those at a Unix socket that never waits, each with its pid; other users' are shown out.

    Where there are no descriptors nobody is taken in: they wait outside.
    """
    for _ in range(_AT_ONCE):
        try:
            found = take_in(listener)
        except ScarceError:
            return
        if found is None:
            return
        connection, _ = found
        pid = pid_if_ours(connection)
        if pid is None:
            connection.close()
            continue
        connection.setblocking(False)
        yield connection, pid


def pid_if_ours(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket; None where it is another user's, or not to be told."""
    try:
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None
    pid, user, _ = _CREDENTIALS.unpack(told)
    return int(pid) if user == os.getuid() else None


def hang_up(connection: socket.socket) -> None:
    """Close a connection, also under a thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def listen_at(address: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there; OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def most_of(wanted: int) -> int:
    """How many strangers a listener may hold: the wanted number, if that leaves descriptors for the work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_FEWEST, soft // 4))


class Crowd(Generic[T]):
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
        return self.one_too_many() if len(self._here) > self._most else None

    def one_too_many(self) -> T | None:
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


class _Stranger:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.nonce, self.said = connection, fresh_nonce(), b""


class Door(Generic[T]):
    """Where others of the run come in over TCP; strangers are shown out and do no harm.

    Each is given a number that was never used before, and has one line to prove with it who it is.
    """

    def __init__(
        self,
        address: str,
        most: int,
        whom: str,
        recognise: Callable[[str, dict[str, Any]], T | None],
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """`whom`: those we listen for, in words; `most`: strangers at a time.

        `recognise`: what a stranger's number and message prove, if they do. SiteError: cannot listen.
        """
        self._recognise, self._handshake_s = recognise, handshake_s
        try:
            self._listener = listen_at(address, 0, max(128, most))
        except OSError as error:
            raise SiteError(f"{address}: cannot listen here for {whom}: {error.strerror}") from None
        self._listener.setblocking(False)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._strangers = Crowd[_Stranger](most_of(most))
        self._resting_until: float | None = None
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell)

    def fileno(self) -> int:
        """Becomes readable when somebody stands at the door."""
        return self._selector.fileno()

    def await_somebody(self) -> None:
        """Wait until somebody stands at the door, or there is something else to see to there."""
        if self._resting_until is not None:
            self._selector.select(_REST_S)
        else:
            self._selector.select(self._handshake_s if len(self._strangers) else None)

    def ring(self) -> None:
        """Wake, for good, whoever waits for somebody."""
        os.eventfd_write(self._bell, 1)

    def arrivals(self) -> list[tuple[socket.socket, T]]:
        """Those who have proved who they are; to be asked now and then, also when nobody comes."""
        known = []
        ready = self._selector.select(0)
        # Who has spoken comes before those who have only come: a crowd does not push him out.
        for key, _ in ready:
            if isinstance(one := key.data, _Stranger) and (found := self._hear(one)) is not None:
                known.append((one.connection, found))
        for one in self._strangers.late(self._handshake_s):
            self._drop(one)
        if self._resting_until is not None and time.monotonic() > self._resting_until:
            self._resting_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if any(key.data is None for key, _ in ready):
            self._let_speak()
        return known

    def _let_speak(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                found = take_in(self._listener)
            except ScarceError:
                late = self._strangers.one_too_many()
                if late is None:
                    self._selector.unregister(self._listener)
                    self._resting_until = time.monotonic() + _REST_S
                    return
                self._drop(late)
                continue
            if found is None:
                return
            connection, host = found
            connection.setblocking(False)
            one = _Stranger(connection)
            self._selector.register(connection, selectors.EVENT_READ, one)
            late = self._strangers.add(one, host)
            if late is not None:
                self._drop(late)
            with contextlib.suppress(OSError):
                connection.send(render_line({"nonce": one.nonce}))

    def _hear(self, one: _Stranger) -> T | None:
        try:
            data = one.connection.recv(MOST_BYTES_OF_A_STRANGER)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        one.said += data
        if data and b"\n" not in one.said and len(one.said) < MOST_BYTES_OF_A_STRANGER:
            return None
        # One line and nothing behind it: who is let in waits for our answer.
        said = parse_line(one.said) if one.said.endswith(b"\n") and one.said.count(b"\n") == 1 else None
        found = self._recognise(one.nonce, said) if said is not None else None
        if found is None:
            self._drop(one)
            return None
        self._forget(one)
        return found

    def _forget(self, one: _Stranger) -> None:
        self._selector.unregister(one.connection)
        self._strangers.remove(one)

    def _drop(self, one: _Stranger) -> None:
        self._forget(one)
        one.connection.close()

    def close(self) -> None:
        """Nobody comes in any more."""
        if self._listener.fileno() < 0:
            return
        for one in self._strangers:
            self._drop(one)
        self._selector.close()
        os.close(self._bell)
        self._listener.close()
