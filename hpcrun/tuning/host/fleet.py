"""Nodes compared by what each says about itself: what should be equal, and which one stands out."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.finding import Finding, Severity, sort_findings
from hpcrun.hostlist import fold_hosts, sort_hosts
from hpcrun.tuning.host.rails import find_crossed_rails
from hpcrun.tuning.host.routes import find_differing_routes as differing_routes
from hpcrun.units import format_bytes

_MOST_PAIRS = 4
NodeFacts = Mapping[str, Any]
"""A node's report as plain values."""
_NEAR = 0.02
"""Sizes that differ by less, such as of memory, are the same."""


def compare_nodes(reports: Mapping[str, NodeFacts], interface: str | None = None) -> tuple[Finding, ...]:
    """What differs between nodes, worst first; each odd node is named. Damaged parts of a report are unknown.

    `interface` is the one of the profile, over which the nodes have to reach each other.
    """
    if len(reports) < 2:
        text = f"{len(reports)} report(s): it takes two nodes to compare; `hpcrun doctor --all` makes them"
        raise UsageError(text)
    findings = [
        finding
        for what, read, severity in _EQUAL
        for finding in _find_differing(reports, what, read, severity)
    ]
    findings += [
        *_repeated_addresses(reports),
        *_common_network(reports, interface),
        *find_crossed_rails(reports),
    ]
    findings += [*differing_routes(reports), *_nearness(reports)]
    return sort_findings(findings)


def _find_differing(
    reports: Mapping[str, NodeFacts],
    what: str,
    read: Callable[[NodeFacts], dict[str, Any]],
    severity: Severity,
) -> Iterator[Finding]:
    facts_of_node = {node: _read_facts(read, facts) for node, facts in reports.items()}
    counts_missing = what in _PRESENCE
    silent = [node for node, of in facts_of_node.items() if not of]
    if silent and not counts_missing:
        if len(silent) < len(facts_of_node):
            yield Finding("unknown", what, _folded(silent), f"{what} is unknown here")
        facts_of_node = {node: of for node, of in facts_of_node.items() if of}
    for subject in dict.fromkeys(subject for of in facts_of_node.values() for subject in of):
        values = {
            node: of.get(subject) for node, of in facts_of_node.items() if counts_missing or subject in of
        }
        yield from _find_odd_nodes(
            _merge_near_sizes(values) if what == _SIZE else values, what, subject, severity
        )


def _find_odd_nodes(
    values: Mapping[str, Any], what: str, subject: str, severity: Severity
) -> Iterator[Finding]:
    nodes_of: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes_of.setdefault(_shown(value, what), []).append(node)
    if len(nodes_of) < 2:
        return
    usual = max(nodes_of, key=lambda value: len(nodes_of[value]))
    count = len(nodes_of[usual])
    if count * 2 <= len(values):
        groups = ", ".join(f"{value} on {_folded(nodes)}" for value, nodes in nodes_of.items())
        yield Finding(severity, what, subject, f"{what} differs: {groups}", "", "medium")
        return
    for value, nodes in nodes_of.items():
        if value != usual:
            text = f"{subject}: {what} is {value}, on {count} other node{'s' * (count > 1)} {usual}"
            yield Finding(severity, what, _folded(nodes), text, "the odd one out")


