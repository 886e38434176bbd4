"""What a node's network looks like from inside: RDMA ports with their GIDs, interfaces, PCI links.

Everything is read from files below a root; what they do not say is None or empty.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcrun.fabric.node_topology import NodeTopology, list_sysfs_entries, read_kernel_text, read_sysfs_line

_NUMBER = re.compile(r"[0-9]{1,9}")
_STATE = re.compile(r"[0-9]+:\s*(\w+)")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) Gb/sec")
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?) GT/s")
_CLASS = re.compile(r"(?:Global tclass\s*=\s*)?([0-9]{1,3})")
_UNICAST = re.compile(r"\s*\|-- ([0-9.]+)")
_HEX = re.compile(r"[0-9A-F]{8}")
_LOCAL = re.compile(r"\s*/32 host LOCAL")


@dataclass(frozen=True)
class Gid:
    """One address of an RDMA port, in its table."""

    index: int
    address: str
    """As an IPv6 address."""
    roce: int | None = None
    """1 or 2; None on InfiniBand, and where the table does not say."""
    interface: str = ""


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    number: int
    state: str = ""
    """Such as ACTIVE or DOWN."""
    physical: str = ""
    """Such as LinkUp or Polling."""
    rate_Gbps: float | None = None
    layer: str = ""
    """InfiniBand or Ethernet."""
    gids: tuple[Gid, ...] = ()
    interfaces: tuple[str, ...] = ()
    traffic_class: int | None = None
    """What the driver forces upon every queue pair; only the vendor's driver tells."""

    @property
    def name(self) -> str:
        """As NCCL and UCX name it, mlx5_0:1."""
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool | None:
        """Whether it can carry traffic; None where it does not say."""
        return self.state == "ACTIVE" if self.state else None

    @property
    def is_roce(self) -> bool:
        """Whether it is an Ethernet port."""
        return self.layer == "Ethernet"


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface as the kernel has it."""

    name: str
    kind: str = "virtual"
    """physical, bridge, loopback or virtual."""
    up: bool | None = None
    speed_Gbps: float | None = None
    mtu: int | None = None
    networks: tuple[str, ...] = ()
    """Its addresses with the length of their network, such as 10.1.0.7/16."""
    trust: str = ""
    """pcp or dscp; only the vendor's driver tells."""
    ecn: tuple[int, ...] | None = None
    """The priorities on which both ends of DCQCN are on; None where the driver does not tell."""


@dataclass(frozen=True)
class PciLink:
    """The PCI link of a GPU or an adapter: what it runs at, and what its two ends could."""

    name: str
    address: str
    speed_GTs: float | None = None
    width: int | None = None
    most_speed_GTs: float | None = None
    most_width: int | None = None
    slot_speed_GTs: float | None = None
    """What the slot above it could; None where there is none or it does not say."""
    slot_width: int | None = None
    iommu: str = ""
    """The translation of its memory accesses: identity, DMA, DMA-FQ; empty: none, or unknown."""


def read_rdma_ports(root: Path = Path("/"), *, with_gids: bool = True) -> tuple[RdmaPort, ...]:
    """The ports of every RDMA device; without their tables of GIDs, which are long, for a quick look."""
    ports = []
    for device in list_sysfs_entries(root / "sys/class/infiniband"):
        interfaces = tuple(path.name for path in list_sysfs_entries(device / "device/net"))
        for port in list_sysfs_entries(device / "ports"):
            if _NUMBER.fullmatch(port.name):
                ports.append(_read_port(device, port, interfaces, with_gids=with_gids))
    return tuple(sorted(ports, key=lambda port: (natural_sort_key(port.device), port.number)))


def natural_sort_key(name: str) -> tuple[str | int, ...]:
    """A key that puts mlx5_2 before mlx5_10."""
    parts = re.split(r"([0-9]{1,9})", name)
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts))


def _read_port(device: Path, port: Path, interfaces: tuple[str, ...], *, with_gids: bool) -> RdmaPort:
    rate = _RATE.match(read_sysfs_line(port / "rate"))
    forced = _CLASS.match(read_sysfs_line(device / "tc" / port.name / "traffic_class"))
    return RdmaPort(
        device.name,
        int(port.name),
        _word(_STATE, read_sysfs_line(port / "state")),
        _word(_STATE, read_sysfs_line(port / "phys_state")),
        float(rate[1]) if rate else None,
        read_sysfs_line(port / "link_layer"),
        _read_gids(port) if with_gids else (),
        interfaces,
        int(forced[1]) if forced and int(forced[1]) < 256 else None,
    )


