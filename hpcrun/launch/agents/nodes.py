"""The nodes of a run as its supervisor sees them: this one, or several with an agent on each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hpcrun import process
from hpcrun.fabric.inventory import Inventory, parse_inventory, try_inventory
from hpcrun.health.connection_test import in_words, targets
from hpcrun.health.preflight import LONGEST_S, Ask, answer
from hpcrun.launch.agents.agent_pool import Crew, Member
from hpcrun.launch.agents.local_ranks import NodeRanks
from hpcrun.launch.agents.local_workers import Hosts
from hpcrun.launch.agents.worker_process import KIND
from hpcrun.launch.attempt_events import Happening, NodeLost, OnNode, RankEnded, RankMet, RankUp, decode
from hpcrun.launch.rendezvous import KIND as MEETING
from hpcrun.launch.rendezvous import TRIAL, MeetingPoint, MeetingRequest, NodeRendezvous, parse_meeting
from hpcrun.process import ProcessId
from hpcrun.runs.heartbeat_age import Heard
from hpcrun.runs.lease import FencedError
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir

_ANSWER_S = 15.0
_DUMP_S = 1.0
"""The answer comes soon after the time that the agents have for it."""


class Nodes(Protocol):
    """Where the ranks of attempts stand, one attempt after the other."""

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes that still answer."""

    @property
    def lost(self) -> list[NodeLost]:
        """Those that do not any more, first one first."""

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """Where in the network the nodes say they are: SLURM_TOPOLOGY_ADDR and its pattern."""

    @property
    def inventories(self) -> dict[str, Inventory]:
        """What the nodes that have said so have inside."""

    def preflight(self, ask: Ask) -> dict[str, dict[str, Any]]:
        """Have every node look at itself; the answers of those that give one in time."""

    def meet(self, request: MeetingRequest) -> dict[str, MeetingPoint]:
        """Where each node is reached by the others, and a port of rank 0's; of those that answer in time."""

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """Have the nodes with ranks connect to each other: what fails, in words, and the nodes to blame."""

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Look out for the ranks of an attempt, which are about to be started.

        `hears`: the name of the socket on each node through which they will report their progress.
        """

    def launched(self, launcher: ProcessId) -> None:
        """The launcher on this host is running."""

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Start a process of the launcher's on a node; only where there are agents."""

    def fileno(self) -> int:
        """Becomes readable when there is something to be told."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen, if only as one that has gone."""

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have met and none has ended."""

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""

    def news(self, *, look: bool) -> Iterator[Happening]:
        """What has happened since the last call; `look`: also go and see who has come up."""

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""

    def rest(self, seconds: float) -> None:
        """Let time pass between two attempts, for so long at most; the nodes are still heard."""

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks; what is seen of each from outside, where its node answers."""

    def kill(self) -> None:
        """End the ranks at once."""

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """End whatever is left of the attempt, the launcher apart; says what could not be ended."""

    def warm(self, spares: Sequence[str]) -> None:
        """Have nodes without ranks load what ranks of ours load, so that they need no time for it later."""

    def call_back(self) -> None:
        """Try to have lost nodes back for an attempt to come; takes no time."""

    def drain(self, node: str, told: dict[str, Any]) -> None:
        """Tell the drain worker of a node something; the first word starts it."""

    def drained(self) -> list[tuple[str, dict[str, Any]]]:
        """What drain workers have said since the last call, each with its node."""

    def verify(self) -> None:
        """FencedError where another supervisor has taken the run over."""

    def close(self) -> None:
        """Let the nodes go."""


