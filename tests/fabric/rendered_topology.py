"""A fabric written as `scontrol show topology` prints one: the counterpart of the parser, for its tests."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Mapping, Sequence

from hpcrun.fabric.graph import Fabric
from hpcrun.fabric.tree import BLOCK
from hpcrun.hostlist import fold_hosts, sort_hosts

HEIGHTS = ("leaf", "spine", "core")
_LISTABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_ANY_HEIGHT = re.compile(r"level([0-9]{1,4})")


def render_topology(fabric: Fabric) -> str:
    """The graph as `scontrol show topology` prints one; parse_fabric reads it back to the same graph.

    Bandwidths, and nodes that are in no unit, have no place in that form.
    """
    lines = []
    block = next((index for index, level in enumerate(fabric.levels) if level.name == BLOCK), None)
    heights = _heights(fabric, block)
    shown: dict[tuple[int, str], str] = {}
    taken: set[str] = set()
    for index, height in heights.items():
        members: Mapping[str, Sequence[str]] = fabric.members(index)
        if index == min(heights):
            members = _with_rails(fabric, index)
        below = _children(fabric, index, [lower for lower in heights if lower < index])
        for unit, nodes in members.items():
            # Two levels may have units of one name, Slurm's switches may not.
            name = f"{unit}-{fabric.levels[index].name}" if unit in taken else unit
            shown[index, unit] = name
            children = [shown[child] for child in below.get(unit, ())]
            listed = f" Switches={_folded(children)}" if children else ""
            lines.append(f"SwitchName={name} Level={height} LinkSpeed=1 Nodes={fold_hosts(nodes)}{listed}")
        taken |= {shown[index, unit] for unit in members}
    if block is not None:
        lines += [
            f"BlockName={unit} BlockIndex={number} Nodes={fold_hosts(nodes)}"
            for number, (unit, nodes) in enumerate(fabric.members(block).items())
        ]
    for grid in fabric.grids:
        # Folding would put the nodes in order, and here their order is the topology.
        listed = fold_hosts(grid.nodes) if sort_hosts(grid.nodes) == grid.nodes else ",".join(grid.nodes)
        size = "x".join(map(str, grid.dims))
        is_ring = len(grid.dims) == 1
        lines.append(
            f"RingName={grid.name} Nodes={listed} RingSize={size}"
            if is_ring
            else f"TorusName={grid.name} Dims={size} Nodes={listed}"
        )
    return "".join(f"{line}\n" for line in lines)


def _heights(fabric: Fabric, block: int | None) -> dict[int, int]:
    """The number that Slurm gives each level of switches."""
    heights: dict[int, int] = {}
    for index, level in enumerate(fabric.levels):
        if index != block:
            other = _ANY_HEIGHT.fullmatch(level.name)
            said = HEIGHTS.index(level.name) if level.name in HEIGHTS else int(other[1]) if other else 0
            heights[index] = max([said, *(height + 1 for height in heights.values())])
    return heights


def _with_rails(fabric: Fabric, index: int) -> dict[str, list[str]]:
    """The leaves and all the nodes of each, in an order in which every node meets its first rail first."""
    found: dict[str, list[str]] = {}
    before: dict[str, dict[str, None]] = {}
    for node in fabric.nodes:
        leaves = [leaf for leaf in fabric.rails.get(node) or (fabric.unit(node, index),) if leaf is not None]
        for place, leaf in enumerate(leaves):
            found.setdefault(leaf, []).append(node)
            before.setdefault(leaf, {}).update(dict.fromkeys(leaves[:place]))
    try:
        return {leaf: found[leaf] for leaf in graphlib.TopologicalSorter(before).static_order()}
    except graphlib.CycleError:  # cables are crossed somewhere, and no order of lines can say so
        return found


def _children(fabric: Fabric, index: int, lower: Sequence[int]) -> dict[str, dict[tuple[int, str], None]]:
    """The level and the name of the units right below each unit of a level."""
    found: dict[str, dict[tuple[int, str], None]] = {}
    for above in fabric.units:
        unit = above[index]
        child = next(((other, name) for other in reversed(lower) if (name := above[other]) is not None), None)
        if unit is not None and child is not None:
            found.setdefault(unit, {})[child] = None
    return found


def _folded(names: Sequence[str]) -> str:
    return fold_hosts(names) if all(map(_LISTABLE.fullmatch, names)) else ",".join(names)
