"""NCCL's own cost model: what it expects of every algorithm and protocol, and so which it takes.

Reimplemented from the formulas of `nccl_constants.SOURCE`: time = latency + bytes / bandwidth, the least time
wins. Bytes are of the whole buffer: allgather's received, reducescatter's sent. NCCL's choice is by this
model, so where the model is wrong the choice is too; how wrong it is, is in platforms.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpcrun.errors import UsageError
from hpcrun.tuning.model import nccl_constants as constants
from hpcrun.tuning.model.nccl_constants import PROTOS, Algo, Arch, Link, Proto

NcclCollective = Literal["allreduce", "allgather", "reducescatter", "broadcast", "reduce"]
CpuVendor = Literal["intel", "amd", "mixed", "arm", "power", "other"]
PATH_TYPES = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "DIS")
"""Kinds of ways between devices, the nearest first."""


@dataclass(frozen=True)
class NcclGraph:
    """What NCCL's search has found for one kind of algorithm; its logs print it at init."""

    channels: int
    bw_intra: float
    """GB/s of a channel inside a node."""
    bw_inter: float
    """Between nodes."""
    type_intra: str = "NVL"
    type_inter: str = "PXN"
    balanced: bool = True
    """Whether a tree has the balanced pattern (1), not the plain one (3)."""
    same_channels: bool = True


@dataclass(frozen=True)
class NcclMachine:
    """All that the model asks about a communicator."""

    nodes: int
    per_node: int
    capability: int
    """Compute capability of the GPUs, 90 for sm90; the lowest where they differ."""
    graphs: Mapping[str, NcclGraph] = field(default_factory=dict)
    """By ring, tree, nvls, collnet; what is not there is not eligible."""
    cpu: CpuVendor = "intel"
    nic_latency_us: float = 0.0
    """As the net plugin tells it: 0 for the built-in InfiniBand, 35 or 75 for EFA."""
    mixed: bool = False
    """GPUs differ in their capability."""
    collnet: bool = False
    version: tuple[int, int] = (2, 30)

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.per_node

    @property
    def arch(self) -> Arch:
        """The row of the tables."""
        for least, name in ((100, "Blackwell"), (90, "Hopper"), (80, "Ampere")):
            if self.capability >= least:
                return name  # type: ignore[return-value]
        return "Volta"

    @property
    def column(self) -> int:
        """The column of the tables: one node, two, more."""
        return min(self.nodes, 3) - 1


@dataclass(frozen=True)
class ExpectedPerformance:
    """Latency and bandwidth of one algorithm and protocol."""

    latency_us: float
    bw_GBps: float


def predict_nccl_performance(
    machine: NcclMachine, collective: NcclCollective
) -> dict[tuple[Algo, Proto], ExpectedPerformance]:
    """Latency and bandwidth of all eligible algorithms and protocols; a machine of one rank has none."""
    performance: dict[tuple[Algo, Proto], ExpectedPerformance] = {}
    if machine.ranks < 2:
        return performance
    for algo, graph in _eligible(machine, collective).items():
        for proto in PROTOS:
            if not _has_protocol(machine, algo, proto, graph):
                continue
            bandwidth = _bandwidth(machine, collective, algo, proto, graph)
            if bandwidth > 0:
                latency = _latency(machine, collective, algo, proto, graph)
                performance[algo, proto] = ExpectedPerformance(latency, bandwidth)
    return performance


def model_version_notes(version: tuple[int, int]) -> list[str]:
    """What is to be said of a version that the constants are not of."""
    if version >= (2, 30):
        return []
    return [f"the constants are those of NCCL 2.30.7; NCCL {version[0]}.{version[1]} has some others"]


def expected_time_us(
    machine: NcclMachine,
    collective: NcclCollective,
    choice: tuple[Algo, Proto],
    expected: ExpectedPerformance,
    size_bytes: float,
) -> float:
    """What NCCL expects for one call of this size."""
    (algo, proto), latency, bandwidth = choice, expected.latency_us, expected.bw_GBps
    if collective == "allreduce" and size_bytes >= 64:
        place = int(math.log2(size_bytes / 64))
        by_size = constants.TREE_BY_SIZE[proto]
        is_x86 = machine.cpu in ("intel", "amd", "mixed")
        like_tree = algo == "NVLSTree" and machine.arch == "Blackwell" and is_x86
        if (algo == "Tree" or like_tree) and place < len(by_size):
            bandwidth *= by_size[place]
    if (algo, proto) == ("Ring", "Simple") and machine.nodes > 1 and collective == "allreduce":
        channels = machine.graphs["ring"].channels if "ring" in machine.graphs else 1
        if size_bytes / (channels * machine.ranks) >= constants.PLATEAU_FROM_BYTES:
            latency *= constants.PLATEAU if machine.capability >= 80 else constants.PLATEAU_BELOW_SM80
    return latency + size_bytes / (1000 * bandwidth)


