"""The inside of a node: its GPUs, network adapters, NUMA nodes, and how near they are to each other.

Everything is read from files below a root, so that a captured tree tells as much as the node itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.specs.placement import Binding

PROXIMITY_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""nvidia-smi's words, nearest first: one PCIe switch, several, the host bridge, the NUMA node, another."""
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_GPUS = {
    "0x10de": ("0x0300", "0x0302"),
    "0x1002": ("0x0300", "0x0302", "0x0380", "0x1200"),
    "0x8086": ("0x0380",),
}
"""PCI vendors of GPUs, and the classes under which theirs appear: a server's own display chip is none."""
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Gpu:
    """A GPU by its index in PCI order, which is nvidia-smi's (CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID)."""

    index: int
    address: str = ""
    """On the PCI bus, such as 0000:17:00.0."""
    numa: int | None = None
    cpus: str = ""
    """The CPUs near to it, such as 0-13,28-41; empty: unknown."""
    uuid: str | None = None
    path: tuple[str, ...] = ()
    """The PCI bridges above it, from the host bridge downwards."""


@dataclass(frozen=True)
class Nic:
    """A network adapter: an RDMA device, or an Ethernet one without RDMA."""

    name: str
    address: str = ""
    numa: int | None = None
    rdma: bool = True
    up: bool | None = None
    rate_Gbps: float | None = None
    interfaces: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeTopology:
    """A node's inside, as far as its files tell it."""

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    numa: Mapping[int, str] = field(default_factory=dict)
    """The CPUs of every NUMA node."""
    near: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """For a GPU's index and an adapter's name, one of NEARNESS."""
    notes: tuple[str, ...] = ()

    def gpu(self, index: int) -> Gpu:
        """The GPU of an index; UsageError where there is none."""
        match = next((gpu for gpu in self.gpus if gpu.index == index), None)
        if match is None:
            listed = ", ".join(str(gpu.index) for gpu in self.gpus) or "none"
            raise UsageError(f"gpu {index}: this node has no such GPU; there are: {listed}")
        return match

    def nearest_nic(self, index: int, hcas: Collection[str] = ()) -> Nic | None:
        """The adapter that a GPU should use: near, up, fast; GPUs that are as near to several share them out.

        `hcas` are the ones to choose from; without it RDMA devices go before others.
        """
        best = self._candidates(self.gpu(index), hcas)
        if not best:
            return None
        peers = [gpu.index for gpu in self.gpus if self._candidates(gpu, hcas) == best]
        return best[peers.index(index) % len(best)]

    def _candidates(self, gpu: Gpu, hcas: Collection[str]) -> list[Nic]:
        chosen = [nic for nic in self.nics if nic.up is not False and (not hcas or nic.name in hcas)]
        chosen = [nic for nic in chosen if nic.rdma] or chosen

        def rank(nic: Nic) -> tuple[int, float]:
            word = self.near.get((gpu.index, nic.name))
            return (PROXIMITY_LEVELS.index(word) if word else len(PROXIMITY_LEVELS)), -(nic.rate_Gbps or 0.0)

        least = min(map(rank, chosen), default=None)
        return [nic for nic in chosen if rank(nic) == least]

    def cpus_of(self, index: int, allowed: Collection[int] = ()) -> str:
        """The CPUs near to a GPU, of those that the job has; all of these where none of them is near."""
        gpu = self.gpu(index)
        near = gpu.cpus or (self.numa.get(gpu.numa, "") if gpu.numa is not None else "")
        if not allowed:
            return near
        return format_cpu_list(set(parse_cpu_list(near)) & set(allowed) or set(allowed))

    def gpus_far_from_cpus(self, allowed: Collection[int]) -> tuple[int, ...]:
        """The GPUs that none of the job's CPUs is near to: the job was given cores on another socket."""
        near = {gpu.index: set(parse_cpu_list(gpu.cpus)) for gpu in self.gpus}
        return tuple(index for index, cpus in near.items() if cpus and allowed and not cpus & set(allowed))

    def bind(
        self,
        local_ranks: int,
        *,
        gpus: Sequence[int] | None = None,
        allowed: Collection[int] = (),
        hcas: Collection[str] = (),
    ) -> tuple[Binding, ...]:
        """What each local rank should use: a GPU of `gpus` (else of all), its adapter, and CPUs near to it.

        `allowed` are the CPUs that the job has. Without GPUs the ranks are spread over the NUMA nodes.
        """
        chosen = [gpu.index for gpu in self.gpus] if gpus is None else list(gpus)
        bindings = []
        for rank in range(local_ranks):
            if not chosen:
                bindings.append(
                    Binding(rank, nic=self._any_nic(hcas), cpus=self._share(rank, local_ranks, allowed))
                )
                continue
            at = rank if local_ranks <= len(chosen) else rank * len(chosen) // local_ranks
            gpu, nic = self.gpu(chosen[at]), self.nearest_nic(chosen[at], hcas)
            bindings.append(
                Binding(
                    rank, gpu.index, gpu.uuid, nic.name if nic else None, self.cpus_of(gpu.index, allowed)
                )
            )
        return tuple(bindings)

    def _any_nic(self, hcas: Collection[str]) -> str | None:
        names = (nic.name for nic in self.nics if nic.up is not False and (not hcas or nic.name in hcas))
        return next(names, None)

    def _share(self, rank: int, local_ranks: int, allowed: Collection[int]) -> str:
        """The CPUs of a NUMA node, neighbours on the same one; of several where the ranks are fewer."""
        nodes = [
            set(parse_cpu_list(cpus)) & set(allowed or parse_cpu_list(cpus)) for cpus in self.numa.values()
        ]
        nodes = [cpus for cpus in nodes if cpus]
        if not nodes:
            return format_cpu_list(allowed)
        first, beyond = rank * len(nodes) // local_ranks, (rank + 1) * len(nodes) // local_ranks
        return format_cpu_list(cpu for cpus in nodes[first : max(first + 1, beyond)] for cpu in cpus)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers in a list of CPUs such as `0-3,8`; what is not a number is left out."""
    numbers: dict[int, None] = {}
    for part in text.split(","):
        if match := _RANGE.fullmatch(part.strip()):
            numbers.update(dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1)))
    return tuple(numbers)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """CPUs as a list such as `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def read_node_topology(root: Path = Path("/")) -> NodeTopology:
    """Read a node, or the captured tree of one."""
    gpus, nics = _read_gpus(root), _read_nics(root)
    unknown = [str(gpu.index) for gpu in gpus if gpu.numa is None]
    notes = (f"GPU {', '.join(unknown)}: the NUMA node is unknown",) if unknown else ()
    numa = {
        int(path.name[4:]): read_sysfs_line(path / "cpulist")
        for path in list_sysfs_entries(root / "sys/devices/system/node")
        if re.fullmatch(r"node[0-9]{1,5}", path.name)
    }
    near = gpu_nic_proximity(gpus, nics)
    return NodeTopology(tuple(gpus), tuple(nics), dict(sorted(numa.items())), near, notes)


def gpu_nic_proximity(gpus: Iterable[Gpu], nics: Collection[Nic]) -> dict[tuple[int, str], str]:
    """The proximity of every GPU to every adapter, by the PCI tree and the NUMA nodes."""
    return {(gpu.index, nic.name): _pci_proximity(gpu, nic) for gpu in gpus for nic in nics}


def read_kernel_text(path: Path) -> str:
    """The text of a file of /proc or /sys; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_sysfs_line(path: Path) -> str:
    """The one line of a file of sysfs."""
    return read_kernel_text(path).strip()


def list_sysfs_entries(folder: Path) -> list[Path]:
    """What stands in a folder, by name; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_gpus(root: Path) -> list[Gpu]:
    gpus: list[Gpu] = []
    for device in list_sysfs_entries(root / "sys/bus/pci/devices"):
        if not read_sysfs_line(device / "class").startswith(
            _GPUS.get(read_sysfs_line(device / "vendor"), ("none",))
        ):
            continue
        information = read_sysfs_line(root / "proc/driver/nvidia/gpus" / device.name / "information")
        uuid = re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", information)
        cpus = read_sysfs_line(device / "local_cpulist")
        gpus.append(
            Gpu(
                len(gpus),
                device.name,
                _read_numa_node(device),
                cpus,
                uuid[1] if uuid else None,
                _pci_path(device),
            )
        )
    return gpus


def _read_nics(root: Path) -> list[Nic]:
    nics = []
    taken: set[str] = set()
    for port in list_sysfs_entries(root / "sys/class/infiniband"):
        device = port / "device"
        interfaces = tuple(path.name for path in list_sysfs_entries(device / "net"))
        taken.update(interfaces)
        states = [read_sysfs_line(entry / "state") for entry in list_sysfs_entries(port / "ports")]
        rates = [
            re.match(r"([0-9.]+) Gb/sec", read_sysfs_line(entry / "rate"))
            for entry in list_sysfs_entries(port / "ports")
        ]
        nics.append(
            Nic(
                port.name,
                pci_address(device),
                _read_numa_node(device),
                True,
                any("ACTIVE" in state for state in states) if any(states) else None,
                max((float(rate[1]) for rate in rates if rate), default=None),
                interfaces,
                _pci_path(device),
            )
        )
    for interface in list_sysfs_entries(root / "sys/class/net"):
        device = interface / "device"
        if interface.name in taken or not pci_address(device):
            continue
        state, speed = read_sysfs_line(interface / "operstate"), read_sysfs_line(interface / "speed")
        rate = int(speed) / 1000 if re.fullmatch(r"[1-9][0-9]{0,6}", speed) else None
        up = {"up": True, "down": False}.get(state)
        nics.append(
            Nic(
                interface.name,
                pci_address(device),
                _read_numa_node(device),
                False,
                up,
                rate,
                (interface.name,),
                _pci_path(device),
            )
        )
    return sorted(nics, key=lambda nic: (not nic.rdma, nic.address, nic.name))


def _read_numa_node(device: Path) -> int | None:
    """None where the firmware says nothing, which sysfs shows as -1."""
    text = read_sysfs_line(device / "numa_node")
    return int(text) if re.fullmatch(r"[0-9]{1,5}", text) else None


def _pci_path_parts(device: Path) -> Iterator[str]:
    """The way to a device from the host bridge: its place in sysfs, followed through the links."""
    for part in device.resolve().parts:
        if _ADDRESS.fullmatch(part) or _BRIDGE.fullmatch(part):
            yield part


def pci_address(device: Path) -> str:
    """The PCI address of a device by its place in sysfs; empty for one that is on no PCI bus."""
    steps = list(_pci_path_parts(device))
    return steps[-1] if steps and _ADDRESS.fullmatch(steps[-1]) else ""


def _pci_path(device: Path) -> tuple[str, ...]:
    return tuple(_pci_path_parts(device))[:-1]


def _pci_proximity(gpu: Gpu, nic: Nic) -> str:
    """The proximity of a GPU and an adapter, by the bridges that they have in common."""
    shared = 0
    for a, b in zip(gpu.path, nic.path, strict=False):
        if a != b:
            break
        shared += 1
    if shared > 1:
        beyond = max(len(gpu.path), len(nic.path)) - shared
        return "PIX" if beyond <= 1 else "PXB"
    if shared == 1:
        return "PHB"
    return "NODE" if gpu.numa is not None and gpu.numa == nic.numa else "SYS"
