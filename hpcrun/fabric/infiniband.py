"""`ibnetdiscover`: which host is plugged into which switch, by the names that the devices give themselves."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcrun.errors import UsageError
from hpcrun.fabric.graph import Fabric, FabricLevel, pluralize
from hpcrun.fabric.tree import level_name
from hpcrun.hostlist import fold_hosts, sort_hosts

_HEADER = re.compile(r'\s*(Switch|Ca|Rt)\s+[0-9]+\s+"([SHR]-[0-9a-fA-Fx]+)"\s*#\s*"([^"]*)"')
_PORT = re.compile(
    r'\s*\[([0-9]+)\](?:\[ext [0-9]+\])?(?:\([0-9a-fA-Fx]+\))?\s+"([SHR]-[0-9a-fA-Fx]+)"\[([0-9]+)\]'
)
_DEVICE = re.compile(r"(?:mlx[0-9]+|hfi[0-9]+|HCA|qib[0-9]+|bnxt_re|irdma)[_-]?[0-9]+\w*", re.IGNORECASE)
_FACTORY = re.compile(r"ConnectX|InfiniHost|MT[0-9]{4,}|Technolog|Aggregation Node|Mellanox", re.IGNORECASE)
"""What an adapter is called as long as nobody has named its host, and what counts no host at all."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_FEW = 4
"""A switch with this many times fewer hosts than its neighbour is not a leaf."""


@dataclass
class _InfinibandNetwork:
    """Switches, adapters and cables as printed, keyed by GUID."""

    switches: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    cables: dict[str, dict[str, None]] = field(default_factory=dict)
    described: set[str] = field(default_factory=set)
    """The devices that have a section of their own."""
    named_at: dict[str, int] = field(default_factory=dict)
    """The line of the first cable to each device."""
    unread: list[int] = field(default_factory=list)
    """Lines of ports that were not understood."""


def is_ibnetdiscover_output(text: str) -> bool:
    """Whether a text looks like the answer of ibnetdiscover."""
    return any(_HEADER.match(line) for line in text.splitlines())


def parse_ibnetdiscover(text: str, source: str) -> Fabric:
    """The graph of hosts below leaves, and of leaves that cables join.

    Switches above the leaves that see each other through lower ones count as one unit: a packet may take any
    of them. What looks like no host, such as the aggregation nodes of the switches, is left out.
    """
    network = _parse_network(text)
    _require_whole(network, source)
    notes: list[str] = []
    if network.unread:
        count = len(network.unread)
        first = network.unread[0]
        notes.append(f"{count} {pluralize('line', count)} of ports not understood, the first is line {first}")
    names = _switch_names(network.switches)
    rails = _rails(network, notes)
    if not rails:
        why = "; ".join(notes) or "no host (Ca) is described: was the answer cut short?"
        raise UsageError(
            f"{source}: {len(network.switches)} {pluralize('switch', len(network.switches))} and no host"
            " below"
            f" them; {why}; write down the whole answer of ibnetdiscover"
        )
    heights = _heights(network, rails, notes)
    joined = _group_by_level(network, heights, names)
    leaf_of = {host: [leaf for leaf in leaves if heights.get(leaf) == 0] for host, leaves in rails.items()}
    hosts = sort_hosts(rails) if rails else ()
    units = []
    for host in hosts:
        at = next(iter(leaf_of[host] or rails[host]))
        row = [names[at] if heights[at] == 0 else None]
        units.append((*row, *(group.get(at) for group in joined)))
    multi_rail = {
        host: tuple(names[leaf] for leaf in leaves) for host, leaves in leaf_of.items() if len(leaves) > 1
    }
    if multi_rail:
        count = len(multi_rail)
        notes.append(f"{count} {pluralize('node', count)} below more than one leaf; the first one counts")
    levels = tuple(FabricLevel(level_name(height)) for height in range(1 + len(joined))) if hosts else ()
    return Fabric(hosts, levels, tuple(units), multi_rail, source, tuple(notes))


def _parse_network(text: str) -> _InfinibandNetwork:
    network = _InfinibandNetwork()
    at: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            at = header[2]
            network.described.add(at)
            kind = {"Switch": network.switches, "Ca": network.adapters}.get(header[1])
            if kind is not None:
                kind[at] = header[3]
        elif not line.strip():
            at = None
        elif at is not None and (port := _PORT.match(line)):
            network.named_at.setdefault(port[2], number)
            network.cables.setdefault(at, {})[port[2]] = None
            network.cables.setdefault(port[2], {})[at] = None
        elif at is not None and line.lstrip().startswith("["):
            network.unread.append(number)
    return network


def _require_whole(network: _InfinibandNetwork, source: str) -> None:
    """UsageError where cables lead to devices that are not described: the hosts there would be lost."""
    missing = [guid for guid in network.named_at if guid not in network.described]
    if missing:
        devices = len(network.named_at.keys() | network.described)
        raise UsageError(
            f"{source}: {len(missing)} of {devices} devices are not described, the first is {missing[0]} on"
            f" line {network.named_at[missing[0]]}: was the answer cut short? write down all that"
            " ibnetdiscover prints"
        )


