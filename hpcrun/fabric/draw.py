"""Pictures of a fabric: a tree of text for the terminal, and an SVG with the groups of one axis in colour."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from hpcrun.errors import UsageError
from hpcrun.fabric.graph import Fabric, pluralize
from hpcrun.hostlist import fold_hosts, sort_hosts
from hpcrun.mesh import AXES, ParallelDegrees
from hpcrun.specs.placement import Placement

FREE = ("idle", "free")
"""The words for a node that a job can have now."""
_MANY = 4
"""More nodes of a job in one unit than this share a line."""
_WIDE = 60
"""Characters of a list of nodes or ranks."""


@dataclass
class _Branch:
    """A unit with the units and the nodes right below it."""

    name: str = ""
    level: str = ""
    branches: dict[tuple[int, str], _Branch] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)

    def all_nodes(self) -> Iterator[str]:
        yield from self.nodes
        for branch in self.branches.values():
            yield from branch.all_nodes()


def _branches(fabric: Fabric) -> _Branch:
    root = _Branch()
    for node, units in zip(fabric.nodes, fabric.units, strict=True):
        at = root
        for index in range(len(units) - 1, -1, -1):
            unit = units[index]
            if unit is not None:
                at = at.branches.setdefault((index, unit), _Branch(unit, fabric.levels[index].name))
        at.nodes.append(node)
    return root


def render_fabric_tree(
    fabric: Fabric,
    states: Mapping[str, str] = {},
    placed: Placement | None = None,
    spares: Iterable[str] = (),
) -> str:
    """The fabric as a tree: nodes folded, how many are free, and where a job's ranks and spares are.

    `states` gives the word for a node's state; without it nothing is said about what is free.
    """
    root, marks = _branches(fabric), _NodeMarks(states, placed, frozenset(spares))
    lines = [marks.count(fabric.nodes), *_render_below(root, marks), *map(str, fabric.grids)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _render_below(branch: _Branch, marks: _NodeMarks) -> list[str]:
    """The lines of what is right below a unit: further units, then nodes."""
    own = marks.lines(branch.nodes) if branch.nodes else []
    if not branch.branches:
        return [f"   {line}" for line in own]
    items = [_render_group(group, marks) for group in _group_alike(branch.branches.values(), marks)]
    if own:
        items.append([f"in no unit below: {marks.count(branch.nodes)}", *(f"   {line}" for line in own)])
    lines = []
    for number, item in enumerate(items, 1):
        first, further = ("└─ ", "   ") if number == len(items) else ("├─ ", "│  ")
        lines += [f"{first}{item[0]}", *(f"{further}{line}" for line in item[1:])]
    return lines


def _render_group(group: Sequence[_Branch], marks: _NodeMarks) -> list[str]:
    """A unit, or several alike in one line."""
    nodes = [node for branch in group for node in branch.all_nodes()]
    first = group[0]
    name = first.name if first.name.startswith(first.level) else f"{first.level} {first.name}"
    if len(group) > 1:
        name = (
            f"{len(group)} {pluralize(first.level, len(group))} {_listed([branch.name for branch in group])}"
        )
    head = f"{name}: {marks.count(nodes)}"
    if first.branches or marks.has_job(nodes):
        return [head, *_render_below(first, marks)]
    return [f"{head}: {', '.join(marks.lines(nodes))}"]


class _NodeMarks:
    """What is said about nodes: their state, their ranks, and whether they are spare."""

    def __init__(self, states: Mapping[str, str], placed: Placement | None, spares: frozenset[str]) -> None:
        self._states = states
        self._ranks: dict[str, list[int]] = {}
        self._spares = spares
        for rank, node in enumerate(placed.ranks if placed else ()):
            self._ranks.setdefault(node, []).append(rank)

    def word(self, node: str) -> str:
        """What a node is, in a word; `ranks` for one of the job's."""
        if node in self._ranks:
            return "ranks"
        return "spare" if node in self._spares else self._states.get(node, "unknown" if self._states else "")

    def count(self, nodes: Collection[str]) -> str:
        """The number of nodes, and of free ones."""
        count = f"{len(nodes)} {pluralize('node', len(nodes))}"
        free = sum(self._states.get(node) in FREE for node in nodes)
        return f"{count}, {free} free" if self._states else count

    def has_job(self, nodes: Iterable[str]) -> bool:
        """Whether there are ranks or spares on any of them."""
        return any(node in self._ranks or node in self._spares for node in nodes)

    def only(self, nodes: Collection[str]) -> str | None:
        """The one word for all of these nodes; None where there are several, or the job."""
        words = {self.word(node) for node in nodes}
        return words.pop() if len(words) == 1 and not self.has_job(nodes) else None

    def lines(self, nodes: Sequence[str]) -> list[str]:
        """One line a word, and one for each node of the job while they are few."""
        ranked = sorted((node for node in nodes if node in self._ranks), key=lambda node: self._ranks[node])
        if len(ranked) <= _MANY:
            lines = [f"ranks {_runs(self._ranks[node])} on {node}" for node in ranked]
        else:
            ranks = sorted(rank for node in ranked for rank in self._ranks[node])
            lines = [f"ranks {_runs(ranks)} on {_listed(ranked)}"]
        others: dict[str, list[str]] = {}
        for node in nodes:
            if node not in self._ranks:
                others.setdefault(self.word(node), []).append(node)
        # Spares belong to the job, and the free ones come next.
        order = sorted(others, key=lambda word: (word != "spare", word not in FREE, word))
        return [*lines, *(f"{word} {_listed(others[word])}".strip() for word in order)]