class ThisNode:
    """All ranks stand on this host, below the launcher: nobody in between is needed."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ranks: NodeRanks | None = None
        self._hosts, self._meeting = Hosts(run), NodeRendezvous()

    @property
    def alive(self) -> tuple[str, ...]:
        """This host."""
        return (os.uname().nodename,)

    @property
    def lost(self) -> list[NodeLost]:
        """Who loses this host does not ask."""
        return []

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """Nobody is asked."""
        return {}

    @property
    def inventories(self) -> dict[str, Inventory]:
        """That of this host, where it can be had."""
        found = try_inventory()
        return {os.uname().nodename: found} if found else {}

    @property
    def _here(self) -> NodeRanks:
        assert self._ranks is not None
        return self._ranks

    def preflight(self, ask: Ask) -> dict[str, dict[str, Any]]:
        """Look at this host."""
        node = os.uname().nodename
        return {node: answer(self._run, ask.of(node).as_json())}

    def meet(self, request: MeetingRequest) -> dict[str, MeetingPoint]:
        """All ranks stand here, so loopback it is."""
        here = replace(request, nodes=request.nodes[:1])
        point = parse_meeting(self._meeting.answer(here.as_json()))
        return dict.fromkeys(request.nodes, point)

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """There is nothing between ranks of one host."""
        return "", ()

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Look out for the ranks of an attempt."""
        self._ranks = NodeRanks(attempt, range(len(placement.ranks)), hears)

    def launched(self, launcher: ProcessId) -> None:
        """The ranks are found below this process."""
        self._here.below = launcher

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Never called: the launcher starts all by itself."""
        raise AssertionError(f"there is no agent on {node}")

    def fileno(self) -> int:
        """Becomes readable when a rank ends."""
        return self._here.fileno()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen."""
        return self._here.is_complete

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have met and none has ended."""
        return self._here.is_calm

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""
        return self._here.is_over

    def news(self, *, look: bool) -> Iterator[Happening]:
        """Who has ended, and who has come up."""
        yield from self._here.ended()
        if look:
            yield from self._here.appeared()
            yield from self._here.heard()

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""
        self._here.signal(number, rank)

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        self._hosts.wait(seconds)

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks."""
        return self._here.dump(timeout_s)

    def kill(self) -> None:
        """End the ranks at once."""
        self._here.kill()

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """End whatever is left of the attempt below the launcher."""
        stuck = self._here.clear(timeout_s, self._hosts.pids)
        self._meeting.close()
        process.reap_orphans()
        return [f"process {pid}" for pid in stuck]

    def warm(self, spares: Sequence[str]) -> None:
        """There are none here."""

    def call_back(self) -> None:
        """Who loses this host does not ask."""

    def drain(self, node: str, told: dict[str, Any]) -> None:
        """Tell the drain worker of a node something."""
        self._hosts.tell(node, told)

    def drained(self) -> list[tuple[str, dict[str, Any]]]:
        """What it has said."""
        return self._hosts.hear()

    def verify(self) -> None:
        """A run on one host dies with it: nobody takes it over."""

    def close(self) -> None:
        """End the drain worker, and give its memory back."""
        self._hosts.close()
        self._meeting.close()