def _word(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.match(text)
    return match[1] if match else ""


def _read_gids(port: Path) -> tuple[Gid, ...]:
    """The table without its empty places."""
    gids = []
    for entry in list_sysfs_entries(port / "gids"):
        try:
            address = ipaddress.IPv6Address(read_sysfs_line(entry))
        except ValueError:
            continue
        if not _NUMBER.fullmatch(entry.name) or int(address) & (2**64 - 1) == 0:
            continue
        kind = read_sysfs_line(port / "gid_attrs/types" / entry.name)
        roce = (
            {"IB/RoCE v1": 1, "RoCE v2": 2}.get(kind)
            if read_sysfs_line(port / "link_layer") == "Ethernet"
            else None
        )
        gids.append(
            Gid(int(entry.name), str(address), roce, read_sysfs_line(port / "gid_attrs/ndevs" / entry.name))
        )
    return tuple(sorted(gids, key=lambda gid: gid.index))


def read_network_interfaces(root: Path = Path("/")) -> tuple[NetworkInterface, ...]:
    """The network interfaces, with their addresses."""
    texts = (read_kernel_text(root / "proc/net" / name) for name in ("route", "fib_trie", "if_inet6"))
    networks = parse_interface_addresses(*texts)
    interfaces = []
    for folder in list_sysfs_entries(root / "sys/class/net"):
        speed, mtu = read_sysfs_line(folder / "speed"), read_sysfs_line(folder / "mtu")
        interfaces.append(
            NetworkInterface(
                folder.name,
                _kind(folder),
                {"up": True, "down": False}.get(read_sysfs_line(folder / "operstate")),
                int(speed) / 1000 if re.fullmatch(r"[1-9][0-9]{0,6}", speed) else None,
                int(mtu) if _NUMBER.fullmatch(mtu) else None,
                networks.get(folder.name, ()),
                read_sysfs_line(folder / "qos/trust"),
                _ecn(folder / "ecn"),
            )
        )
    return tuple(sorted(interfaces, key=lambda interface: natural_sort_key(interface.name)))


def _kind(folder: Path) -> str:
    if folder.name == "lo":
        return "loopback"
    if (folder / "bridge").is_dir():
        return "bridge"
    return "physical" if (folder / "device").exists() else "virtual"


def _ecn(folder: Path) -> tuple[int, ...] | None:
    ends = [folder / end / "enable" for end in ("roce_np", "roce_rp")]
    if not all(map(list_sysfs_entries, ends)):
        return None
    return tuple(n for n in range(8) if all(read_sysfs_line(end / str(n)) == "1" for end in ends))


class KernelRoute(NamedTuple):
    """A line of /proc/net/route; addresses as numbers."""

    interface: str
    network: int
    gateway: int
    mask: int
    flags: str
    metric: str


def parse_kernel_routes(text: str) -> Iterator[KernelRoute]:
    """The lines of /proc/net/route: the main table of IPv4."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 7 and all(_HEX.fullmatch(words[at]) for at in (1, 2, 7)):
            network, gateway, mask = (int.from_bytes(bytes.fromhex(words[at])[::-1]) for at in (1, 2, 7))
            yield KernelRoute(words[0], network, gateway, mask, words[3], words[6])


def parse_interface_addresses(route: str, fib_trie: str, if_inet6: str) -> dict[str, tuple[str, ...]]:
    """The addresses of every interface, by the texts of /proc/net: those of IPv4 first.

    The kernel lists local IPv4 addresses without their interface: an address belongs to whichever has a route
    to its network, which may be several.
    """
    addresses: dict[str, list[str]] = {}
    local = [entry for entry in parse_kernel_routes(route) if entry.mask and not entry.gateway]
    for address in _local_addresses(fib_trie):
        for local_route in local:
            if int(ipaddress.IPv4Address(address)) & local_route.mask == local_route.network:
                addresses.setdefault(local_route.interface, []).append(
                    f"{address}/{local_route.mask.bit_count()}"
                )
    for line in if_inet6.splitlines():
        words = line.split()
        if len(words) == 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]) and words[5] != "lo":
            text = ipaddress.IPv6Address(int(words[0], 16))
            if re.fullmatch(r"[0-9a-f]{1,2}", words[2]):
                addresses.setdefault(words[5], []).append(f"{text}/{int(words[2], 16)}")
    return {name: tuple(dict.fromkeys(texts)) for name, texts in addresses.items()}


def _local_addresses(fib_trie: str) -> list[str]:
    local: dict[str, None] = {}
    last = ""
    for line in fib_trie.splitlines():
        if match := _UNICAST.match(line):
            last = match[1]
        elif last and _LOCAL.match(line) and not last.startswith("127."):
            try:
                local[str(ipaddress.IPv4Address(last))] = None
            except ValueError:
                last = ""
    return list(local)


def read_pci_links(root: Path, host: NodeTopology) -> tuple[PciLink, ...]:
    """The links of GPUs and adapters that stand on a PCI bus."""
    devices = [(f"GPU {gpu.index}", gpu.address, gpu.path) for gpu in host.gpus]
    devices += [(nic.name, nic.address, nic.path) for nic in host.nics]
    links = []
    for name, address, path in devices:
        if not address:
            continue
        here = root / "sys/bus/pci/devices" / address
        slot = root / "sys/bus/pci/devices" / path[-1] if len(path) > 1 else None
        links.append(
            PciLink(
                name,
                address,
                _speed(here / "current_link_speed"),
                _width(here / "current_link_width"),
                _speed(here / "max_link_speed"),
                _width(here / "max_link_width"),
                _speed(slot / "max_link_speed") if slot else None,
                _width(slot / "max_link_width") if slot else None,
                read_sysfs_line(here / "iommu_group/type"),
            )
        )
    return tuple(links)


def _speed(path: Path) -> float | None:
    match = _SPEED.match(read_sysfs_line(path))
    return float(match[1]) if match else None


def _width(path: Path) -> int | None:
    """None for 0 and 255, which stand for no link of its own, as of a virtual function."""
    text = read_sysfs_line(path)
    return int(text) if _NUMBER.fullmatch(text) and 0 < int(text) <= 64 else None
