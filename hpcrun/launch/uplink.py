"""An agent's side of the wire: finds the supervisor, keeps the connection, and notices when there is none."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from typing import Any

from hpcrun.errors import HpcrunError
from hpcrun.launch import lease
from hpcrun.launch.lease import Leader, Vigil
from hpcrun.launch.pulse import Pulse
from hpcrun.launch.wire import Badge, Channel, Session, WireError, join
from hpcrun.specs.rundir import RunDir

BEAT_S = 1.0
"""How often an agent says that it is there."""
_SEEK_S = 0.5


class Uplink:
    """The connection to whoever leads the run now.

    What may wait, for the network or the file system, is done in threads: the agent has ranks to watch.
    """

    def __init__(self, run: RunDir, node: str, position: int, may_claim: Callable[[], bool] | None) -> None:
        """`position`: whose turn it is to take over; `may_claim`: asked before, None where nobody may."""
        self._run, self._node, self._may_claim = run, node, may_claim
        self.vigil = Vigil(position)
        self.session, self._id = Session(), ""
        self.epoch = 0
        """The newest supervisor's that was met."""
        self.won: int | None = None
        """The epoch that is ours to find a supervisor for."""
        self._lock = threading.Lock()
        self._arrived: tuple[Leader, Channel, int, Session, str] | None = None
        self._pulses = [Pulse(BEAT_S, self._beat), Pulse(_SEEK_S, self._seek)]

    def hear(self) -> list[dict[str, Any]]:
        """The orders that have come."""
        for pulse in self._pulses:
            pulse.come_by()
        messages = self.session.hear()
        if messages:
            self.vigil.heard()
        channel = self.session.channel
        # A connection that brings nothing may be dead without knowing it.
        if channel is not None and (channel.is_closed or self.vigil.is_orphaned):
            self.session.detach()
        return messages

    def arrive(self) -> tuple[Channel, bool] | None:
        """A new connection, and whether a supervisor that we had not met stands behind it."""
        with self._lock:
            arrived, self._arrived = self._arrived, None
        if arrived is None:
            return None
        leader, channel, seen, session, number = arrived
        is_new = leader.epoch != self.epoch
        self.session.detach()
        self.session, self._id, self.epoch = session, number, leader.epoch
        self.session.attach(channel, seen)
        self.vigil.heard()
        return channel, is_new

    def _beat(self) -> None:
        self.session.beat(kind="beat")

    def _seek(self) -> None:
        with contextlib.suppress(OSError, HpcrunError):
            if self.session.channel is None or self.vigil.is_quiet:
                self._look_for_leader()
            if self.vigil.is_quiet and self.won is None:
                self._look_at_lease()

    def _look_for_leader(self) -> None:
        leader = lease.read_leader(self._run)
        is_known = leader is not None and leader.epoch <= self.epoch and self.session.channel is not None
        if leader is None or is_known or leader.epoch < self.epoch or self._arrived is not None:
            return
        if leader.epoch == self.epoch:
            session, number = self.session, self._id
        else:
            session, number = Session(), secrets.token_hex(8)
        badge = Badge(self._run.id, leader.epoch, self._node, number, session.seen)
        with contextlib.suppress(WireError):
            channel, seen = join((leader.address, leader.port), leader.secret, badge)
            with self._lock:
                self._arrived = leader, channel, seen, session, number

    def _look_at_lease(self) -> None:
        match self.vigil.look(lease.sign_of(self._run)):
            case "bid" if self._may_claim is not None:
                lease.bid(self._run, self._node)
                self.vigil.bidden()
            case "claim" if self._may_claim is not None:
                epoch = lease.newest_epoch(self._run) + 1
                if not self._may_claim():
                    self.vigil.refused()
                elif lease.claim(self._run, epoch):
                    self.won = epoch
            case _:
                pass

    def close(self) -> None:
        """Let go of everything."""
        for pulse in self._pulses:
            pulse.stop()
        self.session.detach()
