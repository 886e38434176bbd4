"""Which rank stands where in the parallel mesh, and which layers a pipeline stage holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first: neighbouring ranks differ in tp."""


@dataclass(frozen=True)
class ParallelDegrees:
    """The size of each parallel axis; world = pp * dp_replicate * dp_shard * cp * tp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """How many ways the batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """How many ranks the mesh takes."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis, tp varying fastest."""
        assert 0 <= rank < self.world_size
        position: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, position[axis] = divmod(rank, size)
        return position

    def dp_rank(self, rank: int) -> int:
        """Which slice of the batch a rank reads."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return " × ".join(named) or "one rank"


def partition_layers(
    costs: Sequence[float], parts: int, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Cut a row of layers into contiguous non-empty parts so that the dearest part is cheapest.

    `first` and `last` are what the first and last part carry besides (embedding, output head); no cost is
    negative. Among equal answers the sum of squares decides, so that the other parts are even as well; among
    those the one whose early parts are short (early stages of a pipeline hold more activations).
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} layers cannot fill {parts} parts")
    sums = [0.0, *itertools.accumulate(costs)]

    def load(part: int, begin: int, end: int) -> float:
        extra = (first if part == 0 else 0.0) + (last if part == parts - 1 else 0.0)
        return sums[end] - sums[begin] + extra

    even = [count * part // parts for part in range(parts + 1)]
    bound = max(load(part, even[part], even[part + 1]) for part in range(parts))
    dearest, _ = _best_cuts(count, parts, load, bound, max)
    _, cuts = _best_cuts(count, parts, load, dearest, lambda squares, here: squares + here * here)
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def _best_cuts(
    count: int,
    parts: int,
    load: Callable[[int, int, int], float],
    limit: float,
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Score and cuts of the best way to cut [0, count) with no part above the limit."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for part in range(parts):
        following = {}
        for end in range(part + 1, count - (parts - part - 1) + 1):
            candidates = []
            for begin in range(end - 1, part - 1, -1):
                here = load(part, begin, end)
                if here > limit:
                    break
                if begin in best:
                    score, cuts = best[begin]
                    candidates.append((join(score, here), (*cuts, end)))
            if candidates:
                following[end] = min(candidates)
        best = following
    return best[count]
