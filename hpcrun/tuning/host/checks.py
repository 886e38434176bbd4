"""What is wrong with a node, or worth knowing, by what it says about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpcrun.fabric.ports import NetworkInterface, PciLink, RdmaPort
from hpcrun.finding import Finding, Severity, sort_findings
from hpcrun.tuning.host.adapters import ADAPTER_CHECKS
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.gids import AddressFamily, GidChoice, predict_gid_choice
from hpcrun.tuning.host.node_report import HostReport
from hpcrun.tuning.lint.named_files import why_foreign
from hpcrun.tuning.lint.traffic_classes import check_class_agreement, check_lossless_class, nccl_traffic_class
from hpcrun.tuning.registry.device_names import choose_socket_interface, parse_device_list
from hpcrun.tuning.versions import check_versions, parse_versions
from hpcrun.units import format_bytes

_CONTAINER_SHM = 64 * 2**20
_SMALL_SHM = 2**30
_SEGMENT = 10_000_000
"""NCCL's segments are 9.6 MB each."""
_SMALL_MEMLOCK = 2**30
_FEW_FILES = 4096
_RDMA_MTU = 4200
"""What an Ethernet interface needs so that RoCE can use its largest MTU, 4096."""
_DMABUF_KERNEL = (5, 12)
_BRIDGES = ("docker", "virbr", "br-", "cni", "veth")


def check_host(question: HostCheckInput) -> tuple[Finding, ...]:
    """All that is found, worst first."""
    return sort_findings(finding for check in _CHECKS for finding in check(question))


def predict_port_gid(question: HostCheckInput, port: RdmaPort) -> GidChoice:
    """What NCCL takes at a port, by what a job has on this node."""
    environ = question.environ
    index = environ.get("NCCL_IB_GID_INDEX", "")
    family: AddressFamily = "AF_INET6" if environ.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6" else "AF_INET"
    cidr = environ.get("NCCL_IB_ADDR_RANGE", "")
    return predict_gid_choice(
        port,
        index=int(index) if index.isdecimal() and len(index) < 4 else -1,
        family=family,
        cidr=cidr,
        nccl=question.nccl,
    )


def _check_ports(question: HostCheckInput) -> Iterator[Finding]:
    host, network = question.host, question.network
    present = {port.device for port in host.ports}
    for name in network.hcas:
        if name not in present:
            listed = ", ".join(sorted(present)) or "none"
            text = f"the profile names it, this node has {listed}"
            yield Finding("error", "port", name, text, "correct network.hcas, or repair the node")
    for port in host.ports:
        if port.is_active is None:
            yield Finding("unknown", "port", port.name, "its state cannot be read")
        elif not port.is_active:
            state = f"{port.state}{f', {port.physical}' if port.physical else ''}"
            if port in question.used:
                remedy = "look at cable and switch port; until then leave the device out"
                yield Finding("error", "port", port.name, f"is {state}, and jobs are to use it", remedy)
            else:
                yield Finding("note", "port", port.name, f"is {state}; jobs do not use it")
    devices = parse_device_list(host.environ.get("NCCL_IB_HCA", ""))
    if not devices.exact and not devices.excludes:
        yield from _check_wide_names(host, devices.names)
    rates = {port.rate_Gbps for port in question.used if port.rate_Gbps}
    if len(rates) > 1:
        fast = max(rates)
        for port in question.used:
            if port.rate_Gbps and port.rate_Gbps < fast:
                text = f"runs at {port.rate_Gbps:g} Gb/s, its neighbours at {fast:g}"
                remedy = "breakout, cable or FEC; or leave it out of network.hcas where it is for storage"
                yield Finding("warning", "port", port.name, text, remedy, "medium")


def _check_wide_names(host: HostReport, names: Sequence[str]) -> Iterator[Finding]:
    """Names that also take devices that were not meant, as mlx5_1 does mlx5_10."""
    for start in names:
        devices = {port.device for port in host.ports}
        longer = sorted(device for device in devices if device.startswith(start) and device != start)
        if start in devices and longer:
            text = f"NCCL_IB_HCA={start} takes {', '.join(longer)} too: names are beginnings"
            yield Finding("warning", "port", start, text, f"write NCCL_IB_HCA=={start}")


def _check_gids(question: HostCheckInput) -> Iterator[Finding]:
    for port in question.used:
        if not port.is_roce:
            continue
        if not port.gids:
            yield Finding("unknown", "gid", port.name, "its table of GIDs cannot be read, or is empty")
            continue
        choice = predict_port_gid(question, port)
        if not choice.why_bad:
            continue
        text = f"NCCL takes index {choice.index}: {choice.why_bad}; peers will not answer (status 12)"
        yield Finding("error", "gid", port.name, text, _gid_remedy(question, port))


