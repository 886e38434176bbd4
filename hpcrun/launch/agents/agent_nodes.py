"""The nodes of a run with an agent on each, as its supervisor sees them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from hpcrun.checkpoint.worker_messages import WorkerMessage, WorkerOrder
from hpcrun.fabric.inventory import NodeInventory, parse_node_inventory
from hpcrun.health.connection_test import choose_targets, describe_unreachable
from hpcrun.health.preflight import MAX_PREFLIGHT_S, PreflightReport, PreflightRequest
from hpcrun.launch.agents import messages as wire
from hpcrun.launch.agents.agent_pool import AgentHandle, AgentPool
from hpcrun.launch.attempt_events import (
    AttemptEvent,
    NodeEvent,
    NodeLost,
    RankConnected,
    RankEnded,
    RankStarted,
)
from hpcrun.launch.rendezvous import (
    ConnectionTestReport,
    ConnectionTestStep,
    RendezvousAnswer,
    RendezvousPoint,
    RendezvousRequest,
    TestStep,
)
from hpcrun.process import ProcessId
from hpcrun.runs.heartbeat_age import HeartbeatAgeFile
from hpcrun.runs.lease import FencedError
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir

_ANSWER_TIMEOUT_S = 15.0
_DUMP_SLACK_S = 1.0
"""The answer comes soon after the time that the agents have for it."""

_M = TypeVar(
    "_M",
    PreflightReport,
    RendezvousAnswer,
    ConnectionTestReport,
    wire.WatchingRanks,
    wire.StacksDumped,
    wire.RanksCleared,
)


class AgentNodes:
    """Several nodes, each with an agent."""

    def __init__(self, crew: AgentPool, run: RunDir) -> None:
        self._agent_pool, self._losses, self._heard = crew, len(crew.lost), HeartbeatAgeFile(run)
        self._attempt, self._placement = 0, Placement(())
        self._up: set[int] = set()
        self._met: set[int] = set()
        self._ended: set[int] = set()
        self._worker_messages: list[tuple[str, WorkerMessage]] = []

    def _pump(self, timeout_s: float) -> Iterator[tuple[AgentHandle, wire.AgentMessage]]:
        """What agents have said; what comes from checkpoint workers waits until somebody asks for it."""
        for agent, message in self._agent_pool.pump(timeout_s):
            if isinstance(message, wire.ForwardedMessage):
                self._worker_messages.append((agent.node, message.message))
            else:
                yield agent, message

    @property
    def lost(self) -> list[NodeLost]:
        """The nodes that have ceased to answer, first one first."""
        return self._agent_pool.lost

    def _await(
        self, kind: type[_M], timeout_s: float, attempt: int | None = None, nodes: Sequence[str] | None = None
    ) -> dict[str, _M]:
        """One answer of this kind, about this attempt or the newest, from every living agent (of `nodes`)."""
        about = self._attempt if attempt is None else attempt
        answers: dict[str, _M] = {}
        deadline = time.monotonic() + timeout_s
        queried = [agent for agent in self._agent_pool.living if nodes is None or agent.node in nodes]
        while any(
            queried_agent.node not in answers and not queried_agent.is_lost for queried_agent in queried
        ):
            for agent, message in self._pump(0.1):
                if isinstance(message, kind) and message.attempt == about:
                    answers[agent.node] = message
            self._new_losses()
            if time.monotonic() > deadline:
                break
        return answers

    def _new_losses(self) -> list[NodeLost]:
        """Who was lost since the last call; the ranks there have ended."""
        for agent, why in self._agent_pool.find_unresponsive():
            self._agent_pool.lose(agent, why)
        new = self._agent_pool.lost[self._losses :]
        self._losses += len(new)
        for node_lost in new:
            self._ended |= set(self._placement.on(node_lost.node))
        return new

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes whose agent answers."""
        return tuple(agent.node for agent in self._agent_pool.living)

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """What Slurm has told every agent about its place, where it has."""
        hellos = {node: agent.hello for node, agent in self._agent_pool.members.items()}
        return {node: hello.address for node, hello in hellos.items() if hello and all(hello.address)}

    @property
    def inventories(self) -> dict[str, NodeInventory]:
        """What the agents have said with their first words."""
        inventories = (
            (node, parse_node_inventory(agent.hello.inventory))
            for node, agent in self._agent_pool.members.items()
            if agent.hello is not None
        )
        return {node: inventory for node, inventory in inventories if inventory is not None}

    def preflight(self, ask: PreflightRequest) -> dict[str, PreflightReport]:
        """Have every agent look at its node."""
        for agent in self._agent_pool.members.values():
            agent.send(ask.of(agent.node))
        return self._await(PreflightReport, MAX_PREFLIGHT_S + _ANSWER_TIMEOUT_S, ask.attempt)

    def resolve_rendezvous(self, request: RendezvousRequest) -> dict[str, RendezvousPoint]:
        """Ask the agents of the nodes with ranks."""
        for node in request.nodes:
            self._agent_pool.members[node].send(request.of(node))
        answers = self._await(RendezvousAnswer, _ANSWER_TIMEOUT_S, request.attempt, request.nodes)
        return {node: answer.point for node, answer in answers.items()}

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """Each listens, each tries the others, and only then they cease to listen."""
        nodes = self._placement.nodes
        listening = self._run_connection_test("listen", nodes)
        places = {node: report.place for node, report in listening.items() if report.place}
        targets = {node: choose_targets(places, node) for node in places}
        tried = self._run_connection_test("try", places, targets)
        for node in places:
            self._agent_pool.members[node].send(ConnectionTestStep(self._attempt, "end"))
        absent = [node for node in nodes if node not in tried]
        words, blamed = describe_unreachable(
            {node: report.failed for node, report in tried.items()}, [*tried]
        )
        if absent:
            words = "; ".join(filter(None, (f"{', '.join(absent[:8])} took no part in a trial", words)))
        return words, blamed

    def _run_connection_test(
        self,
        step: TestStep,
        nodes: Collection[str],
        targets: Mapping[str, dict[str, tuple[str, int]]] = MappingProxyType({}),
    ) -> dict[str, ConnectionTestReport]:
        for node in nodes:
            order = ConnectionTestStep(self._attempt, step, targets.get(node, {}))
            self._agent_pool.members[node].send(order)
        return self._await(ConnectionTestReport, _ANSWER_TIMEOUT_S, nodes=[*nodes])

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Tell every agent which ranks to look out for."""
        self._attempt, self._placement = attempt.number, placement
        self._up, self._met, self._ended = set(), set(), set()
        for agent in self._agent_pool.members.values():
            ranks = placement.on(agent.node)
            agent.send(wire.WatchRanks(attempt.number, tuple(ranks), hears))
        # The ranks are started only when everybody looks: what was there before can then be told from theirs.
        self._await(wire.WatchingRanks, _ANSWER_TIMEOUT_S)

    def launcher_started(self, launcher: ProcessId) -> None:
        """The agents do not need to know it."""

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Start a process of the launcher's on a node."""
        self._agent_pool.members[node].send(wire.StartProcess(self._attempt, tuple(argv), str(log)))

    def fileno(self) -> int:
        """Becomes readable when an agent has something to tell."""
        return self._agent_pool.fileno()

    @property
    def _expected(self) -> set[int]:
        return set(range(len(self._placement.ranks)))

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen."""
        return self._expected <= self._up | self._ended

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have met and none has ended."""
        return self._expected <= self._met and not self._ended

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended; those of a lost node have."""
        return self._expected <= self._ended

    def news(self, *, look: bool) -> Iterator[AttemptEvent]:
        """What the agents have seen of this attempt."""
        for agent, message in self._pump(0.0):
            if not isinstance(message, wire.NodeReport) or message.attempt != self._attempt:
                continue
            happening = message.event
            if happening.rank not in self._placement.on(agent.node):
                self._agent_pool.refuse(agent, f"it tells of rank {happening.rank}, which is not there")
            else:
                if isinstance(happening, RankEnded):
                    happening = happening.to_supervisor_clock(time.time())
                self._note(happening)
                yield happening
        yield from self._new_losses()
        self._heard.show({agent.node: agent.silent_s for agent in self._agent_pool.living})

    def verify(self) -> None:
        """FencedError where another supervisor has taken over."""
        self._agent_pool.verify()

    def _note(self, happening: NodeEvent) -> None:
        match happening:
            case RankStarted(rank):
                self._up.add(rank)
            case RankConnected(rank):
                self._met.add(rank)
            case RankEnded(rank):
                self._ended.add(rank)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""
        for agent in self._agent_pool.members.values():
            if rank is None or self._placement.ranks[rank] == agent.node:
                agent.send(wire.SignalRanks(self._attempt, number, rank))

    def rest(self, seconds: float) -> None:
        """Let time pass; what an agent says meanwhile is heard."""
        for _ in self._pump(seconds):
            continue
        self._new_losses()

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every agent see to its own ranks; those of one that does not answer are missing."""
        for agent in self._agent_pool.members.values():
            agent.send(wire.DumpStacks(self._attempt, timeout_s))
        answers = self._await(wire.StacksDumped, timeout_s + _DUMP_SLACK_S)
        return {int(rank): seen for answer in answers.values() for rank, seen in answer.ranks.items()}

    def kill(self) -> None:
        """End the ranks at once."""
        for agent in self._agent_pool.members.values():
            agent.send(wire.KillRanks(self._attempt))

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """Have every agent end what is left; the launcher on this host is not theirs to end."""
        for agent in self._agent_pool.members.values():
            spared = (launcher,) if agent.node == os.uname().nodename else ()
            agent.send(wire.ClearRanks(self._attempt, spared))
        try:
            answers = self._await(wire.RanksCleared, timeout_s + _ANSWER_TIMEOUT_S)
        except FencedError:
            # The others do what their new supervisor says, and the agent of this node has been told to.
            return []
        return [f"process {pid} on node {node}" for node, answer in answers.items() for pid in answer.stuck]

    def warm(self, spares: Sequence[str]) -> None:
        """Have these nodes load what ranks of ours load; nobody waits for it."""
        for node in spares:
            self._agent_pool.members[node].send(wire.WarmUp(self._attempt))

    def restart_lost_agents(self) -> None:
        """Try to have lost nodes back for an attempt to come; takes no time."""
        self._agent_pool.restart_lost_agents()

    def send_to_worker(self, node: str, order: WorkerOrder) -> None:
        """Tell the checkpoint worker of a node something."""
        self._agent_pool.members[node].send(wire.ForwardedOrder(order))

    def worker_messages(self) -> list[tuple[str, WorkerMessage]]:
        """What checkpoint workers have said since the last call."""
        messages, self._worker_messages = self._worker_messages, []
        return messages

    def close(self) -> None:
        """End the agents."""
        self._agent_pool.close()