def _group_alike(branches: Iterable[_Branch], marks: _NodeMarks) -> list[list[_Branch]]:
    """Neighbours that have nothing but nodes of one word, as one group; every other branch alone."""

    def kind(branch: _Branch) -> tuple[str, str | None, int]:
        word = marks.only(branch.nodes) if not branch.branches else None
        return branch.level, word, 0 if word is not None else id(branch)

    groups = [list(group) for _, group in itertools.groupby(branches, kind)]
    return [
        part for group in groups for part in ([group] if len(group) > 2 else [[branch] for branch in group])
    ]


def _listed(names: Sequence[str]) -> str:
    try:
        text = fold_hosts(sort_hosts(names))
    except UsageError:  # a switch may have a name that no host list takes
        text = ",".join(names)
    return _short(text)


def _runs(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return _short(",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs))


def _short(text: str) -> str:
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."


_BOX, _GAP, _LABEL, _ROW = 26, 6, 14, 8
"""Side of a rank's square, space between things, height of a label, ranks in a row and racks in a line."""


def render_placement_svg(fabric: Fabric, placement: Placement, degrees: ParallelDegrees, axis: str) -> str:
    """Racks, their nodes, and the ranks on each; ranks of one group of the axis have one colour.

    The axis is one of the mesh, or `dp` for dp_replicate and dp_shard together. Racks without ranks are only
    counted. UsageError for another axis, and for a placement of another size than the mesh.
    """
    groups = _groups(placement, degrees, axis)
    racks, left_out = _racks(fabric, placement)
    parts: list[str] = []
    top, width = _GAP + 2 * _LABEL, 0
    for above, members in itertools.groupby(racks, key=lambda rack: rack[0]):
        parts.append(_text(_GAP, top + _LABEL, above or "racks", bold=True))
        top += _LABEL + _GAP
        row = list(members)
        for line in (row[begin : begin + _ROW] for begin in range(0, len(row), _ROW)):
            left, lowest = _GAP, top
            for _, name, nodes in line:
                drawn, right, bottom = _rack(name, nodes, placement, groups, left, top, degrees)
                parts += drawn
                left, lowest, width = right + _GAP, max(lowest, bottom), max(width, right)
            top = lowest + _GAP
    count = len(set(groups))
    title = f"{len(placement.ranks)} ranks: {degrees}; one colour for each of the {count} groups along {axis}"
    title += f"; {left_out} {pluralize('rack', left_out)} without ranks left out" if left_out else ""
    width = max(width + _GAP, 7 * len(title))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}"'
            f' viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{top}" fill="white"/>',
            _text(_GAP, _GAP + _LABEL, title),
            *parts,
            "</svg>\n",
        ]
    )


