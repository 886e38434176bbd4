"""Ranks come together: a store at one address alone, and nodes that do not reach each other say so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpcrun.address import HostAddress
from hpcrun.errors import RanksDiedError
from hpcrun.health.connection_test import (
    ConnectionTest,
    choose_targets,
    describe_unreachable,
    why_unreachable,
)
from hpcrun.runtime.control import Control, LoneControl
from hpcrun.runtime.store_rendezvous import check_node_connectivity, open_tcp_store, rank_address


class Table:
    """Where the ranks of a pretended world exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size


class Seat(Control):
    """A rank of it, in a thread; every rank on a node of its own."""

    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(rank, len(table.values))
        self._table, self.node = table, f"n{rank}"
        self.local_rank, self.local_size, self.one_node = 0, 1, False
        self.nodes = tuple(f"n{other}" for other in range(self.size))

    def allgather(self, value: Any) -> list[Any]:
        self._table.values[self.rank] = value
        self._table.barrier.wait()
        found = list(self._table.values)
        self._table.barrier.wait()
        return found

    def broadcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        raise AssertionError

    def store(self) -> Any:
        raise AssertionError

    def abort(self, code: int) -> None:
        raise AssertionError


def together(size: int, body: Callable[[Seat], Any]) -> list[Any]:
    """What every rank gives, or the error that it raises."""
    table, found = Table(size), list[Any]([None] * size)

    def run(rank: int) -> None:
        try:
            found[rank] = body(Seat(rank, table))
        except RanksDiedError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def listens_at(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which this host listens on a port."""
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in text.splitlines()]
    return {one[1].partition(":")[0] for one in lines if one[3] == "0A" and int(one[1][-4:], 16) == port}


@pytest.mark.parametrize(
    ("address", "shown"), [("127.0.0.5", "0500007F"), ("::1", "00000000000000000000000001000000")]
)
def test_the_store_listens_at_its_own_address_alone(address: str, shown: str) -> None:
    def body(seat: Seat) -> TCPStore:
        store = open_tcp_store(seat, address)
        store.set(f"from {seat.rank}", "here")
        assert store.get(f"from {1 - seat.rank}") == b"here"
        return store

    first, second = together(2, body)
    assert listens_at(first.port) == {shown}
    assert second.port == first.port


def test_on_one_node_it_is_loopback_s() -> None:
    control = LoneControl()
    assert rank_address(control) == HostAddress("127.0.0.1", "lo")
    store = open_tcp_store(control, rank_address(control).text)
    assert listens_at(store.port) == {"0100007F"}


def test_the_interface_that_gloo_has_is_the_store_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert together(2, rank_address) == [HostAddress("127.0.0.1", "lo", "network.interface lo")] * 2


def test_nodes_that_reach_each_other_say_nothing() -> None:
    assert (
        together(3, lambda seat: check_node_connectivity(seat, HostAddress("127.0.0.1", "lo"))) == [None] * 3
    )


def test_nodes_that_do_not_say_which_place_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(seat: Seat) -> None:
        warning = "its own name n1 means 127.0.1.1, which other nodes cannot reach" if seat.rank == 1 else ""
        check_node_connectivity(seat, HostAddress(f"127.0.0.{seat.rank + 1}", "lo", warning=warning))

    places = ConnectionTest.place

    def place(trial: ConnectionTest) -> tuple[str, int]:
        address, port = places.fget(trial)  # type: ignore[attr-defined]
        # Of n1 another process has the port, or a firewall refuses it.
        return (address, 1) if address == "127.0.0.2" else (address, port)

    monkeypatch.setattr(ConnectionTest, "place", property(place))
    words = (
        "the nodes do not reach each other: 2 of 4 connections of n1 fail: refused (127.0.0.2:1);"
        " n1: its own name n1 means 127.0.1.1, which other nodes cannot reach"
    )
    assert together(3, body) == [words] * 3


def test_a_store_that_is_not_reached_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Seat):
        def broadcast(self, value: Any) -> Any:
            return "127.0.0.1", 1

    with pytest.raises(RanksDiedError, match=r"store of rank 0 on node n0: refused \(127.0.0.1:1\)"):
        open_tcp_store(Deaf(1, Table(2)), "127.0.0.1")


def test_why_a_connection_fails() -> None:
    assert why_unreachable("127.0.0.1", "127.0.0.1", 1) == "refused (127.0.0.1:1)"
    assert why_unreachable("127.0.0.1", "255.255.255.255", 9) == "Network is unreachable (255.255.255.255:9)"


def test_in_a_large_world_all_try_every_node_together() -> None:
    places = {f"n{number}": [f"10.0.0.{number}", 1] for number in range(200)}
    tried = [choose_targets(places, node) for node in places]
    assert {len(one) for one in tried} == {64}
    assert all(node not in one for node, one in zip(places, tried, strict=True))
    assert {node for one in tried for node in one} == places.keys()
    assert choose_targets({"a": ["x", 1], "b": ["y", 2]}, "a") == {"b": ["y", 2]}


def test_a_trial_in_words() -> None:
    assert describe_unreachable({"a": {}, "b": {}}, ["a", "b"]) == ("", ())
    late = "no answer in 3 s (10.0.0.2:77)"
    assert describe_unreachable({"a": {"b": late}, "b": {}}, ["a", "b"]) == (
        f"a does not reach b: {late}",
        (),
    )
    failed = {node: {"c": late} for node in "abd"} | {"c": {}}
    assert describe_unreachable(failed, [*"abcd"]) == (f"3 of 6 connections of c fail: {late}", ("c",))
