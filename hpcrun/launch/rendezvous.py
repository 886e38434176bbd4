"""Where the ranks of an attempt meet: what every node says of its own address, and a port on rank 0's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcrun.address import LOOPBACK, reachable_address
from hpcrun.errors import SiteError
from hpcrun.health.connection_test import ConnectionTest
from hpcrun.launch.ports import PortLease, choose_port

RENDEZVOUS_KIND, CONNECTION_TEST_KIND = "meeting", "trial"
"""The orders to an agent, and the kinds of its answers (of a trial, with its step)."""


@dataclass(frozen=True)
class RendezvousRequest:
    """What a node is asked for, as it travels to the agents."""

    attempt: int
    nodes: tuple[str, ...]
    """Those with ranks, in rank order: the first one is rank 0's."""
    interface: str | None = None
    suffix: str = ""
    seed: int = 0
    """Of the port that is tried first."""
    wants_port: bool = False

    def of(self, node: str) -> RendezvousRequest:
        """The same for one node: only rank 0's looks for a port."""
        return replace(self, wants_port=self.wants_port and node == self.nodes[0])

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class RendezvousPoint:
    """What a node says: where the others reach it."""

    address: str
    interface: str = ""
    port: int = 0
    notes: tuple[str, ...] = ()
    """What was in the way of the port."""
    warning: str = ""
    """What is wrong with the node's own name; it does not matter to whoever uses the address."""
    problem: str = ""
    """Why there is no address or no port."""


class NodeRendezvous:
    """A node's part: finds its address, and holds the port of an attempt until that is over."""

    def __init__(self) -> None:
        self._lease: PortLease | None = None
        self._address = ""
        self._trial: ConnectionTest | None = None

    def answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to an order, as it travels."""
        self.close()
        known = {name: order[name] for name in RendezvousRequest.__dataclass_fields__ if name in order}
        point = self._point(RendezvousRequest(**known))
        self._address = point.address
        return {"kind": RENDEZVOUS_KIND, "attempt": order["attempt"], **asdict(point)}

    def probe_peers(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a step of a trial: where this node listens, then which others it has not reached.

        Any other step ends it.
        """
        said: dict[str, Any] = {
            "kind": f"{CONNECTION_TEST_KIND} {order['step']}",
            "attempt": order["attempt"],
        }
        if order["step"] == "listen":
            self._end_trial()
            # Without an address it would listen at all of them.
            with contextlib.suppress(OSError):
                self._trial = ConnectionTest(self._address) if self._address else None
            return said | {"place": self._trial.place if self._trial else None}
        if order["step"] == "try" and self._trial is not None:
            return said | {"failed": self._trial.failures(order["places"])}
        self._end_trial()
        return said | {"failed": {}}

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None

    def _point(self, request: RendezvousRequest) -> RendezvousPoint:
        try:
            if len(request.nodes) > 1:
                address = reachable_address(request.interface, request.nodes, request.suffix)
                point = RendezvousPoint(address.text, address.interface, warning=address.warning)
            else:
                point = RendezvousPoint(LOOPBACK, "lo")
            if request.wants_port:
                self._lease = choose_port(request.seed)
                notes = tuple(f"{os.uname().nodename}: {note}" for note in self._lease.notes)
                point = replace(point, port=self._lease.number, notes=notes)
        except SiteError as error:
            return RendezvousPoint("", problem=str(error))
        return point

    def close(self) -> None:
        """Let the port go."""
        self._end_trial()
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def parse_rendezvous_point(message: Mapping[str, Any]) -> RendezvousPoint:
    """The answer of a node."""
    notes: Sequence[str] = message.get("notes", ())
    values = {name: message[name] for name in ("address", "interface", "port", "warning", "problem")}
    return RendezvousPoint(**values, notes=tuple(notes))
