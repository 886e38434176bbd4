"""NCCL's choice among a port's addresses, played through."""

from __future__ import annotations

import pytest

from hpcrun.fabric.ports import Gid, RdmaPort
from hpcrun.tuning.host.gids import (
    AddressFamily,
    find_routable_family,
    find_routable_gid_index,
    predict_gid_choice,
)

LOCAL = "fe80::5aa2:e1ff:fe10:1"
V4, OTHER_V4 = "::ffff:10.1.0.7", "::ffff:192.168.5.7"
V6 = "fd02::7"


def port(*gids: tuple[int, str, int | None], layer: str = "Ethernet") -> RdmaPort:
    table = tuple(Gid(index, address, roce) for index, address, roce in gids)
    return RdmaPort("mlx5_0", 1, "ACTIVE", layer=layer, gids=table)


USUAL = port((0, LOCAL, 1), (1, LOCAL, 2), (2, V4, 1), (3, V4, 2))
TWO_NETWORKS = port((0, LOCAL, 1), (1, LOCAL, 2), (2, OTHER_V4, 1), (3, OTHER_V4, 2), (4, V4, 1), (5, V4, 2))
IPV6 = port((0, LOCAL, 1), (1, LOCAL, 2), (2, V6, 1), (3, V6, 2))
GAP = port((2, V4, 1), (5, V4, 2))


@pytest.mark.parametrize(
    ("one", "family", "cidr", "index", "bad"),
    [
        (USUAL, "AF_INET", "", 3, ""),
        (USUAL, "AF_INET6", "", 0, "link-local"),
        (TWO_NETWORKS, "AF_INET", "", 3, ""),
        (TWO_NETWORKS, "AF_INET", "10.1.0.0/16", 5, ""),
        (TWO_NETWORKS, "AF_INET", "172.16.0.0/12", 0, "link-local"),
        (IPV6, "AF_INET", "", 0, "link-local"),
        (IPV6, "AF_INET6", "", 3, ""),
        (IPV6, "AF_INET6", "fd02::/16", 3, ""),
        (GAP, "AF_INET", "", 5, ""),
        (port((0, V4, 1)), "AF_INET", "", 0, "RoCE v1"),
        (port((0, V4, 2), (1, V4, 1)), "AF_INET", "", 0, ""),
        (port(), "AF_INET", "", 0, ""),
        (USUAL, "AF_INET", "nonsense", 0, "link-local"),
    ],
)
def test_roce(one: RdmaPort, family: AddressFamily, cidr: str, index: int, bad: str) -> None:
    choice = predict_gid_choice(one, family=family, cidr=cidr)
    assert choice.index == index
    assert bad in choice.why_bad
    assert bool(bad) == bool(choice.why_bad)


def test_what_is_told_wins_and_old_ones_take_the_first() -> None:
    assert (
        predict_gid_choice(USUAL, index=2).why_bad == f"GID 2 is RoCE v1, which routers do not carry ({V4})"
    )
    assert predict_gid_choice(USUAL, index=9).why_bad == "GID 9 is empty"
    assert predict_gid_choice(USUAL, nccl=(2, 20, 5)).index == 0
    assert (
        predict_gid_choice(USUAL, nccl=(2, 21)).index == predict_gid_choice(USUAL, nccl=(2, 27, 7)).index == 3
    )


def test_infiniband_takes_the_routable_one_only_where_it_is_one() -> None:
    plain = port((0, "fe80::506b:4b03:0:1", None), (1, "fe80::506b:4b03:0:2", None), layer="InfiniBand")
    routed = port(
        (0, "fe80::506b:4b03:0:1", None), (1, "fe80:0:12:0:506b:4b03:0:2", None), layer="InfiniBand"
    )
    assert (predict_gid_choice(plain).index, predict_gid_choice(routed).index) == (0, 1)
    assert predict_gid_choice(plain).why_bad == ""


def test_the_one_that_is_certain() -> None:
    assert find_routable_gid_index(USUAL) == 3
    assert find_routable_gid_index(TWO_NETWORKS) is None
    assert find_routable_gid_index(TWO_NETWORKS, cidr="10.1.0.0/16") == 5
    assert find_routable_gid_index(IPV6) is None
    assert find_routable_gid_index(IPV6, "AF_INET6") == 3


def test_the_family_that_suits_all() -> None:
    assert find_routable_family([USUAL, GAP]) == "AF_INET"
    assert find_routable_family([IPV6]) == "AF_INET6"
    assert find_routable_family([USUAL, IPV6]) is None
    assert find_routable_family([]) is None
