"""A test of connections: each node listens while the test runs and tries the others; nobody is let in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hpcrun.messages.listeners import (
    OutOfDescriptorsError,
    accept_connection,
    open_listening_socket,
    shut_down_connection,
)
from hpcrun.tuning.host.connectivity import attribute_failures

_P = TypeVar("_P")
"""Where a node listens."""
_CONNECT_TIMEOUT_S = 3.0
"""A lost packet is sent again after a second."""
_MAX_PARALLEL, _REST_S = 32, 0.1
_SHOWN = 3
_MAX_TARGETS = 64
"""In larger worlds each node tries those after it: all nodes together still try every one."""


class ConnectionTest:
    """One node's part, at its own address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._server = open_listening_socket(address, 0, 1024)
        self._is_over = threading.Event()
        # Unless they are accepted, connections of strangers would keep out those of the other nodes.
        self._thread = threading.Thread(target=self._drop_connections, name="trial", daemon=True)
        self._thread.start()

    def _drop_connections(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            while not self._is_over.is_set():
                try:
                    accepted = accept_connection(self._server)
                except OutOfDescriptorsError:
                    self._is_over.wait(_REST_S)
                    continue
                if accepted is not None:
                    accepted[0].close()

    @property
    def place(self) -> tuple[str, int]:
        """Where it listens."""
        return self._address, int(self._server.getsockname()[1])

    def failures(self, places: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """Which of the other nodes were not reached, and why, in the system's words."""
        with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
            whys = pool.map(
                lambda place: why_unreachable(self._address, place[0], int(place[1])), places.values()
            )
            return {node: why for node, why in zip(places, whys, strict=True) if why}

    def close(self) -> None:
        """Stop listening; to be called when all have tried."""
        self._is_over.set()
        # Also under the thread, which waits for somebody.
        shut_down_connection(self._server)
        self._thread.join(_CONNECT_TIMEOUT_S)


def why_unreachable(own: str, host: str, port: int) -> str:
    """Why a connection from our own address fails, with the place; empty where it does not.

    In words that are not those of a connection which breaks because a rank has died.
    """
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S, source_address=(own, 0)).close()
    except TimeoutError:
        return f"no answer in {_CONNECT_TIMEOUT_S:g} s ({host}:{port})"
    except (ConnectionRefusedError, ConnectionResetError):
        return f"refused ({host}:{port})"
    except OSError as error:
        return f"{error.strerror or error} ({host}:{port})"
    return ""


def choose_targets(places: Mapping[str, _P], node: str) -> dict[str, _P]:
    """The nodes that this one tries: all others, or in a large world those that come after it."""
    names = [*places]
    at = names.index(node) if node in names else 0
    others = [name for name in (*names[at:], *names[:at]) if name != node]
    return {name: places[name] for name in others[:_MAX_TARGETS]}


def describe_unreachable(
    failed: Mapping[str, Mapping[str, str]], nodes: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """What a trial has shown, in words, and the nodes that are to blame; empty where all were reached."""
    culprits, pairs = attribute_failures(failed, nodes)
    lines = [
        f"{culprit.failed} of {culprit.tried} connections of {culprit.node} fail: {culprit.why}"
        for culprit in culprits
    ]
    lines += [f"{a} does not reach {b}: {why}" for (a, b), why in pairs.items()]
    rest = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + rest, tuple(culprit.node for culprit in culprits)
