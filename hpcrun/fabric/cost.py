"""What a placement costs on a fabric: the time at the busiest link, axis by axis.

The model. A level's figures hold for the links that lead into it from below, each direction by itself:
- a node's link into level k carries all that it exchanges with nodes that it meets at level k or above, at
  bandwidth(k), and at bandwidth ÷ oversubscription for the innermost level;
- the uplink of a unit at level k carries all that leaves the unit, at
  bandwidth(k+1) × members of the unit ÷ oversubscription(k+1).
All groups of an axis run at once, so a link's load is the sum over them; axes run one after the other, so
their times add up. Time of an axis = the most of load ÷ capacity over the links + messages × the latency of
its longest way (the sum over the levels up to where the pair meets; unknown counts as none). What stays
inside a node is free. Other jobs' traffic, rails beyond the first and hierarchical collectives are not
modelled.

Costs are compared by `Cost.key`, in this order: bytes of tp that leave a block, where the fabric has blocks;
bytes between nodes that meet nowhere that is known (times the hops on a ring or torus); seconds, where every
level's bandwidth and oversubscription are known; bytes that meet at each level, from the outermost inwards.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hpcrun.fabric.graph import Fabric
from hpcrun.fabric.traffic import Traffic, TrafficFlow
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.placement import Placement
from hpcrun.units import format_bytes

CostKey = tuple[float, ...]
"""Smaller is better."""

BLOCK = "block"
"""The level of nodes that are joined like the GPUs inside one."""


@dataclass(frozen=True)
class AxisCost:
    """One axis of the mesh: its time in a step, and where its bytes go."""

    axis: str
    seconds: float | None
    """None: unknown."""
    bytes: tuple[int, ...]
    """Bytes of all ranks, by the level where sender and receiver meet, as `PlacementCost.levels`."""


@dataclass(frozen=True)
class PlacementCost:
    """What a step's communication costs; prints and dumps to JSON."""

    levels: tuple[str, ...]
    """`node`, the fabric's levels from the inside out, `beyond` for what meets nowhere that is known."""
    axes: tuple[AxisCost, ...]
    key: CostKey
    """For comparing placements of one job."""

    @property
    def seconds(self) -> float | None:
        """Seconds of all axes, one after the other; None: unknown."""
        seconds = [axis.seconds for axis in self.axes if axis.seconds is not None]
        return sum(seconds) if len(seconds) == len(self.axes) else None

    @property
    def bytes(self) -> tuple[int, ...]:
        """A step's bytes by the level where sender and receiver meet."""
        return tuple(sum(axis.bytes[level] for axis in self.axes) for level in range(len(self.levels)))

    @property
    def costliest_axis(self) -> str:
        """The axis that crosses the outermost level with most bytes; pp where none sends anything."""
        axes = [axis for axis in self.axes if any(axis.bytes)]
        return max(axes, key=lambda axis: tuple(reversed(axis.bytes))).axis if axes else "pp"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "seconds": self.seconds, "bytes": self.bytes}

    def __str__(self) -> str:
        parts = [
            f"{level} {format_bytes(count)}"
            for level, count in zip(self.levels, self.bytes, strict=True)
            if count
        ]
        time = "time unknown" if self.seconds is None else f"{self.seconds * 1e3:.3g} ms"
        return f"{time} a step ({', '.join(parts) or 'no traffic'})"


def compute_placement_cost(
    fabric: Fabric, placement: Placement, degrees: ParallelDegrees, traffic: Traffic
) -> PlacementCost:
    """The modelled cost of a step's communication."""
    nodes = placement.nodes
    place = {node: slot for slot, node in enumerate(nodes)}
    return compute_flow_cost(
        fabric, nodes, slot_flows(traffic, degrees, [place[node] for node in placement.ranks])
    )


def compute_flow_cost(fabric: Fabric, nodes: Sequence[str], streams: Sequence[SlotFlow]) -> PlacementCost:
    """The cost of streams between slots on these nodes."""
    sites, site_of = find_topology_sites(fabric, nodes)
    loads = LinkLoads(fabric, sites, len(nodes), streams)
    loads.place([site_of[node] for node in nodes])
    return loads.cost()


