"""How a node's adapters are used: too few of them, bonds by one queue pair, machines without a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrun.fabric.ports import Port
from hpcrun.specs.cluster import NetworkSpec
from hpcrun.tuning.finding import Finding
from hpcrun.tuning.host import Host
from hpcrun.tuning.names import parse_devices
from hpcrun.tuning.values import number


def left_idle(host: Host, network: NetworkSpec) -> Iterator[Finding]:
    """Ports that NCCL_IB_HCA leaves out, of those that are as fast as the ones it takes."""
    wanted = parse_devices(host.environ.get("NCCL_IB_HCA", ""))
    if not wanted.entries or wanted.excludes:
        return
    active = [port for port in host.ports if port.is_active]
    taken = [port for port in active if wanted.takes(port.device, port.number)]
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


def bonded(host: Host, used: Sequence[Port]) -> Iterator[Finding]:
    """Ports of two links that a single queue pair a connection keeps to one of them."""
    if (number(host.environ.get("NCCL_IB_QPS_PER_CONNECTION", "")) or 1) > 1:
        return
    for port in used:
        if port.is_roce and any("bond" in name for name in (port.device, *port.interfaces)):
            text = "is bonded, and the one queue pair of a connection keeps to one of its links"
            remedy = (
                "measure NCCL_IB_QPS_PER_CONNECTION=2 and 4; switches must hash on the UDP source port too"
            )
            yield Finding("warning", "port", port.name, text, remedy, "medium")


def unmapped(host: Host, network: NetworkSpec, used: Sequence[Port]) -> Iterator[Finding]:
    """A virtual machine with GPUs and adapters, and nothing that says which of them are near each other."""
    told = network.nccl_topology or host.environ.get("NCCL_TOPO_FILE") or host.topology_file
    if host.is_virtual and host.inside.gpus and used and not told:
        text = "a virtual machine without a topology file: NCCL cannot see which adapter is near which GPU"
        remedy = "network.nccl_topology in the profile: the image has the file for this size of machine"
        yield Finding("warning", "topology", host.node, text, remedy, "medium")
