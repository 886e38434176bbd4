"""The one graph of a cluster's network: nodes, the units above each of them, and what each level carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

SCHEMA_VERSION = 1
"""Version of a fabric's JSON."""


@dataclass(frozen=True)
class FabricLevel:
    """One level of switches, from the node upwards: block (NVLink), leaf, spine, core."""

    name: str
    bandwidth_Bps: float | None = None
    """Bandwidth of one node's link at this level, one direction; None: unknown."""
    oversubscription: float | None = None
    """Traffic below over capacity above; None: unknown."""
    latency_s: float | None = None
    """Added by this level, one way; None: unknown."""


@dataclass(frozen=True)
class Grid:
    """Nodes in a ring (one dimension) or a torus: there are distances between them, but no units."""

    name: str
    dims: tuple[int, ...]
    nodes: tuple[str, ...]
    """In the order of their places, the first dimension running fastest (as Slurm's torus3d has it)."""

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node: place for place, node in enumerate(self.nodes)}

    def distance(self, a: str, b: str) -> int | None:
        """Links between two nodes, the shorter way round in every dimension; None: one is not in it."""
        if a not in self._places or b not in self._places:
            return None
        first, second, links = self._places[a], self._places[b], 0
        for size in self.dims:
            first, x = divmod(first, size)
            second, y = divmod(second, size)
            links += min(abs(x - y), size - abs(x - y))
        return links

    def __str__(self) -> str:
        size = "×".join(map(str, self.dims))
        return f"{'ring' if len(self.dims) == 1 else 'torus'} {self.name} of {size}"


@dataclass(frozen=True)
class Fabric:
    """The network of a cluster, or of the part of it that a job has; prints and dumps to JSON.

    Units of one name at different levels are different units. A node that the topology does not know is in
    no unit at any level. A node below several leaves (rails) counts as below the first one.
    """

    nodes: tuple[str, ...]
    """In Slurm's node-table order, as far as it is known."""
    levels: tuple[FabricLevel, ...] = ()
    """Innermost first; empty: no topology is known."""
    units: tuple[tuple[str | None, ...], ...] = ()
    """For every node its unit at every level; None: in no unit there."""
    rails: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All the leaves of the nodes that are below more than one, first rail first."""
    source: str = "unknown"
    """Where it is known from, in words."""
    notes: tuple[str, ...] = ()
    """What is odd or unknown, one line each."""
    grids: tuple[Grid, ...] = ()
    """Rings and tori."""
    is_unread: bool = False
    """A description was there and could not be read; the notes say why."""
    trees: Mapping[str, str] = field(default_factory=dict)
    """The tree of every node, where Slurm has several: it gives no job nodes of two. Empty: it has one."""

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The place of every node in `nodes`."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def _members(self) -> list[dict[str, tuple[str, ...]]]:
        units_of_level: list[dict[str, list[str]]] = [{} for _ in self.levels]
        for node, above in zip(self.nodes, self.units, strict=True):
            for members, unit in zip(units_of_level, above, strict=True):
                if unit is not None:
                    members.setdefault(unit, []).append(node)
        return [{unit: tuple(nodes) for unit, nodes in members.items()} for members in units_of_level]

    def unit(self, node: str, level_index: int) -> str | None:
        """The unit of a node at a level."""
        place = self.index.get(node)
        return None if place is None else self.units[place][level_index]

    def members(self, level_index: int) -> Mapping[str, tuple[str, ...]]:
        """The units of a level and the nodes below each, both in the order of the nodes."""
        return self._members[level_index]

    def common_level(self, a: str, b: str) -> int:
        """0: the same node; k: they meet at levels[k-1]; len(levels)+1: they meet nowhere that is known."""
        if a == b:
            return 0
        first, second = self.index.get(a), self.index.get(b)
        if first is not None and second is not None:
            for level, (x, y) in enumerate(zip(self.units[first], self.units[second], strict=True), 1):
                if x is not None and x == y:
                    return level
        return len(self.levels) + 1

    def hops(self, a: str, b: str) -> int | None:
        """Links between two nodes; None: unknown."""
        level = self.common_level(a, b)
        if level <= len(self.levels):
            above = (self.units[self.index[node]][:level] for node in (a, b) if level)
            return sum(unit is not None for units in above for unit in units)
        return next((links for grid in self.grids if (links := grid.distance(a, b)) is not None), None)

    def restricted(self, nodes: Iterable[str]) -> Fabric:
        """The part over these nodes, in this order; a node that is not in it comes with no units."""
        chosen = tuple(dict.fromkeys(nodes))
        nowhere = (None,) * len(self.levels)
        places = [self.index.get(node) for node in chosen]
        return Fabric(
            chosen,
            self.levels,
            tuple(nowhere if place is None else self.units[place] for place in places),
            {node: self.rails[node] for node in chosen if node in self.rails},
            self.source,
            self.notes,
            self.grids,
            self.is_unread,
            {node: self.trees[node] for node in chosen if node in self.trees},
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def __str__(self) -> str:
        counts = [
            f"{len(members)} {pluralize(level.name, len(members))}"
            for level, members in zip(self.levels, self._members, strict=True)
        ]
        counts += [str(grid) for grid in self.grids]
        shape = ", ".join(counts) or "no topology known"
        return f"{len(self.nodes)} {pluralize('node', len(self.nodes))}: {shape} ({self.source})"


def flat_fabric(
    nodes: Iterable[str], source: str, notes: Sequence[str] = (), *, is_unread: bool = False
) -> Fabric:
    """A fabric without levels; `is_unread`: a description could not be read."""
    names = tuple(dict.fromkeys(nodes))
    return Fabric(names, (), ((),) * len(names), {}, source, tuple(notes), is_unread=is_unread)


def pluralize(word: str, count: int) -> str:
    """`leaf` and `leaves`, `node` and `nodes`."""
    if count == 1:
        return word
    return {"leaf": "leaves", "switch": "switches"}.get(word, f"{word}s")
