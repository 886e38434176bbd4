"""Nodes read from one another: whole and undamaged, or an error that names the node."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from xxhash import xxh3_64_intdigest

from hpcrun import __version__
from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.parity.peers import (
    PartServer,
    PeerClient,
    PeerCredentials,
    PeerError,
    PeerReply,
    PeerServer,
)
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry, TierName
from hpcrun.messages import authentication, frames, lines
from hpcrun.messages.authentication import HANDSHAKE_S, Handshake, fresh_nonce
from hpcrun.messages.frames import FRAME_BYTES, FramedConnection, RateLimiter
from hpcrun.messages.lines import receive_json_line, render_json_line

HERE = "127.0.0.1"
GENERATION = "ab" * 16
CONTENT = bytes(range(256)) * 12_000 + b"odd"


def who(node: str, secret: str = "s3cret", run: str = "run-1") -> PeerCredentials:
    return PeerCredentials(run, node, secret)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    server = PeerServer(HERE, who("n1"), timeout_s=5.0)
    path = tmp_path / "slot-0-0.bin"
    path.write_bytes(b"x" * 100 + CONTENT)
    part = Part(0, 0, len(CONTENT), 64, 64, "0" * 16)
    holding = InventoryEntry(
        CheckpointId(GENERATION, 3, 24, 2, 1), "memory", "n1", (HeldPart(0, str(path), 100, part),)
    )
    PartServer(server, lambda: [holding])
    server.on("echo", lambda request: PeerReply({"said": request["word"]}))
    yield server
    server.close()


@contextlib.contextmanager
def asking(
    server: PeerServer, credentials: PeerCredentials | None = None, timeout_s: float = 5.0
) -> Iterator[PeerClient]:
    addresses = {"n1": (server.address, server.port)}
    with PeerClient(credentials or who("n0"), addresses, timeout_s=timeout_s) as peers:
        yield peers


def part(at: int = 0, number: int = 0) -> dict[str, object]:
    return {"do": "part", "generation": GENERATION, "number": number, "at": at}


@pytest.mark.parametrize(
    ("at", "size"), [(0, 0), (0, 1), (17, FRAME_BYTES), (1, 2 * FRAME_BYTES + 7), (len(CONTENT) - 3, 3)]
)
def test_bytes_of_a_part_come_as_they_are(server: PeerServer, at: int, size: int) -> None:
    into = memoryview(bytearray(size))
    with asking(server) as peers:
        peers.read("n1", part(at), into)
    assert bytes(into) == CONTENT[at : at + size]


def test_many_ask_at_once_and_connections_are_used_again(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    connect = PeerClient._connect

    def counted(peers: PeerClient, node: str, address: tuple[str, int]) -> FramedConnection:
        made.append(node)
        return connect(peers, node, address)

    monkeypatch.setattr(PeerClient, "_connect", counted)
    with asking(server) as peers, ThreadPoolExecutor(4) as pool:

        def read(number: int) -> bool:
            into = memoryview(bytearray(70_000))
            peers.read("n1", part(number), into)
            return bytes(into) == CONTENT[number : number + 70_000]

        assert all(pool.map(read, range(40)))
    assert 1 <= len(made) <= 4


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        (part(number=1), r"n1: has no part 1 of generation abab"),
        (part(at=len(CONTENT)), r"n1: no such request: bytes \d+ to \d+ of \d+"),
        ({"do": "part"}, r"n1: no such request: 'generation'"),
        ({"do": "format"}, r"n1: no such request: format is nothing that this node answers"),
    ],
)
def test_what_is_not_there_is_said_and_the_connection_goes_on(
    server: PeerServer, request_of: dict[str, object], said: str
) -> None:
    with asking(server) as peers:
        with pytest.raises(PeerError, match=said):
            peers.read("n1", request_of, memoryview(bytearray(10)))
        assert peers.ask("n1", {"do": "echo", "word": "still"})["said"] == "still"


def test_a_file_that_ends_too_early_is_no_answer(server: PeerServer, tmp_path: Path) -> None:
    (tmp_path / "slot-0-0.bin").write_bytes(b"x" * 2000)
    with asking(server) as peers, pytest.raises(PeerError, match=r"n1 .*slot-0-0.bin: ends at 2000"):
        peers.read("n1", part(), memoryview(bytearray(5000)))


@pytest.mark.parametrize(
    "credentials", [who("n0", secret="other"), who("n0", run="run-2"), who("n0", secret="")]
)
def test_who_does_not_know_the_secret_of_this_run_is_shown_out(
    server: PeerServer, credentials: PeerCredentials
) -> None:
    shown_out = pytest.raises(PeerError, match=r"n1 \(127\.0\.0\.1:\d+\): ")
    with asking(server, credentials) as peers, shown_out:
        peers.ask("n1", {"do": "echo", "word": "a"})
    with asking(server) as peers:
        assert peers.ask("n1", {"do": "echo", "word": "b"})["said"] == "b"


@pytest.mark.parametrize("said", [{}, {"node": "n0", "nonce": "1" * 32, "proof": "0" * 64}])
def test_who_proves_nothing_gets_no_answer_whatever_it_asks(server: PeerServer, said: dict[str, str]) -> None:
    with socket.create_connection((server.address, server.port), timeout=5.0) as connection:
        receive_json_line(connection, time.monotonic() + 5)
        with contextlib.suppress(ConnectionError):
            connection.sendall(render_json_line(said))
            FramedConnection(connection, b"", b"", 5.0).say({"do": "echo", "word": "a"})
            assert connection.recv(1000) == b""


def test_a_node_that_is_not_the_one_meant_is_found_out() -> None:
    other = PeerServer(HERE, who("n2"))
    try:
        with asking(other) as peers, pytest.raises(PeerError, match=r"n1 "):
            peers.ask("n1", {"do": "echo"})
    finally:
        other.close()


def test_an_impostor_learns_no_proof_and_is_not_believed() -> None:
    heard: list[dict[str, object]] = []

    def impostor(connection: socket.socket) -> None:
        connection.sendall(render_json_line({"nonce": fresh_nonce(), "version": __version__}))
        heard.append(receive_json_line(connection, time.monotonic() + 5))
        # It can only send the other's own proof back.
        connection.sendall(render_json_line({"proof": heard[0]["proof"]}))

    found_out = pytest.raises(PeerError, match=r"is not the checkpoint worker of n1, or does not know")
    with listening(impostor) as address, PeerClient(who("n0"), {"n1": address}) as peers, found_out:
        peers.ask("n1", {"do": "echo"})
    assert "s3cret" not in str(heard)


def test_a_worker_of_another_version_is_refused_and_both_ends_name_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[tuple[str, str]] = []
    server = PeerServer(HERE, who("n1"), refuse_version=lambda *peer: refused.append(peer))
    for module in (authentication, lines):
        monkeypatch.setattr(module, "__version__", "0.0.9")
    words = (
        f"the checkpoint worker of n1 runs hpcrun {__version__}, that of n0 0.0.9;"
        " install one version on all nodes"
    )
    with asking(server) as peers, pytest.raises(PeerError, match=words.replace(".", r"\.")):
        peers.ask("n1", {"do": "echo", "word": "a"})
    deadline = time.monotonic() + 5
    while not refused and time.monotonic() < deadline:
        time.sleep(0.01)
    server.close()
    assert refused == [("n0", "0.0.9")]


def test_strangers_who_say_nothing_do_not_keep_others_out(server: PeerServer) -> None:
    crowd = [socket.create_connection((server.address, server.port)) for _ in range(60)]
    try:
        crowd[0].sendall(b"GET / HTTP/1.1\r\n" * 500)
        with asking(server) as peers:
            assert peers.ask("n1", {"do": "echo", "word": "in"})["said"] == "in"
        crowd[3].settimeout(HANDSHAKE_S / 2)
        with contextlib.suppress(ConnectionError):
            while crowd[3].recv(100):
                pass  # it is shown out before its time, as too many others came
    finally:
        for one in crowd:
            one.close()


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Something else than a PeerServer, for one connection."""
    with socket.create_server((HERE, 0)) as listener:

        def once() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=once)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join()


