"""Units, as Slurm or a table names them, made into the graph."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hpcrun.errors import UsageError
from hpcrun.fabric.graph import Fabric, FabricLevel, Grid, pluralize
from hpcrun.hostlist import expand_hosts, sort_hosts
from hpcrun.slurm.topology import TopologyUnit

BLOCK = "block"
"""The level of NVLink domains, below the leaves."""
_HEIGHTS = ("leaf", "spine", "core")
_ONE_BRACKET = re.compile(r"([^,\[\]]*)\[([^\[\]]*)\]([^,\[\]]*)(?=,|$)")
_MOST_LEVELS = 1000


def level_name(height: int) -> str:
    """What switches this far above the nodes are called, 0 for those that nodes are plugged into."""
    return _HEIGHTS[height] if height < len(_HEIGHTS) else f"level{height}"


def build_fabric(units: Iterable[TopologyUnit], name: str, source: str, *, of_slurm: bool = True) -> Fabric:
    """The graph of these units; UsageError, with `name` and the line, where they contradict each other.

    `of_slurm`: as Slurm has them, which never joins nodes below switches that have none in common.
    """
    units = tuple(units)
    tree = _SwitchTree([unit for unit in units if unit.kind == "switch"], name)
    blocks = _blocks([unit for unit in units if unit.kind == "block"], name, tree.notes)
    grids = _grids([unit for unit in units if unit.kind in ("ring", "torus")], name, tree.notes)
    listed = dict.fromkeys([*tree.lowest, *blocks, *(node for grid in grids for node in grid.nodes)])
    for unit in units:
        if unit.kind in ("ring", "torus"):
            listed.update(dict.fromkeys(_expand(unit, name)))
    nodes = sort_hosts(listed) if listed else ()
    heights, above = tree.columns(nodes, of_slurm)
    levels = [FabricLevel(level_name(height)) for height in heights]
    if blocks and _blocks_are_nested(nodes, blocks, above, tree.notes):
        levels.insert(0, FabricLevel(BLOCK))
        above = [(blocks.get(node), *row) for node, row in zip(nodes, above, strict=True)]
    rails = {node: tuple(leaves) for node, leaves in tree.leaves.items() if len(leaves) > 1}
    if rails:
        tree.notes.append(
            f"{len(rails)} {pluralize('node', len(rails))} below more than one leaf; the first one counts"
        )
    return Fabric(
        nodes,
        tuple(levels),
        tuple(above),
        rails,
        source,
        tuple(tree.notes),
        tuple(grids),
        trees=tree.apart() if of_slurm else {},
    )


def _where(unit: TopologyUnit, name: str) -> str:
    place = f"{name}:{unit.line}" if unit.line else name
    kind = {"switch": "SwitchName", "block": "BlockName", "ring": "RingName", "torus": "TorusName"}[unit.kind]
    return f"{place} {kind}={unit.name}"


def _expand(unit: TopologyUnit, name: str) -> tuple[str, ...]:
    return expand_hosts(unit.nodes, f"{_where(unit, name)} Nodes")


def _each_once(units: Sequence[TopologyUnit], name: str) -> dict[str, TopologyUnit]:
    units_by_name: dict[str, TopologyUnit] = {}
    for unit in units:
        if unit.name in units_by_name:
            first = units_by_name[unit.name].line
            since = f", first on line {first}" if first else ""
            raise UsageError(f"{_where(unit, name)}: stands twice{since}; give each unit a name of its own")
        units_by_name[unit.name] = unit
    return units_by_name


def _names(text: str, where: str) -> tuple[str, ...]:
    """The names of switches, which may hold characters that no host name has."""
    if "[" in text:
        return expand_hosts(text, where)
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


class _SwitchTree:
    """Switches and what is below each; a node goes up from the leaf that names it first."""

    def __init__(self, switches: Sequence[TopologyUnit], name: str) -> None:
        self._name = name
        self._switches = _each_once(switches, name)
        self.notes: list[str] = []
        self._children = {switch.name: self._children_of(switch) for switch in switches}
        self._heights = self._measured()
        self._below = {switch.name: _expand(switch, name) for switch in switches}
        self.leaves: dict[str, list[str]] = {}
        """The leaves of every node, first rail first."""
        self.lowest: dict[str, str] = {}
        """The switch that every node goes up from."""
        self._find_lowest()
        self._parents = self._find_parents()

    def _children_of(self, switch: TopologyUnit) -> tuple[str, ...]:
        where = _where(switch, self._name)
        children = _names(switch.children, f"{where} Switches")
        if switch.name in children:
            raise UsageError(f"{where}: is listed below itself; take it out of its Switches")
        missing = [child for child in children if child not in self._switches]
        if missing and not switch.nodes:
            raise UsageError(
                f"{where}: {', '.join(missing[:5])} below it {'is' if len(missing) == 1 else 'are'} nowhere"
                f" described; add a line SwitchName={missing[0]}, or correct the name"
            )
        if missing:
            # scontrol prints all the nodes below a switch, also where it was asked for a part.
            self.notes.append(f"{switch.name}: nothing is said about {', '.join(missing[:5])} below it")
        return tuple(child for child in children if child in self._switches)

    def _measured(self) -> dict[str, int]:
        """Levels above the leaves, by the longest way down; UsageError for a circle."""
        heights: dict[str, int] = {}
        for start in self._switches:
            way = [start]
            while way:
                at = way[-1]
                following = next((child for child in self._children[at] if child not in heights), None)
                if following in way:
                    circle = [*way[way.index(following) :], following]
                    raise UsageError(
                        f"{_where(self._switches[at], self._name)}: the switches go round in a circle,"
                        f" {' > '.join(map(str, circle[:8]))}; a switch is below another or above it"
                    )
                if following is not None:
                    way.append(following)
                    continue
                stated = min(self._switches[at].level or 0, _MOST_LEVELS)
                heights[at] = max([stated, *(heights[child] + 1 for child in self._children[at])])
                way.pop()
        return heights

    def _find_lowest(self) -> None:
        upwards = sorted(self._switches, key=lambda switch: self._heights[switch])
        for switch in upwards:
            for node in self._below[switch]:
                if self._heights[switch] == 0:
                    self.leaves.setdefault(node, []).append(switch)
                self.lowest.setdefault(node, switch)

    def _find_parents(self) -> dict[str, str]:
        """The one switch above each that counts: the one with most below it, the first of equals."""
        size: Counter[str] = Counter()
        for switch in sorted(self._switches, key=lambda switch: self._heights[switch]):
            own = len(self._below[switch])
            size[switch] = max(own, sum(size[child] for child in self._children[switch]))
        parents: dict[str, str] = {}
        several = set()
        for switch, children in self._children.items():
            for child in children:
                best = parents.setdefault(child, switch)
                if best != switch:
                    several.add(child)
                    parents[child] = switch if size[switch] > size[best] else best
        if several:
            self.notes.append(
                f"{len(several)} {pluralize('switch', len(several))} below more than one other; one counts"
            )
        return parents

    def apart(self) -> dict[str, str]:
        """For every node the topmost switch of its tree; empty where all are in one."""
        joined = {switch: switch for switch in self._switches}

        def root(switch: str) -> str:
            while joined[switch] != switch:
                joined[switch] = joined[joined[switch]]
                switch = joined[switch]
            return switch

        for switch, children in self._children.items():
            for child in children:
                joined[root(child)] = root(switch)
        first: dict[str, str] = {}
        for switch, nodes in self._below.items():
            for node in nodes:
                joined[root(switch)] = root(first.setdefault(node, switch))
        tops: dict[str, str] = {}
        for switch in sorted(self._switches, key=lambda switch: -self._heights[switch]):
            tops.setdefault(root(switch), switch)
        tree_of_node = {node: tops[root(switch)] for node, switch in first.items()}
        return tree_of_node if len(set(tree_of_node.values())) > 1 else {}

    def columns(self, nodes: Sequence[str], of_slurm: bool) -> tuple[list[int], list[tuple[str | None, ...]]]:
        """The heights that there are, and for every node its switch at each of them."""
        ways: dict[str, dict[int, str]] = {}
        for switch in dict.fromkeys(self.lowest[node] for node in nodes if node in self.lowest):
            way: dict[int, str] = {}
            at: str | None = switch
            while at is not None:
                way[self._heights[at]] = at
                at = self._parents.get(at)
            ways[switch] = way
        heights = sorted({height for way in ways.values() for height in way})
        rows = {switch: tuple(way.get(height) for height in heights) for switch, way in ways.items()}
        nowhere: tuple[str | None, ...] = (None,) * len(heights)
        roots = {way[max(way)] for way in ways.values()}
        if len(roots) > 1:
            self.notes.append(
                f"{len(roots)} switches have none above them ({', '.join(sorted(roots)[:5])});"
                + (
                    " Slurm gives no job nodes below two of them"
                    if of_slurm and self.apart()
                    else " how nodes below different ones meet is unknown"
                )
            )
        return heights, [rows[self.lowest[node]] if node in self.lowest else nowhere for node in nodes]


def _blocks(units: Sequence[TopologyUnit], name: str, notes: list[str]) -> dict[str, str]:
    """The block of every node."""
    block_of_node: dict[str, str] = {}
    for unit in _each_once(units, name).values():
        for node in _expand(unit, name):
            if block_of_node.setdefault(node, unit.name) != unit.name:
                notes.append(
                    f"{node}: is in the blocks {block_of_node[node]} and {unit.name}; the first one counts"
                )
    return block_of_node


def _blocks_are_nested(
    nodes: Sequence[str], blocks: dict[str, str], above: Sequence[tuple[str | None, ...]], notes: list[str]
) -> bool:
    """Whether each block lies below one leaf, so that blocks are a level of the tree."""
    rows: dict[str, tuple[str | None, ...]] = {}
    for node, row in zip(nodes, above, strict=True):
        block = blocks.get(node)
        if block is not None and rows.setdefault(block, row) != row:
            notes.append(f"the blocks are left out: {block} lies below more than one leaf")
            return False
    return True


def _grids(units: Sequence[TopologyUnit], name: str, notes: list[str]) -> list[Grid]:
    grids = []
    for unit in _each_once(units, name).values():
        # The order of a bracket counts here, as in n[3,1,2].
        listed = _ONE_BRACKET.sub(
            lambda term: ",".join(f"{term[1]}[{item}]{term[3]}" for item in term[2].split(",")), unit.nodes
        )
        nodes = _expand(replace(unit, nodes=listed), name)
        dims = (len(nodes),) if unit.kind == "ring" else unit.dims
        if nodes and math.prod(dims) == len(nodes) and dims:
            grids.append(Grid(unit.name, dims, nodes))
            notes.append(f"{unit.kind} {unit.name}: distances are known, taken from the order of its nodes")
        else:
            notes.append(
                f"{unit.kind} {unit.name}: {len(nodes)} {pluralize('node', len(nodes))} do not fill its"
                " places"
                f" ({'x'.join(map(str, dims)) or 'unknown'}), so that no distances are known"
            )
    return grids
