"""The constants of NCCL's own cost model, as in src/graph/tuning.cc of NCCL 2.30.7 (2.31 has the same).

Microseconds and GB/s (1e9). Tables of protocols are in the order LL, LL128, Simple; tables of bandwidths by
architecture, then for one node, two nodes, more nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

MODEL_SOURCE = "NCCL 2.30.7, src/graph/tuning.cc"

Algo = Literal["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"]
Proto = Literal["LL", "LL128", "Simple"]
Arch = Literal["Volta", "Ampere", "Hopper", "Blackwell"]
Link = Literal["NVL", "PCI", "NET"]

ALGOS: tuple[Algo, ...] = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
"""In NCCL's order: its logs up to 2.23 print the number."""
PROTOS: tuple[Proto, ...] = ("LL", "LL128", "Simple")
"""Likewise."""

_Three = tuple[float, float, float]
_NOT: _Three = (0.0, 0.0, 0.0)

BASE_LATENCY_US: Mapping[Algo, _Three] = {
    "Tree": (6.8, 14.0, 8.4),
    "Ring": (6.6, 14.0, 8.4),
    "CollNetDirect": _NOT,
    "CollNetChain": _NOT,
    "NVLS": _NOT,
    "NVLSTree": _NOT,
    "PAT": (8.0, 8.0, 8.0),
}
HARDWARE_LATENCY_US: Mapping[Link, Mapping[Algo, _Three]] = {
    "NVL": {
        "Tree": (0.6, 1.25, 4.0),
        "Ring": (0.6, 1.9, 3.4),
        "CollNetDirect": (0.0, 0.0, 3.7),
        "CollNetChain": (0.0, 0.0, 2.8),
        "NVLS": (0.0, 0.0, 25.0),
        "NVLSTree": (0.0, 0.0, 25.0),
        "PAT": (0.0, 0.0, 4.0),
    },
    "PCI": {
        "Tree": (1.0, 1.9, 4.0),
        "Ring": (1.0, 2.5, 5.7),
        "CollNetDirect": (0.0, 0.0, 3.7),
        "CollNetChain": (0.0, 0.0, 2.8),
        "NVLS": _NOT,
        "NVLSTree": _NOT,
        "PAT": (0.0, 0.0, 4.0),
    },
    "NET": {
        "Tree": (5.0, 8.5, 14.0),
        "Ring": (2.7, 4.0, 14.0),
        "CollNetDirect": (0.0, 0.0, 31.0),
        "CollNetChain": (0.0, 0.0, 30.0),
        "NVLS": (0.0, 0.0, 18.0),
        "NVLSTree": (0.0, 0.0, 20.9),
        "PAT": (0.0, 0.0, 14.0),
    },
}

LL_MOST: Mapping[Arch, _Three] = {
    "Volta": (39.0, 39.0, 20.4),
    "Ampere": (87.7, 22.5, 19.0),
    "Hopper": (141.0, 45.0, 35.0),
    "Blackwell": (282.0, 90.0, 70.0),
}
"""One node: by its GPUs; more nodes: by their CPUs, Ampere's row for AMD or mixed ones, else Volta's."""
RING_LL128_A_CHANNEL: Mapping[Arch, _Three] = {
    "Volta": (20.0, 20.0, 20.0),
    "Ampere": (20.0, 20.0, 20.0),
    "Hopper": (36.7, 36.7, 36.7),
    "Blackwell": (40.0, 40.0, 40.0),
}
TREE_LL128_A_CHANNEL: Mapping[Arch, _Three] = {
    "Volta": (20.0, 20.0, 20.0),
    "Ampere": (20.0, 20.0, 20.0),
    "Hopper": (36.7, 36.7, 29.0),
    "Blackwell": (55.6, 31.67, 20.0),
}
TREE_A_CHANNEL: Mapping[Arch, _Three] = {
    "Volta": (26.5, 18.5, 10.0),
    "Ampere": (24.0, 23.6, 17.8),
    "Hopper": (38.7, 41.4, 36.0),
    "Blackwell": (70.0, 42.8, 24.0),
}
NVLSTREE_A_CHANNEL: Mapping[Arch, _Three] = {
    "Volta": (26.5, 18.5, 10.0),
    "Ampere": (24.0, 23.6, 17.8),
    "Hopper": (0.0, 57.7, 45.5),
    "Blackwell": (0.0, 96.0, 80.0),
}
NVLS_EFFICIENCY: Mapping[Arch, float] = {"Volta": 0.0, "Ampere": 0.0, "Hopper": 0.85, "Blackwell": 0.74}

RING_LL, RING_LL128, TREE = 0.5, 0.92, 0.92
"""Shares of the bus that remain."""
TREE_LL, TREE_LL128_ONE_NODE, TREE_LL128 = 1 / 3.8, 7 / 9, 120 / 128
UNBALANCED_TREE, PAT, COLLNET_DIRECT_HOPPER, COLLNET_NET = 0.85, 0.75, 0.85, 0.9

NET_OVERHEAD_US, NET_OVERHEAD_AMD_US, NET_OVERHEAD_SIMPLE = 1.0, 2.0, 3
"""Overhead of a step of a ring between nodes; times the last one for Simple."""
PLATEAU, PLATEAU_BELOW_SM80, PLATEAU_FROM_BYTES = 1.4, 1.9, 64
"""Latency of Ring/Simple allreduce between nodes, from so many bytes a rank and channel on."""
ARITY_US = 0.4
PAT_STEP, PAT_A_RANK_US = 3.5, 2.8

TREE_BY_SIZE: Mapping[Proto, tuple[float, ...]] = {
    "LL": (*(1.0,) * 4, 0.9, 0.8, *(0.7,) * 4, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, *(1.0,) * 4),
    "LL128": (*(1.0,) * 5, 0.9, 0.8, 0.8, 0.8, 0.7, *(0.6,) * 6, 0.8, *(0.9,) * 4, 1.0, 1.0),
    "Simple": (
        *(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9,
    ),
}  # fmt: skip
"""Of a tree's bandwidth what remains, by the whole part of log2(bytes / 64).

Of NVLSTree's too, on Blackwell with an x86 CPU."""