def _eligible(machine: NcclMachine, collective: NcclCollective) -> dict[Algo, NcclGraph]:
    """What NCCL considers for this collective, with the graph that it goes by."""
    several, graphs = machine.nodes > 1, machine.graphs
    graph_names: dict[Algo, str] = {"Ring": "ring"}
    nvls_works = constants.NVLS_EFFICIENCY[machine.arch] > 0
    if collective == "allreduce":
        graph_names["Tree"] = "tree"
        if nvls_works and (not several or machine.collnet):
            graph_names["NVLS"] = "nvls"
        if nvls_works and several:
            graph_names["NVLSTree"] = "nvls"
        if machine.collnet:
            graph_names |= {"CollNetDirect": "collnet", "CollNetChain": "collnet"}
    elif collective in ("allgather", "reducescatter"):
        if machine.per_node == 1:
            graph_names["PAT"] = "tree"
        if nvls_works and (not several or machine.collnet):
            graph_names["NVLS"] = "nvls"
        if machine.collnet:
            graph_names["CollNetDirect"] = "collnet"
    return {algo: graphs[name] for algo, name in graph_names.items() if name in graphs}


def _has_protocol(machine: NcclMachine, algo: Algo, proto: Proto, graph: NcclGraph) -> bool:
    if algo not in ("Ring", "Tree"):
        return proto == "Simple"
    if proto != "LL128":
        return True
    # Elsewhere it was never tested, and may corrupt data.
    farthest = "PXN" if machine.capability >= 90 else "PXB"
    return (
        machine.capability >= 70
        and (not machine.mixed or machine.capability >= 90)
        and _is_path_within(graph.type_intra, "NVB")
        and _is_path_within(graph.type_inter, farthest)
    )


def _is_path_within(path: str, farthest: str) -> bool:
    if path not in PATH_TYPES:
        raise UsageError(f"{path}: is not a kind of way between devices; there are {', '.join(PATH_TYPES)}")
    return PATH_TYPES.index(path) <= PATH_TYPES.index(farthest)


def _bandwidth(
    machine: NcclMachine, collective: NcclCollective, algo: Algo, proto: Proto, graph: NcclGraph
) -> float:
    """Algorithm bandwidth in GB/s."""
    gathers = collective in ("allgather", "reducescatter")
    bus = _bus_bandwidth(machine, collective, algo, proto, graph)
    if gathers and algo != "Ring":
        return bus
    if algo in ("Ring", "NVLS", "NVLSTree"):
        return bus * machine.ranks / ring_steps(machine, collective)
    return bus / 2


def ring_steps(machine: NcclMachine, collective: NcclCollective) -> int:
    """The number of steps of a ring."""
    ranks = machine.ranks
    if collective == "allreduce":
        return 2 * (ranks - 1)
    return ranks - 1 if collective in ("allgather", "reducescatter") else ranks


def _bus_bandwidth(
    machine: NcclMachine, collective: NcclCollective, algo: Algo, proto: Proto, graph: NcclGraph
) -> float:
    if algo in ("NVLS", "NVLSTree"):
        return graph.channels * _nvls_channel(machine, collective, algo, graph)
    near = machine.nodes <= (1 if algo == "Ring" and machine.version >= (2, 31) else 2)
    collnet = algo in ("CollNetDirect", "CollNetChain")
    bus = graph.channels * (graph.bw_intra if near or collnet else graph.bw_inter)
    if algo == "Ring":
        return _ring_bus(machine, proto, graph.channels, bus)
    if algo == "Tree":
        return _tree_bus(machine, proto, graph, bus)
    if algo == "PAT":
        return bus * constants.PAT
    if algo == "CollNetDirect":
        if collective != "allreduce":
            return machine.per_node * min(graph.bw_intra, constants.COLLNET_NET * graph.bw_inter)
        factor = machine.per_node / graph.channels
        bus /= factor - (factor - 1) / 2
        return bus * (constants.COLLNET_DIRECT_HOPPER if machine.capability >= 90 else 1.0)
    return bus