def _gid_remedy(question: HostCheckInput, port: RdmaPort) -> str:
    if "NCCL_IB_GID_INDEX" in question.host.environ:
        return "leave NCCL_IB_GID_INDEX out: newer NCCL (2.21) finds the address by itself"
    if question.nccl is not None and question.nccl < (2, 21):
        right = [gid.index for gid in port.gids if gid.roce == 2 and "ffff:" in gid.address]
        return f"set NCCL_IB_GID_INDEX={right[0]}, or use NCCL 2.21" if right else "use NCCL 2.21 or newer"
    if not predict_gid_choice(port, family="AF_INET6").why_bad:
        return "it has IPv6 addresses only: set network.address_family: ipv6 in the profile"
    return "give the interface an address that peers can route to"


def _check_pci(question: HostCheckInput) -> Iterator[Finding]:
    used = {port.device for port in question.used}
    for link in question.host.links:
        if (
            link.width
            and link.most_width
            and link.width < min(link.most_width, link.slot_width or link.most_width)
        ):
            text = f"its PCIe link runs at x{link.width}, it could x{link.most_width}"
            yield Finding("error", "pci", link.name, text, "reseat or replace the card or riser")
        elif link.width and link.most_width and link.width < link.most_width:
            text = f"its PCIe link runs at x{link.width} of x{link.most_width}: the slot has no more"
            yield Finding("note", "pci", link.name, text)
        yield from _pci_speed(link, is_gpu=link.name.startswith("GPU"))
        if link.iommu.startswith("DMA") and (link.name in used or link.name.startswith("GPU")):
            text = f"the IOMMU translates its accesses ({link.iommu}); GPU and adapter may not talk directly"
            remedy = "on bare metal iommu=pt and no ACS on the bridges; in a VM ATS and a topology file"
            yield Finding("warning", "pci", link.name, text, remedy, "medium")


def _pci_speed(link: PciLink, *, is_gpu: bool) -> Iterator[Finding]:
    most = min(filter(None, (link.most_speed_GTs, link.slot_speed_GTs)), default=None)
    # An idle GPU lets its link sleep at the lowest speed; only its width tells.
    if is_gpu or link.speed_GTs is None or most is None or link.speed_GTs >= most:
        return
    text = f"its PCIe link runs at {link.speed_GTs:g} GT/s, both ends could {most:g}"
    remedy = "reseat the card, then look at the slot's setting in the BIOS"
    yield Finding("error", "pci", link.name, text, remedy)


def _check_traffic_classes(question: HostCheckInput) -> Iterator[Finding]:
    host, network, environ = question.host, question.network, question.environ
    for port in (candidate for candidate in question.used if candidate.is_roce):
        yield from check_class_agreement(
            environ, port.name, uses_ucx=question.uses_ucx, forced=port.traffic_class
        )
        for name in port.interfaces:
            lossless, interface = host.lossless.get(name), host.interface(name)
            trust = interface.trust if interface else ""
            if lossless is None:
                yield Finding("unknown", "pfc", name, "neither dcb nor mlnx_qos tells its PFC state")
            elif not lossless:
                yield _no_pfc(name, nccl_traffic_class(environ))
            elif trust == "pcp" and environ.get("NCCL_IB_TC"):
                text = "trusts the VLAN tag (pcp): a traffic class in the IP header does not count"
                yield Finding("error", "trust", name, text, "ask for trust dscp, on the switch port too")
            else:
                tc = nccl_traffic_class(environ) if port.traffic_class is None else port.traffic_class
                yield from check_lossless_class(tc, lossless, trust, network.service_level, name)
            if (
                interface
                and interface.ecn is not None
                and lossless
                and not set(lossless) & set(interface.ecn)
            ):
                text = (
                    f"DCQCN is off on priority {', '.join(map(str, lossless))}: no rate control, only pauses"
                )
                remedy = "turn roce_np and roce_rp on for it, or know why not"
                yield Finding("warning", "ecn", name, text, remedy, "medium")


def _no_pfc(name: str, tc: int) -> Finding:
    text = f"PFC is off on all priorities; NCCL's traffic (TC {tc}) can be dropped, and RoCE goes on slowly"
    remedy = "`hpcrun tune checklist KIND` has what to ask for; some fabrics do without on purpose"
    return Finding("warning", "pfc", name, text, remedy, "medium")


