"""Everything that listens: what comes before the proof costs its own connection, and nobody else anything."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun import __version__
from hpcrun.checkpoint.parity.peers import PeerClient, PeerCredentials, PeerReply, PeerServer
from hpcrun.health.connection_test import ConnectionTest
from hpcrun.launch.agents import connection
from hpcrun.launch.agents.connection import (
    AgentIdentity,
    AgentListener,
    PendingAgent,
    connect_to_supervisor,
)
from hpcrun.launch.watch import progress
from hpcrun.launch.watch import progress_listener as listeners
from hpcrun.launch.watch.progress import ProgressReporter
from hpcrun.launch.watch.progress_listener import ProgressListener
from hpcrun.messages.authentication import Handshake, fresh_nonce
from hpcrun.messages.channel import Channel
from hpcrun.messages.lines import connect_unix_socket
from hpcrun.messages.listeners import AuthenticatingListener, UnauthenticatedPeers
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry import prometheus_exporter
from tests.checkpoint.workers import Host
from tests.security.users import ATTACKER, as_user, needs_root

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.66"
SECRET, RUN = "a" * 64, "run-1"
MESSAGES = 10_000

LISTENERS = {
    "messages/listeners.py": "TCP, for others of a run: agents, checkpoint workers, connection tests",
    "messages/lines.py": "Unix socket in the arena, for the ranks of a node",
    "launch/watch/progress_listener.py": "abstract Unix socket, for the progress of a node's ranks",
    "telemetry/prometheus_exporter.py": "HTTP, /metrics",
    "runtime/store_rendezvous.py": "torch's TCPStore, for the ranks of an attempt without MPI",
}
"""Every module that opens a listening socket. What is added here is added to the fuzz below."""
_OPENS = {"listen", "create_server", "start_http_server", "start_server", "start_unix_server", "TCPStore"}
_SERVERS = ("HTTPServer", "TCPServer", "UnixStreamServer", "UDPServer", "UnixDatagramServer")


def listens(tree: ast.AST) -> bool:
    """Whether a module opens a listening socket, or a server of the standard library's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # A listening socket takes a number or nothing; functions of ours of that name take more.
            is_other = name == "listen" and (len(node.args) > 1 or not isinstance(node.func, ast.Attribute))
            if name in _OPENS and not is_other:
                return True
        names = [node.id] if isinstance(node, ast.Name) else []
        if any(name.endswith(_SERVERS) for name in names):
            return True
    return False


def test_every_listener_is_in_the_table() -> None:
    package = Path(prometheus_exporter.__file__).parents[1]
    sources = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    found = {
        str(path.relative_to(package))
        for path, text in sources.items()
        if any(one in text for one in (*_OPENS, *_SERVERS)) and listens(ast.parse(text))
    }
    assert found == LISTENERS.keys()
    assert listens(ast.parse("s.bind(a); s.listen(5)"))
    assert listens(ast.parse("class A(ThreadingHTTPServer): pass"))
    assert listens(ast.parse("from prometheus_client import start_http_server as s; x.start_http_server(1)"))


# What a stranger may send: values of every wrong kind, and texts that are no JSON or nearly some.
ODD: list[Any] = [
    None, True, False, 0, -1, 3, 1 << 53, 1 << 64, 10**400, 1.5, float("nan"), float("inf"), -0.0, "", "0",
    "n01", "n1", "\0", "\ud800", "\udcff" * 40, "é", "x" * 3000, "a" * 64, [], [[]], {}, {"n": 1}, ["n01"],
]  # fmt: skip
TEXTS = [
    b"", b"\n", b"\0" * 70, b"{}\n", b"[]\n", b"null\n", b'""\n', b"{\n", b"GET /metrics HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n" * 20, b"HEAD\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", b"SSH-2\r\n",
    b"[" * 4000 + b"\n", b'{"a":' * 700 + b"\n", b"x" * 9000, b"\xff\xfe{\0}\0\n\0", b"\xef\xbb\xbf{}\n",
    b'{"nonce": "\\ud800", "proof": "\\udfff"}\n', b'{"proof": "\\ud800"}\n', b'{"node": "\xed\xa0\x80"}\n',
    b'{"seen": ' + b"9" * 4000 + b"}\n", b'{"seen": 1e999, "epoch": NaN, "n": -Infinity}\n',
    b'{"node": "n01", "node": ["n01"], "proof": "a", "proof": null}\n', b"{}\n{}\n", b"\x02\0\0\0" * 40,
]  # fmt: skip


