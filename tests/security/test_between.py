"""Somebody in between two ends that have proved themselves: nothing of his is acted upon, and it is noticed.

Also what an end sends that has proved itself and talks no sense: that costs its connection, and no more.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

import pytest

from hpcrun.checkpoint.parity.peers import PeerClient, PeerCredentials, PeerError, PeerReply, PeerServer
from hpcrun.checkpoint.tier import CheckpointId, StoreResult
from hpcrun.checkpoint.worker_messages import GenerationSealed, SaveFailed, WorkerReady
from hpcrun.health.preflight import PreflightRequest
from hpcrun.launch.agents.connection import (
    AgentIdentity,
    AgentListener,
    ReliableSession,
    connect_to_supervisor,
)
from hpcrun.launch.agents.messages import (
    AGENT_MESSAGES,
    AGENT_ORDERS,
    AgentMessage,
    AgentOrder,
    ForwardedMessage,
    NodeReport,
)
from hpcrun.launch.attempt_events import (
    NodeEvent,
    RankConnected,
    RankEnded,
    RankProgress,
    RankStarted,
    RankStopped,
)
from hpcrun.launch.rendezvous import ConnectionTestStep, NodeRendezvous, RendezvousAnswer, RendezvousRequest
from hpcrun.messages.channel import Channel
from hpcrun.messages.frames import FRAME_BYTES
from hpcrun.typed_json import Tagged, TaggedUnion, WrongValue, render_typed


@dataclass(frozen=True)
class Word(Tagged):
    """A message of these tests."""

    word: str


WORDS = TaggedUnion[Word](Word)
HERE, SECRET, RUN = "127.0.0.1", "a" * 64, "run-1"
Tamper = Callable[[list[bytes]], list[bytes]]


class Between:
    """A proxy on the way to a port: lets the handshake pass, and then `tamper` with what one end sends."""

    def __init__(self, port: int) -> None:
        self.port_of_it = port
        self._listener = socket.create_server((HERE, 0))
        self.port = int(self._listener.getsockname()[1])
        self.tamper: Callable[[bytes], bytes] = lambda data: data
        """Of the end that has connected, after its line of the handshake."""
        self.tamper_back: Callable[[bytes], bytes] = lambda data: data
        """Of the other, after its two lines."""
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((HERE, self.port_of_it))
                self._ends += [near, far]
                for words in ((near, far, 1, lambda: self.tamper), (far, near, 2, lambda: self.tamper_back)):
                    self._threads.append(threading.Thread(target=self._pump, args=words))
                    self._threads[-1].start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        lines: int,
        tamper: Callable[[], Callable[[bytes], bytes]],
    ) -> None:
        with contextlib.suppress(OSError):
            while lines and (byte := source.recv(1)):
                sink.sendall(byte)
                lines -= byte == b"\n"
            while data := source.recv(1 << 20):
                sink.sendall(tamper()(data))
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for one in self._threads:
            one.join(20)
        for end in (self._listener, *self._ends):
            end.close()


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


@pytest.fixture
def gate() -> Iterator[AgentListener]:
    made = AgentListener(HERE, SECRET, RUN, 3, ["n01"])
    yield made
    made.close()


def let_in(
    gate: AgentListener, port: int, session: ReliableSession[Any], ours: ReliableSession[Any]
) -> tuple[Channel, Channel]:
    """Both ends of a connection of the agent's, the leader's first; they go on where they were."""
    found: list[tuple[Channel, int]] = []
    badge = AgentIdentity(RUN, 3, "n01", "s", session.seen)
    caller = threading.Thread(
        target=lambda: found.append(connect_to_supervisor((HERE, port), SECRET, badge, 20.0))
    )
    caller.start()
    (guest,) = until(gate.accept_authenticated)
    channel = guest.admit(ours.seen)
    caller.join()
    ours.attach(channel, guest.identity.seen)
    session.attach(*found[0])
    return channel, found[0][0]


INVENTED = b'{"number": 2, "message": {"kind": "word", "word": "evil"}}\n'
TAMPERS: dict[str, Tamper] = {
    "a byte is flipped": lambda lines: [lines[0], lines[1].replace(b'"b"', b'"c"'), lines[2]],
    "the mark is flipped": lambda lines: [lines[0], bytes([lines[1][0] ^ 1]) + lines[1][1:], lines[2]],
    "a message is repeated": lambda lines: [lines[0], lines[0], lines[1]],
    "a message is left out": lambda lines: [lines[0], lines[2]],
    "two have changed places": lambda lines: [lines[0], lines[2], lines[1]],
    "a message is invented": lambda lines: [
        lines[0],
        INVENTED,
        *lines[1:],
    ],
    "one is invented under another's mark": lambda lines: [lines[0], lines[1][:32] + lines[2][32:]],
    "bytes of every kind": lambda lines: [lines[0], b"\xff\0\xed\xa0\x80\n"],
}


@pytest.mark.parametrize("direction", ["orders", "answers"])
@pytest.mark.parametrize("name", TAMPERS)
def test_nothing_of_a_man_in_the_middle_is_acted_upon(gate: AgentListener, name: str, direction: str) -> None:
    between = Between(gate.port)
    leader, agent = ReliableSession(WORDS), ReliableSession(WORDS)
    let_in(gate, between.port, agent, leader)
    speaks, hears = (leader, agent) if direction == "orders" else (agent, leader)
    held: list[bytes] = []

    def tamper(data: bytes) -> bytes:
        held.append(data)
        lines = b"".join(held).splitlines(keepends=True)
        if len(lines) < 3 or not lines[2].endswith(b"\n"):
            return b""
        return b"".join(TAMPERS[name](lines))

    if direction == "orders":
        between.tamper_back = tamper
    else:
        between.tamper = tamper
    for word in "abc":
        speaks.send(Word(word))
    heard: list[Word] = []
    channel = hears.channel
    assert channel is not None

    def hear() -> list[Word]:
        heard.extend(hears.receive()[1])
        return heard

    until(lambda: len(hear()) > 3 or channel.is_closed)
    assert heard == [Word("a")]
    assert "not what the other end has sent next" in channel.why
    # It is made anew, and then nothing is lost, and nothing doubled.
    leader.detach()
    agent.detach()
    between.close()
    let_in(gate, gate.port, agent, leader)
    until(lambda: len(hear()) == 3)
    assert heard == [Word("a"), Word("b"), Word("c")]
    leader.detach()
    agent.detach()


def test_what_was_sent_over_one_connection_is_of_no_use_for_another(gate: AgentListener) -> None:
    sent: list[bytes] = []
    between = Between(gate.port)
    between.tamper = lambda data: sent.append(data) or data  # type: ignore[func-returns-value]
    leader, agent = ReliableSession(WORDS), ReliableSession(WORDS)
    let_in(gate, between.port, agent, leader)
    agent.send(Word("a"))
    assert until(lambda: leader.receive()[1]) == [Word("a")]
    between.tamper = lambda data: sent[0]
    leader.detach()
    agent.detach()
    ours, _ = let_in(gate, between.port, agent, leader)
    agent.send_heartbeat()
    until(lambda: leader.receive()[1] or ours.is_closed)
    assert "not what the other end has sent next" in ours.why
    leader.detach()
    agent.detach()
    between.close()


CONTENT = bytes(range(256)) * (FRAME_BYTES // 256) + b"more"


@pytest.fixture
def server() -> Iterator[PeerServer]:
    asked: list[str] = []

    def echo(request: dict[str, Any]) -> PeerReply:
        asked.append(request["word"])
        return PeerReply({"asked": list(asked)})

    def read(at: int, into: memoryview) -> None:
        into[:] = CONTENT[at : at + len(into)]

    made = PeerServer(HERE, PeerCredentials(RUN, "n1", SECRET))
    made.on("echo", echo)
    made.on("bytes", lambda request: PeerReply({}, len(CONTENT), read))
    yield made
    made.close()


@pytest.mark.parametrize("change", ["flip", "repeat", "invent"])
def test_requests_between_nodes_are_the_ones_that_were_made(server: PeerServer, change: str) -> None:
    between = Between(server.port)
    header = 8 + 8 + 16
    changes: dict[str, Callable[[bytes], bytes]] = {
        "flip": lambda data: data.replace(b'"good"', b'"evil"'),
        "repeat": lambda data: data + data,
        "invent": lambda data: data[:header] + data[header:].replace(b"good", b"evil"),
    }
    with PeerClient(PeerCredentials(RUN, "n0", SECRET), {"n1": (HERE, between.port)}) as peers:
        between.tamper = changes[change]
        with contextlib.suppress(PeerError):
            peers.ask("n1", {"do": "echo", "word": "good"})
        between.tamper = lambda data: data
        asked = peers.ask("n1", {"do": "echo", "word": "last"})["asked"]
    assert "evil" not in asked
    assert asked.count("good") == (change == "repeat")
    between.close()


@pytest.mark.parametrize(
    "at", [0, 5, 20, 40, FRAME_BYTES // 2], ids=["kind", "length", "mark", "first", "bulk"]
)
def test_bytes_between_nodes_are_those_that_were_sent(server: PeerServer, at: int) -> None:
    between = Between(server.port)
    passed = [0]

    def flip(data: bytes) -> bytes:
        # The message before the bytes is short and comes first; what follows it is the first frame of bytes.
        begin = 32 + len(json.dumps({"size": len(CONTENT)}))
        place = begin + at - passed[0]
        passed[0] += len(data)
        if 0 <= place < len(data):
            return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        return data

    between.tamper_back = flip
    into = memoryview(bytearray(len(CONTENT)))
    with PeerClient(PeerCredentials(RUN, "n0", SECRET), {"n1": (HERE, between.port)}) as peers:
        with pytest.raises(PeerError, match=r"n1 \(127\.0\.0\.1:\d+\): (what came|bytes were damaged)"):
            peers.read("n1", {"do": "bytes"}, into)
        between.tamper_back = lambda data: data
        peers.read("n1", {"do": "bytes"}, into)
    assert bytes(into) == CONTENT
    between.close()


WRONG: list[Any] = [
    None,
    True,
    -1.5,
    1e400,
    10**40,
    "x",
    "\ud800",
    [],
    [1, "a"],
    [[]],
    {},
    {"a": 1},
    {"a": {"b": 2}},
]


def test_what_makes_no_sense_costs_its_connection_and_is_not_heard_again(gate: AgentListener) -> None:
    """For every kind of message and each of its values, all that does not belong there."""
    tried = 0
    for kinds, classes in ((AGENT_MESSAGES, get_args(AgentMessage)), (AGENT_ORDERS, get_args(AgentOrder))):
        for cls in classes:
            names = [one.name for one in fields(cls)]
            for name in names:
                for value in WRONG:
                    message = {"kind": cls.kind, **dict.fromkeys(names), name: value}
                    tried += is_refused(kinds, message)
            assert is_refused(kinds, {"kind": cls.kind, **dict.fromkeys(names), "more": 1})
            if names:
                assert is_refused(kinds, {"kind": cls.kind})
        odd: list[Any] = [*WRONG, {}, {"word": "kill_ranks"}, *({"kind": value} for value in WRONG)]
        assert all(is_refused(kinds, message) for message in odd)
    assert tried > 500
    leader, agent = ReliableSession(AGENT_MESSAGES), ReliableSession(WORDS)
    ours, _ = let_in(gate, gate.port, agent, leader)
    right = NodeReport(1, RankConnected(1))
    agent.send(NodeReport(1, RankConnected(True)))
    agent.send(right)
    until(lambda: leader.receive()[1] or ours.is_closed)
    assert ours.why == "node_report: event: rank_connected: rank: expected an integer, not True"
    leader.detach()
    agent.detach()
    let_in(gate, gate.port, agent, leader)
    assert until(lambda: leader.receive()[1]) == [right]
    leader.detach()
    agent.detach()


def is_refused(kinds: TaggedUnion[Any], message: Any) -> bool:
    try:
        kinds.parse(message)
    except WrongValue:
        return True
    return False


@pytest.mark.parametrize("number", [-1, True, "1", None, 1.0, 1 << 60])
def test_numbers_of_messages_are_numbers(gate: AgentListener, number: Any) -> None:
    for name in ("number", "heartbeat"):
        leader, agent = ReliableSession(WORDS), ReliableSession(WORDS)
        ours, theirs = let_in(gate, gate.port, agent, leader)
        theirs.send({"message": Word("a"), name: number})
        until(lambda: leader.receive()[1] or ours.is_closed)  # noqa: B023
        assert ours.why == "what came has no number that can be"
        leader.detach()
        agent.detach()


def test_what_we_say_makes_sense() -> None:
    events: list[NodeEvent] = [
        RankStarted(0, "n", 1), RankConnected(0),
        RankEnded(0, "n", None, None, 1.5), RankEnded(0, "n", 7, 9, 1.5),
        RankStopped(0, "n", True), RankProgress(0, "n", "step", None, {"step": 0.5}, [0.25]),
        RankProgress(0, "n", "eval", 4, {}),
    ]  # fmt: skip
    request, node = RendezvousRequest(1, ("n1",), wants_port=True), NodeRendezvous()
    steps = [
        ConnectionTestStep(1, "listen"),
        ConnectionTestStep(1, "try", {"n2": (HERE, 9)}),
        ConnectionTestStep(1, "end"),
    ]
    orders: list[Any] = [PreflightRequest(("shm",), hcas=("a",), xids={"79": "reset"}), request, *steps]
    for order in orders:
        assert AGENT_ORDERS.parse(json.loads(render_typed(order))) == order
    answers: list[Any] = [NodeReport(1, event) for event in events]
    answers += [RendezvousAnswer(1, node.answer(request)), *map(node.probe_peers, steps)]
    node.close()
    stamp = CheckpointId("ab", 1, 2, 1, 1)
    answers += [
        ForwardedMessage(message)
        for message in (
            GenerationSealed(stamp, 5),
            StoreResult(stamp, "local", 0.5, 5),
            WorkerReady(None, None, "s"),
            SaveFailed(stamp, "durable", "no room"),
        )
    ]
    for answer in answers:
        assert AGENT_MESSAGES.parse(json.loads(render_typed(answer))) == answer
    wrong: list[dict[str, Any]] = [
        {"kind": "worker_ready", "port": "x"},
        {"kind": "generation_sealed", "stamp": 1},
        {"kind": "generation_sealed", "stamp": {"generation": []}},
    ]
    for message in wrong:
        with pytest.raises(WrongValue, match=f"forwarded_message: message: {message['kind']}: "):
            AGENT_MESSAGES.parse({"kind": "forwarded_message", "message": message})
