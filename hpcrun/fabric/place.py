"""Which nodes a job takes, and which rank stands where on them.

Neighbouring ranks share a node, so that the question is the order of the nodes. The cheapest is taken, by
`fabric.cost`; among equally cheap ones the one that leaves large free racks whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.fabric.cost import (
    BLOCK,
    LinkLoads,
    PlacementCost,
    compute_flow_cost,
    find_topology_sites,
    slot_flows,
)
from hpcrun.fabric.graph import Fabric, pluralize
from hpcrun.fabric.search import PlacementSearch, TreeAllocator, axis_orders
from hpcrun.fabric.traffic import Traffic
from hpcrun.hostlist import fold_hosts
from hpcrun.mesh import ParallelDegrees
from hpcrun.specs.placement import Placement, place_in_blocks
from hpcrun.units import format_bytes

PlacementPolicy = Literal["pack", "spread", "pin", "none"]
"""pack: cheapest; spread: over as many racks as there are; pin: these nodes; none: as they come."""

PlacementMethod = Literal["exact", "heuristic", "as given"]


class NoSingleTreeError(UsageError):
    """The nodes are there, and Slurm never gives one job nodes of two trees."""

    exit_code = EXIT_CHECK_FAILED


_START_EDGES = 100_000
"""The number of edges that all starts of a search may have together; a start of a large job has many."""
_FEWEST_STARTS = 8


@dataclass(frozen=True)
class PlacementResult:
    """A placement, the nodes kept spare, what it costs and how it came about."""

    placement: Placement
    spares: tuple[str, ...]
    cost: PlacementCost
    method: PlacementMethod
    why: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "placement": self.placement.as_json(),
            "spares": list(self.spares),
            "cost": self.cost.as_json(),
            "method": self.method,
            "why": list(self.why),
        }


def place_job(
    fabric: Fabric,
    free: Sequence[str],
    ranks: int,
    per_node: int,
    degrees: ParallelDegrees,
    traffic: Traffic,
    *,
    spares: int = 0,
    policy: PlacementPolicy = "pack",
    avoid: Collection[str] = (),
    node_count: int | None = None,
) -> PlacementResult:
    """Choose nodes among the free ones and order them; UsageError where there are too few.

    Under `pin` and `none` the first of them are taken. Nodes of `node_count` that no rank needs stay spare.
    Of several trees one is taken; NoSingleTreeError where none has so many nodes.
    """
    slots, avoid = -(-ranks // per_node), frozenset(avoid)
    if node_count is not None:
        spares += max(0, node_count - slots)
    avoided = [node for node in dict.fromkeys(free) if node in avoid]
    usable = [node for node in dict.fromkeys(free) if node not in avoid]
    if len(usable) < slots + spares:
        raise UsageError(_too_few_message(slots, spares, usable, avoided, policy))
    fitting = _trees_that_fit(fabric, usable, slots, spares, policy)
    if fitting is not None:
        whole, what = replace(fabric, trees={}), (ranks, per_node, degrees, traffic)
        place = partial(place_job, spares=spares, policy=policy, avoid=avoid)
        tried = [place(whole, [*nodes, *avoided], *what) for nodes in fitting]
        return _cheapest(fabric, tried)
    if policy in ("pin", "none"):
        usable = usable[: slots + spares]
    elif policy == "spread":
        usable = _choose_spread(fabric, _in_topology_order(fabric, usable), slots + spares)
    method: PlacementMethod = "as given"
    job = _PlacementProblem(fabric, ranks, per_node, degrees, traffic)
    if policy == "none":
        nodes = usable[:slots]
    else:
        # Spares are not to tempt ranks back into one rack.
        chosen = usable[:slots] if policy == "spread" else usable
        nodes, method = job.arrange(_in_topology_order(fabric, chosen), keep_whole=policy == "pack")
    at_work = set(nodes)
    left = [node for node in usable if node not in at_work]
    kept = _choose_spares(fabric, nodes, left, spares)
    placement = place_in_blocks(nodes, ranks, per_node)
    price = job.cost(nodes)
    why = (
        *(fabric.notes if fabric.is_unread else ()),
        *_why_policy(fabric, usable, nodes, policy),
        *(_why_not_fewer(fabric, usable, nodes, job) if policy == "pack" else ()),
        *_why_spares(fabric, kept),
        *([f"to be avoided: {_named(avoided)}"] if avoided else []),
        *_why_cost(fabric, price, traffic),
    )
    return PlacementResult(placement, tuple(kept), price, method, why)


def order_granted_nodes(
    fabric: Fabric,
    granted: Sequence[str],
    ranks: int,
    per_node: int,
    degrees: ParallelDegrees,
    traffic: Traffic,
    *,
    policy: PlacementPolicy = "pack",
    avoid: Collection[str] = (),
) -> PlacementResult:
    """Order the nodes that Slurm granted; those that no rank needs stay spare, in as many racks as can be."""
    avoid = frozenset(avoid)
    fabric = replace(fabric, trees={})  # they are granted
    usable = sum(node not in avoid for node in dict.fromkeys(granted))
    return place_job(
        fabric,
        granted,
        ranks,
        per_node,
        degrees,
        traffic,
        spares=max(0, usable - -(-ranks // per_node)),
        policy=policy if policy in ("none", "spread") else "pin",
        avoid=avoid,
    )


def _group_by_tree(fabric: Fabric, nodes: Sequence[str]) -> dict[str | None, list[str]]:
    """Nodes by the tree that they are in; those that the topology does not name stand for themselves."""
    groups: dict[str | None, list[str]] = {}
    for node in nodes:
        groups.setdefault(fabric.trees.get(node), []).append(node)
    return groups


def _trees_that_fit(
    fabric: Fabric, usable: Sequence[str], slots: int, spares: int, policy: PlacementPolicy
) -> list[list[str]] | None:
    """The nodes of each tree that has enough of them, in the order to try; None where all are in one."""
    groups = _group_by_tree(fabric, usable)
    if len(groups) < 2:
        return None
    large = [nodes for nodes in groups.values() if len(nodes) >= slots + spares]
    if not large:
        raise NoSingleTreeError(_no_tree_message(groups, slots, spares, policy))
    # Where they come in an order, the first of them decides.
    return large[:1] if policy in ("pin", "none") else sorted(large, key=len)


def _cheapest(fabric: Fabric, tried: Sequence[PlacementResult]) -> PlacementResult:
    best = min(tried, key=lambda placed: placed.cost.key)
    tree = fabric.trees.get(best.placement.nodes[0], "no switch")
    return replace(best, why=(f"inside the tree of {tree}: Slurm joins no two", *best.why))


class _PlacementProblem:
    """The job to place, without the nodes."""

    def __init__(
        self, fabric: Fabric, ranks: int, per_node: int, degrees: ParallelDegrees, traffic: Traffic
    ) -> None:
        self._fabric = fabric
        self._slots = -(-ranks // per_node)
        self._streams = slot_flows(traffic, degrees, [rank // per_node for rank in range(ranks)])
        weights = {stream.axis: sum(stream.edges.values()) for stream in self._streams}
        self._orders = axis_orders(degrees, ranks, per_node, weights)

    def cost(self, nodes: Sequence[str]) -> PlacementCost:
        """The cost of the ranks on these nodes."""
        return compute_flow_cost(self._fabric, nodes, self._streams)

    def arrange(self, usable: Sequence[str], *, keep_whole: bool) -> tuple[list[str], PlacementMethod]:
        """The cheapest of these nodes, in the order of the ranks."""
        sites, site_of = find_topology_sites(self._fabric, usable)
        waiting: list[list[str]] = [[] for _ in sites]
        for node in reversed(usable):
            waiting[site_of[node]].append(node)
        free = [len(nodes) for nodes in waiting]
        starts = {
            tuple(site_of[node] for node in listed[: self._slots]): None
            for listed in (usable, sorted(usable))
        }
        edges = sum(len(stream.edges) for stream in self._streams)
        most = max(_FEWEST_STARTS, _START_EDGES // max(1, edges))
        choice = TreeAllocator(sites, free)
        for ordered, blocks in self._orders:
            for block, choose in itertools.product(reversed(blocks), (choice.best_fit, choice.round_robin)):
                chosen = choose(self._slots, block) if len(starts) < most else None
                if chosen is not None:
                    starts[tuple(site for _, site in sorted(zip(ordered, chosen, strict=True)))] = None
        result = PlacementSearch(
            LinkLoads(self._fabric, sites, self._slots, self._streams), free, keep_whole
        ).run(starts)
        return [waiting[site].pop() for site in result.where], result.method


def _in_topology_order(fabric: Fabric, nodes: Sequence[str]) -> list[str]:
    """In Slurm's order; nodes that it does not know last, as they came."""
    last = len(fabric.nodes)
    return sorted(nodes, key=lambda node: fabric.index.get(node, last))