GREETING = json.dumps({"hpcrun": __version__}).encode() + b"\n"
"""The first line to a checkpoint worker."""


class Fuzz:
    """Messages that prove nothing, always the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def noise(self) -> bytes:
        """Bytes that do not even know what is spoken here."""
        draw = self._random
        match draw.randrange(4):
            case 0:
                return draw.randbytes(draw.randrange(1, 200)) + b"\n" * draw.randrange(2)
            case 1:
                names = ("node", "session", "epoch", "seen", "nonce", "version", "proof", "kind", "rank")
                said = {name: draw.choice(ODD) for name in names if draw.random() < 0.7}
                return json.dumps(said).encode() + b"\n"
            case _:
                return draw.choice(TEXTS)

    def nearly(self, right: bytes) -> bytes:
        """A message that would be taken, with something wrong."""
        draw, said = self._random, json.loads(right)
        match draw.randrange(5):
            case 0:  # one bit
                at = draw.randrange(len(right) - 1)
                return right[:at] + bytes([right[at] ^ 1 << draw.randrange(7)]) + right[at + 1 :]
            case 1:  # another value
                name = draw.choice(list(said))
                value = draw.choice(
                    [one for one in ODD if one != said[name] or type(one) is not type(said[name])]
                )
                return json.dumps(said | {name: value}).encode() + b"\n"
            case 2:  # one is missing
                said.pop(draw.choice(list(said)))
                return json.dumps(said).encode() + b"\n"
            case 3:  # values under each other's names
                names = list(said)
                said = dict(zip(names, [said[name] for name in names[1:] + names[:1]], strict=True))
                return json.dumps(said).encode() + b"\n"
            case _:  # cut short, and more behind it
                return right[: draw.randrange(1, len(right) - 2)] + draw.choice([b"", b"\n", b"}\n", right])


def prove(bound_to: tuple[Any, ...], said: dict[str, Any], nonces: tuple[str, str]) -> bytes:
    """The line by which one comes in."""
    proof = Handshake(SECRET, bound_to, nonces).proof("connecting", __version__)
    return json.dumps(said | {"version": __version__, "proof": proof}).encode() + b"\n"


class AtGate:
    """The supervisor's gate; the one who fuzzes attends to it."""

    def __init__(self) -> None:
        self.gate = AgentListener(HERE, SECRET, RUN, 3, ["n01", "n02"])
        self.connected = self.let_in("n01")

    def open(self) -> socket.socket:
        return socket.create_connection((HERE, self.gate.port))

    def attend(self) -> None:
        for guest in self.gate.accept_authenticated():
            guest.refuse()
            pytest.fail(f"let in: {guest}")

    def right(self, one: socket.socket) -> bytes:
        self.attend()
        nonces = (json.loads(one.recv(4096))["nonce"], fresh_nonce())
        badge = AgentIdentity(RUN, 3, "n02", "s", 5)
        said = {"node": "n02", "session": "s", "epoch": 3, "seen": 5, "nonce": nonces[1]}
        return prove(badge.bound_to, said, nonces)

    def let_in(self, node: str) -> tuple[Channel, Channel]:
        found: list[tuple[Channel, int]] = []
        where, badge = (HERE, self.gate.port), AgentIdentity(RUN, 3, node, "s", 0)
        caller = threading.Thread(
            target=lambda: found.append(connect_to_supervisor(where, SECRET, badge, 20.0))
        )
        caller.start()
        guests: list[PendingAgent] = []
        while not guests:
            guests = self.gate.accept_authenticated()
        ours = guests[0].admit(0)
        caller.join()
        return ours, found[0][0]

    def serves(self) -> None:
        ours, theirs = self.connected
        theirs.send({"kind": "beat"})
        assert until(ours.receive) == [{"kind": "beat"}]
        for one in self.let_in("n02"):
            one.close()

    def close(self) -> None:
        for one in self.connected:
            one.close()
        self.gate.close()