def let_in(connection: socket.socket) -> FramedConnection:
    """The handshake as node n1 makes it."""
    nonce = fresh_nonce()
    connection.sendall(render_json_line({"nonce": nonce, "version": __version__}))
    said = receive_json_line(connection, time.monotonic() + 5)
    handshake = Handshake("s3cret", who("n1").bound_to("n0", "n1"), (nonce, str(said["nonce"])))
    connection.sendall(render_json_line({"proof": handshake.proof("listening", {})}))
    frames = FramedConnection(connection, *handshake.keys("listening"), 5.0)
    assert frames.hear() is not None
    return frames


def header(frames: FramedConnection, kind: int, data: bytes, length: int | None = None) -> bytes:
    said = struct.pack(
        "<IIQ",
        kind,
        len(data) if length is None else length,
        xxh3_64_intdigest(data, frames._our_seed),
    )
    return said + frames._sending.mark(said + data if kind == 1 else said)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (lambda one: header(one, 2, b"right") + b"wrong", "bytes were damaged on the way"),
        (lambda one: header(one, 2, b"right") + b"ri", "the connection ended in the middle of a frame"),
        (lambda one: header(one, 2, b"right")[:7], "the connection ended in the middle of a frame"),
        (lambda one: b"", "the connection ended in the middle of the bytes"),
        (lambda one: header(one, 2, b"longer") + b"longer", "6 bytes came where 5 belong"),
        (lambda one: header(one, 2, b"", length=1 << 31), "what came is not a frame"),
        (lambda one: header(one, 1, b"nonsense") + b"nonsense", "what came is not a message"),
        (lambda one: header(one, 1, b"[" * 90_000) + b"[" * 90_000, "what came is not a message"),
        (lambda one: header(one, 1, b'{"problem":"disk"}') + b'{"problem":"disk"}', "disk"),
    ],
)
def test_a_stream_that_is_cut_or_damaged_is_not_taken(
    sent: Callable[[FramedConnection], bytes], said: str
) -> None:
    def serve(connection: socket.socket) -> None:
        frames = let_in(connection)
        frames.say({"size": 5})
        connection.sendall(sent(frames))

    refused = pytest.raises(PeerError, match=rf"n1 \(127\.0\.0\.1:\d+\): {said}")
    with listening(serve) as address, PeerClient(who("n0"), {"n1": address}) as peers, refused:
        peers.read("n1", part(), memoryview(bytearray(5)))