def _group_by_rack(fabric: Fabric, nodes: Iterable[str]) -> dict[str, list[str]]:
    """Nodes by what fails together: the innermost unit; a node in none stands for itself."""
    racks: dict[str, list[str]] = {}
    for node in nodes:
        unit = fabric.unit(node, 0) if fabric.levels else None
        racks.setdefault(unit if unit is not None else node, []).append(node)
    return racks


def _choose_spread(fabric: Fabric, nodes: Sequence[str], count: int) -> list[str]:
    """Choose nodes from the racks in turns."""
    return list(_round_robin(list(_group_by_rack(fabric, nodes).values())))[:count]


def _round_robin(racks: Sequence[Sequence[str]]) -> Iterator[str]:
    for turn in range(max(map(len, racks), default=0)):
        yield from (rack[turn] for rack in racks if len(rack) > turn)


def _choose_spares(fabric: Fabric, nodes: Sequence[str], left: Sequence[str], count: int) -> list[str]:
    """One of each rack in turns: racks where the job has most nodes first, then those with fewest left."""
    at_work = {rack: len(working) for rack, working in _group_by_rack(fabric, nodes).items()}
    racks = sorted(
        _group_by_rack(fabric, left).items(), key=lambda rack: (-at_work.get(rack[0], 0), len(rack[1]))
    )
    return list(_round_robin([rest for _, rest in racks]))[:count]


