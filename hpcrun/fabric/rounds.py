"""Algorithms of collectives as rows of rounds: who sends how much to whom at one time.

After Thakur, Rabenseifner, Gropp (2005), Bruck et al. (1997) and Sanders, Speck, Träff (2009, two trees).
Ranks are numbered by their place in the group; a share is of the size of the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from hpcrun.errors import UsageError

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send"
]
CollectiveAlgorithm = Literal[
    "ring",
    "whole_ring",
    "segmented_ring",
    "recursive_doubling",
    "halving_doubling",
    "rabenseifner",
    "tree",
    "preorder_tree",
    "pipelined_tree",
    "double_binary_tree",
    "two_level",
    "torus",
    "bruck",
    "pairwise",
    "direct",
]


class CommunicationRound(NamedTuple):
    """One step of a collective: who sends to whom, by rank in the group, and which share of the size."""

    pairs: tuple[tuple[int, int], ...]
    share: float
    times: int = 1
    """The number of repetitions."""
    reduces: bool = False
    """Receivers add what they get to what they have."""
    pipelined: bool = False
    """`times` levels of a tree, through which the share may go in pieces, all levels at work at once."""


def collective_rounds(
    collective: Collective, algorithm: CollectiveAlgorithm, ranks: int, inner: int = 1
) -> list[CommunicationRound]:
    """The rounds of an algorithm; UsageError for one that this collective does not have.

    `inner` neighbouring ranks are near each other (on a node, say); two_level and torus go by it.
    """
    algorithms = _ALGORITHMS[collective]
    if algorithm not in algorithms:
        raise UsageError(f"{collective}: has no algorithm {algorithm}; use {' or '.join(algorithms)}")
    if algorithm in NESTED_ALGORITHMS and (ranks % inner or not 1 < inner < ranks):
        raise UsageError(
            f"{collective}: {algorithm} wants {ranks} ranks in several equal groups of more than one,"
            f" not groups of {inner}"
        )
    return algorithms[algorithm](ranks, inner) if ranks > 1 else []


NESTED_ALGORITHMS: frozenset[CollectiveAlgorithm] = frozenset({"two_level", "torus"})
"""They work in two dimensions: near and far."""


def _flat(make: Callable[[int], list[CommunicationRound]]) -> _RoundMaker:
    return lambda count, _: make(count)


def _ring(laps: int, reducing: bool) -> Callable[[int], list[CommunicationRound]]:
    """Pieces go round: once to gather or to scatter, twice for both."""

    def make(count: int) -> list[CommunicationRound]:
        lap = CommunicationRound(_circle(range(count)), 1 / count, count - 1)
        return [lap._replace(reduces=True), lap][:laps] if reducing else [lap]

    return make


def _circle(members: Iterable[int]) -> tuple[tuple[int, int], ...]:
    row = [*members]
    return tuple(zip(row, [*row[1:], row[0]], strict=True))


def _whole_ring(count: int) -> list[CommunicationRound]:
    """The whole data of every rank goes round, and every rank reduces all of it (gloo's plain ring)."""
    return [CommunicationRound(_circle(range(count)), 1.0, count - 1, reduces=True)]


def _segmented_ring(count: int) -> list[CommunicationRound]:
    """Two pieces of every rank go round, one behind the other (gloo's chunked ring)."""
    lap = CommunicationRound(_circle(range(count)), 1 / (2 * count), 2 * (count - 1))
    return [lap._replace(reduces=True), lap]


def _pairwise(count: int) -> list[CommunicationRound]:
    return [
        CommunicationRound(tuple((rank, (rank + far) % count) for rank in range(count)), 1 / count)
        for far in range(1, count)
    ]


def _direct(count: int) -> list[CommunicationRound]:
    return [CommunicationRound(tuple((rank, rank + 1) for rank in range(count - 1)), 1.0)]


def _tree(count: int) -> list[CommunicationRound]:
    """Binomial: in every round twice as many have it."""
    return [
        CommunicationRound(tuple((rank, rank + far) for rank in range(min(far, count - far))), 1.0)
        for far in _powers(count)
    ]


def _up(down: Iterable[CommunicationRound]) -> list[CommunicationRound]:
    """A tree reversed: from the leaves to the root."""
    return [
        step._replace(pairs=tuple((b, a) for a, b in step.pairs), reduces=True) for step in reversed([*down])
    ]


def _up_and_down(
    down: Callable[[int], list[CommunicationRound]],
) -> Callable[[int], list[CommunicationRound]]:
    return lambda count: [*_up(down(count)), *down(count)]


def _preorder_tree(count: int) -> list[CommunicationRound]:
    """Binomial with every subtree a row of neighbours, the largest first (MPICH's knomial_1)."""
    levels: dict[int, list[tuple[int, int]]] = {}

    def grow(root: int, size: int, time: int) -> None:
        child = root + 1
        left = size - 1
        while left > 0:
            part = min(left, max(1, 1 << (left.bit_length() - 1)))
            levels.setdefault(time, []).append((root, child))
            grow(child, part, time + 1)
            child, left, time = child + part, left - part, time + 1

    grow(0, count, 0)
    return [CommunicationRound(tuple(pairs), 1.0) for _, pairs in sorted(levels.items())]


def _binary_edges(count: int) -> list[tuple[int, int]]:
    """Parent and child of an in-order binary tree: odd ranks are leaves."""
    edges = []
    for rank in range(1, count):
        bit = rank & -rank
        above = (rank ^ bit) | (bit << 1)
        edges.append((above if above < count else rank ^ bit, rank))
    return edges


def _depth(edges: Iterable[tuple[int, int]]) -> int:
    above = {child: parent for parent, child in edges}
    deepest = 0
    for start in above:
        steps, at = 0, start
        while at in above:
            steps, at = steps + 1, above[at]
        deepest = max(deepest, steps)
    return deepest


def _pipelined_tree(count: int) -> list[CommunicationRound]:
    edges = _binary_edges(count)
    return [CommunicationRound(tuple(edges), 1.0, _depth(edges), pipelined=True)]


def _double_tree(count: int) -> list[CommunicationRound]:
    """Two trees with half of the data each; who is inside one is a leaf of the other."""

    def turn(rank: int) -> int:
        return (rank + 1) % count if count % 2 else count - 1 - rank

    first = _binary_edges(count)
    second = [(turn(parent), turn(child)) for parent, child in first]
    return [CommunicationRound((*first, *second), 0.5, _depth(first), pipelined=True)]


def _doubling(count: int) -> list[CommunicationRound]:
    """Ranks exchange all data with a partner twice as far each round."""
    return _fold_to_power_of_two(count, lambda powers: [(far, 1.0, True) for far in powers])


def _doubling_gather(count: int) -> list[CommunicationRound]:
    """What is there by now goes to a partner twice as far each round."""
    return _fold_to_power_of_two(count, lambda powers: [(far, far / count, False) for far in powers])


def _halving_doubling(count: int) -> list[CommunicationRound]:
    """Halves are scattered the way out, the farthest first, and gathered the way back."""

    def shares(powers: list[int]) -> list[tuple[int, float, bool]]:
        out = [(far, far / (2 * powers[-1])) for far in reversed(powers)]
        return [*((*part, True) for part in out), *((*part, False) for part in reversed(out))]

    return _fold_to_power_of_two(count, shares)


def _rabenseifner(count: int) -> list[CommunicationRound]:
    """The halves go to the nearest first, so that far away only little is left (MPICH, gloo)."""

    def shares(powers: list[int]) -> list[tuple[int, float, bool]]:
        out = [(far, 1 / (2 * far)) for far in powers]
        return [*((*part, True) for part in out), *((*part, False) for part in reversed(out))]

    return _fold_to_power_of_two(count, shares)


def _halving(count: int) -> list[CommunicationRound]:
    return _fold_to_power_of_two(
        count, lambda powers: [(far, far / (2 * powers[-1]), True) for far in reversed(powers)]
    )


def _fold_to_power_of_two(
    count: int, shares: Callable[[list[int]], list[tuple[int, float, bool]]]
) -> list[CommunicationRound]:
    """Exchanges among a power of two of ranks; the rest hand theirs over first and get it back at the end."""
    core = 1 << (count.bit_length() - 1)
    rest = tuple((rank, rank - core) for rank in range(core, count))
    exchanged = [
        CommunicationRound(tuple((rank, rank ^ far) for rank in range(core)), share, reduces=reduces)
        for far, share, reduces in shares(_powers(core))
    ]
    if not rest:
        return exchanged
    reducing = any(step.reduces for step in exchanged)
    return [
        CommunicationRound(rest, 1.0, reduces=reducing),
        *exchanged,
        CommunicationRound(tuple((b, a) for a, b in rest), 1.0),
    ]


def _bruck_gather(count: int) -> list[CommunicationRound]:
    """What is there by now goes to the rank that far below; any count in as few rounds as can be."""
    return [
        CommunicationRound(
            tuple((rank, (rank - far) % count) for rank in range(count)), min(far, count - far) / count
        )
        for far in _powers(count)
    ]


def _bruck_exchange(count: int) -> list[CommunicationRound]:
    """All the pieces whose way has this bit go that far at once, over several stations."""
    return [
        CommunicationRound(
            tuple((rank, (rank + far) % count) for rank in range(count)),
            sum(bool(way & far) for way in range(count)) / count,
        )
        for far in _powers(count)
    ]


def _two_level(count: int, inner: int) -> list[CommunicationRound]:
    """Scattered among the near, reduced across, gathered among the near again."""
    return _nested(count, inner, _rabenseifner(count // inner))


def _torus(count: int, inner: int) -> list[CommunicationRound]:
    """Rings along one dimension, then along the other, and back."""
    return _nested(count, inner, _ring(2, True)(count // inner))


def _nested(count: int, inner: int, across: list[CommunicationRound]) -> list[CommunicationRound]:
    near = tuple(pair for start in range(0, count, inner) for pair in _circle(range(start, start + inner)))
    lap = CommunicationRound(near, 1 / inner, inner - 1)
    far = [
        step._replace(
            pairs=tuple((a * inner + own, b * inner + own) for a, b in step.pairs for own in range(inner)),
            share=step.share / inner,
        )
        for step in across
    ]
    return [lap._replace(reduces=True), *far, lap]


def _powers(count: int) -> list[int]:
    """1, 2, 4, ... below count."""
    return [1 << bit for bit in range((count - 1).bit_length())]


_RoundMaker = Callable[[int, int], list[CommunicationRound]]
_ALGORITHMS: Mapping[Collective, Mapping[CollectiveAlgorithm, _RoundMaker]] = {
    "all_reduce": {
        "ring": _flat(_ring(2, True)),
        "whole_ring": _flat(_whole_ring),
        "segmented_ring": _flat(_segmented_ring),
        "recursive_doubling": _flat(_doubling),
        "halving_doubling": _flat(_halving_doubling),
        "rabenseifner": _flat(_rabenseifner),
        "tree": _flat(_up_and_down(_tree)),
        "preorder_tree": _flat(_up_and_down(_preorder_tree)),
        "pipelined_tree": _flat(_up_and_down(_pipelined_tree)),
        "double_binary_tree": _flat(_up_and_down(_double_tree)),
        "two_level": _two_level,
        "torus": _torus,
    },
    "all_gather": {
        "ring": _flat(_ring(1, False)),
        "recursive_doubling": _flat(_doubling_gather),
        "bruck": _flat(_bruck_gather),
    },
    "reduce_scatter": {"ring": _flat(_ring(1, True)), "halving_doubling": _flat(_halving)},
    "broadcast": {
        "tree": _flat(_tree),
        "pipelined_tree": _flat(_pipelined_tree),
        "double_binary_tree": _flat(_double_tree),
    },
    "reduce": {
        "tree": _flat(lambda count: _up(_tree(count))),
        "pipelined_tree": _flat(lambda count: _up(_pipelined_tree(count))),
        "double_binary_tree": _flat(lambda count: _up(_double_tree(count))),
    },
    "all_to_all": {"pairwise": _flat(_pairwise), "bruck": _flat(_bruck_exchange)},
    "send": {"direct": _flat(_direct)},
}
