"""Who is let in at a supervisor's gate, and that what two sides tell each other arrives once and in order."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcrun import __version__
from hpcrun.errors import SiteError
from hpcrun.launch.agents import connection
from hpcrun.launch.agents.connection import (
    AgentConnectionError,
    AgentIdentity,
    AgentListener,
    PendingAgent,
    ReliableSession,
    connect_to_supervisor,
)
from hpcrun.launch.agents.messages import (
    AGENT_MESSAGES,
    AGENT_ORDERS,
    KillRanks,
    LeaveRun,
    RanksCleared,
    WarmUp,
    WatchingRanks,
)
from hpcrun.messages import authentication, channel, lines
from hpcrun.messages.authentication import Handshake
from hpcrun.messages.channel import Channel
from hpcrun.messages.lines import VersionMismatchError

SECRET = "a" * 64
HERE = "127.0.0.1"


@pytest.fixture
def gate() -> Iterator[AgentListener]:
    made = AgentListener(HERE, SECRET, "run-1", 3, ["n01", "n02"])
    yield made
    made.close()


def badge(
    node: str = "n01", *, epoch: int = 3, run: str = "run-1", session: str = "s", seen: int = 0
) -> AgentIdentity:
    return AgentIdentity(run, epoch, node, session, seen)


def wait(gate: AgentListener, seconds: float = 5.0) -> list[PendingAgent]:
    """Attend to the gate until somebody may come in, or the time is over."""
    with selectors.EpollSelector() as selector:
        selector.register(gate, selectors.EVENT_READ)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            selector.select(0.02)
            if guests := gate.accept_authenticated():
                return guests
    return []


class Caller(threading.Thread):
    """Somebody who wants to come in."""

    def __init__(self, gate: AgentListener, secret: str, who: AgentIdentity) -> None:
        super().__init__()
        self.result: tuple[Channel, int] | None = None
        self.error = ""
        self._words = (gate.address, gate.port), secret, who
        self.start()

    def run(self) -> None:
        try:
            self.result = connect_to_supervisor(*self._words, timeout_s=3)
        except (AgentConnectionError, VersionMismatchError) as error:
            self.error = str(error)


def let_in(gate: AgentListener, who: AgentIdentity, seen: int = 0) -> tuple[Channel, Channel]:
    """Both ends of a connection of this agent's."""
    caller = Caller(gate, SECRET, who)
    (guest,) = wait(gate)
    ours = guest.admit(seen)
    caller.join()
    assert caller.result is not None
    assert caller.result[1] == seen
    return ours, caller.result[0]


def heard(session: ReliableSession[Any]) -> Callable[[], list[Any]]:
    return lambda: session.receive()[1]


def receive(take: Callable[[], list[Any]], count: int) -> list[Any]:
    found: list[Any] = []
    end = time.monotonic() + 5
    while len(found) < count and time.monotonic() < end:
        found += take()
        time.sleep(0.005)
    return found


def test_both_sides_know_the_secret_and_talk(gate: AgentListener) -> None:
    ours, theirs = let_in(gate, badge(seen=4), seen=7)
    ours.send({"do": "beat"})
    theirs.send({"kind": "beat", "text": "ü" * 100_000})
    assert receive(theirs.receive, 1) == [{"do": "beat"}]
    assert receive(ours.receive, 1)[0]["text"] == "ü" * 100_000
    theirs.close()
    assert receive(ours.receive, 1) == []
    assert ours.is_closed
    ours.close()


@pytest.mark.parametrize(
    ("secret", "who"),
    [
        ("b" * 64, badge()),
        (SECRET, badge("n03")),
        (SECRET, badge(epoch=2)),
        (SECRET, badge(epoch=4)),
        (SECRET, badge(run="run-2")),
    ],
    ids=["another secret", "another node", "an old epoch", "a new epoch", "another run"],
)
def test_who_is_not_of_this_run_and_epoch_stays_outside(
    gate: AgentListener, secret: str, who: AgentIdentity
) -> None:
    caller = Caller(gate, secret, who)
    assert wait(gate, 0.3) == []
    caller.join()
    assert "did not let us in" in caller.error


def test_a_supervisor_without_the_secret_is_left_at_once() -> None:
    with socket.create_server((HERE, 0)) as server:
        with_other = "b" * 64

        def pretend() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(json.dumps({"nonce": "00", "version": __version__}).encode() + b"\n")
                said = json.loads(connection.makefile().readline())
                handshake = Handshake(with_other, badge().bound_to, ("00", said["nonce"]))
                proof = handshake.proof("listening", {"seen": 0})
                connection.sendall(json.dumps({"seen": 0, "proof": proof}).encode() + b"\n")

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AgentConnectionError, match="does not know the run's secret"):
            connect_to_supervisor((HERE, server.getsockname()[1]), SECRET, badge())
        thread.join()