def _switch_names(switches: Mapping[str, str]) -> dict[str, str]:
    """A name for every GUID: the one that the admin gave, where it is one of a kind, else the GUID."""
    short = {guid: _short(text) for guid, text in switches.items()}
    full = {guid: _clean(text.partition(";")[2] or text) for guid, text in switches.items()}
    counts = [Counter(short.values()), Counter(full.values())]
    names = dict(zip(switches, switches, strict=True))
    for guid in switches:
        for given, count in zip((short, full), counts, strict=True):
            if given[guid] and count[given[guid]] == 1:
                names[guid] = given[guid]
                break
    return names


def _short(text: str) -> str:
    """`leaf01` in `MF0;leaf01:MQM8700/U1`; empty where there is no such name."""
    name = text.partition(";")[2].partition(":")[0] if ";" in text else text
    return name if _HOST.fullmatch(name) else ""


def _clean(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")
    return name if _HOST.fullmatch(name) and not _FACTORY.search(text) else ""


def _host(text: str) -> str:
    """The host that an adapter names, as in `n01 mlx5_0` or `hfi1_0 n01`; empty where there is none."""
    if _FACTORY.search(text):
        return ""
    words = [word.strip("'()") for word in text.split()]
    hosts = [word for word in words if not _DEVICE.fullmatch(word)]
    name = hosts[0].partition(".")[0] if hosts else ""
    return name if _HOST.fullmatch(name) else ""


def _rails(network: _InfinibandNetwork, notes: list[str]) -> dict[str, list[str]]:
    """The switches that each host is plugged into, in the order of its adapters' names."""
    adapters: dict[str, list[tuple[str, str]]] = {}
    nameless = []
    for guid, text in network.adapters.items():
        host = _host(text)
        if host:
            adapters.setdefault(host, []).append((_natural_sort_key(text), guid))
        elif "Aggregation Node" not in text:
            nameless.append(text)
    if nameless:
        notes.append(
            f"{len(nameless)} {pluralize('adapter', len(nameless))} without a host's name, such as"
            f" {nameless[0][:40]!r}, left out"
        )
    rails: dict[str, list[str]] = {}
    for host, named in adapters.items():
        switches = (
            peer
            for _, guid in sorted(named)
            for peer in network.cables.get(guid, ())
            if peer in network.switches
        )
        rails[host] = list(dict.fromkeys(switches))
    lost = [host for host, switches in rails.items() if not switches]
    if lost:
        notes.append(f"{fold_hosts(lost)}: plugged into no switch, left out")
    return {host: switches for host, switches in rails.items() if switches}


def _natural_sort_key(text: str) -> str:
    """Sorts mlx5_10 after mlx5_2."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(8), text)


def _heights(
    network: _InfinibandNetwork, rails: Mapping[str, Iterable[str]], notes: list[str]
) -> dict[str, int]:
    """Cables from the nearest leaf to every switch; a leaf is a switch that hosts are plugged into."""
    hosts = Counter(switch for switches in rails.values() for switch in switches)
    cables = {
        switch: [peer for peer in network.cables.get(switch, ()) if peer in network.switches]
        for switch in network.switches
    }
    leaves = [
        switch for switch in hosts if all(hosts[switch] * _FEW > hosts[peer] for peer in cables[switch])
    ]
    odd = [host for host, switches in rails.items() if not set(switches) & set(leaves)]
    if odd:
        notes.append(f"{fold_hosts(odd)}: plugged into a switch above the leaves")
    heights = dict.fromkeys(leaves, 0)
    queue = deque(leaves)
    while queue:
        at = queue.popleft()
        for peer in cables[at]:
            if peer not in heights:
                heights[peer] = heights[at] + 1
                queue.append(peer)
    return heights


def _group_by_level(
    network: _InfinibandNetwork, heights: Mapping[str, int], names: Mapping[str, str]
) -> list[dict[str, str]]:
    """For every level above the leaves, the name of the unit that each switch is in there.

    A cable upwards joins at the level of its upper end, one between equals at the level above them.
    """
    cables: dict[int, list[tuple[str, str]]] = {}
    for at, peers in network.cables.items():
        for peer in peers:
            if at in heights and peer in heights and at < peer:
                a, b = heights[at], heights[peer]
                cables.setdefault(max(a, b) if a != b else a + 1, []).append((at, peer))
    group = {switch: switch for switch in heights}

    def root(switch: str) -> str:
        while group[switch] != switch:
            group[switch] = group[group[switch]]
            switch = group[switch]
        return switch

    levels = []
    for height in range(1, max(cables, default=0) + 1):
        for at, peer in cables.get(height, ()):
            group[root(at)] = root(peer)
        # A unit goes by the first of its highest switches; it is more than that switch where cables between
        # equals make it.
        named: dict[str, str] = {}
        for switch in sorted(heights, key=lambda switch: (-min(heights[switch], height), switch)):
            if heights[switch] <= height:
                name = names[switch] if heights[switch] == height else f"{names[switch]}-{level_name(height)}"
                named.setdefault(root(switch), name)
        levels.append({switch: named[root(switch)] for switch in heights if heights[switch] <= height})
    return levels