def test_a_node_that_falls_silent_is_not_waited_for() -> None:
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        let_in(connection).say({"size": 5})
        done.wait(10)

    with listening(serve) as address, PeerClient(who("n0"), {"n1": address}, timeout_s=0.2) as peers:
        with pytest.raises(PeerError, match=r"n1 .*: did not answer within 0.2 s"):
            peers.read("n1", part(), memoryview(bytearray(5)))
        done.set()


def test_a_node_that_is_gone_is_named(server: PeerServer) -> None:
    with asking(server) as peers:
        peers.ask("n1", {"do": "echo", "word": "here"})
        server.close()
        with pytest.raises(PeerError, match=r"n1 \(127\.0\.0\.1:\d+\): "):
            peers.ask("n1", {"do": "echo", "word": "gone"})
        with pytest.raises(PeerError, match=r"n7: its address is not known here"):
            peers.ask("n7", {"do": "echo"})


def test_a_server_that_came_back_at_the_same_place_is_found_again() -> None:
    """A kept connection that has ended is no reason to give up."""
    rounds = iter(range(2))

    def serve(connection: socket.socket) -> None:
        let_in(connection).say({"round": next(rounds)})

    with socket.create_server((HERE, 0)) as listener:

        def twice() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=twice)
        thread.start()
        with PeerClient(who("n0"), {"n1": listener.getsockname()[:2]}) as peers:
            assert [peers.ask("n1", {"do": "echo"})["round"] for _ in range(2)] == [0, 1]
        thread.join()


def test_no_more_bytes_a_second_than_allowed_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(frames, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    throttle = RateLimiter(1e6)
    for _ in range(5):
        throttle.take(500_000)
    assert slept == pytest.approx([0.5] * 4)


def test_the_quickest_tier_that_still_has_a_part_is_read(tmp_path: Path) -> None:
    server = PeerServer(HERE, who("n1"))
    held = []
    tiers: tuple[TierName, ...] = ("local", "memory")
    for tier in tiers:
        path = tmp_path / tier
        path.write_bytes(tier.encode().ljust(64))
        one = HeldPart(0, str(path), 0, Part(0, 0, 64, 0, 0, ""))
        held.append(InventoryEntry(CheckpointId(GENERATION, 3, 24, 1, 1), tier, "n1", (one,)))
    PartServer(server, lambda: held)
    into = memoryview(bytearray(64))
    try:
        with asking(server) as peers:
            peers.read("n1", part(), into)
    finally:
        server.close()
    assert bytes(into).strip() == b"memory"
