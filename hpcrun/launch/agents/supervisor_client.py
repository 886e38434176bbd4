"""An agent's side of the wire: finds the supervisor, keeps the connection, and notices when there is none."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
from collections.abc import Callable
from typing import Any

from hpcrun.errors import HpcrunError
from hpcrun.launch.agents.connection import Badge, Channel, Session, WireError, host_answers, join
from hpcrun.launch.agents.messages import problem_of_order
from hpcrun.launch.heartbeat import TICK_S, AwakeClock, Pulse
from hpcrun.runs import lease
from hpcrun.runs.lease import Leader, Vigil
from hpcrun.specs.io_retry import say
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
        clock = AwakeClock()
        self.vigil = Vigil(position, clock)
        self.session, self._id = Session(problem_of_order), ""
        self.epoch = 0
        """The newest supervisor's that was met."""
        self.won: int | None = None
        """The epoch that is ours to find a supervisor for."""
        self._lock = threading.Lock()
        self._arrived: tuple[Leader, Channel, int, Session, str] | None = None
        seekers = (self._look_for_leader, self._look_at_lease, self._try_host)
        self._pulses = [Pulse(BEAT_S, self._beat), *(Pulse(_SEEK_S, seek) for seek in seekers)]
        self._pulses.append(Pulse(TICK_S, clock.tick, math.inf))

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
            if channel.why:
                say(f"the connection to the supervisor is ended and made anew: {channel.why}")
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

    def _look_for_leader(self) -> None:
        if self._arrived is not None or not (self.session.channel is None or self.vigil.is_quiet):
            return
        with contextlib.suppress(OSError, HpcrunError, WireError):
            leader = lease.read_leader(self._run)
            if leader is None or leader.epoch < self.epoch:
                return
            if leader.epoch == self.epoch and self.session.channel is not None:
                return
            session, number = self.session, self._id
            if leader.epoch > self.epoch:
                session, number = Session(problem_of_order), secrets.token_hex(8)
            badge = Badge(self._run.id, leader.epoch, self._node, number, session.seen)
            channel, seen = join((leader.address, leader.port), leader.secret, badge)
            with self._lock:
                self._arrived = leader, channel, seen, session, number

    def _try_host(self) -> None:
        """Whether there is a machine at all where the supervisor was; a dead one takes its time to say no."""
        if not self.vigil.is_quiet or self._may_claim is None:
            return
        with contextlib.suppress(OSError):
            leader = lease.read_leader(self._run)
            if leader is not None:
                self.vigil.tried(host_answers((leader.address, leader.port)))

    def _look_at_lease(self) -> None:
        if not self.vigil.is_quiet or self.won is not None:
            return
        with contextlib.suppress(OSError, HpcrunError):
            # Known before the look: who comes while Slurm is asked, which may take long, has come before us.
            epoch = lease.newest_epoch(self._run) + 1
            move = self.vigil.look(lease.sign_of(self._run))
            if self._may_claim is None:
                return
            if move == "bid":
                lease.bid(self._run, self._node)
                self.vigil.bidden()
            elif move == "claim":
                self._claim(epoch, self._may_claim())

    def _claim(self, epoch: int, may: bool) -> None:
        if not may:
            self.vigil.refused()
        elif self.vigil.is_quiet and lease.claim(self._run, epoch):
            self.won = epoch

    def close(self) -> None:
        """Let go of everything."""
        for pulse in self._pulses:
            pulse.stop()
        self.session.detach()
