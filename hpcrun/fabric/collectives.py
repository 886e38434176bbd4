"""Times of single collectives by their algorithms, with the links that groups share counted.

α-β times as in Thakur, Rabenseifner, Gropp (2005): an algorithm is a row of rounds (`fabric.rounds`), in each
of which ranks send at the same time; a round takes as long as its busiest link (`fabric.cost` says what a
link is) and the latency of its longest way. All groups run at once. What stays inside a node is free, unless
it is said what a node carries inside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from hpcrun.errors import UsageError
from hpcrun.fabric.cost import LinkLoads, SlotFlow, find_topology_sites
from hpcrun.fabric.graph import Fabric
from hpcrun.fabric.rounds import Collective, CollectiveAlgorithm, CommunicationRound, collective_rounds

_UNIT = 1 << 40
"""The size at which loads are counted; a power of two, so that scaling it loses nothing."""


class IntraNodeLink(NamedTuple):
    """What a rank's way to the others on its node carries, one direction."""

    bandwidth_Bps: float
    latency_s: float = 0.0


class RoundCost(NamedTuple):
    """The fixed cost of one round, and its cost per byte of the size."""

    latency_s: float
    s_per_byte: float
    times: int = 1
    reduced: float = 0.0
    """The share of the size that the busiest rank reduces."""
    pipelined: bool = False

    def seconds(self, size_bytes: float, reduce_s_per_byte: float = 0.0) -> float:
        """Seconds of all repetitions; a pipelined round is cut into the best number of pieces."""
        bytes_s = size_bytes * (self.s_per_byte + self.reduced * reduce_s_per_byte)
        if not self.pipelined or self.times == 1 or not bytes_s:
            return self.times * (self.latency_s + bytes_s)
        # Of (times + pieces - 1) (latency + bytes_s / pieces), the least is at the root of this.
        best = math.sqrt(bytes_s * (self.times - 1) / self.latency_s) if self.latency_s else _MAX_PIECES
        choices = {1, *(max(1, min(_MAX_PIECES, math.floor(best) + step)) for step in (0, 1))}
        return min((self.times + pieces - 1) * (self.latency_s + bytes_s / pieces) for pieces in choices)


_MAX_PIECES = 1 << 20


def round_costs(
    fabric: Fabric,
    groups: Sequence[Sequence[str]],
    collective: Collective,
    algorithm: CollectiveAlgorithm,
    *,
    inner: int = 1,
    inside: IntraNodeLink | None = None,
) -> tuple[RoundCost, ...] | None:
    """What every round costs, for any size; None: unknown. `inner` is as in `rounds`.

    Groups are given as the node of every rank, and are of one size; all of them work at once. The size is
    what a rank has after (all_gather) or before (all others). `send` is from every rank of a group to the
    next, all at one time.
    """
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise UsageError(f"{collective}: groups are of one size, these have {sorted(sizes)} ranks")
    nodes = list(dict.fromkeys(node for group in groups for node in group))
    slot = {node: place for place, node in enumerate(nodes)}
    members = [[slot[node] for node in group] for group in groups]
    steps = collective_rounds(collective, algorithm, max(sizes, default=0), inner)
    costs = _between_nodes(fabric, nodes, members, steps)
    if costs is None or inside is None:
        return costs
    return tuple(
        _with_intra_node_link(pace, step, members, inside) for pace, step in zip(costs, steps, strict=True)
    )


def _between_nodes(
    fabric: Fabric,
    nodes: Sequence[str],
    members: Sequence[Sequence[int]],
    steps: Sequence[CommunicationRound],
) -> tuple[RoundCost, ...] | None:
    sites, site_of = find_topology_sites(fabric, nodes)
    # Without latency to know what bytes take, and without bytes to know the latency.
    streams = [
        SlotFlow("", edges, 0, messages)
        for step in steps
        for edges, messages in ((_edges(step, members, _UNIT), 0), (_edges(step, members, 0), 1))
    ]
    loads = LinkLoads(fabric, sites, len(nodes), streams)
    loads.place([site_of[node] for node in nodes])
    spent = [axis.seconds for axis in loads.cost().axes]
    costs = []
    for step, stream, bytes_s, latency_s in zip(steps, streams[::2], spent[::2], spent[1::2], strict=True):
        if not stream.edges:
            bytes_s = latency_s = 0.0
        if bytes_s is None or latency_s is None:
            return None
        reduced = (
            step.share * _most_ranks_on_one(receiver for _, receiver in step.pairs) if step.reduces else 0.0
        )
        costs.append(RoundCost(latency_s, bytes_s / _UNIT, step.times, reduced, step.pipelined))
    return tuple(costs)


def _with_intra_node_link(
    pace: RoundCost, step: CommunicationRound, members: Sequence[Sequence[int]], inside: IntraNodeLink
) -> RoundCost:
    """The round also lasts as long as what stays inside nodes."""
    near = [
        (number, *pair)
        for number, group in enumerate(members)
        for pair in step.pairs
        if group[pair[0]] == group[pair[1]]
    ]
    if not near:
        return pace
    busiest = max(
        _most_ranks_on_one((number, sender) for number, sender, _ in near),
        _most_ranks_on_one((number, receiver) for number, _, receiver in near),
    )
    return pace._replace(
        latency_s=max(pace.latency_s, inside.latency_s),
        s_per_byte=max(pace.s_per_byte, busiest * step.share / inside.bandwidth_Bps),
    )


def _most_ranks_on_one(ranks: Iterable[Hashable]) -> int:
    return max(Counter(ranks).values(), default=0)


def _edges(
    step: CommunicationRound, members: Sequence[Sequence[int]], size_bytes: int
) -> dict[tuple[int, int], int]:
    edges: dict[tuple[int, int], int] = {}
    size = math.ceil(size_bytes * step.share)
    for group in members:
        for sender, receiver in step.pairs:
            pair = group[sender], group[receiver]
            if pair[0] != pair[1]:
                edges[pair] = edges.get(pair, 0) + size
    return edges