class AtPeers:
    """A checkpoint worker's end for other nodes."""

    def __init__(self) -> None:
        self.server = PeerServer(HERE, PeerCredentials(RUN, "n1", SECRET))
        self.server.on("echo", lambda request: PeerReply({"said": request["word"]}))
        self.peers = PeerClient(PeerCredentials(RUN, "n0", SECRET), {"n1": (HERE, self.server.port)})
        self.serves()

    def open(self) -> socket.socket:
        return socket.create_connection((HERE, self.server.port))

    def attend(self) -> None:
        pass

    def right(self, one: socket.socket) -> bytes:
        one.settimeout(20)
        nonces = (json.loads(one.recv(4096))["nonce"], fresh_nonce())
        bound_to = PeerCredentials(RUN, "n0", SECRET).bound_to("n0", "n1")
        return prove(bound_to, {"node": "n0", "nonce": nonces[1]}, nonces)

    def serves(self) -> None:
        assert self.peers.ask("n1", {"do": "echo", "word": "a"})["said"] == "a"
        with PeerClient(PeerCredentials(RUN, "n2", SECRET), {"n1": (HERE, self.server.port)}) as another:
            assert another.ask("n1", {"do": "echo", "word": "b"})["said"] == "b"

    def close(self) -> None:
        self.peers.close()
        self.server.close()


class AtMetrics:
    """The exporter's HTTP."""

    def __init__(self) -> None:
        self.server = prometheus_exporter._bind_server(HERE, 20_000 + os.getpid() % 9000, lambda: "figures\n")
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def open(self) -> socket.socket:
        return socket.create_connection((HERE, int(self.server.server_address[1])))

    def attend(self) -> None:
        # Faster than it takes them in, the kernel would make us wait a second for each.
        until(lambda: len(self.server._clients) < 8)

    def right(self, one: socket.socket) -> bytes:
        return b'{"GET /metrics HTTP/1.1": "Host: here\\r\\n\\r\\n"}\n'

    def serves(self) -> None:
        with self.open() as one:
            one.settimeout(20)
            one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            said = b"".join(iter(lambda: one.recv(4096), b""))
        assert said.startswith(b"HTTP/1.0 200")
        assert said.endswith(b"figures\n")

    def close(self) -> None:
        self.server.end()
        self._thread.join()


class AtTrial:
    """A node's part in the trial of connections: nobody says anything there."""

    def __init__(self) -> None:
        self.trial = ConnectionTest(HERE)

    def open(self) -> socket.socket:
        return socket.create_connection(self.trial.place)

    def attend(self) -> None:
        pass

    def right(self, one: socket.socket) -> bytes:
        return b'{"a": "b"}\n'

    def serves(self) -> None:
        with self.open() as one:
            one.settimeout(20)
            assert one.recv(1) == b""

    def close(self) -> None:
        self.trial.close()


class AtProgress:
    """A node's end of the progress socket; messages of our own user's other processes come here."""

    def __init__(self) -> None:
        self.name = f"hpcrun-test-{os.urandom(8).hex()}"
        self.listener = ProgressListener(self.name, [0])
        self.rank = ProgressReporter(0, self.name)
        self._step = 0

    def open(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.connect(f"\0{self.name}")
        return one

    def attend(self) -> None:
        assert self.listener.hear() == []

    def right(self, one: socket.socket) -> bytes:
        # Wrong in two ways: one change alone does not make it right.
        return b'{"rank": 7, "section": 5, "step": 3, "longest_s": {}, "can_dump": true, "probe_s": 1}\n'

    def serves(self) -> None:
        self._step += 1
        self.rank.report(f"section {self._step}", self._step)
        (heard,) = self.listener.hear()
        assert (heard.rank, heard.step) == (0, self._step)

    def close(self) -> None:
        self.rank.close()
        self.listener.close()


class AtArena:
    """A checkpoint worker's socket for the ranks of its node, which is a process of its own."""

    def __init__(self, root: Path) -> None:
        (root / "run" / "checkpoints").mkdir(parents=True)
        self.host = Host(root, RunDir(root / "run"), "n1")
        self.socket = Path(self.host.configure()["socket"])
        self.host.wait("writes_probed")  # until then it has files of its own open
        self._descriptors = self.descriptors()

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.host.process.pid}/fd").iterdir()))

    def open(self) -> socket.socket:
        one = connect_unix_socket(self.socket.parent, self.socket.name)
        one.sendall(GREETING)
        return one

    def attend(self) -> None:
        pass

    def right(self, one: socket.socket) -> bytes:
        return b'{"kind": "reserve_slots", "rank": 0, "ranks": [1], "slots": 2, "size_bytes": 1e999}\n'

    def serves(self) -> None:
        with self.open() as one:
            one.settimeout(20)
            one.sendall(b'{"kind": "ping_from_rank", "rank": 0}\n')
            with one.makefile("rb") as lines:
                assert [json.loads(next(lines)) for _ in range(2)] == [
                    json.loads(GREETING),
                    {"kind": "worker_pong"},
                ]
        self.host.say(kind="ping_worker")
        self.host.wait("worker_pong")
        until(lambda: self.descriptors() == self._descriptors)

    def close(self) -> None:
        self.host.end()


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