def _check_mtu(question: HostCheckInput) -> Iterator[Finding]:
    for port in (candidate for candidate in question.used if candidate.is_roce):
        for interface in map(question.host.interface, port.interfaces):
            if interface and interface.mtu and interface.mtu < _RDMA_MTU:
                text = f"MTU {interface.mtu} leaves RoCE {_rdma_mtu(interface.mtu)} bytes a packet"
                remedy = f"raise it to {_RDMA_MTU} or more, on switches too"
                yield Finding("warning", "mtu", interface.name, text, remedy)


def _rdma_mtu(mtu: int) -> int:
    """The largest of the sizes that RDMA knows which fits with its headers."""
    return max((size for size in (256, 512, 1024, 2048, 4096) if size + 104 <= mtu), default=0)


def _check_sockets(question: HostCheckInput) -> Iterator[Finding]:
    host = question.host
    text = question.socket_names
    devices = parse_device_list(text)
    if not host.interfaces:
        yield Finding("unknown", "interface", host.node, "its network interfaces cannot be read")
        return
    chosen = choose_socket_interface(host.interfaces, text, question.nccl)
    if devices.entries and not devices.excludes:
        source = (
            "NCCL_SOCKET_IFNAME"
            if "NCCL_SOCKET_IFNAME" in host.environ
            else "the profile's network.interface"
        )
        if chosen is None:
            there = (
                ", ".join(interface.name for interface in host.interfaces if interface.networks)
                or "none with an address"
            )
            remedy = f"name one of {there}"
            yield Finding(
                "error",
                "interface",
                host.node,
                f"{source} is {text}, and there is none here with an address",
                remedy,
            )
        elif chosen.name == "lo":
            text = f"{source} names lo: no other node is reached by it"
            yield Finding("error", "interface", "lo", text, "name the one between nodes")
        return
    if chosen is not None and _is_private_bridge(chosen):
        remedy = "set network.interface in the profile"
        text = f"NCCL takes it for its sockets, and every host has it: {', '.join(chosen.networks)}"
        yield Finding("error", "interface", chosen.name, text, remedy)


def _is_private_bridge(interface: NetworkInterface) -> bool:
    return interface.name.startswith(_BRIDGES)


def _check_limits(question: HostCheckInput) -> Iterator[Finding]:
    host, uses_rdma = question.host, bool(question.used)
    if not host.limits:
        yield Finding("unknown", "limits", host.node, "its limits cannot be read")
        return
    memlock = host.limits.get("memlock")
    if uses_rdma and memlock is not None and memlock < _SMALL_MEMLOCK:
        text = f"memlock is {memlock // 1024} KiB here: RDMA cannot register its buffers"
        remedy = "unlimited in limits.conf of slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        yield Finding("error", "limits", host.node, text, remedy)
    if (nofile := host.limits.get("nofile")) is not None and nofile < _FEW_FILES:
        text = f"{nofile} open files at most; large jobs need some for every peer"
        remedy = "raise the soft limit in the profile's setup: ulimit -n 65536"
        yield Finding("note", "limits", host.node, text, remedy)
    if (
        "stack" in host.limits
        and host.limits["stack"] is None
        and question.nccl
        and question.nccl < (2, 30, 4)
    ):
        text = "the stack is unlimited, which crashed NCCL 2.27.5 at 44 ranks and more on GB200"
        yield Finding("note", "limits", host.node, text, "ulimit -s 8192 in the profile's setup", "medium")


def _check_shared_memory(question: HostCheckInput) -> Iterator[Finding]:
    shm, gpus = question.host.shm, len(question.host.inside.gpus)
    if shm.size_bytes is None:
        yield Finding("unknown", "shm", "/dev/shm", "its size cannot be read")
    elif shm.size_bytes <= _CONTAINER_SHM:
        text = f"has {format_bytes(shm.size_bytes)}, a container's default; NCCL ends with a bus error"
        yield Finding("error", "shm", "/dev/shm", text, "--shm-size or --ipc=host of the container runtime")
    elif shm.size_bytes < _SMALL_SHM:
        text = f"has only {format_bytes(shm.size_bytes)}"
        yield Finding("warning", "shm", "/dev/shm", text, "give it 1 GiB or more")
    if shm.free_bytes is not None and shm.free_bytes < _SEGMENT * max(8, gpus):
        text = f"{format_bytes(shm.free_bytes)} are free; NCCL takes about 10 MiB for each pair of neighbours"
        yield Finding("error", "shm", "/dev/shm", text, "remove what dead jobs left")
    if shm.stale:
        names = ", ".join(shm.stale[:3]) + (", …" if len(shm.stale) > 3 else "")
        text = f"{len(shm.stale)} segment(s) of dead jobs, {format_bytes(shm.stale_bytes)}: {names}"
        remedy = "no process maps them: they can be removed"
        yield Finding("warning", "shm", "/dev/shm", text, remedy, "medium")


