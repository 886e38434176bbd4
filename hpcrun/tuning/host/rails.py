"""Which adapter of a node is which rail, by order and by network, and where nodes do not agree on it."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hpcrun.finding import Finding
from hpcrun.tuning.host.doctor_report import ports_of_report
from hpcrun.tuning.registry.device_names import parse_device_list

_CROSS_NIC, _HCA = "NCCL_CROSS_NIC", "NCCL_IB_HCA"


class AdapterRail(NamedTuple):
    """One rail, in NCCL's order."""

    port: str
    """As HCA:port."""
    network: str
    """The network of its interface; empty: unknown."""


def read_rails(report: Mapping[str, Any]) -> tuple[AdapterRail, ...]:
    """The rails of a node by its report: the active ports that NCCL_IB_HCA takes, in their order.

    None of them where the report is damaged.
    """
    try:
        return _rails(report)
    except (KeyError, TypeError, AttributeError):
        return ()


def _rails(report: Mapping[str, Any]) -> tuple[AdapterRail, ...]:
    devices = parse_device_list((report.get("environ") or {}).get(_HCA, ""))
    networks = {
        interface["name"]: interface.get("networks") or () for interface in report.get("interfaces") or ()
    }
    return tuple(
        AdapterRail(
            port.name, next(filter(None, (_network(networks.get(name, ())) for name in port.interfaces)), "")
        )
        for port in ports_of_report(report)
        if port.is_active and devices.takes(port.device, port.number)
    )


def _network(texts: tuple[str, ...] | list[str]) -> str:
    for text in texts:
        try:
            address = ipaddress.ip_interface(text)
        except ValueError:
            continue
        if not address.is_link_local:
            return str(address.network)
    return ""


def find_crossed_rails(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes whose rails stand in another order than those of most, or are others where that is to be kept."""
    maps = {node: rails for node, report in reports.items() if (rails := read_rails(report))}
    kept = any((report.get("environ") or {}).get(_CROSS_NIC) == "0" for report in reports.values())
    by_network = {node: tuple(rail.network for rail in rails) for node, rails in maps.items()}
    railed = {
        node: of for node, of in by_network.items() if len(of) > 1 and all(of) and len({*of}) == len(of)
    }
    usual, count = _usual_rails(railed)
    reported = set()
    for node, of in railed.items():
        if of != usual and {*of} == {*usual} and count * 2 > len(railed):
            reported.add(node)
            yield _other_order_finding(node, maps[node], usual, kept=kept)
    ports = {node: tuple(rail.port for rail in rails) for node, rails in maps.items()}
    usual, count = _usual_rails(ports)
    for node, names in ports.items():
        if kept and node not in reported and names != usual and count * 2 > len(ports):
            text = f"its rails are {', '.join(names)}, on {count} others {', '.join(usual)}"
            remedy = (
                f"with {_CROSS_NIC}=0 they pair by order: {_HCA} by node, HCA:port, and its rail from 2.30 on"
            )
            yield Finding("warning", "rail", node, text, remedy, "medium")


def _usual_rails(of: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], int]:
    return Counter(of.values()).most_common(1)[0] if of else ((), 0)


def _other_order_finding(
    node: str, rails: tuple[AdapterRail, ...], usual: tuple[str, ...], *, kept: bool
) -> Finding:
    places = [usual.index(rail.network) for rail in rails]
    at = next(here for here, place in enumerate(places) if here != place)
    text = (
        f"its rail {at} is {rails[at].port} in {rails[at].network}, on the others rail {at} is in {usual[at]}"
    )
    text += f": rails cross{f', {_CROSS_NIC}=0 or not' if kept else ''}"
    value = "=" + ",".join(f"{rail.port}:{place}" for rail, place in zip(rails, places, strict=True))
    remedy = f"{_HCA}={value} there, which names each one's rail (NCCL 2.30); or cable it as the others"
    return Finding("warning", "rail", node, text, remedy)