def is_ended(send: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether the other end lets the connection go, while more and more is sent."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end:
            send()
            time.sleep(0.01)
        return False
    return True


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def speak(at: Any, fuzz: Fuzz, number: int) -> None:
    """One message of a stranger's, and his end: at once, with a reset, half closed, or in two pieces."""
    with contextlib.suppress(OSError), at.open() as one:
        message = fuzz.nearly(at.right(one)) if number % 3 == 0 else fuzz.noise()
        if number % 7 == 0:
            one.sendall(message[: len(message) // 2])
            at.attend()
            message = message[len(message) // 2 :]
        if message:
            one.sendall(message)
        if number % 5 == 0:
            one.shutdown(socket.SHUT_WR)
        at.attend()
        if number % 2:
            # Reset: what was not read yet is gone, and so is the other end's address for it.
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_ten_thousand_messages_have_no_effect_beyond_their_connection(tmp_path: Path) -> None:
    makers: dict[Callable[[], Any], int] = {
        AtGate: 3000,
        AtPeers: 2400,
        lambda: AtArena(tmp_path): 2000,
        AtProgress: 1600,
        AtMetrics: 600,
        AtTrial: 400,
    }
    assert sum(makers.values()) == MESSAGES
    for seed, (make, count) in enumerate(makers.items()):
        before, threads = descriptors(), threading.active_count()
        at, fuzz = make(), Fuzz(seed)
        try:
            at.serves()
            open_now = descriptors()
            for number in range(count):
                speak(at, fuzz, number)
                if number % 500 == 0:
                    at.serves()
            at.serves()
            until(lambda: at.attend() or descriptors() <= open_now)  # noqa: B023
        finally:
            at.close()
        until(lambda: descriptors() <= before and threading.active_count() <= threads)  # noqa: B023


@contextlib.contextmanager
def strangers(port: int, count: int, host: str = ELSEWHERE) -> Iterator[None]:
    """So many connections of another host that say nothing, held by another process."""
    reader, writer = os.pipe()
    goes_on, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        held = []
        with contextlib.suppress(OSError):
            for _ in range(count):
                one = socket.socket()
                one.settimeout(5)
                one.bind((host, 0))
                one.connect((HERE, port))
                held.append(one)
        os.write(writer, b"1")
        os.read(goes_on, 1)
        os._exit(0)
    os.close(writer)
    os.close(goes_on)
    try:
        os.read(reader, 1)
        yield
    finally:
        os.close(end)
        os.close(reader)
        os.waitpid(child, 0)


def answer(one: socket.socket) -> None:
    """The line of agent n01, to the number that has come."""
    one.settimeout(20)
    nonces = (json.loads(one.recv(4096))["nonce"], fresh_nonce())
    said = {"node": "n01", "session": "s", "epoch": 3, "seen": 0, "nonce": nonces[1]}
    one.sendall(prove(AgentIdentity(RUN, 3, "n01", "s", 0).bound_to, said, nonces))


def test_a_crowd_from_one_host_pushes_nobody_out() -> None:
    gate = AgentListener(HERE, SECRET, RUN, 3, ["n01"])
    with socket.create_connection((HERE, gate.port)) as agent:
        until(lambda: gate.accept_authenticated() or agent.recv(1, socket.MSG_PEEK))
        # More than may wait: the agent is the oldest of all, and has not spoken yet.
        for _ in range(2):
            with strangers(gate.port, 100):
                for _ in range(20):
                    assert gate.accept_authenticated() == []
        answer(agent)
        (guest,) = until(gate.accept_authenticated)
        guest.refuse()
    gate.close()


def test_the_oldest_of_those_who_are_most_has_to_go() -> None:
    crowd = UnauthenticatedPeers[str](3)
    assert [crowd.add(one, one[0]) for one in ("a1", "b1", "b2")] == [None] * 3
    assert crowd.add("c1", "c") == "b1"
    for one in crowd:
        crowd.remove(one)
    assert crowd.eviction_candidate() is None
    assert (len(crowd), crowd.late(-1.0)) == (0, [])


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Where there are so many more, and then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 40, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in fillers:
            os.close(one)


def test_where_descriptors_run_out_agents_still_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_S", 1000.0)
    gate = AgentListener(HERE, SECRET, RUN, 3, [f"n{number:02}" for number in range(60)])
    with strangers(gate.port, 60), socket.create_connection((HERE, gate.port)) as agent:
        with few_descriptors(6):
            for _ in range(20):
                assert gate.accept_authenticated() == []
            answer(agent)
            (guest,) = until(gate.accept_authenticated)
        guest.refuse()
    gate.close()


def test_where_there_is_no_descriptor_at_all_nobody_spins_and_nobody_is_lost() -> None:
    gate = AgentListener(HERE, SECRET, RUN, 3, ["n01"])
    with socket.create_connection((HERE, gate.port)) as agent:
        with few_descriptors(0):
            assert gate.accept_authenticated() == []
            # Somebody waits outside, and yet there is nothing to be done: not ready again and again.
            assert gate._door._accept_paused_until is not None
            assert gate._door._selector.select(0) == []
        until(lambda: gate.accept_authenticated() or gate._door._accept_paused_until is None)
        until(lambda: gate.accept_authenticated() or len(gate._door._unauthenticated))
        answer(agent)
        (guest,) = until(gate.accept_authenticated)
        guest.refuse()
    gate.close()


def test_who_sends_a_byte_now_and_then_is_shown_out_in_time() -> None:
    door = AuthenticatingListener[str](HERE, 8, "a test", SECRET, lambda said: ("in", ()), handshake_s=0.2)
    with (
        socket.create_connection((HERE, door.port)) as slow,
        socket.create_connection((HERE, door.port)) as half,
    ):
        half.shutdown(socket.SHUT_WR)

        def more() -> None:
            slow.send(b" ")
            assert door.accept_authenticated() == []

        assert is_ended(more)
        until(lambda: door.accept_authenticated() or len(door._unauthenticated) == 0)
    door.close()


def test_slow_clients_hold_up_neither_scrapes_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_exporter, "_CLIENT_S", 1000.0)
    monkeypatch.setattr(prometheus_exporter._Handler, "timeout", 1000.0)
    at = AtMetrics()
    slow = [at.open() for _ in range(3)]
    slow[0].sendall(b"GET /met")
    slow[1].sendall(b"GET /metrics HTTP/1.1\r\nHost: h\r\n")
    at.serves()
    # More than there is room for: the oldest go, a scrape does not.
    slow += [at.open() for _ in range(40)]
    at.serves()
    end = threading.Thread(target=at.close, daemon=True)
    end.start()
    end.join(20)
    assert not end.is_alive()
    for one in slow:
        one.close()


def test_a_client_that_takes_too_long_is_let_go_whatever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_exporter, "_CLIENT_S", 0.2)
    at = AtMetrics()
    with at.open() as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        # Each line is within the time for one: all together they are not.
        assert is_ended(lambda: slow.sendall(b"X: y\r\n"))
    at.close()


def test_a_rank_that_finds_a_crowd_at_the_door_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_BACKLOG", 0)
    monkeypatch.setattr(progress, "_RECONNECT_S", 0.0)
    at = AtProgress()
    late = ProgressReporter(0, at.name)  # the first one waits there still
    late.report("init")
    assert at.listener.hear() == []
    late.report("step", 4)
    assert [one.step for one in at.listener.hear()] == [4]
    late.close()
    at.close()


@needs_root
def test_another_user_of_the_node_reaches_no_unix_socket() -> None:
    at = AtProgress()

    def attack() -> None:
        for _ in range(50):
            with at.open() as one, contextlib.suppress(ConnectionError):
                one.settimeout(20)
                one.send(at.right(one).replace(b"7", b"0").replace(b"5", b'"step"'))
                assert one.recv(1) == b""

    heard: list[Any] = []
    is_over = threading.Event()

    def hear() -> None:
        while not is_over.is_set():
            heard.extend(at.listener.hear())
            time.sleep(0.001)

    hears = threading.Thread(target=hear)
    hears.start()
    try:
        as_user(ATTACKER, attack)
    finally:
        is_over.set()
        hears.join()
    assert heard == []
    at.serves()
    at.close()
