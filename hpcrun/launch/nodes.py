"""The nodes of a run as its supervisor sees them: this one, or several with an agent on each."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.launch.happenings import Happening, NodeLost, OnNode, RankEnded, RankMet, RankUp, decode
from hpcrun.launch.lease import Lease
from hpcrun.launch.node import NodeRanks
from hpcrun.launch.preflight import LONGEST_S, Ask, answer
from hpcrun.launch.pulse import Pulse
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir

_HELLO_S = 120.0
_BEAT_S = 1.0
_SILENCE_S = 10.0
"""An agent speaks every second; one that is silent for so long is lost."""
_SILENT = f"its agent has said nothing for {_SILENCE_S:g} s"
_ANSWER_S = 15.0
_LEAVE_S = 5.0


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

    def preflight(self, ask: Ask) -> dict[str, dict[str, Any]]:
        """Have every node look at itself; the answers of those that give one in time."""

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Look out for the ranks of an attempt, which are about to be started.

        `hears`: the name of the socket on each node through which they will report their progress.
        """

    def launched(self, pid: int) -> None:
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

    def close(self) -> None:
        """Let the nodes go."""


class ThisNode:
    """All ranks stand on this host, below the launcher: nobody in between is needed."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ranks: NodeRanks | None = None

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
    def _here(self) -> NodeRanks:
        assert self._ranks is not None
        return self._ranks

    def preflight(self, ask: Ask) -> dict[str, dict[str, Any]]:
        """Look at this host."""
        return {os.uname().nodename: answer(self._run, ask.as_json())}

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Look out for the ranks of an attempt."""
        self._ranks = NodeRanks(attempt, range(len(placement.ranks)), hears)

    def launched(self, pid: int) -> None:
        """The ranks are found below this process."""
        self._here.below = pid

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
        time.sleep(seconds)

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks."""
        return self._here.dump(timeout_s)

    def kill(self) -> None:
        """End the ranks at once."""
        self._here.kill()

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """End whatever is left of the attempt below the launcher."""
        stuck = self._here.clear(timeout_s)
        process.reap_orphans(keep=launcher)
        return [f"process {pid}" for pid in stuck]

    def close(self) -> None:
        """Nothing is held between attempts."""


class _Agent:
    """One agent, through the two pipes of the command that has started it."""

    def __init__(self, node: str, child: subprocess.Popen[bytes], log: Path) -> None:
        self.node, self.child, self.log = node, child, log
        self.heard = time.monotonic()
        self.is_lost = False
        self._waiting = b""
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)

    @property
    def output(self) -> int:
        assert self.child.stdout is not None
        return self.child.stdout.fileno()

    def tell(self, **order: Any) -> None:
        if self.is_lost:
            return  # its pipe would fill up, and we would wait
        assert self.child.stdin is not None
        # One that is gone is noticed where its answers are read.
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write((json.dumps(order) + "\n").encode())
            self.child.stdin.flush()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it has said; `{"kind": "gone"}` is the last."""
        try:
            while data := os.read(self.output, 65536):
                self._waiting += data
        except BlockingIOError:
            closed = False
        else:
            closed = True
        *lines, self._waiting = self._waiting.split(b"\n")
        for line in lines:
            self.heard = time.monotonic()
            # What a site's prolog prints comes this way too.
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and "kind" in message:
                    yield message
        if closed:
            yield {"kind": "gone"}

    def last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f"; it said last: {said[-1][:300]}" if said else ""


