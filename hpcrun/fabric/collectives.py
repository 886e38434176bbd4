"""Times of single collectives by their algorithms, with the links that groups share counted.

α-β times as in Thakur, Rabenseifner, Gropp (2005): an algorithm is a row of rounds, in each of which ranks
send at the same time; a round takes as long as its busiest link (`fabric.cost` says what a link is) and the
latency of its longest way. All groups run at once. What stays inside a node is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from hpcrun.errors import UsageError
from hpcrun.fabric.cost import Loads, Stream, sites_of
from hpcrun.fabric.graph import Fabric

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"]
Algorithm = Literal["ring", "recursive_doubling", "halving_doubling", "tree", "pairwise", "direct"]


class Round(NamedTuple):
    """Who sends to whom at one time, by rank in the group, and which share of the size."""

    pairs: tuple[tuple[int, int], ...]
    share: float
    times: int = 1
    """How often the same round comes."""


def rounds(collective: Collective, algorithm: Algorithm, ranks: int) -> list[Round]:
    """The rounds of an algorithm; UsageError for one that this collective does not have."""
    known = _ALGORITHMS[collective]
    if algorithm not in known:
        raise UsageError(f"{collective}: has no algorithm {algorithm}; use {' or '.join(known)}")
    return known[algorithm](ranks) if ranks > 1 else []


def collective_s(
    fabric: Fabric,
    groups: Sequence[Sequence[str]],
    collective: Collective,
    algorithm: Algorithm,
    size_bytes: float,
) -> float | None:
    """Seconds until all groups, given as the node of every rank, are done; None: unknown.

    `size_bytes` is what a rank has before (all_reduce, reduce_scatter, broadcast, send, all_to_all) or after
    (all_gather). `send` is from every rank of a group to the next, all at one time. Groups are of one size.
    """
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise UsageError(f"{collective}: groups are of one size, these have {sorted(sizes)} ranks")
    nodes = list(dict.fromkeys(node for group in groups for node in group))
    slot = {node: place for place, node in enumerate(nodes)}
    members = [[slot[node] for node in group] for group in groups]
    steps = rounds(collective, algorithm, max(sizes, default=0))
    sites, site_of = sites_of(fabric, nodes)
    loads = Loads(fabric, sites, len(nodes), [_stream(step, members, size_bytes) for step in steps])
    loads.place([site_of[node] for node in nodes])
    total = 0.0
    for step, spent in zip(steps, loads.cost().axes, strict=True):
        if spent.seconds is None:
            return None
        total += step.times * spent.seconds
    return total


def _stream(step: Round, members: Sequence[Sequence[int]], size_bytes: float) -> Stream:
    edges: dict[tuple[int, int], int] = {}
    size = math.ceil(size_bytes * step.share)
    for group in members:
        for sender, receiver in step.pairs:
            pair = group[sender], group[receiver]
            if pair[0] != pair[1]:
                edges[pair] = edges.get(pair, 0) + size
    return Stream("", edges, 0, 1)


def _ring(laps: int) -> _Maker:
    """Pieces go round: once to gather or to scatter, twice for both."""

    def make(count: int) -> list[Round]:
        return [
            Round(tuple((rank, (rank + 1) % count) for rank in range(count)), 1 / count, laps * (count - 1))
        ]

    return make


def _pairwise(count: int) -> list[Round]:
    return [
        Round(tuple((rank, (rank + far) % count) for rank in range(count)), 1 / count)
        for far in range(1, count)
    ]


def _direct(count: int) -> list[Round]:
    return [Round(tuple((rank, rank + 1) for rank in range(count - 1)), 1.0)]


def _tree(count: int) -> list[Round]:
    """Binomial: in every round twice as many have it."""
    return [
        Round(tuple((rank, rank + far) for rank in range(min(far, count - far))), 1.0)
        for far in _powers(count)
    ]


def _tree_reduce_and_back(count: int) -> list[Round]:
    down = _tree(count)
    up = [Round(tuple((receiver, sender) for sender, receiver in one.pairs), one.share) for one in down]
    return [*reversed(up), *down]


def _doubling(count: int) -> list[Round]:
    """Everybody exchanges everything with a partner twice as far each round."""
    return _folded(count, lambda powers: [(far, 1.0) for far in powers])


def _doubling_gather(count: int) -> list[Round]:
    """What is there by now goes to a partner twice as far each round."""
    return _folded(count, lambda powers: [(far, far / count) for far in powers])


def _halving_doubling(count: int) -> list[Round]:
    """Rabenseifner's: halves are scattered the way out, and gathered the way back."""

    def shares(powers: list[int]) -> list[tuple[int, float]]:
        out = [(far, far / (2 * powers[-1])) for far in reversed(powers)]
        return [*out, *reversed(out)]

    return _folded(count, shares)


def _halving(count: int) -> list[Round]:
    return _folded(count, lambda powers: [(far, far / (2 * powers[-1])) for far in reversed(powers)])


def _folded(count: int, shares: Callable[[list[int]], list[tuple[int, float]]]) -> list[Round]:
    """Exchanges among a power of two of ranks; the rest hand theirs over first and get it back at the end."""
    core = 1 << (count.bit_length() - 1)
    rest = tuple((rank, rank - core) for rank in range(core, count))
    exchanged = [
        Round(tuple((rank, rank ^ far) for rank in range(core)), share)
        for far, share in shares(_powers(core))
    ]
    if not rest:
        return exchanged
    return [Round(rest, 1.0), *exchanged, Round(tuple((b, a) for a, b in rest), 1.0)]


def _powers(count: int) -> list[int]:
    """1, 2, 4, ... below count."""
    return [1 << bit for bit in range((count - 1).bit_length())]


_Maker = Callable[[int], list[Round]]
_ALGORITHMS: Mapping[Collective, Mapping[Algorithm, _Maker]] = {
    "all_reduce": {
        "ring": _ring(2),
        "recursive_doubling": _doubling,
        "halving_doubling": _halving_doubling,
        "tree": _tree_reduce_and_back,
    },
    "all_gather": {"ring": _ring(1), "recursive_doubling": _doubling_gather},
    "reduce_scatter": {"ring": _ring(1), "halving_doubling": _halving},
    "broadcast": {"tree": _tree},
    "all_to_all": {"pairwise": _pairwise},
    "send": {"direct": _direct},
}