# --- why, in words

_FEW = 4
"""Names that a line lists before it counts the rest."""
_COMPARED = 64
"""Larger jobs are not placed a second time only to say what fewer leaves would cost."""


def _why_policy(
    fabric: Fabric, usable: Sequence[str], nodes: Sequence[str], policy: PlacementPolicy
) -> Iterator[str]:
    count = f"{len(nodes)} of {len(usable)} {'free' if policy == 'pack' else 'given'} nodes"
    if policy == "none":
        yield f"placement none: {count}, in the order in which they came"
        return
    if not fabric.levels:
        way = "by the hops between them" if fabric.grids else "in their plain order"
        yield f"{count}, {way}: no switches or blocks are known"
        return
    leaf = fabric.levels[0].name
    taken, before = _group_by_rack(fabric, nodes), _group_by_rack(fabric, usable)
    yield f"{count}, from {len(taken)} {pluralize(leaf, len(taken))}: {_listed(_counts(taken))}"
    if policy != "pack":
        return
    whole = {rack: free for rack, free in before.items() if rack not in taken and len(free) > 1}
    if whole:
        kept = sorted(_counts(whole), key=lambda item: -item[1])
        yield f"left whole: {_listed(kept, 'free')}"


def _why_not_fewer(
    fabric: Fabric, usable: Sequence[str], nodes: Sequence[str], job: _PlacementProblem
) -> Iterator[str]:
    """What the job would cost in as few leaves as can hold it, where it has more."""
    if not fabric.levels:
        return
    fewest: list[list[str]] = []
    room, left = sorted(_group_by_rack(fabric, usable).values(), key=len), len(nodes)
    while left > 0:
        # The tightest that holds the rest, else the largest.
        fewest.append(next((rack for rack in room if len(rack) >= left), room[-1]))
        room.remove(fewest[-1])
        left -= len(fewest[-1])
    if len(fewest) >= len(_group_by_rack(fabric, nodes)):
        return
    times = ""
    if len(nodes) <= _COMPARED:
        packed, _ = job.arrange(
            _in_topology_order(fabric, [node for rack in fewest for node in rack]), keep_whole=True
        )
        narrow, wide = job.cost(packed).seconds, job.cost(nodes).seconds
        times = f" at {narrow / wide:.3g} times the modelled time" if narrow and wide else ""
    leaf = pluralize(fabric.levels[0].name, len(fewest))
    yield (
        f"{len(fewest)} {leaf} could hold it{times}; more are cheaper, for each adds an uplink, if other jobs"
        " leave these idle"
    )


