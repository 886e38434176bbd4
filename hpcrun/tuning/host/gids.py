"""Which address of a port's table NCCL takes, and whether the fabric can route to it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpcrun.fabric.ports import Gid, RdmaPort

AddressFamily = Literal["AF_INET", "AF_INET6"]
AUTOMATIC_GID_SINCE = (2, 21)
"""The first NCCL that looks through the table; earlier ones take index 0 unless they are told."""
_ROUTABLE_INDEX = 1


@dataclass(frozen=True)
class GidChoice:
    """What NCCL takes at a port."""

    index: int
    gid: Gid | None
    """None where the table has nothing at this index."""
    why_bad: str = ""
    """Why peers in other racks cannot reach it; empty where nothing speaks against it."""


def predict_gid_choice(
    port: RdmaPort,
    *,
    index: int = -1,
    family: AddressFamily = "AF_INET",
    cidr: str = "",
    roce: int = 2,
    nccl: tuple[int, ...] | None = None,
) -> GidChoice:
    """What this NCCL (None: a new one) takes, given NCCL_IB_GID_INDEX, _ADDR_FAMILY, _ADDR_RANGE and so on.

    A table that cannot be read gives index 0, as an empty one would.
    """
    table = {gid.index: gid for gid in port.gids}
    if index >= 0:
        return _judge_choice(port, table, index)
    if nccl is not None and nccl < AUTOMATIC_GID_SINCE:
        return _judge_choice(port, table, 0)
    if not port.is_roce:
        routable = table.get(_ROUTABLE_INDEX)
        has_flid = routable is not None and any(ipaddress.IPv6Address(routable.address).packed[4:6])
        return _judge_choice(port, table, _ROUTABLE_INDEX if has_flid else 0)
    chosen = 0
    for candidate in sorted(table):
        if _is_preferred(table[candidate], table.get(chosen), family, cidr, roce):
            chosen = candidate
    return _judge_choice(port, table, chosen)


def _is_preferred(new: Gid, old: Gid | None, family: AddressFamily, cidr: str, roce: int) -> bool:
    if gid_address_family(new) != family or not _is_in(new, cidr):
        return False
    if (gid_address_family(old) if old else "AF_INET6") != family:
        return True
    return not is_link_local_gid(new) and new.roce == roce != (old.roce if old else None)


def gid_address_family(gid: Gid) -> AddressFamily:
    """The family that NCCL counts an address in: ::ffff:a.b.c.d is IPv4."""
    return "AF_INET" if ipaddress.IPv6Address(gid.address).ipv4_mapped else "AF_INET6"


def is_link_local_gid(gid: Gid) -> bool:
    """Whether it is of no use beyond the next switch."""
    return ipaddress.IPv6Address(gid.address) in ipaddress.IPv6Network("fe80::/64")


def _is_in(gid: Gid, cidr: str) -> bool:
    address = ipaddress.IPv6Address(gid.address)
    try:
        return not cidr or (address.ipv4_mapped or address) in ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        return False


def _judge_choice(port: RdmaPort, table: dict[int, Gid], index: int) -> GidChoice:
    gid = table.get(index)
    if gid is None:
        return GidChoice(index, None, f"GID {index} is empty" if table else "")
    if port.is_roce and is_link_local_gid(gid):
        version = f"RoCE v{gid.roce}" if gid.roce else "RoCE"
        return GidChoice(index, gid, f"GID {index} is link-local ({gid.address}, {version})")
    if port.is_roce and gid.roce == 1:
        return GidChoice(index, gid, f"GID {index} is RoCE v1, which routers do not carry ({gid.address})")
    return GidChoice(index, gid)


def find_routable_gid_index(port: RdmaPort, family: AddressFamily = "AF_INET", cidr: str = "") -> int | None:
    """The one RoCE v2 address of a family that can be routed; None where there is none, or several."""
    indices = [
        gid.index
        for gid in port.gids
        if gid.roce == 2
        and gid_address_family(gid) == family
        and not is_link_local_gid(gid)
        and _is_in(gid, cidr)
    ]
    return indices[0] if len(indices) == 1 else None


def find_routable_family(ports: Iterable[RdmaPort]) -> AddressFamily | None:
    """The address family under which every port gets an address that can be routed; None for neither."""
    roce_ports = [port for port in ports if port.is_roce and port.gids]
    families: tuple[AddressFamily, ...] = ("AF_INET", "AF_INET6")
    for family in families:
        if roce_ports and not any(predict_gid_choice(port, family=family).why_bad for port in roce_ports):
            return family
    return None
