"""Switches and blocks as scontrol prints them and as topology.conf and topology.yaml name them, and a node's
own address among them. No parser raises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcrun.errors import UsageError
from hpcrun.slurm.output_formats import json_string, leading_integer, nested_value
from hpcrun.specs.yaml import parse_yaml_value

TopologyUnitKind = Literal["switch", "block", "aggregate", "ring", "torus"]
_KINDS: dict[str, TopologyUnitKind] = {
    "switchname": "switch",
    "blockname": "block",
    "aggregatedblock": "aggregate",
    "ringname": "ring",
    "torusname": "torus",
}
_FIELD = re.compile(r"(?:^|\s)(\w+)\s*=\s*\"?([^\s\"]*)", re.ASCII)
_PARTS = frozenset({"nodes", "switches", "blockindex", "level"})
_OTHERS = frozenset({"blocksizes", "include"})
"""What else topology.conf may hold."""
_COMMENT = re.compile(r"#.*")
_AFTER_COMMA = re.compile(r",\s+")

_CONFIGURED: tuple[tuple[TopologyUnitKind, str, str, str], ...] = (
    ("switch", "switch", "tree", "switches"),
    ("block", "block", "block", "blocks"),
    ("ring", "ring", "ring", "rings"),
    ("torus", "name", "torus3d", "toruses"),
)
"""A unit's kind and the key of its name in topology.yaml, and below which keys the units are listed."""


@dataclass(frozen=True)
class TopologyUnit:
    """A switch, a block or another unit of the topology, and the nodes below it."""

    kind: TopologyUnitKind
    name: str
    nodes: str = ""
    """Host list of all nodes below it, empty where there are none."""
    children: str = ""
    """Host list of the switches right below a switch."""
    level: int | None = None
    """0 is a leaf; only switches have levels."""
    size: int | None = None
    """The size that Slurm plans with, which is not the number of nodes."""
    dims: tuple[int, ...] = ()
    """The sizes of a torus; the nodes fill it with the first dimension running fastest."""
    line: int | None = field(default=None, compare=False)
    """The line in the text."""


def parse_topology(text: str) -> list[TopologyUnit]:
    """The units of `scontrol show topology` (fetch everything, SLURM_TOPO_LEN unset), or of topology.conf.

    Keys in any case, comments, indentation and lines continued with a backslash are topology.conf's.
    """
    units = []
    for line, statement in _statements(text):
        fields = {key.lower(): value for key, value in reversed(_FIELD.findall(statement))}
        key = statement.partition("=")[0].strip().lower()
        # Further lines of a torus repeat its name and describe how jobs fit into it.
        if key not in _KINDS or not fields.get(key) or "placementdims" in fields:
            continue
        dims = fields.get("dims", "").lower()
        units.append(
            TopologyUnit(
                _KINDS[key],
                fields[key],
                fields.get("nodes", ""),
                fields.get("switches", ""),
                leading_integer(fields.get("level", "")),
                leading_integer(fields.get("blocksize", "")),
                tuple(map(int, dims.split("x"))) if re.fullmatch(r"[0-9]{1,5}(x[0-9]{1,5})*", dims) else (),
                line,
            )
        )
    return units


def find_unread_statements(text: str) -> list[tuple[int, str]]:
    """The lines of such a text, with their numbers, that describe nothing that is known."""
    unread = []
    for line, statement in _statements(text):
        key = statement.partition("=")[0].strip().lower()
        fields = {name.lower(): value for name, value in _FIELD.findall(statement)}
        is_empty = key in ("switchname", "blockname") and not _PARTS & set(fields)
        is_cut = key in _KINDS and any("=" not in word for word in statement.split())
        if statement.strip() and (key not in _OTHERS and (key not in _KINDS or is_empty or is_cut)):
            unread.append((line, " ".join(statement.split())))
    return unread


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Lines with the number of each, comments taken away, continued ones joined."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun if parts else number
        statement = _COMMENT.sub("", line).rstrip()
        parts.append(statement.removesuffix("\\"))
        if not statement.endswith("\\"):
            yield begun, _AFTER_COMMA.sub(",", " ".join(parts))
            parts = []
    if parts:
        yield begun, " ".join(parts)


@dataclass(frozen=True)
class NamedTopology:
    """One topology of a cluster that has several (25.05 and later)."""

    name: str
    is_default: bool
    units: tuple[TopologyUnit, ...]
    """As configured: a switch above the leaves lists its children and no nodes; no levels."""


def parse_topoconf(text: str) -> list[NamedTopology]:
    """The topologies of `scontrol show topoconf`, which has the form of topology.yaml; else empty."""
    try:
        value = parse_yaml_value(text, "", "topoconf")
    except UsageError:
        return []
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    return [
        NamedTopology(
            json_string(entry.get("topology")),
            entry.get("cluster_default") is True,
            tuple(_parse_units(entry)),
        )
        for entry in entries
    ]


def _parse_units(entry: dict[str, Any]) -> list[TopologyUnit]:
    sizes = nested_value(entry, "block", "block_sizes")
    base = next((size for size in sizes if isinstance(size, int)), None) if isinstance(sizes, list) else None
    units = []
    for kind, key, *way in _CONFIGURED:
        listed = nested_value(entry, *way)
        for unit in listed if isinstance(listed, list) else ():
            name, nodes, children = (
                json_string(nested_value(unit, part)) for part in (key, "nodes", "children")
            )
            size = base if kind == "block" else None
            dims = _parse_dims(nested_value(unit, "dims")) if kind == "torus" else ()
            regions = nested_value(unit, "regions")
            if isinstance(regions, list):
                # Their places in the torus are not those of the nodes in order.
                nodes, dims = ",".join(json_string(nested_value(region, "nodes")) for region in regions), ()
            units += [TopologyUnit(kind, name, nodes, children, size=size, dims=dims)] if name else []
    return units


def _parse_dims(value: Any) -> tuple[int, ...]:
    """The sizes in `{x: 4, y: 4, z: 2}` or `4x4x2`; empty for anything else."""
    if isinstance(value, str):
        value = dict(zip("xyz", (leading_integer(part) for part in value.lower().split("x")), strict=False))
    sizes = [nested_value(value, axis) for axis in "xyz"]
    return tuple(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else ()


def split_topology_address(address: str, pattern: str) -> list[tuple[str, str]]:
    """Split SLURM_TOPOLOGY_ADDR by its pattern: (`switch`, name) from the top down to (`node`, name).

    Levels without a name are kept, with an empty name. A node name may contain dots, a switch name may not.
    The list is empty where the address does not fit the pattern.
    """
    kinds = pattern.split(".")
    names = address.split(".", len(kinds) - 1)
    if len(names) != len(kinds) or not pattern:
        return []
    return list(zip(kinds, names, strict=True))