class SlotFlow(NamedTuple):
    """A flow between slots: the places of nodes in the order of the ranks."""

    axis: str
    edges: Mapping[tuple[int, int], int]
    """Bytes from a slot to another one."""
    inside: int
    """Bytes that stay inside slots."""
    messages: int


def slot_flows(traffic: Traffic, degrees: ParallelDegrees, slot_of: Sequence[int]) -> list[SlotFlow]:
    """The flows of a job whose ranks stand in these slots."""
    return [_slot_flow(flow, degrees, slot_of) for flow in traffic.flows]


def _slot_flow(flow: TrafficFlow, degrees: ParallelDegrees, slot_of: Sequence[int]) -> SlotFlow:
    edges: dict[tuple[int, int], int] = {}
    inside = 0
    for sender, receiver, count in flow.edges(degrees, len(slot_of)):
        pair = slot_of[sender], slot_of[receiver]
        if pair[0] == pair[1]:
            inside += count
        else:
            edges[pair] = edges.get(pair, 0) + count
    return SlotFlow(flow.axis, edges, inside, flow.messages)


class TopologySite(NamedTuple):
    """Where nodes stand: those of one site are interchangeable."""

    units: tuple[str | None, ...]
    node: str
    """One node of the site; on a ring or torus the only one."""


def find_topology_sites(fabric: Fabric, nodes: Sequence[str]) -> tuple[list[TopologySite], dict[str, int]]:
    """The sites of some nodes, in the order of their first node, and the index of each node's site."""
    nowhere = (None,) * len(fabric.levels)
    gridded = {node for grid in fabric.grids for node in grid.nodes}
    site_numbers: dict[tuple[Any, ...], int] = {}
    sites: list[TopologySite] = []
    site_of: dict[str, int] = {}
    for node in nodes:
        at = fabric.index.get(node)
        units = nowhere if at is None else fabric.units[at]
        mark = (units, node) if node in gridded else units
        site = site_numbers.setdefault(mark, len(sites))
        if site == len(sites):
            sites.append(TopologySite(units, node))
        site_of[node] = site
    return sites, site_of


class _SiteRoute(NamedTuple):
    """From one site to another: where they meet, and the uplinks on the way there and down again."""

    level: int
    up: tuple[int, ...]
    down: tuple[int, ...]
    hops: int