def _nvls_channel(machine: NcclMachine, collective: NcclCollective, algo: Algo, graph: NcclGraph) -> float:
    """GB/s; of fewer than two channels nothing comes."""
    channels, arch, reduces = graph.channels, machine.arch, collective == "allreduce"
    if channels < 2:
        return 0.0
    inside = graph.bw_intra * constants.NVLS_EFFICIENCY[arch] * (channels - 1) / channels
    inside *= 2 if reduces else (machine.per_node - 1) / machine.per_node
    if algo == "NVLS":
        return min(inside, graph.bw_inter)
    most = constants.NVLSTREE_A_CHANNEL[arch][machine.column]
    return min(inside, graph.bw_inter * (2 if machine.nodes <= 2 else 1), most)


def _ring_bus(machine: NcclMachine, proto: Proto, channels: int, bus: float) -> float:
    if proto == "LL":
        return min(_ll_bandwidth_limit(machine), bus * constants.RING_LL)
    if proto == "LL128":
        most = constants.RING_LL128_A_CHANNEL[machine.arch][machine.column]
        return min(bus * constants.RING_LL128, channels * most)
    return bus


def _tree_bus(machine: NcclMachine, proto: Proto, graph: NcclGraph, bus: float) -> float:
    arch, column, channels = machine.arch, machine.column, graph.channels
    bus = min(bus * constants.TREE, channels * constants.TREE_A_CHANNEL[arch][column])
    if proto == "LL":
        bus = min(bus * constants.TREE_LL, _ll_bandwidth_limit(machine))
    elif proto == "LL128":
        share = constants.TREE_LL128_ONE_NODE if machine.nodes == 1 else constants.TREE_LL128
        bus = min(bus * share, channels * constants.TREE_LL128_A_CHANNEL[arch][column])
    return bus if graph.balanced else bus * constants.UNBALANCED_TREE


def _ll_bandwidth_limit(machine: NcclMachine) -> float:
    row: Arch = machine.arch
    if machine.nodes > 1:
        row = "Ampere" if machine.cpu in ("amd", "mixed") else "Volta"
    return constants.LL_MOST[row][machine.column]


def _latency(
    machine: NcclMachine, collective: NcclCollective, algo: Algo, proto: Proto, graph: NcclGraph
) -> float:
    """Microseconds."""
    at, nodes, per_node = PROTOS.index(proto), machine.nodes, machine.per_node
    link: Link = "NVL" if _is_path_within(graph.type_intra, "NVL") else "PCI"
    hardware, base = constants.HARDWARE_LATENCY_US, constants.BASE_LATENCY_US[algo][at]
    inside = hardware[link][algo][at]
    # With one rank a node nothing hides a step between nodes.
    across = hardware["NET"]["Tree" if per_node == 1 else algo][at]
    across += machine.nic_latency_us * (2 if proto == "Simple" else 1)
    height = int(math.log2(nodes))
    if algo == "Ring":
        return base + _ring_latency(machine, collective, proto, graph, inside, across)
    if algo == "Tree":
        return base + 2 * ((per_node - 1) * inside + height * across)
    if algo == "CollNetDirect":
        return 2 * (min(1, per_node - 1) * inside + constants.ARITY_US * (per_node - 1)) + across
    if algo == "CollNetChain":
        return 2 * (per_node - 1) * inside + across
    if algo == "NVLS":
        return inside + (across if nodes > 1 else 0.0)
    if algo == "NVLSTree":
        return inside + 2 * height * across
    return base + height * across / constants.PAT_STEP + constants.PAT_A_RANK_US * machine.ranks


def _ring_latency(
    machine: NcclMachine,
    collective: NcclCollective,
    proto: Proto,
    graph: NcclGraph,
    inside: float,
    across: float,
) -> float:
    nodes, at = machine.nodes, PROTOS.index(proto)
    if collective in ("broadcast", "reduce"):
        hop = inside if nodes == 1 else constants.HARDWARE_LATENCY_US["NET"]["Ring"][at]
        if graph.same_channels:
            return hop
        if proto == "Simple":
            link: Link = "NET" if nodes > 1 else "NVL" if _is_path_within(graph.type_intra, "NVL") else "PCI"
            hop = constants.HARDWARE_LATENCY_US[link]["Tree"][at]
        return ring_steps(machine, collective) * hop
    overhead = 0.0
    if nodes > 1:
        overhead = constants.NET_OVERHEAD_AMD_US if machine.cpu == "amd" else constants.NET_OVERHEAD_US
        overhead *= constants.NET_OVERHEAD_SIMPLE if proto == "Simple" else 1
    between = 0 if nodes == 1 else (2 if collective == "allreduce" else 1) * (nodes - 1)
    return (ring_steps(machine, collective) - between) * max(inside, overhead) + between * across
