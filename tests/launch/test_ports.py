"""Ports for programs to meet at: outside of the kernel's own, free, and a holder that is named."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hpcrun.errors import SiteError
from hpcrun.launch import ports
from hpcrun.launch.ports import choose_port, describe_port_holder, ephemeral_ports
from hpcrun.launch.rendezvous import NodeRendezvous, RendezvousRequest
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.submission.prepare import prepare_job
from tests.launch.supervised import LIMITS, Recorder
from tests.security.users import ATTACKER, as_user, in_namespace, needs_root

SEED = 4242


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def listener(address: str, port: int, *, listens: bool = True) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if ":" in address:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.bind((address, port))
    if listens:
        one.listen()
    return one


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("32768\t60999\n", range(20_000, 30_000)),
        ("15000 64000\n", range(10_000, 65_536)),
        ("20000 29990\n", range(10_000, 65_536)),
        ("9000 65500\n", range(1_024, 9_000)),
        ("1024 65535\n", range(1_024, 65_536)),
        ("nonsense\n", range(20_000, 30_000)),
        (None, range(20_000, 30_000)),
    ],
)
def test_the_kernel_s_own_ports_are_left_to_it(
    tmp_path: Path, stack: ExitStack, text: str | None, allowed: range
) -> None:
    place = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
    place.parent.mkdir(parents=True)
    if text is not None:
        place.write_text(text)
    own = ephemeral_ports(tmp_path)
    for seed in range(25):
        lease = choose_port(seed, tmp_path)
        stack.callback(lease.close)
        assert lease.number in allowed
        assert lease.number not in own or text == "1024 65535\n"


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "127.0.0.9", "::", "::1"])
@pytest.mark.parametrize("listens", [True, False])
def test_a_taken_port_names_its_holder_and_another_is_used(address: str, listens: bool) -> None:
    with closing(choose_port(SEED)) as lease:
        first = lease.number
        assert lease.notes == ()
    with closing(listener(address, first, listens=listens)), closing(choose_port(SEED)) as lease:
        assert lease.number != first
        (told,) = lease.notes
        # A socket that only has its name is in no table of the kernel's.
        own = Path("/proc/self/cmdline").read_bytes().decode().partition("\0")[0]
        who = own[:20] if listens else "somebody who cannot be seen from here"
        assert told.startswith(f"port {first} is taken by {who}"), told
        assert f"(pid {os.getpid()}, user root)" in told or not listens or os.getuid() != 0
        assert told.endswith(f"; the ranks meet at port {lease.number}")
    with closing(choose_port(SEED)) as lease:
        assert lease.number == first


def test_two_runs_on_a_node_never_have_the_same(stack: ExitStack) -> None:
    leases = [choose_port(SEED) for _ in range(5)]
    for lease in leases:
        stack.callback(lease.close)
    assert len({lease.number for lease in leases}) == 5
    assert leases[1].notes[0].startswith(f"port {leases[0].number} is taken by another run of hpcrun;")


def test_where_all_are_taken_that_is_said(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    lease = choose_port(SEED)
    stack.callback(lease.close)
    monkeypatch.setattr(ports, "_PORT_RANGES", (range(lease.number, lease.number + 1),))
    with pytest.raises(
        SiteError, match=f"no TCP port is free .* port {lease.number} is taken by another run"
    ):
        choose_port(SEED)


@needs_root
def test_of_another_user_s_process_whose_it_is() -> None:
    def body() -> None:
        with closing(listener("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]

            def ask() -> None:
                taken.close()  # what the child has of it
                assert describe_port_holder(port) == "a process of user root, which cannot be seen from here"

            as_user(ATTACKER, ask)
        assert describe_port_holder(1) == "somebody who cannot be seen from here"

    in_namespace(body)


def test_connections_that_are_just_closing_are_told_as_such() -> None:
    with closing(listener("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
    assert describe_port_holder(port) == "connections that are just closing"


def test_a_node_says_where_it_is_reached_and_holds_the_port() -> None:
    with closing(NodeRendezvous()) as desk, closing(NodeRendezvous()) as other:
        request = RendezvousRequest(3, ("n1",), seed=SEED, wants_port=True)
        point = desk.answer(request.of("n1"))
        assert (point.address, point.problem, point.notes) == ("127.0.0.1", "", ())
        second = other.answer(request)
        assert second.port != point.port
        assert f"port {point.port} is taken by another run of hpcrun" in second.notes[0]
        # The next attempt has let go of the port of the one before.
        assert desk.answer(request).port == point.port
        two = RendezvousRequest(4, ("n1", "n2"), "lo", wants_port=True)
        assert desk.answer(two.of("n2")).port == 0
        assert desk.answer(two.of("n2")).address == "127.0.0.1"


def test_a_program_on_one_node_is_told_of_loopback_and_of_a_port_that_is_free(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = 'echo "$MASTER_ADDR $MASTER_PORT"'
    first = _first_of_run(monkeypatch)
    prepared = prepare_job(None, ["parallel.dp_replicate=2", "name=t"], command=["sh", "-c", says])
    observer = Recorder()
    with closing(listener("127.0.0.1", first)), SignalQueue() as inbox:
        outcome = Supervisor(prepared, inbox, observer, limits=LIMITS).run()
    assert outcome.status == "done", outcome.message
    (told,) = {outcome.files.log(rank).read_text() for rank in range(2)}
    address, port = told.split()
    assert address == "127.0.0.1"
    assert int(port) not in {first, *ephemeral_ports()}
    (note,) = [one for one in observer.notes if "is taken by" in one]
    assert note.startswith(f"{os.uname().nodename}: port {first} is taken by ")
    assert note.endswith(f"; the ranks meet at port {port}")


def _first_of_run(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port that the next run tries first."""
    monkeypatch.setattr("hpcrun.launch.rank_environment.crc32", lambda _: SEED)
    with closing(choose_port(SEED)) as lease:
        return lease.number
