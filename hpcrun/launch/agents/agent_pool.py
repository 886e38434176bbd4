"""The agents of a run as their supervisor has them: started, let in, listened to, given up, called back."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.files import open_for_append
from hpcrun.launch.agents import messages as wire
from hpcrun.launch.agents.connection import AgentIdentity, AgentListener, PendingAgent, ReliableSession
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.failover.heartbeat import CLOCK_TICK_S, AwakeClock, Heartbeat
from hpcrun.messages.lines import describe_version_mismatch
from hpcrun.runs.lease import LEADER_TIMEOUT_S, LEASE_RENEW_S, FencedError, LeaderRecord, Leadership
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.rundir import RunDir

_HELLO_TIMEOUT_S = 120.0
_HEARTBEAT_S = 1.0
_SILENCE_TIMEOUT_S = 10.0
"""An agent speaks every second; one that is silent for so long is lost."""
_SILENT = f"its agent has said nothing for {_SILENCE_TIMEOUT_S:g} s"
_RECONNECT_S = 4.0
"""So long an agent has to connect again when its connection breaks."""
_SUSPECT_PARTITION_S = 4.0
"""When most agents are silent for so long, we may be the one who is cut off: the lease rests."""
_FAILOVER_S = 25.0
"""So long others have then to take over: LEADERLESS_S, two more looks, their turns, and Slurm's word."""
_ADOPT_TIMEOUT_S = 15.0
_SHUTDOWN_S = 20.0
"""So long agents may take to end what is left of ranks, and to give memory back; then the job may end."""
_MAX_LOSSES = 1
"""A node that was lost more often is not called back."""
_RESTART_TIMEOUT_S = 30.0
"""So long an agent that is called back may take to come."""