def _groups(placement: Placement, degrees: ParallelDegrees, axis: str) -> list[int]:
    """The number of the group of every rank: the ranks that differ in nothing but this axis."""
    inside = {"dp": ("dp_replicate", "dp_shard")}.get(axis, (axis,))
    if not set(inside) <= set(AXES):
        raise UsageError(f"{axis}: is not an axis of the mesh; use {', '.join((*AXES, 'dp'))}")
    if len(placement.ranks) != degrees.world_size:
        raise UsageError(
            f"placement: has {len(placement.ranks)} ranks, but {degrees} is {degrees.world_size}; draw the"
            " placement of this job"
        )
    numbers: dict[tuple[int, ...], int] = {}
    numbers_of_ranks = []
    for rank in range(degrees.world_size):
        at = degrees.coordinates(rank)
        key = tuple(position for name, position in at.items() if name not in inside)
        numbers_of_ranks.append(numbers.setdefault(key, len(numbers)))
    return numbers_of_ranks


def _racks(fabric: Fabric, placement: Placement) -> tuple[list[tuple[str, str, list[str]]], int]:
    """What is above each rack with ranks, its name and its nodes; and how many racks there are besides."""
    level = next((index for index, level in enumerate(fabric.levels) if level.name != "block"), 0)
    used = set(placement.nodes)
    racks: dict[tuple[str, str], list[str]] = {}
    for node in dict.fromkeys((*fabric.nodes, *placement.nodes)):
        units = [fabric.unit(node, index) for index in range(len(fabric.levels))]
        above = " / ".join(unit for unit in reversed(units[level + 1 :]) if unit is not None)
        name = (units[level] if units else None) or "in no unit"
        racks.setdefault((above, name), []).append(node)
    busy = [(above, name, nodes) for (above, name), nodes in racks.items() if used & set(nodes)]
    return sorted(busy, key=lambda rack: rack[0]), len(racks) - len(busy)


def _rack(
    name: str,
    nodes: Sequence[str],
    placement: Placement,
    groups: Sequence[int],
    left: int,
    top: int,
    degrees: ParallelDegrees,
) -> tuple[list[str], int, int]:
    """A rack's shapes, and where it ends on the right and below."""
    ranks = {node: placement.on(node) for node in nodes}
    most = max(map(len, ranks.values()))
    longest = 7 * max(map(len, (name, *nodes)))
    width = max(min(most, _ROW) * _BOX, longest) + 2 * _GAP
    parts, y = [_text(left + _GAP, top + _LABEL, name)], top + _LABEL + _GAP
    for node in nodes:
        rows = -(-len(ranks[node]) // _ROW)
        height = _LABEL + _GAP + rows * _BOX
        fill = "#f4f4f4" if ranks[node] else "#dddddd"
        parts.append(_rect(left + _GAP // 2, y, width - _GAP, height, fill, node))
        parts.append(_text(left + _GAP, y + _LABEL - 2, node))
        for number, rank in enumerate(ranks[node]):
            x = left + _GAP + number % _ROW * _BOX
            box = y + _LABEL + number // _ROW * _BOX
            at = ", ".join(f"{axis} {place}" for axis, place in reversed(degrees.coordinates(rank).items()))
            parts.append(
                _rect(x, box, _BOX - 2, _BOX - 2, _colour(groups[rank]), f"rank {rank} on {node}: {at}")
            )
            parts.append(_text(x + 2, box + _LABEL, str(rank)))
        y += height + _GAP // 2
    frame = f'<rect x="{left}" y="{top}" width="{width}" height="{y - top}" fill="none" stroke="#888888"/>'
    return [frame, *parts], left + width, y


def _colour(group: int) -> str:
    """Neighbouring groups get hues far apart: steps of the golden angle."""
    return f"hsl({group * 137.508 % 360:.0f},65%,{(70, 82, 60)[group // 24 % 3]}%)"


def _rect(x: int, y: int, width: int, height: int, fill: str, title: str) -> str:
    return (
        f"<rect x={quoteattr(str(x))} y={quoteattr(str(y))} width={quoteattr(str(width))}"
        f" height={quoteattr(str(height))} fill={quoteattr(fill)}><title>{escape(title)}</title></rect>"
    )


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}"{weight}>{escape(text)}</text>'