def _counts(racks: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    return [(rack, len(nodes)) for rack, nodes in racks.items()]


def _listed(counts: Sequence[tuple[str, int]], word: str = "") -> str:
    named = ", ".join(f"{rack} ({count}{' ' * bool(word)}{word})" for rack, count in counts[:_FEW])
    return named + (f" and {len(counts) - _FEW} more" if len(counts) > _FEW else "")


def _why_spares(fabric: Fabric, spares: Sequence[str]) -> Iterator[str]:
    if spares:
        count = len(_group_by_rack(fabric, spares))
        where = f", in {count} {pluralize(fabric.levels[0].name, count)}" if fabric.levels else ""
        yield f"spare: {_named(spares)}{where}"


def _why_cost(fabric: Fabric, price: PlacementCost, traffic: Traffic) -> Iterator[str]:
    names = [level.name for level in fabric.levels]
    for axis in price.axes:
        outermost = max((level for level, count in enumerate(axis.bytes) if count), default=0)
        amount = f"{format_bytes(axis.bytes[outermost])} a step"
        if outermost == 0:
            yield f"{axis.axis} stays inside nodes"
        elif outermost > len(names):
            condition = " on ways that are not known" if names else ""
            yield f"{axis.axis} goes between nodes{condition} with {amount}"
        elif outermost == 1:
            yield f"{axis.axis} stays inside {pluralize(names[0], 2)}"
        else:
            yield f"{axis.axis} crosses the {names[outermost - 1]} with {amount}"
        if axis.axis == "tp" and names[:1] == [BLOCK] and outermost > 1:
            yield "tp does not fit into a block: its groups are larger than the room that is free in one"
    if names and price.seconds is None and any(price.bytes[1:]):
        yield "bandwidths or ways are unknown: bytes are compared, from the outermost level inwards"
    yield from traffic.notes


def _too_few_message(
    slots: int, spares: int, usable: Sequence[str], avoided: Sequence[str], policy: PlacementPolicy
) -> str:
    needed = f"{slots} {pluralize('node', slots)}" + (
        f" and {spares} {pluralize('spare', spares)}" if spares else ""
    )
    verb = "is" if slots + spares == 1 else "are"
    there = f"{len(usable)} {'is' if len(usable) == 1 else 'are'} {'given' if policy == 'pin' else 'free'}"
    shunned = f", {_named(avoided)} to be avoided" if avoided else ""
    remedy = "name more nodes" if policy == "pin" else "wait"
    return (
        f"resources.nodes: {needed} {verb} needed, {there} ({fold_hosts(usable) or 'none'}){shunned};"
        f" ask for fewer, or {remedy}"
    )


def _no_tree_message(
    groups: Mapping[str | None, Sequence[str]], slots: int, spares: int, policy: PlacementPolicy
) -> str:
    there = sorted(
        ((name or "no tree", len(nodes)) for name, nodes in groups.items()), key=lambda item: -item[1]
    )
    needed = slots + spares
    which = "of the nodes given" if policy == "pin" else "that are free"
    return (
        f"resources.nodes: no tree has the {needed} {pluralize('node', needed)} that are needed ({which}:"
        f" {_listed(there)}), and Slurm gives no job nodes of two trees (topology.conf(5));"
        f" ask for {there[0][1]} at most, or have the trees joined by a switch above them"
    )


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:_FEW]) + " ..." * (len(nodes) > _FEW)