class AgentHandle:
    """One agent: what we have told each other, and the command that has started it."""

    def __init__(self, node: str, log: Path, clock: Callable[[], float]) -> None:
        self.node, self.log, self._clock = node, log, clock
        self.session, self.id = ReliableSession(wire.AGENT_MESSAGES), ""
        self._heard = clock()
        self._said_before = log.stat().st_size if log.exists() else 0
        self.is_lost = self.has_left = False
        self.refusal = ""
        """Why it is not let in: it is of another version."""
        self.hello: wire.AgentHello | None = None
        """What it has said about itself."""
        self.called: float | None = None
        self.losses = 0
        self.replaced: set[str] = set()
        """The sessions of agents that another one has taken the place of."""
        self._broken: float | None = None
        self._why = ""
        self.children: list[subprocess.Popen[bytes]] = []
        """The steps that it may be in."""

    def send(self, order: wire.AgentOrder) -> None:
        """Give it an order, which it gets also when its connection breaks meanwhile."""
        if not self.is_lost:
            self.session.send(order)

    @property
    def has_answered(self) -> bool:
        """Whether it has said who it is."""
        return self.hello is not None

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard."""
        return self._clock() - self._heard

    def heard(self) -> None:
        """It has said something, over a connection that stands."""
        self._heard, self._broken = self._clock(), None

    def broken(self, why: str) -> None:
        """Its connection has broken; `why`: what was wrong with what came over it, if that was it."""
        self._broken, self._why = self._clock(), f": {why}" if why else ""

    @property
    def is_ended(self) -> bool:
        """Whether it is gone for sure: its connection, and the step that it was in."""
        has_ended = bool(self.children) and all(child.poll() is not None for child in self.children)
        return has_ended and self.session.channel is None

    def trouble(self) -> str | None:
        """Why it must be taken for lost; None where there is no reason."""
        if self.refusal:
            return self.refusal
        if self.is_ended:
            return f"its agent ended{self.last_words()}"
        if self._broken is not None and self._clock() - self._broken > _RECONNECT_S:
            return f"its agent has let the connection go{self._why}{self.last_words()}"
        return _SILENT if self.silent_s > _SILENCE_TIMEOUT_S else None

    def cancel_restart(self) -> None:
        """End the try to have another agent in its place."""
        if self.called is not None:
            self.called = None
            process.kill_child(self.children[-1])

    def last_words(self) -> str:
        """What its log ends with, of what was said while we lead."""
        try:
            with self.log.open(errors="replace") as file:
                file.seek(self._said_before)
                lines = file.read().split("\n")
        except OSError:
            return ""
        output = [line.strip() for line in lines if line.strip()]
        return f"; last output: {output[-1][:300]}" if output else ""


class AgentPool:
    """Agents that come to our gate, one a node."""

    def __init__(
        self,
        run: RunDir,
        leadership: Leadership,
        address: str,
        nodes: Sequence[str],
        missing: str = "",
        gone: Collection[str] = (),
    ) -> None:
        """`missing`: the node whose supervisor we come after; `gone`: those that were lost before.

        Their agents are not waited for; if they come, they are let in.
        """
        self._logs = run.agent_logs
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._leadership = leadership
        clock = AwakeClock()
        self.members = {node: AgentHandle(node, self._logs / f"{node}.log", clock) for node in nodes}
        self._steps: list[subprocess.Popen[bytes]] = []
        self._again: Callable[[str], subprocess.Popen[bytes]] | None = None
        self._deferred: list[tuple[AgentHandle, wire.AgentMessage]] = []
        self._is_closing = False
        self.lost: list[NodeLost] = []
        """The nodes that have ceased to answer, first one first."""
        secret = secrets.token_hex(32)
        self._agent_listener = AgentListener(
            address, secret, run.id, leadership.epoch, nodes, self._refuse_version
        )
        self._selector = selectors.EpollSelector()
        self._selector.register(self._agent_listener, selectors.EVENT_READ)
        self._heartbeats = [Heartbeat(LEASE_RENEW_S, leadership.renew), Heartbeat(_HEARTBEAT_S, self._beat)]
        self._heartbeats.append(Heartbeat(CLOCK_TICK_S, clock.tick, math.inf))
        for node in self.members.keys() & {*gone} - {missing}:
            self.members[node].is_lost, self.members[node].losses = True, 1
        if missing in self.members:
            self.lose(self.members[missing], "its supervisor did not answer any more")
        LeaderRecord(
            leadership.epoch, address, self._agent_listener.port, secret, os.uname().nodename
        ).publish(run)

    def _beat(self) -> None:
        # Who goes on hearing us would not look for the one who leads now.
        if self._leadership.is_fenced:
            return
        for member in self.members.values():
            member.session.send_heartbeat()

    def fileno(self) -> int:
        """Becomes readable when an agent has something to tell."""
        return self._selector.fileno()

    @property
    def living(self) -> list[AgentHandle]:
        """Those that answer."""
        return [agent for agent in self.members.values() if not agent.is_lost]

    def verify(self) -> None:
        """FencedError where another supervisor has taken over."""
        self._leadership.verify()

    def start(self, steps: Mapping[tuple[str, ...], Sequence[str]], environ: Mapping[str, str]) -> None:
        """Start agents by these commands, and wait for them; SiteError names who stays away."""
        for nodes, command in steps.items():
            log = self._logs / f"{nodes[0] if len(nodes) == 1 else 'step'}.log"
            child = self._launch(command, environ, log)
            for node in nodes:
                self.members[node].children.append(child)
        self._await_hello(_HELLO_TIMEOUT_S)
        silent = [agent for agent in self.members.values() if not agent.has_answered]
        for agent in silent:
            if agent.refusal:
                raise SiteError(agent.refusal)
            if agent.is_ended:
                words = f"the agent of node {agent.node} did not start{agent.last_words()}"
                raise SiteError(f"{words}; log: {agent.log}")
        if silent:
            who = ", ".join(agent.node for agent in silent)
            raise SiteError(f"no agent answered on {who} within {_HELLO_TIMEOUT_S:g} s")

    def adopt(self, *, starts_missing: bool = False) -> None:
        """Wait for the agents that somebody else has started; who does not come in time is lost.

        `starts_missing`: that one may have been killed before it had started them all.
        """
        self._await_hello(_ADOPT_TIMEOUT_S)
        missing = [agent for agent in self.living if not agent.has_answered]
        if starts_missing and missing and self._again is not None:
            for agent in missing:
                agent.children.append(self._again(agent.node))
            self._await_hello(_RESTART_TIMEOUT_S)
        for agent in self.living:
            if not agent.has_answered:
                self.lose(agent, "its agent did not come to the new supervisor")

    def set_restart_command(
        self, command: Callable[[str], Sequence[str]], environ: Mapping[str, str]
    ) -> None:
        """How the agent of a lost node is started again, once it is tried."""
        self._again = lambda node: self._launch(command(node), environ, self._logs / f"{node}.log")

    def _launch(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        with open_for_append(log) as output:
            child = process.protect_from_reaper(
                subprocess.Popen(
                    command,
                    # Its end tells agents outside of a batch job that we are gone.
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=dict(environ),
                    start_new_session=True,
                )
            )
        self._steps.append(child)
        return child

    def restart_lost_agents(self) -> None:
        """Try to start an agent again on nodes that were lost once: some come back. Nobody waits for it."""
        for agent in self.members.values():
            is_wanted = agent.is_lost and agent.losses <= _MAX_LOSSES and agent.called is None
            if is_wanted and self._again is not None:
                agent.children.append(self._again(agent.node))
                agent.called = time.monotonic()

    def _await_hello(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(not (agent.has_answered or agent.is_ended or agent.refusal) for agent in self.living):
            if time.monotonic() > deadline:
                return
            for _ in self.pump(0.1):
                pass

    def pump(self, timeout_s: float) -> Iterator[tuple[AgentHandle, wire.AgentMessage]]:
        """What has come in, of agents that live; FencedError where another supervisor leads."""
        for pulse in self._heartbeats:
            pulse.beat()
        self._leadership.check()
        aside, self._deferred = self._deferred, []
        yield from aside
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                continue
            agent: AgentHandle = key.data
            channel = agent.session.channel
            is_alive, messages = agent.session.receive()
            if is_alive:
                agent.heard()
            for message in messages:
                if isinstance(message, wire.AgentHello):
                    agent.hello = message
                    if message.is_restarted:
                        agent.called = None
                    agent.cancel_restart()
                elif isinstance(message, wire.AgentLeft):
                    agent.has_left = True
                elif not agent.is_lost:
                    yield agent, message
            if channel is not None and channel.is_closed and agent.session.channel is channel:
                self._break(agent, channel.why)
        # Also where nobody comes: those who have come and say nothing are shown out in time.
        for guest in self._agent_listener.accept_authenticated():
            self._welcome(guest)

    def _refuse_version(self, identity: AgentIdentity, version: str) -> None:
        agent = self.members[identity.node]
        if not agent.refusal:
            agent.refusal = describe_version_mismatch(f"the agent on {agent.node}", version, "the supervisor")
            log_line(agent.refusal)

    def refuse(self, agent: AgentHandle, why: str) -> None:
        """What it has said cannot be: its connection ends, and it may come again."""
        if agent.session.channel is not None:
            self._break(agent, why)

    def _break(self, agent: AgentHandle, why: str) -> None:
        if why:
            log_line(f"{agent.node}: the connection to its agent is ended, to be made anew: {why}")
        self._let_go(agent)
        agent.broken(why)

    def _welcome(self, guest: PendingAgent) -> None:
        """Let an agent in: one that we know goes on where it was, a new one takes the place of an old one."""
        agent = self.members[guest.identity.node]
        agent.refusal = ""
        if agent.losses > _MAX_LOSSES or guest.identity.session in agent.replaced:
            guest.refuse()
            return
        if guest.identity.session != agent.id:
            agent.send(wire.LeaveRun())
            agent.replaced.add(agent.id)
            if agent.id and not agent.is_lost:
                self.lose(agent, "another agent has come in its place")
                agent.losses -= 1
            agent.session, agent.id, agent.hello = (
                ReliableSession(wire.AGENT_MESSAGES),
                guest.identity.session,
                None,
            )
        self._let_go(agent)
        channel = guest.admit(agent.session.seen)
        agent.session.attach(channel, guest.identity.seen)
        self._selector.register(channel, selectors.EVENT_READ, agent)
        agent.heard()
        if agent.is_lost:
            agent.is_lost = False
            # Whatever it has of an attempt that went on without it.
            agent.send(wire.ClearRanks(None, ()))
            if self._is_closing:
                agent.send(wire.LeaveRun())

    def _let_go(self, agent: AgentHandle) -> None:
        if agent.session.channel is not None:
            self._selector.unregister(agent.session.channel)
            agent.session.detach()

    def find_unresponsive(self) -> list[tuple[AgentHandle, str]]:
        """Who must be taken for lost, and why; where most fall silent at once, it may be us who are lost."""
        if self._is_cut_off():
            self._wait_for_successor()
        for member in self.members.values():
            if member.called is not None and time.monotonic() - member.called > _RESTART_TIMEOUT_S:
                member.cancel_restart()
        troubles = ((agent, agent.trouble()) for agent in self.living)
        return [(agent, why) for agent, why in troubles if why is not None]

    def _is_cut_off(self) -> bool:
        living = self.living
        silent = [agent for agent in living if agent.silent_s > _SUSPECT_PARTITION_S and not agent.is_ended]
        return 2 * len(silent) > len(living)

    def _wait_for_successor(self) -> None:
        """Do nothing for as long as it takes the others to continue without us; FencedError when they have.

        Nobody can tell a network that has left us from nodes that have failed: the lease rests meanwhile, so
        that the other side may take over. If nobody does, they have failed, and we decide.
        """
        self._leadership.is_paused = True
        living = self.living
        began, has_killed = time.monotonic(), False
        try:
            while self._is_cut_off() and time.monotonic() - began < _FAILOVER_S:
                # What was put aside before comes first.
                self._deferred = list(self.pump(0.2))
                if not has_killed and time.monotonic() - began > LEADER_TIMEOUT_S - _SUSPECT_PARTITION_S:
                    # Before anybody else starts them, our own ranks are gone.
                    has_killed = True
                    for member in living:
                        member.send(wire.KillRanks(None))
            self._leadership.verify()
        finally:
            self._leadership.is_paused = False

    def lose(self, member: AgentHandle, why: str) -> NodeLost:
        """Give one up."""
        self._let_go(member)
        member.is_lost = True
        member.losses += 1
        self.lost.append(NodeLost(member.node, why, time.time()))
        return self.lost[-1]

    def close(self) -> None:
        """End the agents, unless another supervisor has them now."""
        try:
            self._leadership.verify()
            self._dismiss_agents()
        except FencedError:
            # At a signal that can be caught, and at the end of its own child too, srun would end the agents.
            for child in self._steps:
                process.kill_child(child)
        for pulse in self._heartbeats:
            pulse.stop()
        for child in self._steps:
            process.kill_child(child)
            child.wait()
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        for agent in self.members.values():
            self._let_go(agent)
        self._agent_listener.close()
        self._selector.close()

    def _dismiss_agents(self) -> None:
        self._is_closing = True
        for agent in self.members.values():
            agent.send(wire.LeaveRun())
        deadline = time.monotonic() + _SHUTDOWN_S
        # A connection that breaks tells nothing: whoever made it again is yet to hear that it may go.
        while time.monotonic() < deadline and any(
            not agent.has_left and not agent.trouble() for agent in self.living
        ):
            for _ in self.pump(0.1):
                pass
        for child in self._steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