class AgentNodes:
    """Several nodes, each with an agent that was started there by the given command."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str], run: RunDir
    ) -> None:
        logs = run.agent_logs
        logs.mkdir(mode=0o700, exist_ok=True)
        self._lease, self._pulse = Lease(run), Pulse(run)
        self._selector = selectors.EpollSelector()
        self._agents: dict[str, _Agent] = {}
        self._placement = Placement(())
        self._up: set[int] = set()
        self._met: set[int] = set()
        self._ended: set[int] = set()
        self._beaten = 0.0
        self.lost: list[NodeLost] = []
        """The nodes that do not answer any more, first one first."""
        try:
            for node, command in commands.items():
                self._open(node, command, environ, logs / f"{node}.log")
            self._hello = self._await("hello", _HELLO_S)
        except BaseException:
            self.close()
            raise

    def _open(self, node: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
        self._agents[node] = _Agent(node, child, log)
        self._selector.register(self._agents[node].output, selectors.EVENT_READ, node)

    def _await(self, kind: str, timeout_s: float) -> dict[str, dict[str, Any]]:
        """One answer of this kind from every agent that lives; SiteError names those that give none."""
        answers: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        began = time.monotonic()
        while waited := [one for one in self._agents.values() if one.node not in answers and not one.is_lost]:
            self._selector.select(0.1)
            self._lease.renew()
            for agent in waited:
                for message in agent.messages():
                    if message["kind"] == kind:
                        answers[agent.node] = message
                    elif message["kind"] == "gone":
                        if kind == "hello":
                            words = f"the agent of node {agent.node} did not start{agent.last_words()}"
                            raise SiteError(f"{words}; log: {agent.log}")
                        self._lose(agent, f"its agent ended{agent.last_words()}")
                silent_s = time.monotonic() - max(agent.heard, began)
                if kind != "hello" and not agent.is_lost and silent_s > _SILENCE_S:
                    self._lose(agent, _SILENT)
            if time.monotonic() > deadline:
                nodes = ", ".join(one.node for one in waited)
                if kind == "hello":
                    raise SiteError(f"no agent answered on {nodes} within {timeout_s:g} s")
                break
        return answers

    def _lose(self, agent: _Agent, why: str) -> NodeLost:
        agent.is_lost = True
        self._selector.unregister(agent.output)
        self._ended |= set(self._placement.on(agent.node))
        self.lost.append(NodeLost(agent.node, why, time.time()))
        return self.lost[-1]

    @property
    def alive(self) -> tuple[str, ...]:
        """The nodes whose agent still answers."""
        return tuple(node for node, agent in self._agents.items() if not agent.is_lost)

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """What Slurm has told every agent about its place, where it has."""
        told = {node: said["address"] for node, said in self._hello.items()}
        return {node: (address, pattern) for node, (address, pattern) in told.items() if address and pattern}

    def preflight(self, ask: Ask) -> dict[str, dict[str, Any]]:
        """Have every agent look at its node."""
        for agent in self._agents.values():
            agent.tell(do="preflight", **ask.as_json())
        return self._await("preflight", LONGEST_S + _ANSWER_S)

    def watch(self, attempt: Attempt, placement: Placement, hears: str) -> None:
        """Tell every agent which ranks to look out for."""
        self._placement = placement
        self._up, self._met, self._ended = set(), set(), set()
        for agent in self._agents.values():
            ranks = placement.on(agent.node)
            agent.tell(do="watch", attempt=attempt.number, ranks=ranks, hears=hears)
        # The ranks are started only when everybody looks: what was there before can then be told from theirs.
        self._await("watching", _ANSWER_S)

    def launched(self, pid: int) -> None:
        """The agents do not need to know it."""

    def start(self, node: str, argv: Sequence[str], log: Path) -> None:
        """Start a process of the launcher's on a node."""
        self._agents[node].tell(do="start", argv=list(argv), log=str(log))

    def fileno(self) -> int:
        """Becomes readable when an agent has something to tell."""
        return self._selector.fileno()

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
        """What the agents have seen."""
        self._beat()
        for agent in [one for one in self._agents.values() if not one.is_lost]:
            for message in agent.messages():
                happening = decode(message)
                if happening is not None:
                    self._note(happening)
                    yield happening
                elif message["kind"] == "gone":
                    yield self._lose(agent, f"its agent ended{agent.last_words()}")
            if not agent.is_lost and time.monotonic() - agent.heard > _SILENCE_S:
                yield self._lose(agent, _SILENT)

    def _beat(self) -> None:
        """Say that we are there: to the agents, and in the run directory."""
        self._lease.renew()
        if time.monotonic() - self._beaten > _BEAT_S:
            self._beaten = time.monotonic()
            for agent in self._agents.values():
                agent.tell(do="beat")
            self._pulse.show({node: self._agents[node].heard for node in self.alive})

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
        for agent in self._agents.values():
            if rank is None or self._placement.ranks[rank] == agent.node:
                agent.tell(do="signal", number=number, rank=rank)

    def rest(self, seconds: float) -> None:
        """Let time pass; what an agent says meanwhile is heard."""
        self._selector.select(seconds)
        for _ in self.news(look=False):
            continue

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every agent see to its own ranks; those of one that does not answer are missing."""
        for agent in self._agents.values():
            agent.tell(do="dump", timeout_s=timeout_s)
        answers = self._await("dumped", timeout_s + _BEAT_S)
        return {int(rank): seen for one in answers.values() for rank, seen in one["ranks"].items()}

    def kill(self) -> None:
        """End the ranks at once."""
        for agent in self._agents.values():
            agent.tell(do="kill")

    def clear(self, timeout_s: float, launcher: int) -> list[str]:
        """Have every agent end what is left; the launcher on this host is not theirs to end."""
        for agent in self._agents.values():
            spared = [launcher] if agent.node == os.uname().nodename else []
            agent.tell(do="clear", spared=spared)
        answers = self._await("cleared", timeout_s + _ANSWER_S)
        return [
            f"process {pid} on node {node}" for node, answer in answers.items() for pid in answer["stuck"]
        ]

    def close(self) -> None:
        """End the agents."""
        for agent in self._agents.values():
            agent.tell(do="leave")
            assert agent.child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                agent.child.stdin.close()
        deadline = time.monotonic() + _LEAVE_S
        for agent in self._agents.values():
            try:
                agent.child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill_tree(agent.child.pid)
                agent.child.kill()
                agent.child.wait()
            assert agent.child.stdout is not None
            agent.child.stdout.close()
        self._selector.close()