class LinkLoads:
    """The load of every link while slots are put on sites one by one; the search's form of the cost.

    All loads are whole bytes, so that no order of moves leaves a rounding error behind. Slots that stand
    nowhere yet cost nothing but their own links: the key of a part is never above the key of the whole.
    """

    def __init__(
        self, fabric: Fabric, sites: Sequence[TopologySite], slots: int, streams: Sequence[SlotFlow]
    ) -> None:
        self.sites = sites
        self._slots = slots
        self.streams = streams
        self._fabric = fabric
        self._top = top = len(fabric.levels)
        self.timed = top > 0 and all(
            level.bandwidth_Bps is not None and level.oversubscription is not None for level in fabric.levels
        )
        self._blocks = top > 0 and fabric.levels[0].name == BLOCK
        self._latency = [0.0]
        for level in fabric.levels:
            self._latency.append(self._latency[-1] + (level.latency_s or 0.0))
        self._routes: dict[tuple[int, int], _SiteRoute] = {}
        self._number_uplinks()
        self._thin = self._thin_levels()
        self.clear()
        self._own_s = [self._own_links_s(stream) for stream in streams]
        self._near: list[list[tuple[int, int, int | None, int | None]]] = [[] for _ in range(slots)]
        for index, stream in enumerate(streams):
            for (sender, receiver), size in stream.edges.items():
                back = stream.edges.get((receiver, sender))
                self._near[sender].append((index, receiver, size, back))
                if back is None:
                    self._near[receiver].append((index, sender, None, size))

    def clear(self) -> None:
        """Take every slot away."""
        self.where = [-1] * self._slots
        streams, links, thin = range(len(self.streams)), len(self._pace), len(self._thin)
        self._out = [[0] * links for _ in streams]
        self._in = [[0] * links for _ in streams]
        self._thin_out = [[[0] * self._slots for _ in range(thin)] for _ in streams]
        self._thin_in = [[[0] * self._slots for _ in range(thin)] for _ in streams]
        self._at = [[0] * (self._top + 1) for _ in streams]
        self._pairs = [[0] * (self._top + 1) for _ in streams]
        self._strayed = self._far = 0

    def place(self, where: Sequence[int]) -> None:
        """Put every slot on a site, all at once; nothing may stand anywhere before."""
        self.where = list(where)
        # Most edges stay inside a site; there is no link to be loaded then but the nodes' own.
        inner = [bool(site.units) and site.units[0] is not None for site in self.sites]
        for index, stream in enumerate(self.streams):
            near = pairs = 0
            for (sender, receiver), size in stream.edges.items():
                start, end = where[sender], where[receiver]
                if start == end and inner[start]:
                    near += size
                    pairs += 1
                else:
                    self._add(index, sender, receiver, start, end, size, 1)
            self._at[index][0] += near
            self._pairs[index][0] += pairs

    def move(self, slot: int, site: int) -> None:
        """Put one slot on another site; -1 takes it away."""
        before, where = self.where[slot], self.where
        for index, other, sent, received in self._near[slot]:
            there = where[other]
            if there < 0:
                continue
            if before >= 0:
                if sent is not None:
                    self._add(index, slot, other, before, there, -sent, -1)
                if received is not None:
                    self._add(index, other, slot, there, before, -received, -1)
            if site >= 0:
                if sent is not None:
                    self._add(index, slot, other, site, there, sent, 1)
                if received is not None:
                    self._add(index, other, slot, there, site, received, 1)
        where[slot] = site

    def neighbours(self, slot: int) -> Iterator[int]:
        """The slots that a slot exchanges something with."""
        return (other for _, other, _, _ in self._near[slot])

    def kinds(self, free: Sequence[int]) -> list[object]:
        """What makes sites alike: the units above, the uplink, the free nodes, and no other site below."""
        gridded = bool(self._fabric.grids)
        shared = Counter(site.units[0] for site in self.sites if site.units)
        return [
            site
            if gridded or not site.units or site.units[0] is None or shared[site.units[0]] > 1
            else (site.units[1:], count, self._pace[link] if (link := links[0]) is not None else None)
            for site, count, links in zip(self.sites, free, self._links, strict=True)
        ]

    @property
    def change_cost(self) -> int:
        """About what a change of two slots and its key cost, in visits of an edge."""
        edges = sum(map(len, self._near)) // max(1, self._slots)
        return 20 + 4 * edges + len(self.streams) * len(self._pace) // 10

    def key(self) -> CostKey:
        """See the module: what costs are compared by."""
        seconds = sum(self._seconds(index) for index in range(len(self.streams))) if self.timed else 0.0
        return (self._strayed, self._far, seconds, *map(sum, reversed(list(zip(*self._at, strict=True)))))

    def cost(self) -> PlacementCost:
        """The cost of what is placed."""
        axes = tuple(
            AxisCost(
                stream.axis,
                self._seconds(index) if self.timed and not self._at[index][self._top] else None,
                (stream.inside, *self._at[index]),
            )
            for index, stream in enumerate(self.streams)
        )
        levels = ("node", *(level.name for level in self._fabric.levels), "beyond")
        return PlacementCost(levels, axes, self.key())

    def _seconds(self, index: int) -> float:
        pace, out, into = self._pace, self._out[index], self._in[index]
        busiest = max(
            self._own_s[index],
            max(map(operator.mul, out, pace), default=0.0),
            max(map(operator.mul, into, pace), default=0.0),
        )
        for thin, (_, seconds_a_byte) in enumerate(self._thin):
            most = max(max(self._thin_out[index][thin]), max(self._thin_in[index][thin]))
            busiest = max(busiest, most * seconds_a_byte)
        longest = max((level for level, pairs in enumerate(self._pairs[index]) if pairs), default=-1)
        latency = self._latency[min(longest + 1, self._top)]
        return busiest + self.streams[index].messages * latency

    def _add(
        self, index: int, sender: int, receiver: int, start: int, end: int, size: int, pairs: int
    ) -> None:
        route = self._routes.get((start, end)) or self._route(start, end)
        level, up, down, hops = route
        if up:
            out = self._out[index]
            for link in up:
                out[link] += size
        if down:
            into = self._in[index]
            for link in down:
                into[link] += size
        self._at[index][level] += size
        self._pairs[index][level] += pairs
        if level == self._top:
            self._far += size * hops
        if self._blocks and level and self.streams[index].axis == "tp":
            self._strayed += size
        for thin, (least, _) in enumerate(self._thin):
            if level >= least:
                self._thin_out[index][thin][sender] += size
                self._thin_in[index][thin][receiver] += size

    def _route(self, start: int, end: int) -> _SiteRoute:
        top = self._top
        first, second = self.sites[start], self.sites[end]
        pairs = zip(first.units, second.units, strict=True)
        level = next((place for place, (a, b) in enumerate(pairs) if a is not None and a == b), top)
        hops = 1
        if level == top and first.node != second.node:
            # Farther than the longest ring or torus: nothing is known of the way.
            distance = self._fabric.hops(first.node, second.node)
            hops = (
                distance if distance is not None else 1 + sum(len(grid.nodes) for grid in self._fabric.grids)
            )
        up, down = (
            tuple(link for link in self._links[site][:level] if link is not None) for site in (start, end)
        )
        route = self._routes[start, end] = _SiteRoute(level, up, down, hops)
        return route

    def _number_uplinks(self) -> None:
        """Every unit below the top level has one uplink; its pace is seconds a byte."""
        numbers: dict[tuple[int, str], int] = {}
        self._pace: list[float] = []
        self._links: list[list[int | None]] = []
        for site in self.sites:
            links: list[int | None] = []
            for level, unit in enumerate(site.units[:-1]):
                if unit is None:
                    links.append(None)
                    continue
                link = numbers.setdefault((level, unit), len(numbers))
                if link == len(self._pace):
                    capacity = uplink_Bps(self._fabric, level, unit)
                    self._pace.append(1 / capacity if capacity else 0.0)
                links.append(link)
            self._links.append([*links, None])

    def _thin_levels(self) -> list[tuple[int, float]]:
        """Levels at which a node's own link is slower than at every level below: (level, seconds a byte)."""
        thin: list[tuple[int, float]] = []
        if self.timed:
            slowest = node_link_Bps(self._fabric, 0)
            for level in range(1, self._top):
                bandwidth = node_link_Bps(self._fabric, level)
                if bandwidth < slowest:
                    thin.append((level, 1 / bandwidth))
                    slowest = bandwidth
        return thin

    def _own_links_s(self, stream: SlotFlow) -> float:
        """Time at the busiest link of a node: all that leaves a slot passes it, wherever the slot stands."""
        if not self.timed:
            return 0.0
        out, into = [0] * self._slots, [0] * self._slots
        for (sender, receiver), size in stream.edges.items():
            out[sender] += size
            into[receiver] += size
        return max(*out, *into, 0) / node_link_Bps(self._fabric, 0)


def node_link_Bps(fabric: Fabric, level_index: int) -> float:
    """What one node's link into a level carries, one direction; its figures must be known."""
    level = fabric.levels[level_index]
    assert level.bandwidth_Bps is not None
    assert level.oversubscription is not None
    return level.bandwidth_Bps / (level.oversubscription if level_index == 0 else 1.0)


def uplink_Bps(fabric: Fabric, level_index: int, unit: str) -> float | None:
    """What a unit's links into the level above carry together, one direction; None: unknown or no level."""
    if level_index + 1 >= len(fabric.levels):
        return None
    above = fabric.levels[level_index + 1]
    if above.bandwidth_Bps is None or above.oversubscription is None:
        return None
    return above.bandwidth_Bps * len(fabric.members(level_index)[unit]) / above.oversubscription
