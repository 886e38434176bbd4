"""A node's routes, and nodes that reach one network by different interfaces.

NCCL and gloo bind the listening side of a socket alone: by which of several interfaces in one network a node
sends is the kernel's choice, the route of the lowest metric and of several such the first.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.fabric.ports import parse_kernel_routes
from hpcrun.finding import Finding
from hpcrun.typed_json import WrongValue, parse_typed

_UNUSED = ("local", "broadcast", "multicast", "anycast", "unreachable", "blackhole", "prohibit", "throw")
"""Kinds of routes by which nothing is sent to another node."""
_OWN = ("local", "255")
"""Tables of the node's own addresses."""
_REJECTED = 0x200
_WORD = re.compile(r"(dev|via|metric|table) (\S+)")


@dataclass(frozen=True)
class NetworkRoute:
    """One route: where to, by which interface."""

    destination: str
    """A network, or default."""
    interface: str
    """Several, joined by +, where packets are spread over them."""
    metric: int = 0
    table: str = "main"
    line: str = ""
    """As `ip route` prints it."""


def parse_ip_route(text: str) -> tuple[NetworkRoute, ...]:
    """The answer of `ip route`, of one table or of all, in its order."""
    routes: list[NetworkRoute] = []
    for line in text.splitlines():
        fields = dict(_WORD.findall(line))
        words = line.split()
        if words[:1] == ["nexthop"] and routes and line[:1].isspace() and "dev" in fields:
            last = routes.pop()
            interfaces = sorted({*filter(None, last.interface.split("+")), fields["dev"]})
            joined = f"{last.line} {' '.join(words)}"
            routes.append(
                NetworkRoute(last.destination, "+".join(interfaces), last.metric, last.table, joined)
            )
            continue
        words = words[1:] if words[:1] == ["unicast"] else words
        name = _destination(words[0], fields.get("via", "")) if words else ""
        if not name or fields.get("table") in _OWN:
            continue
        metric = int(fields["metric"]) if fields.get("metric", "").isdecimal() else 0
        routes.append(
            NetworkRoute(name, fields.get("dev", ""), metric, fields.get("table", "main"), " ".join(words))
        )
    return tuple(route for route in routes if route.interface)


def _destination(word: str, via: str) -> str:
    """A network as it is compared; empty for what is none, and for link-local ones."""
    if word in _UNUSED:
        return ""
    if word == "default":
        return "default of IPv6" if ":" in via else "default"
    try:
        network = ipaddress.ip_network(word)
    except ValueError:
        return ""
    return "" if network.is_link_local or network.is_multicast else str(network)


def parse_proc_route(text: str) -> tuple[NetworkRoute, ...]:
    """The routes of /proc/net/route: the main table of IPv4."""
    routes = []
    for route in parse_kernel_routes(text):
        if not re.fullmatch(r"[0-9A-F]{4}", route.flags) or int(route.flags, 16) & _REJECTED:
            continue
        length = route.mask.bit_count()
        name = _destination(f"{ipaddress.IPv4Address(route.network)}/{length}" if length else "default", "")
        if not name:
            continue
        via = f" via {ipaddress.IPv4Address(route.gateway)}" if route.gateway else ""
        metric = int(route.metric) if route.metric.isdecimal() else 0
        line = f"{name}{via} dev {route.interface}" + (f" metric {metric}" if metric else "")
        routes.append(NetworkRoute(name, route.interface, metric, "main", line))
    return tuple(routes)


def routes_of_report(report: Mapping[str, Any]) -> tuple[NetworkRoute, ...] | None:
    """The routes that a report tells of; None where it tells none."""
    try:
        return tuple(parse_typed(NetworkRoute, values) for values in report.get("routes") or ()) or None
    except (WrongValue, TypeError):
        return None


def find_differing_routes(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes that have several interfaces in one network, and send by another one of them than most."""
    routes_of_node = {node: of for node, report in reports.items() if (of := routes_of_report(report))}
    for name in dict.fromkeys(_key(route) for of in routes_of_node.values() for route in of):
        ways = {node: way for node, of in routes_of_node.items() if (way := _routes_to(of, name))}
        if len(ways) < 2 or all(len(way) < 2 for way in ways.values()):
            continue
        usual, count = Counter(map(_plain, ways.values())).most_common(1)[0]
        like = next(node for node, way in ways.items() if _plain(way) == usual)
        for node, way in ways.items():
            if _plain(way) != usual:
                yield _other_route_finding(name, node, way, like, ways[like], count)


def _key(route: NetworkRoute) -> str:
    return route.destination if route.table == "main" else f"{route.destination} of table {route.table}"


def _routes_to(routes: Iterable[NetworkRoute], name: str) -> tuple[NetworkRoute, ...]:
    """The routes to one network in the order in which they are taken."""
    return tuple(sorted((route for route in routes if _key(route) == name), key=lambda route: route.metric))


def _plain(way: tuple[NetworkRoute, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((route.interface, route.metric) for route in way)


def _other_route_finding(
    name: str,
    node: str,
    way: tuple[NetworkRoute, ...],
    like: str,
    usual: tuple[NetworkRoute, ...],
    count: int,
) -> Finding:
    first, other = way[0].interface, usual[0].interface
    others = f"on {count} other node{'s' * (count > 1)}"
    if first != other:
        text = f"sends to {name} by {first}, {others} by {other}"
    else:
        text = f"has other routes to {name} than {others.removeprefix('on ')}; all send by {first}"
    text += f": `ip route` here says {_lines(way)}; on {like} {_lines(usual)}"
    remedy = (
        "give each interface a network of its own, or all nodes the same metrics: NCCL_SOCKET_IFNAME binds"
        " only the side that listens, what is sent takes the first route of the lowest metric"
    )
    return Finding("warning" if first != other else "note", "route", node, text, remedy)


def _lines(way: tuple[NetworkRoute, ...]) -> str:
    return ", then ".join(f"'{route.line}'" for route in way)