def _check_peer_memory(question: HostCheckInput) -> Iterator[Finding]:
    host = question.host
    if not host.inside.gpus or not question.used or "nvidia" not in " ".join(host.modules or ()):
        return
    if {"nvidia_peermem", "nv_peer_mem"} & set(host.modules or ()):
        return
    parts = host.kernel.split(".")
    kernel = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if "Open Kernel Module" in host.driver and kernel >= _DMABUF_KERNEL:
        text = "nvidia_peermem is not loaded; kernel and open driver can do without (DMA-BUF)"
        yield Finding("note", "peermem", host.node, text)
        return
    text = "nvidia_peermem is not loaded, and DMA-BUF needs the open driver on kernel 5.12"
    remedy = "load it, after driver updates too; data goes by the CPU's memory"
    yield Finding("warning", "peermem", host.node, text, remedy, "medium")


def _check_affinity(question: HostCheckInput) -> Iterator[Finding]:
    host = question.host
    gpus = len(host.inside.gpus)
    if gpus and host.allowed and len(host.allowed) < 2 * gpus:
        text = f"{len(host.allowed)} CPU(s) for {gpus} GPUs: NCCL's proxy threads share cores with the ranks"
        remedy = "ask for whole nodes, or bind looser"
        if gpus > 1 and question.environ.get("NCCL_P2P_PXN_LEVEL") != "0":
            remedy += "; all-to-all suffers most, as one of them sends for all GPUs of a rail (PXN)"
        yield Finding("warning", "affinity", host.node, text, remedy, "medium")
    for index in host.inside.gpus_far_from_cpus(host.allowed):
        text = "none of the job's CPUs is near it"
        yield Finding("warning", "affinity", f"GPU {index}", text, "ask for whole nodes")
    unknown = [f"GPU {gpu.index}" for gpu in host.inside.gpus if gpu.numa is None]
    if unknown:
        yield Finding("unknown", "affinity", ", ".join(unknown), "the NUMA node is not told")


def _check_named_files(question: HostCheckInput) -> Iterator[Finding]:
    """What settings name and this node has not, or has from another machine."""
    host = question.host
    gpus = [gpu.address for gpu in host.inside.gpus if gpu.address]
    devices = {port.device for port in host.ports}
    for file in host.files:
        source = f" ({file.where})" if file.where else ""
        if file.lacks:
            severity: Severity = "error" if file.kind == "graphs" else "warning"
            text = f"{file.lacks}{source}"
            yield Finding(severity, "file", file.variable, text, "put it there, or take the setting out")
        elif other := why_foreign(file, gpus, devices):
            text = f"{file.path}{source} {other}: it was made for another machine"
            remedy = "take this machine's, or leave it out; NCCL_TOPO_DUMP_FILE writes a true one"
            yield Finding("warning", "file", file.variable, text, remedy)


def _check_library_versions(question: HostCheckInput) -> Iterator[Finding]:
    """The driver and libfabric of this node against the NCCL that jobs load."""
    host = question.host
    versions = parse_versions(f"{host.driver}\n{host.libfabric}")
    given = {"nccl": question.nccl, "cuda": question.cuda if versions.get("driver") else None}
    yield from check_versions(versions | {name: (version,) for name, version in given.items() if version})


_CHECKS: tuple[Callable[[HostCheckInput], Iterator[Finding]], ...] = (
    _check_ports, _check_gids, _check_pci, _check_traffic_classes, _check_mtu, _check_sockets, _check_limits,
    _check_shared_memory, _check_peer_memory, _check_affinity, *ADAPTER_CHECKS, _check_named_files,
    _check_library_versions,
)  # fmt: skip


def check_clock_skew(
    node: str, shown: float, earliest: float, latest: float, allowed_s: float = 1.0
) -> list[Finding]:
    """Whether a node's clock stands where it must: it was read between two moments of a trusted clock."""
    off = shown - latest if shown > latest else min(0.0, shown - earliest)
    if abs(off) <= allowed_s:
        return []
    text = f"its clock is {abs(off):.1f} s or more {'ahead' if off > 0 else 'behind'}"
    return [Finding("warning", "clock", node, text, "look at chronyd or ntpd")]
