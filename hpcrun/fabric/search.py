"""Which site each slot of a job stands on: exact for small cases, else good starts and a local search.

A slot is a node's place in the order of the ranks. Nodes of one site are interchangeable, so slots are put on
sites; so are leaves of one parent of which nothing is used yet and that have equally many nodes. Work is
bounded by counts of evaluations, never by time: the same question has the same answer on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hpcrun.fabric.cost import CostKey, LinkLoads, TopologySite
from hpcrun.mesh import AXES, ParallelDegrees

SearchMethod = Literal["exact", "heuristic"]

EXACT_SLOTS = 24
"""A tree of more slots is not tried: its budget would be spent before the first half."""
EXACT_EDGES = 600_000
"""Edges that the exact search visits before it gives up."""
LOCAL_EDGES = 200_000
"""Edges that the local search visits."""
_SMALL_JOB = 64
_IMPROVED = 8
"""Starts of a small job that the local search goes on from."""
_MOST_ORDERS = 24


class SearchResult(NamedTuple):
    """The best assignment and how it was found."""

    where: tuple[int, ...]
    """The site of every slot."""
    method: SearchMethod


@dataclass
class PlacementSearch:
    """Puts the slots of a job on sites with this many free nodes each."""

    loads: LinkLoads
    free: Sequence[int]
    """Free nodes by site."""
    keep_whole: bool = True
    """Among equal costs leave large free racks whole; False: leave nodes over in as many racks as can be."""

    def __post_init__(self) -> None:
        self._steps = LOCAL_EDGES // self.loads.change_cost
        self._used = [0] * len(self.free)
        self._kinds = self.loads.kinds(self.free)

    def run(self, starts: Iterable[Sequence[int]]) -> SearchResult:
        """Never worse than any of the starts; among equals the earliest of them."""
        ranked: list[tuple[CostKey, tuple[int, ...]]] = []
        for where in starts:
            self._reset(where)
            ranked.append((self._key(), tuple(where)))
        ranked.sort(key=lambda start: start[0])
        if len(self.free) == 1:
            return SearchResult(ranked[0][1], "exact")
        best = min(
            (self._improve(where, key) for key, where in ranked[: _IMPROVED if self._small else 1]),
            key=lambda start: start[0],
        )
        if len(self.loads.where) <= EXACT_SLOTS:
            proven, best = self._prove(best)
            if proven:
                return SearchResult(best[1], "exact")
        return SearchResult(best[1], "heuristic")

    @property
    def _small(self) -> bool:
        return len(self.loads.where) <= _SMALL_JOB

    def _reset(self, where: Sequence[int]) -> None:
        self.loads.clear()
        self.loads.place(where)
        self._used = [0] * len(self.free)
        for site in where:
            self._used[site] += 1

    def _key(self) -> CostKey:
        left = sum((free - used) ** 2 for free, used in zip(self.free, self._used, strict=True))
        return (*self.loads.key(), -left if self.keep_whole else left)

    def _shift(self, slot: int, site: int) -> None:
        before = self.loads.where[slot]
        self.loads.move(slot, site)
        if before >= 0:
            self._used[before] -= 1
        if site >= 0:
            self._used[site] += 1

    # --- local search

    def _improve(self, where: Sequence[int], key: CostKey) -> tuple[CostKey, tuple[int, ...]]:
        """Exchange slots, and move slots to free nodes, as long as that helps."""
        self._reset(where)
        draw = random.Random(len(where))
        while self._steps:
            improved = False
            for change in self._changes(draw):
                self._steps -= 1
                before = [(slot, self.loads.where[slot]) for slot, _ in change]
                for slot, site in change:
                    self._shift(slot, site)
                now = self._key()
                if now < key:
                    key, improved = now, True
                else:
                    for slot, site in before:
                        self._shift(slot, site)
                if not self._steps:
                    break
            if not improved:
                break
        return key, tuple(self.loads.where)

    def _changes(self, draw: random.Random) -> Iterator[list[tuple[int, int]]]:
        """Moves of slots that exchange something with another site, in a shuffled order."""
        where = self.loads.where
        slots = [slot for slot in range(len(where)) if self._on_border(slot)]
        draw.shuffle(slots)
        for slot in slots:
            for site in dict.fromkeys(where[other] for other in self.loads.neighbours(slot)):
                if site != where[slot] and self._used[site] < self.free[site]:
                    yield [(slot, site)]
        if self._small:
            for slot, site in itertools.product(slots, range(len(self.free))):
                if site != where[slot] and self._used[site] < self.free[site]:
                    yield [(slot, site)]
        for first, second in itertools.combinations(slots, 2):
            if where[first] != where[second]:
                yield [(first, where[second]), (second, where[first])]

    def _on_border(self, slot: int) -> bool:
        where = self.loads.where
        return any(where[other] != where[slot] for other in self.loads.neighbours(slot))

    # --- exact search

    def _prove(self, best: tuple[CostKey, tuple[int, ...]]) -> tuple[bool, tuple[CostKey, tuple[int, ...]]]:
        """Depth first with the cost of the part as a bound; whether it came to the end, and the best."""
        self.loads.clear()
        self._used = [0] * len(self.free)
        slots, steps = len(self.loads.where), EXACT_EDGES // self.loads.change_cost
        choices = [iter(self._distinct_sites())]
        while choices:
            slot = len(choices) - 1
            if self.loads.where[slot] >= 0:
                self._shift(slot, -1)
            site = next(choices[-1], None)
            if site is None:
                choices.pop()
                continue
            if steps == 0:
                return False, best
            steps -= 1
            self._shift(slot, site)
            if len(choices) == slots:
                key = self._key()
                if key < best[0]:
                    best = key, tuple(self.loads.where)
            elif self.loads.key() <= best[0][:-1]:
                choices.append(iter(self._distinct_sites()))
        return True, best

    def _distinct_sites(self) -> list[int]:
        """Sites with a node left; of untouched sites that are alike only the first."""
        seen = set()
        distinct = []
        for site, (free, used, kind) in enumerate(zip(self.free, self._used, self._kinds, strict=True)):
            if used == free or (not used and kind in seen):
                continue
            if not used:
                seen.add(kind)
            distinct.append(site)
        return distinct


def axis_orders(
    degrees: ParallelDegrees, ranks: int, per_node: int, weights: dict[str, int]
) -> list[tuple[list[int], list[int]]]:
    """Ways to nest the axes of the mesh: the slots in that order, and the sizes of its blocks.

    The first has the axis with the most bytes innermost; the last is the order of the ranks itself.
    """
    slots = list(range(-(-ranks // per_node)))
    plain: tuple[list[int], list[int]] = (slots, [1])
    if degrees.world_size != ranks:
        return [plain]
    at = [degrees.coordinates(slot * per_node) for slot in slots]
    extent = {axis: len({place[axis] for place in at}) for axis in AXES}
    axes = sorted((axis for axis in AXES if extent[axis] > 1), key=lambda axis: weights.get(axis, 0))
    nested: list[tuple[list[int], list[int]]] = []
    for chosen in itertools.islice(itertools.permutations(axes), _MOST_ORDERS):
        ordered = sorted(slots, key=lambda slot: tuple(at[slot][axis] for axis in chosen))
        sizes = list(itertools.accumulate((extent[axis] for axis in reversed(chosen)), lambda a, b: a * b))
        nested.append(
            (ordered, [1, *(size for size in sizes if len(slots) % size == 0 and size < len(slots))])
        )
    return [*nested, plain]


@dataclass
class _FabricPart:
    """A part of the fabric: one site, or the parts below a unit."""

    free: int = 0
    site: int | None = None
    below: dict[object, _FabricPart] = field(default_factory=dict)
    _usable: dict[int, int] = field(default_factory=dict)

    def usable(self, block: int) -> int:
        """Nodes for whole blocks of slots, each below one part if any is large enough."""
        if block not in self._usable:
            inside = sum(part.usable(block) for part in self.below.values())
            self._usable[block] = inside or self.free // block * block
        return self._usable[block]

    def smallest_fitting(self, count: int, block: int) -> int:
        """The room of the smallest part in here that holds so many; this one must."""
        holding = (part for part in self.below.values() if part.usable(block) >= count)
        return min((part.smallest_fitting(count, block) for part in holding), default=self.usable(block))

    def take(self, count: int, block: int) -> Iterator[int]:
        """The sites of so many slots: the tightest part, else the largest and what is left anew."""
        if self.site is not None:
            yield from itertools.repeat(self.site, count)
            return
        if not any(part.usable(block) for part in self.below.values()):
            block = 1
        room = sorted(self.below.values(), key=lambda part: part.usable(block), reverse=True)
        for at, largest in enumerate(room):
            if largest.usable(block) >= count:
                holding = (part for part in room[at:] if part.usable(block) >= count)
                part = min(holding, key=lambda part: (part.smallest_fitting(count, block), part.free))
                yield from part.take(count, block)
                return
            yield from largest.take(largest.usable(block), block)
            count -= largest.usable(block)


class TreeAllocator:
    """Ways to take free nodes out of the fabric's tree; what the search starts from."""

    def __init__(self, sites: Sequence[TopologySite], free: Sequence[int]) -> None:
        self._free = free
        self._root = _FabricPart()
        for site, (where, count) in enumerate(zip(sites, free, strict=True)):
            part = self._root
            part.free += count
            for unit in (*reversed(where.units), ("site", site)):
                part = part.below.setdefault(unit, _FabricPart())
                part.free += count
            part.site = site

    def best_fit(self, slots: int, block: int) -> list[int] | None:
        """The sites of so many slots, in the order of the tree, few and small ones; blocks stay together."""
        return list(self._root.take(slots, block)) if self._root.usable(block) >= slots else None

    def round_robin(self, slots: int, block: int) -> list[int] | None:
        """The sites of so many slots, in the order of the tree, a block on every site in turns.

        Wide jobs have more uplinks: where these are thin, that may be cheaper than few full leaves.
        """
        given = dict.fromkeys(self._in_tree(self._root), 0)
        left = slots
        while left:
            before = left
            for site in given:
                count = min(block, left)
                if self._free[site] - given[site] >= count:
                    given[site] += count
                    left -= count
            if left == before:
                return None
        return [site for site, count in given.items() for _ in range(count)]

    def _in_tree(self, part: _FabricPart) -> Iterator[int]:
        if part.site is not None:
            yield part.site
        for below in part.below.values():
            yield from self._in_tree(below)
