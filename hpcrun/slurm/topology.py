"""Switches and blocks as scontrol prints them, and a node's own address among them. No parser raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrun.errors import UsageError
from hpcrun.slurm.printed import inside, parse_records, string, whole_number
from hpcrun.specs.yaml import parse_value

UnitKind = Literal["switch", "block", "aggregate", "ring", "torus"]
_KINDS: dict[str, UnitKind] = {
    "SwitchName": "switch",
    "BlockName": "block",
    "AggregatedBlock": "aggregate",
    "RingName": "ring",
    "TorusName": "torus",
}

_CONFIGURED: tuple[tuple[UnitKind, str, str, str], ...] = (
    ("switch", "switch", "tree", "switches"),
    ("block", "block", "block", "blocks"),
    ("ring", "ring", "ring", "rings"),
    ("torus", "name", "torus3d", "toruses"),
)
"""A unit's kind and the key of its name in topology.yaml, and below which keys the units are listed."""


@dataclass(frozen=True)
class Unit:
    """A switch, a block or another unit of the topology, and the nodes below it."""

    kind: UnitKind
    name: str
    nodes: str = ""
    """Host list of all nodes below it, empty where there are none."""
    children: str = ""
    """Host list of the switches right below a switch."""
    level: int | None = None
    """0 is a leaf; only switches have levels."""
    size: int | None = None
    """The size that Slurm plans with, which is not the number of nodes."""


def parse_topology(text: str) -> list[Unit]:
    """The lines of `scontrol show topology` (fetch everything, with SLURM_TOPO_LEN unset)."""
    return [
        Unit(
            kind,
            fields[key],
            fields.get("Nodes", ""),
            fields.get("Switches", ""),
            whole_number(fields.get("Level", "")),
            whole_number(fields.get("BlockSize", "")),
        )
        for key, kind in _KINDS.items()
        for fields in parse_records(text, key)
        if fields[key]
    ]


@dataclass(frozen=True)
class NamedTopology:
    """One topology of a cluster that has several (25.05 and later)."""

    name: str
    is_default: bool
    units: tuple[Unit, ...]
    """As configured: a switch above the leaves lists its children and no nodes; no levels."""


def parse_topoconf(text: str) -> list[NamedTopology]:
    """The topologies of `scontrol show topoconf`, which has the form of topology.yaml; else empty."""
    try:
        value = parse_value(text, "", "topoconf")
    except UsageError:
        return []
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    return [
        NamedTopology(
            string(entry.get("topology")),
            entry.get("cluster_default") is True,
            tuple(_units(entry)),
        )
        for entry in entries
    ]


def _units(entry: dict[str, Any]) -> list[Unit]:
    sizes = inside(entry, "block", "block_sizes")
    base = next((size for size in sizes if isinstance(size, int)), None) if isinstance(sizes, list) else None
    found = []
    for kind, key, *way in _CONFIGURED:
        listed = inside(entry, *way)
        for unit in listed if isinstance(listed, list) else ():
            name, nodes, children = (string(inside(unit, part)) for part in (key, "nodes", "children"))
            size = base if kind == "block" else None
            found += [Unit(kind, name, nodes, children, size=size)] if name else []
    return found


def parse_address(address: str, pattern: str) -> list[tuple[str, str]]:
    """SLURM_TOPOLOGY_ADDR against its pattern: (`switch`, name) from the top down to (`node`, name).

    A level without a name is left out. A node name may hold dots, a switch name may not.
    """
    kinds = pattern.split(".")
    names = address.split(".", len(kinds) - 1)
    if len(names) != len(kinds) or not pattern:
        return []
    return [(kind, name) for kind, name in zip(kinds, names, strict=True) if name]
