"""Where others reach a host, with hostile hosts files: each case in namespaces of its own."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcrun.address import reachable_address
from hpcrun.errors import SiteError
from tests.security.users import in_namespace, needs_root

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
ETH = ("10.1.0.7/24 eth0",)
TWO = ("10.1.0.7/24 eth0", "10.2.0.7/24 ib0")
PEERS = ("n1", "n2", "n3", "n4", "n5")
LINKS = ("fe80::7/64 eth0", *ETH)
BOTH = ("fd00::7/64 eth0", *ETH)
DATA = "10.2.0.8 n2\n10.2.0.9 n3\n"


def host(hosts: str, addresses: Sequence[str], body: Callable[[], None], *commands: str) -> None:
    """Run `body` on a host called n1 with this file of hosts and these addresses, and nothing else."""

    def inside() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS | _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname("n1")
        for name, text in (("hosts", hosts), ("nsswitch.conf", "hosts: files\n")):
            Path(f"/tmp/{name}").write_text(text)
            subprocess.run(["mount", "--bind", f"/tmp/{name}", f"/etc/{name}"], check=True)
        lines = ["link set lo up"]
        for number, interface in enumerate(dict.fromkeys(one.split()[1] for one in addresses)):
            lines += [
                f"link add {interface} type veth peer name far{number}",
                f"link set {interface} up",
                f"link set far{number} up",
            ]
        for one in addresses:
            address, interface = one.split()
            lines.append(f"addr add {address} dev {interface}{' nodad' * (':' in address)}")
        script = "".join(f"{line}\n" for line in (*lines, *commands))
        subprocess.run(["ip", "-batch", "-"], input=script, text=True, check=True)
        if any(command.startswith("link set far") for command in commands):
            _await_lost_link()
        body()

    in_namespace(inside)


def _await_lost_link() -> None:
    """The kernel notices a moment later that the other end of a cable has gone."""
    end = time.monotonic() + 10
    while (
        "NO-CARRIER" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    ):
        assert time.monotonic() < end
        time.sleep(0.02)


def found(*words: str, interface: str | None = None, suffix: str = "", peers: Sequence[str] = PEERS) -> str:
    one = reachable_address(interface, peers, suffix)
    return f"{one.text} {one.interface}"


def check(
    hosts: str,
    addresses: Sequence[str],
    expected: str,
    *commands: str,
    interface: str | None = None,
    suffix: str = "",
) -> None:
    def body() -> None:
        try:
            told = found(interface=interface, suffix=suffix)
        except SiteError as error:
            told = str(error)
        assert expected in (told, told[: len(expected)]), told

    host(hosts, addresses, body, *commands)


@needs_root
@pytest.mark.parametrize(
    ("hosts", "addresses", "expected"),
    [
        pytest.param("127.0.1.1 n1\n10.1.0.8 n2\n", ETH, "10.1.0.7 eth0", id="Debian's line"),
        pytest.param("127.0.0.1 localhost n1\n10.1.0.8 n2\n", ETH, "10.1.0.7 eth0", id="localhost's line"),
        pytest.param("::1 n1\n10.1.0.8 n2\n", ETH, "10.1.0.7 eth0", id="the line of ::1"),
        pytest.param("127.0.1.1 n1\n", ETH, "10.1.0.7 eth0", id="and no other name is known"),
        pytest.param("", ETH, "10.1.0.7 eth0", id="no name at all"),
        pytest.param("0.0.0.0 n1\n", ETH, "10.1.0.7 eth0", id="everywhere"),
        pytest.param("10.1.0.99 n1\n10.1.0.8 n2\n", ETH, "10.1.0.7 eth0", id="an address that has moved"),
        pytest.param(f"127.0.1.1 n1\n{DATA}", TWO, "10.2.0.7 ib0", id="the way to the others decides"),
        pytest.param(f"10.1.0.7 n1\n{DATA}", TWO, "10.1.0.7 eth0", id="a name that means one stands"),
        pytest.param(f"10.1.0.7 n1\n10.2.0.7 n1\n{DATA}", TWO, "10.2.0.7 ib0", id="of two, the way decides"),
        pytest.param("10.1.0.7 n1\n10.2.0.7 n1\n", TWO, "10.1.0.7 eth0", id="of two, the first"),
        pytest.param(
            "127.0.1.1 n1\n127.0.0.1 n2\n10.1.0.9 n3\n", ETH, "10.1.0.7 eth0", id="a peer on loopback"
        ),
        pytest.param(
            "127.0.1.1 n1\n10.1.0.8 n2\n10.2.0.9 n3\n10.2.0.10 n4\n10.2.0.11 n5\n",
            TWO,
            "10.2.0.7 ib0",
            id="one peer with a wrong line",
        ),
        pytest.param("127.0.1.1 n1\n10.1.0.7 n2\n", ETH, "10.1.0.7 eth0", id="a peer with our address"),
        pytest.param(
            "172.17.0.1 n1\n10.1.0.8 n2\n",
            (*ETH, "172.17.0.1/16 docker0"),
            "10.1.0.7 eth0",
            id="a bridge of containers",
        ),
        pytest.param(
            "127.0.1.1 n1\n",
            (*ETH, "192.168.122.1/24 virbr0", "172.18.0.1/16 br-0123456789ab"),
            "10.1.0.7 eth0",
            id="bridges do not count as networks",
        ),
        pytest.param(
            "169.254.3.4 n1\n10.1.0.8 n2\n",
            ("169.254.3.4/16 usb0", *ETH),
            "10.1.0.7 eth0",
            id="one link alone",
        ),
        pytest.param("fe80::7 n1\n10.1.0.8 n2\n", LINKS, "10.1.0.7 eth0", id="the same of IPv6"),
        pytest.param("fd00::7 n1\nfd00::8 n2\n", ("fd00::7/64 eth0",), "fd00::7 eth0", id="IPv6 alone"),
        pytest.param("::1 n1\nfd00::8 n2\n", BOTH[:1], "fd00::7 eth0", id="IPv6 and loopback"),
        pytest.param("10.1.0.7 n1\nfd00::7 n1\n", BOTH, "10.1.0.7 eth0", id="IPv4 first"),
        pytest.param("10.1.0.70 n1\n", (*ETH, "10.1.0.70/24 eth0"), "10.1.0.70 eth0", id="a second one"),
        pytest.param(
            "127.0.1.1 n1\n",
            TWO,
            "n1: no address for other nodes to reach it at: its own name n1 means 127.0.1.1, which other"
            " nodes cannot reach; it has several, and nothing says which: 10.1.0.7 on eth0, 10.2.0.7 on ib0;"
            " set network.interface in the profile",
            id="nothing says which",
        ),
        pytest.param(
            "127.0.1.1 n1\n",
            (),
            "n1: no address for other nodes to reach it at: its own name n1 means 127.0.1.1, which",
            id="no network",
        ),
    ],
)  # fmt: skip
def test_the_name_alone_is_never_believed(hosts: str, addresses: Sequence[str], expected: str) -> None:
    check(hosts, addresses, expected)


@needs_root
def test_an_interface_that_is_down_is_none() -> None:
    stale = "10.2.0.7 n1\n10.1.0.8 n2\n"
    check(stale, TWO, "10.1.0.7 eth0", "link set ib0 down")
    # The cable is out.
    check(stale, TWO, "10.1.0.7 eth0", "link set far1 down")
    check(stale, TWO, "10.1.0.7 eth0", "link set ib0 down", interface="ib0")


@needs_root
def test_the_default_route_decides_where_no_name_does() -> None:
    check("127.0.1.1 n1\n", TWO, "10.2.0.7 ib0", "route add default via 10.2.0.1")


@needs_root
def test_what_the_profile_names_comes_first() -> None:
    hosts = "10.1.0.7 n1\n10.2.0.77 n1-ib\n10.1.0.8 n2\n"
    check(hosts, TWO, "10.2.0.7 ib0", interface="ib0")
    check(hosts, TWO, "10.1.0.7 eth0", interface="nosuch0")
    three = (*TWO, "10.2.0.77/24 ib1")
    check(hosts, three, "10.2.0.77 ib1", suffix="-ib")
    check(hosts, TWO, "10.1.0.7 eth0", suffix="-ib")
    check(hosts, (*ETH, "172.17.0.1/16 docker0"), "172.17.0.1 docker0", interface="docker0")
    check(hosts, ("10.1.0.7/24 eth0", "fd00::7/64 ib0", "fe80::7/64 ib0"), "fd00::7 ib0", interface="ib0")


@needs_root
def test_a_host_outside_of_the_allocation_is_reached_where_the_way_to_it_begins() -> None:
    def body() -> None:
        # Its own name is that of another network, and may well be right there.
        assert found(peers=("n2", "n3")) == "10.2.0.7 ib0"
        assert found(peers=("n1", "n2", "n3")) == "10.1.0.7 eth0"
        assert found(peers=("unknown",)) == "10.1.0.7 eth0"

    host(f"10.1.0.7 n1\n{DATA}", TWO, body)


def test_loopback_is_an_answer_only_where_it_is_named() -> None:
    assert found(interface="lo", peers=()) == "127.0.0.1 lo"


@needs_root
def test_what_is_wrong_with_the_name_is_told() -> None:
    def warning(expected: str) -> Callable[[], None]:
        def body() -> None:
            assert reachable_address(None, PEERS).warning == expected

        return body

    host("10.1.0.7 n1\n", ETH, warning(""))
    host("10.1.0.9 n1\n", ETH, warning("its own name n1 means 10.1.0.9, which no interface of it has"))
    host("", ETH, warning("its own name n1 cannot be resolved"))
    host(
        "172.17.0.1 n1\n",
        (*ETH, "172.17.0.1/16 docker0"),
        warning("its own name n1 means 172.17.0.1, of docker0, which leads nowhere"),
    )


def test_a_name_service_that_is_down_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = __import__("threading").Event()

    def slow(*_: object, **__: object) -> list[object]:
        released.wait(60)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr("hpcrun.address._RESOLVE_S", 0.05)
    try:
        assert reachable_address("lo", ("n2",)).text == "127.0.0.1"
        assert reachable_address(None).text  # from what the host has, or loopback
    finally:
        released.set()
    assert os.uname().nodename
