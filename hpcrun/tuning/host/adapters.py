"""How a node's adapters are used: too few of them, bonds by one queue pair, machines without a map."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcrun.finding import Finding
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.registry.device_names import parse_device_list
from hpcrun.tuning.registry.values import parse_c_integer


def _find_unused_ports(question: HostCheckInput) -> Iterator[Finding]:
    """Ports that NCCL_IB_HCA leaves out, of those that are as fast as the ones it takes."""
    host, network = question.host, question.network
    devices = parse_device_list(host.environ.get("NCCL_IB_HCA", ""))
    if not devices.entries or devices.excludes:
        return
    active = [port for port in host.ports if port.is_active]
    taken = [port for port in active if devices.takes(port.device, port.number)]
    if network.hcas:
        meant = [port for port in active if port.device in network.hcas]
    else:
        kinds = {(port.layer, port.rate_Gbps) for port in taken}
        meant = [port for port in active if (port.layer, port.rate_Gbps) in kinds]
    idle = [port.name for port in meant if port not in taken]
    if taken and idle:
        text = f"NCCL_IB_HCA leaves {len(idle)} of {len(meant)} ports for jobs unused"
        remedy = "name all of them, or leave the variable out; one GPU drives one adapter"
        yield Finding("warning", "port", ", ".join(idle), text, remedy, "high" if network.hcas else "medium")


def _find_single_queue_pair_bonds(question: HostCheckInput) -> Iterator[Finding]:
    """Ports of two links that a single queue pair a connection keeps to one of them."""
    host = question.host
    if (parse_c_integer(host.environ.get("NCCL_IB_QPS_PER_CONNECTION", "")) or 1) > 1:
        return
    for port in question.used:
        if port.is_roce and any("bond" in name for name in (port.device, *port.interfaces)):
            text = "is bonded, and the one queue pair of a connection keeps to one of its links"
            remedy = (
                "measure NCCL_IB_QPS_PER_CONNECTION=2 and 4; switches must hash on the UDP source port too"
            )
            yield Finding("warning", "port", port.name, text, remedy, "medium")


def _find_unused_second_ports(question: HostCheckInput) -> Iterator[Finding]:
    """Adapters with two ports of which NCCL keeps to the first when rails are not to cross."""
    host = question.host
    if host.environ.get("NCCL_CROSS_NIC") != "0":
        return
    entries = parse_device_list(host.environ.get("NCCL_IB_HCA", "")).entries
    by_port = {entry[0] for entry in entries if len(entry) > 1}
    ports: dict[str, list[str]] = {}
    for port in question.used:
        if port.is_active and port.device not in by_port:
            ports.setdefault(port.device, []).append(port.name)
    for device, names in ports.items():
        if len(names) > 1:
            text = f"has {len(names)} ports in use, and with NCCL_CROSS_NIC=0 NCCL keeps to the first"
            remedy = f"name them, and from NCCL 2.30 on their rails: NCCL_IB_HCA=={','.join(names)}"
            yield Finding("warning", "rail", device, text, remedy, "medium")


def _find_unused_adaptive_routing(question: HostCheckInput) -> Iterator[Finding]:
    """InfiniBand whose adaptive routing lives on service levels that NCCL does not use."""
    network = question.network
    levels = network.adaptive_routing_levels
    if not levels or parse_c_integer(question.environ.get("NCCL_IB_ADAPTIVE_ROUTING", "")) == 0:
        return
    level = parse_c_integer(question.environ.get("NCCL_IB_SL", ""))
    level = (network.service_level or 0) if level is None or level < 0 else level
    names = [port.name for port in question.used if port.layer == "InfiniBand"]
    if names and level not in levels:
        listed = ", ".join(map(str, levels))
        text = f"NCCL sends on service level {level}, and adaptive routing is on {listed}: it does not get it"
        remedy = f"network.service_level: {levels[0]}, if jobs may use it"
        yield Finding("warning", "routing", ", ".join(names), text, remedy)


def _find_missing_topology_file(question: HostCheckInput) -> Iterator[Finding]:
    """A virtual machine with GPUs and adapters, and nothing that says which of them are near each other."""
    host, network = question.host, question.network
    topology_file = network.nccl_topology or host.environ.get("NCCL_TOPO_FILE") or host.topology_file
    if host.is_virtual and host.inside.gpus and question.used and not topology_file:
        text = "a virtual machine without a topology file: NCCL cannot see which adapter is near which GPU"
        remedy = "network.nccl_topology in the profile: the image has the file for this size of machine"
        yield Finding("warning", "topology", host.node, text, remedy, "medium")


ADAPTER_CHECKS: tuple[Callable[[HostCheckInput], Iterator[Finding]], ...] = (
    _find_unused_ports,
    _find_single_queue_pair_bonds,
    _find_missing_topology_file,
    _find_unused_second_ports,
    _find_unused_adaptive_routing,
)