def _merge_near_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes with those that are nearly the same made the same."""
    seen: list[int] = []
    merged = {}
    for node, size in sizes.items():
        near = next((known_size for known_size in seen if abs(known_size - size) <= _NEAR * known_size), size)
        seen.append(near)
        merged[node] = near
    return merged


def _read_facts(read: Callable[[NodeFacts], dict[str, Any]], facts: NodeFacts) -> dict[str, Any]:
    try:
        return read(facts)
    except (KeyError, TypeError, AttributeError, ValueError):
        return {}


def _shown(value: Any, what: str) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if what == _SIZE:
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _folded(nodes: Iterable[str]) -> str:
    names = list(nodes)
    try:
        return fold_hosts(sort_hosts(names))
    except UsageError:
        return ",".join(names)


def _of_ports(key: str) -> Callable[[NodeFacts], dict[str, Any]]:
    return lambda facts: {
        f"{port['device']}:{port['number']}": port[key] for port in facts["ports"] if port[key]
    }


def _of_links(key: str) -> Callable[[NodeFacts], dict[str, Any]]:
    # An idle GPU lets its link sleep at a low speed.
    return lambda facts: {
        link["name"]: link[key]
        for link in facts["links"]
        if link[key] is not None and not (key == "speed_GTs" and link["name"].startswith("GPU"))
    }


def _of_interfaces(key: str) -> Callable[[NodeFacts], dict[str, Any]]:
    """A value of each adapter and each other interface with an address; not of bridges inside the node."""
    return lambda facts: {
        interface["name"]: interface[key]
        for interface in facts["interfaces"]
        if interface[key]
        and (interface["kind"] == "physical" or (interface["kind"] == "virtual" and interface["networks"]))
    }


def _of_node(key: str) -> Callable[[NodeFacts], dict[str, Any]]:
    return lambda facts: {"node": facts[key]}


def _sizes(facts: NodeFacts) -> dict[str, Any]:
    sizes = {"memory": facts["memory_bytes"], "/dev/shm": facts["shm"]["size_bytes"]}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _limits(facts: NodeFacts) -> dict[str, Any]:
    return {name: "unlimited" if value is None else value for name, value in facts["limits"].items()}


_SIZE = "size"
_PRESENCE = ("state", "setting")
"""Where a value that is missing is a fact of its own, as of a device that is not there."""
_EQUAL: tuple[tuple[str, Callable[[NodeFacts], dict[str, Any]], Severity], ...] = (
    ("state", _of_ports("state"), "error"),
    ("rate in Gb/s", _of_ports("rate_Gbps"), "error"),
    ("link layer", _of_ports("layer"), "warning"),
    ("forced traffic class", _of_ports("traffic_class"), "warning"),
    ("GID that NCCL takes", lambda facts: dict(facts["gid_index"]), "warning"),
    ("PCIe width", _of_links("width"), "error"),
    ("PCIe speed in GT/s", _of_links("speed_GTs"), "error"),
    ("MTU", _of_interfaces("mtu"), "error"),
    ("trust", _of_interfaces("trust"), "warning"),
    ("PFC priorities", lambda facts: {k: v for k, v in facts["lossless"].items() if v is not None}, "error"),
    ("limit", _limits, "warning"),
    (_SIZE, _sizes, "warning"),
    ("number of GPUs", _of_node("gpus"), "error"),
    ("kernel", _of_node("kernel"), "note"),
    ("driver", _of_node("driver"), "warning"),
    ("libfabric", lambda facts: {"node": facts["libfabric"]} if facts["libfabric"] else {}, "warning"),
    ("huge pages", _of_node("hugepages"), "note"),
    ("setting", lambda facts: dict(facts["environ"]), "note"),
    (
        "content",
        lambda facts: {
            f"{file['variable']} {file['path']}": file["digest"] or file["state"] for file in facts["files"]
        },
        "warning",
    ),
    ("peer memory", lambda facts: {"nvidia_peermem": "nvidia_peermem" in facts["modules"]}, "warning"),
)
"""What is read, how, and how bad a difference is."""


def _nearness(reports: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Nodes on which GPUs and adapters stand otherwise to each other: cards in other slots, another BIOS."""
    near = {node: _read_facts(_gpu_nic_distances, facts) for node, facts in reports.items()}
    near = {node: of for node, of in near.items() if of}
    usual: dict[str, Any] = {}
    for pair in dict.fromkeys(pair for of in near.values() for pair in of):
        words = Counter(of[pair] for of in near.values() if pair in of)
        usual[pair] = words.most_common(1)[0][0]
    for node, of in near.items():
        others = [pair for pair, word in of.items() if word != usual[pair]]
        if others:
            described = ", ".join(
                f"{pair} {of[pair]} (others {usual[pair]})" for pair in others[:_MOST_PAIRS]
            )
            rest = f" and {len(others) - _MOST_PAIRS} more" * (len(others) > _MOST_PAIRS)
            text = f"GPUs and adapters are not as near as elsewhere: {described}{rest}"
            remedy = (
                "compare `nvidia-smi topo -m`: cards in other slots, or settings of the BIOS; `hpcrun doctor"
                " pairs NODES --hca NAMES` tries the adapters"
            )
            yield Finding("warning", "nearness", node, text, remedy)


def _gpu_nic_distances(facts: NodeFacts) -> dict[str, Any]:
    """The proximity of GPUs and RDMA devices; of all adapters where there are no RDMA devices."""
    devices = {port["device"] for port in facts.get("ports") or ()}
    return {
        f"{gpu} to {nic}": word
        for gpu, of in facts["near"].items()
        for nic, word in of.items()
        if nic in devices or not devices
    }


def _repeated_addresses(reports: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Addresses that several nodes have, as those of docker0 are: no node is reached by them."""
    owners: dict[tuple[str, str], list[str]] = {}
    for node, facts in reports.items():
        for name, address in _addresses(facts):
            owners.setdefault((name, str(address.ip)), []).append(node)
    for (name, ip), nodes in owners.items():
        if len(nodes) < 2:
            continue
        chosen = [node for node in nodes if _chosen_interface(reports[node]) == name]
        text = f"{ip} is on {len(nodes)} nodes"
        if chosen:
            text += ", and NCCL takes this interface for its sockets"
            yield Finding("error", "address", name, text, "set network.interface in the profile")
        else:
            yield Finding("note", "address", name, f"{text}; nothing is to use it")


def _chosen_interface(facts: NodeFacts) -> Any:
    return facts.get("socket_interface")


def _addresses(facts: NodeFacts) -> Iterator[tuple[str, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    for interface in facts.get("interfaces") or ():
        for text in interface.get("networks") or ():
            try:
                address = ipaddress.ip_interface(text)
            except ValueError:
                continue
            if not address.is_link_local and not address.is_loopback:
                yield interface["name"], address


def _common_network(reports: Mapping[str, NodeFacts], interface: str | None) -> Iterator[Finding]:
    """Whether the interfaces that the nodes' sockets use stand in one network."""
    networks: dict[str, set[str]] = {}
    for node, facts in reports.items():
        used = interface or _chosen_interface(facts)
        own = {str(address.network) for name, address in _addresses(facts) if name == used}
        if own:
            networks[node] = own
        elif interface:
            yield Finding("error", "interface", node, f"{interface} has no address here, or is missing")
    if not networks:
        text = "no addresses are known: whether the nodes reach each other is not"
        yield Finding("unknown", "interface", "all", text)
        return
    if set.intersection(*networks.values()):
        return
    usual, count = Counter(network for own in networks.values() for network in own).most_common(1)[0]
    odd = {node: own for node, own in networks.items() if usual not in own}
    if count * 2 <= len(networks):
        text = f"{len(odd)} of {len(networks)} nodes stand in other networks than {usual}"
        remedy = "one network a rack is fine where routes exist"
        yield Finding("note", "interface", _folded(iter(odd)), text, remedy, "low")
        return
    for node, own in odd.items():
        text = f"stands in {', '.join(sorted(own))}, {count} others in {usual}"
        yield Finding("warning", "interface", node, text, "a route between them must exist", "medium")