def test_what_was_said_once_opens_no_door_again(gate: AgentListener) -> None:
    said: list[bytes] = []
    with socket.create_connection((gate.address, gate.port)) as first:
        assert wait(gate, 0.1) == []
        nonce = json.loads(first.makefile().readline())["nonce"]
        proof = Handshake(SECRET, badge().bound_to, (nonce, "11")).proof("connecting", __version__)
        words = {"node": "n01", "session": "s", "epoch": 3, "seen": 0, "nonce": "11", "proof": proof}
        words["version"] = __version__
        said.append(json.dumps(words).encode() + b"\n")
        first.sendall(said[0])
        (guest,) = wait(gate)
        guest.refuse()
    with socket.create_connection((gate.address, gate.port)) as second:
        assert wait(gate, 0.1) == []
        second.sendall(said[0])
        assert wait(gate, 0.2) == []
        assert second.makefile().readline() != ""  # the challenge, which is another one now
        assert second.recv(1) == b""


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\n",
        b"[]\n",
        b'{"node": ["n01"], "session": {}}\n',
        b"[" * 4000 + b"\n",
        b"x" * 100_000,
    ],
    ids=["http", "tls", "no object", "odd values", "deep", "no end"],
)
def test_nonsense_does_no_harm(gate: AgentListener, words: bytes) -> None:
    with socket.create_connection((gate.address, gate.port)) as stranger:
        stranger.sendall(words)
        assert wait(gate, 0.2) == []
        ours, theirs = let_in(gate, badge())
        ours.close()
        theirs.close()


def test_strangers_who_say_nothing_are_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_S", 0.1)
    gate = AgentListener(HERE, SECRET, "run-1", 3, ["n01", "n02"])
    crowd = [socket.create_connection((gate.address, gate.port)) for _ in range(100)]
    assert wait(gate, 0.05) == []
    ours, theirs = let_in(gate, badge())
    time.sleep(0.15)
    assert gate.accept_authenticated() == []
    for one in crowd:
        one.settimeout(2)
        assert one.makefile().read().count("\n") <= 1  # at most the challenge, and the end
        one.close()
    ours.close()
    theirs.close()
    gate.close()


def test_a_line_without_end_closes_the_connection(
    gate: AgentListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1000)
    ours, theirs = let_in(gate, badge())
    theirs.send({"kind": "x" * 2000})
    assert receive(ours.receive, 1) == []
    assert ours.is_closed
    ours.close()
    theirs.close()


def test_a_new_connection_loses_and_doubles_nothing(gate: AgentListener) -> None:
    leader, agent = ReliableSession(AGENT_MESSAGES), ReliableSession(AGENT_ORDERS)
    ours, theirs = let_in(gate, badge())
    leader.attach(ours, 0)
    agent.attach(theirs, 0)
    leader.send(WarmUp(1))
    leader.send(KillRanks(1))
    assert receive(heard(agent), 2) == [WarmUp(1), KillRanks(1)]
    agent.send(WatchingRanks(1))
    # It breaks with words on the way, and others are said meanwhile.
    ours.close()
    theirs.close()
    leader.send(KillRanks(2))
    agent.send(RanksCleared(1, ()))
    leader.detach()
    agent.detach()
    ours, theirs = let_in(gate, badge(seen=agent.seen), seen=leader.seen)
    leader.attach(ours, agent.seen)
    agent.attach(theirs, leader.seen)
    assert receive(heard(agent), 1) == [KillRanks(2)]
    assert receive(heard(leader), 2) == [WatchingRanks(1), RanksCleared(1, ())]
    # Who has not yet been told that a message was seen sends it again.
    ours.close()
    theirs.close()
    leader.detach()
    agent.detach()
    ours, theirs = let_in(gate, badge())
    leader.attach(ours, 0)
    agent.attach(theirs, 0)
    leader.send(LeaveRun())
    assert receive(heard(agent), 1) == [LeaveRun()]
    agent.send_heartbeat()
    deadline = time.monotonic() + 5
    while (received := leader.receive()) == (False, []) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert received == (True, [])
    leader.detach()
    agent.detach()


def test_an_agent_of_another_version_is_refused_and_both_ends_name_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[tuple[str, str]] = []
    gate = AgentListener(
        HERE, SECRET, "run-1", 3, ["n01"], lambda agent, version: refused.append((agent.node, version))
    )
    monkeypatch.setattr(authentication, "__version__", "0.0.9")
    monkeypatch.setattr(lines, "__version__", "0.0.9")
    said: list[str] = []

    def call() -> None:
        try:
            connect_to_supervisor((HERE, gate.port), SECRET, badge(), 3)
        except VersionMismatchError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    assert wait(gate, 0.3) == []
    thread.join()
    assert said == [
        f"the supervisor runs hpcrun {__version__}, the agent on n01 0.0.9; install one version on all nodes"
    ]
    assert refused == [("n01", "0.0.9")]
    # A stranger that names a version is no agent.
    refused.clear()
    call_with_other = Caller(gate, "b" * 64, badge())
    assert wait(gate, 0.3) == []
    call_with_other.join()
    assert refused == []
    gate.close()


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(SiteError, match="cannot listen here for the agents"):
        AgentListener("192.0.2.1", SECRET, "run-1", 1, [])