class AgentNodes:
    """Several nodes, each with an agent."""

    def __init__(self, crew: Crew, run: RunDir) -> None:
        self._crew, self._losses, self._heard = crew, len(crew.lost), Heard(run)
        self._attempt, self._placement = 0, Placement(())
        self._up: set[int] = set()
        self._met: set[int] = set()
        self._ended: set[int] = set()
        self._drained: list[tuple[str, dict[str, Any]]] = []

    def _pump(self, timeout_s: float) -> Iterator[tuple[Member, dict[str, Any]]]:
        """What agents have said; what comes from drain workers waits until somebody asks for it."""
        for agent, message in self._crew.pump(timeout_s):
            if message["kind"] == KIND:
                self._drained.append((agent.node, message["told"]))
            else:
                yield agent, message

    @property
    def lost(self) -> list[NodeLost]:
        """The nodes that have ceased to answer, first one first."""
        return self._crew.lost

    def _await(
        self, kind: str, timeout_s: float, attempt: int | None = None, nodes: Sequence[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """One answer of this kind, about this attempt or the newest, from every living agent (of `nodes`)."""
        about = self._attempt if attempt is None else attempt
        answers: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        asked = [one for one in self._crew.living if nodes is None or one.node in nodes]
        while any(one.node not in answers and not one.is_lost for one in asked):
            for agent, message in self._pump(0.1):
                if message["kind"] == kind and message.get("attempt") == about:
                    answers[agent.node] = message
            self._new_losses()
            if time.monotonic() > deadline:
                break
        return answers

    def _new_losses(self) -> list[NodeLost]:
        """Who was lost since the last call; the ranks there have ended."""
        for agent, why in self._crew.troubles():
            self._crew.lose(agent, why)
        new = self._crew.lost[self._losses :]
        self._losses += len(new)
        for one in new:
            self._ended |= set(self._placement.on(one.node))
        return new

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes whose agent answers."""
        return tuple(agent.node for agent in self._crew.living)

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """What Slurm has told every agent about its place, where it has."""
        said = {node: one.hello for node, one in self._crew.members.items()}
        told = {node: hello["address"] for node, hello in said.items() if hello}
        return {node: (address, pattern) for node, (address, pattern) in told.items() if address and pattern}

    @property
    def inventories(self) -> dict[str, Inventory]:
        """What the agents have said with their first words."""
        said = ((node, parse_inventory(one.hello.get("inside"))) for node, one in self._crew.members.items())
        return {node: found for node, found in said if found is not None}

    def preflight(self, ask: Ask) -> dict[str, dict[str, Any]]:
        """Have every agent look at its node."""
        for agent in self._crew.members.values():
            agent.tell(do="preflight", **ask.of(agent.node).as_json())
        return self._await("preflight", LONGEST_S + _ANSWER_S, ask.attempt)

    def meet(self, request: MeetingRequest) -> dict[str, MeetingPoint]:
        """Ask the agents of the nodes with ranks."""
        for node in request.nodes:
            self._crew.members[node].tell(do=MEETING, **request.of(node).as_json())
        answers = self._await(MEETING, _ANSWER_S, request.attempt, request.nodes)
        return {node: parse_meeting(one) for node, one in answers.items()}

    def try_connections(self) -> tuple[str, tuple[str, ...]]:
        """Each listens, each tries the others, and only then they cease to listen."""
        nodes = self._placement.nodes
        listening = self._trial("listen", {node: {} for node in nodes})
        places = {node: one["place"] for node, one in listening.items() if one.get("place")}
        orders = {node: {"places": targets(places, node)} for node in places}
        tried = self._trial("try", orders)
        self._trial("end", {node: {} for node in places}, wait=False)
        absent = [node for node in nodes if node not in tried]
        words, blamed = in_words({node: one["failed"] for node, one in tried.items()}, [*tried])
        if absent:
            words = "; ".join(filter(None, (f"{', '.join(absent[:8])} took no part in a trial", words)))
        return words, blamed

    def _trial(
        self, step: str, orders: Mapping[str, dict[str, Any]], *, wait: bool = True
    ) -> dict[str, dict[str, Any]]:
        for node, more in orders.items():
            self._crew.members[node].tell(do=TRIAL, attempt=self._attempt, step=step, **more)
        if not wait:
            return {}
        return self._await(f"{TRIAL} {step}", _ANSWER_S, nodes=[*orders])

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Tell every agent which ranks to look out for."""
        self._attempt, self._placement = attempt.number, placement
        self._up, self._met, self._ended = set(), set(), set()
        for agent in self._crew.members.values():
            ranks = placement.on(agent.node)
            agent.tell(do="watch", attempt=attempt.number, ranks=ranks, hears=hears)
        # The ranks are started only when everybody looks: what was there before can then be told from theirs.
        self._await("watching", _ANSWER_S)

    def launched(self, launcher: ProcessId) -> None:
        """The agents do not need to know it."""

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Start a process of the launcher's on a node."""
        self._crew.members[node].tell(do="start", attempt=self._attempt, argv=list(argv), log=str(log))

    def fileno(self) -> int:
        """Becomes readable when an agent has something to tell."""
        return self._crew.fileno()

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

    def news(self, *, look: bool) -> Iterator[Happening]:
        """What the agents have seen of this attempt."""
        for agent, message in self._pump(0.0):
            if message.pop("attempt", None) != self._attempt:
                continue
            happening = decode(message)
            if happening is not None and happening.rank not in self._placement.on(agent.node):
                self._crew.refuse(agent, f"it tells of rank {happening.rank}, which is not there")
            elif happening is not None:
                if isinstance(happening, RankEnded):
                    happening = happening.by_our_clock(time.time())
                self._note(happening)
                yield happening
        yield from self._new_losses()
        self._heard.show({one.node: one.silent_s for one in self._crew.living})

    def verify(self) -> None:
        """FencedError where another supervisor has taken over."""
        self._crew.verify()

    def _note(self, happening: OnNode) -> None:
        match happening:
            case RankUp(rank):
                self._up.add(rank)
            case RankMet(rank):
                self._met.add(rank)
            case RankEnded(rank):
                self._ended.add(rank)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""
        for agent in self._crew.members.values():
            if rank is None or self._placement.ranks[rank] == agent.node:
                agent.tell(do="signal", attempt=self._attempt, number=number, rank=rank)

    def rest(self, seconds: float) -> None:
        """Let time pass; what an agent says meanwhile is heard."""
        for _ in self._pump(seconds):
            continue
        self._new_losses()

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every agent see to its own ranks; those of one that does not answer are missing."""
        for agent in self._crew.members.values():
            agent.tell(do="dump", attempt=self._attempt, timeout_s=timeout_s)
        answers = self._await("dumped", timeout_s + _DUMP_S)
        return {int(rank): seen for one in answers.values() for rank, seen in one["ranks"].items()}

    def kill(self) -> None:
        """End the ranks at once."""
        for agent in self._crew.members.values():
            agent.tell(do="kill", attempt=self._attempt)

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """Have every agent end what is left; the launcher on this host is not theirs to end."""
        for agent in self._crew.members.values():
            spared = [launcher] if agent.node == os.uname().nodename else []
            agent.tell(do="clear", attempt=self._attempt, spared=spared)
        try:
            answers = self._await("cleared", timeout_s + _ANSWER_S)
        except FencedError:
            # The others do what their new supervisor says, and the agent of this node has been told to.
            return []
        return [
            f"process {pid} on node {node}" for node, answer in answers.items() for pid in answer["stuck"]
        ]

    def warm(self, spares: Sequence[str]) -> None:
        """Have these nodes load what ranks of ours load; nobody waits for it."""
        for node in spares:
            self._crew.members[node].tell(do="warm", attempt=self._attempt)

    def call_back(self) -> None:
        """Try to have lost nodes back for an attempt to come; takes no time."""
        self._crew.call_back()

    def drain(self, node: str, told: dict[str, Any]) -> None:
        """Tell the drain worker of a node something."""
        self._crew.members[node].tell(do=KIND, told=told)

    def drained(self) -> list[tuple[str, dict[str, Any]]]:
        """What drain workers have said since the last call."""
        said, self._drained = self._drained, []
        return said

    def close(self) -> None:
        """End the agents."""
        self._crew.close()
