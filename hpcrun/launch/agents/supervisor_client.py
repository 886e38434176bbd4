"""An agent's side of the wire: finds the supervisor, keeps the connection, and notices when there is none."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
from collections.abc import Callable

from hpcrun.errors import HpcrunError
from hpcrun.launch.agents.connection import (
    AgentConnectionError,
    AgentIdentity,
    ReliableSession,
    connect_to_supervisor,
    is_host_reachable,
)
from hpcrun.launch.agents.messages import AGENT_ORDERS, AgentOrder
from hpcrun.launch.failover.heartbeat import CLOCK_TICK_S, AwakeClock, Heartbeat
from hpcrun.launch.failover.lease_monitor import LeaseMonitor
from hpcrun.messages.channel import Channel
from hpcrun.messages.lines import VersionMismatchError
from hpcrun.runs import lease
from hpcrun.runs.lease import LeaderRecord
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.rundir import RunDir

AGENT_HEARTBEAT_S = 1.0
"""How often an agent says that it is there."""
_POLL_S = 0.5


class SupervisorClient:
    """The connection to whoever leads the run now.

    What may wait, for the network or the file system, is done in threads: the agent has ranks to watch.
    """

    def __init__(self, run: RunDir, node: str, position: int, may_claim: Callable[[], bool] | None) -> None:
        """`position`: whose turn it is to take over; `may_claim`: asked before, None where nobody may."""
        self._run, self._node, self._may_claim = run, node, may_claim
        clock = AwakeClock()
        self.lease_monitor = LeaseMonitor(position, clock)
        self.session, self._id = ReliableSession(AGENT_ORDERS), ""
        self.epoch = 0
        """The newest supervisor's that was met."""
        self.won_epoch: int | None = None
        """The epoch that is ours to find a supervisor for."""
        self._refusal = ""
        """Why the supervisor does not let us in: it is of another version."""
        self._lock = threading.Lock()
        self._arrived: tuple[LeaderRecord, Channel, int, ReliableSession[AgentOrder], str] | None = None
        seekers = (self._find_leader, self._check_lease, self._probe_host)
        self._heartbeats = [
            Heartbeat(AGENT_HEARTBEAT_S, self._beat),
            *(Heartbeat(_POLL_S, seek) for seek in seekers),
        ]
        self._heartbeats.append(Heartbeat(CLOCK_TICK_S, clock.tick, math.inf))

    def receive(self) -> list[AgentOrder]:
        """The orders that have come."""
        for pulse in self._heartbeats:
            pulse.beat()
        is_alive, orders = self.session.receive()
        if is_alive:
            self.lease_monitor.heard()
        channel = self.session.channel
        # A connection that brings nothing may be dead without knowing it.
        if channel is not None and (channel.is_closed or self.lease_monitor.is_orphaned):
            if channel.why:
                log_line(f"the connection to the supervisor is ended and made anew: {channel.why}")
            self.session.detach()
        return orders

    def take_new_connection(self) -> tuple[Channel, bool] | None:
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
        self.lease_monitor.heard()
        return channel, is_new

    def _beat(self) -> None:
        self.session.send_heartbeat()

    def _find_leader(self) -> None:
        if self._arrived is not None or not (self.session.channel is None or self.lease_monitor.is_quiet):
            return
        with contextlib.suppress(OSError, HpcrunError, AgentConnectionError):
            leader = lease.read_leader(self._run)
            if leader is None or leader.epoch < self.epoch:
                return
            if leader.epoch == self.epoch and self.session.channel is not None:
                return
            session, number = self.session, self._id
            if leader.epoch > self.epoch:
                session, number = ReliableSession(AGENT_ORDERS), secrets.token_hex(8)
            badge = AgentIdentity(self._run.id, leader.epoch, self._node, number, session.seen)
            try:
                channel, seen = connect_to_supervisor((leader.address, leader.port), leader.secret, badge)
            except VersionMismatchError as error:
                if str(error) != self._refusal:
                    self._refusal = str(error)
                    log_line(self._refusal)
                return
            with self._lock:
                self._arrived = leader, channel, seen, session, number

    def _probe_host(self) -> None:
        """Whether there is a machine at all where the supervisor was; a dead one takes its time to say no."""
        if not self.lease_monitor.is_quiet or self._may_claim is None:
            return
        with contextlib.suppress(OSError):
            leader = lease.read_leader(self._run)
            if leader is not None:
                self.lease_monitor.tried(is_host_reachable((leader.address, leader.port)))

    def _check_lease(self) -> None:
        if not self.lease_monitor.is_quiet or self.won_epoch is not None:
            return
        with contextlib.suppress(OSError, HpcrunError):
            # Known before the look: who comes while Slurm is asked, which may take long, has come before us.
            epoch = lease.newest_epoch(self._run) + 1
            move = self.lease_monitor.look(lease.leader_fingerprint(self._run))
            if self._may_claim is None:
                return
            if move == "bid":
                lease.write_lease_probe(self._run, self._node)
                self.lease_monitor.probe_written()
            elif move == "claim":
                self._claim(epoch, self._may_claim())

    def _claim(self, epoch: int, may: bool) -> None:
        if not may:
            self.lease_monitor.refused()
        elif self.lease_monitor.is_quiet and lease.claim_epoch(self._run, epoch):
            self.won_epoch = epoch

    def close(self) -> None:
        """Let go of everything."""
        for pulse in self._heartbeats:
            pulse.stop()
        self.session.detach()
