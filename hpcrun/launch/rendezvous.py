"""Where the ranks of an attempt meet: what every node says of its own address, and a port on rank 0's."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcrun.address import LOOPBACK, reachable_address
from hpcrun.errors import SiteError
from hpcrun.health.connection_test import ConnectionTest
from hpcrun.launch.ports import PortLease, choose_port
from hpcrun.typed_json import Tagged

TestStep = Literal["listen", "try", "end"]


@dataclass(frozen=True)
class RendezvousRequest(Tagged):
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


@dataclass(frozen=True)
class RendezvousAnswer(Tagged):
    """A node's answer to a request."""

    attempt: int
    point: RendezvousPoint


@dataclass(frozen=True)
class ConnectionTestStep(Tagged):
    """One step of a trial of connections between nodes; any but the first two ends it."""

    attempt: int
    step: TestStep
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Where the nodes to try listen."""


@dataclass(frozen=True)
class ConnectionTestReport(Tagged):
    """What a step has come to: where this node listens, or which others it has not reached, and why."""

    attempt: int
    step: TestStep
    place: tuple[str, int] | None = None
    failed: dict[str, str] = field(default_factory=dict)


class NodeRendezvous:
    """A node's part: finds its address, and holds the port of an attempt until that is over."""

    def __init__(self) -> None:
        self._lease: PortLease | None = None
        self._address = ""
        self._trial: ConnectionTest | None = None

    def answer(self, request: RendezvousRequest) -> RendezvousPoint:
        """Where the others reach this node, and its port where one is wanted."""
        self.close()
        point = self._point(request)
        self._address = point.address
        return point

    def probe_peers(self, order: ConnectionTestStep) -> ConnectionTestReport:
        """Listen, then try the others, then end."""
        if order.step == "listen":
            self._end_trial()
            # Without an address it would listen at all of them.
            with contextlib.suppress(OSError):
                self._trial = ConnectionTest(self._address) if self._address else None
            place = self._trial.place if self._trial else None
            return ConnectionTestReport(order.attempt, order.step, place)
        if order.step == "try" and self._trial is not None:
            return ConnectionTestReport(order.attempt, order.step, failed=self._trial.failures(order.places))
        self._end_trial()
        return ConnectionTestReport(order.attempt, order.step)

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
