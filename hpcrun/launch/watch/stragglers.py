"""Stragglers: nodes whose ranks take longer than the others' for one and the same piece of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hpcrun.launch.attempt_events import RankProgress

_WINDOW = 15
"""So many of a rank's newest measurements are looked at."""
_GROUP_SIZE = 3
"""So many in a row count as one: what holds a rank up every few milliseconds may miss a single one."""
_MIN_MEASUREMENTS = 9
_SLOW_BELOW, _FINE_ABOVE = 0.7, 0.85
"""Below the first a node is slow, above the second it no longer is."""


@dataclass(frozen=True)
class Straggler:
    """A node that is slow, and by how much."""

    node: str
    score: float
    """The others' time over its own: 1 is as fast as they are."""

    def __str__(self) -> str:
        """In words, with what it costs."""
        return (
            f"node {self.node} takes {1 / self.score:.2f} times as long as the others for the same work;"
            f" all wait for it, for up to {1 - self.score:.0%} of every step"
        )


class StragglerDetector:
    """Hears what the ranks' fixed piece of work takes, and says which nodes have become slow."""

    def __init__(self) -> None:
        self._probes: dict[tuple[str, int], deque[float]] = {}
        self._named: set[str] = set()

    def heard(self, progress: RankProgress) -> None:
        """A rank has measured itself."""
        if progress.probes_s:
            window = self._probes.setdefault((progress.node, progress.rank), deque(maxlen=_WINDOW))
            window.extend(progress.probes_s)

    def scores(self) -> dict[str, float]:
        """Of every node that has measured enough: the median of the other nodes over its own slowest rank."""
        own: dict[str, float] = {}
        for (node, _), window in self._probes.items():
            if len(window) >= _MIN_MEASUREMENTS:
                own[node] = max(own.get(node, 0.0), _typical_seconds([*window]))
        if len(own) < 2:
            return {}
        return {
            node: median([other for name, other in own.items() if name != node]) / mine
            for node, mine in own.items()
            if mine > 0
        }

    def new(self) -> list[Straggler]:
        """Nodes that have become slow since the last call; one that recovers may become so again."""
        scores = self.scores()
        self._named -= {node for node, score in scores.items() if score > _FINE_ABOVE}
        slow = [node for node, score in scores.items() if score < _SLOW_BELOW and node not in self._named]
        self._named |= set(slow)
        return [Straggler(node, scores[node]) for node in slow]


def _typical_seconds(times: Sequence[float]) -> float:
    """What the work takes: the median over groups, the newest one whole, is deaf to a hiccup or two."""
    ends = range(len(times), _GROUP_SIZE - 1, -_GROUP_SIZE)
    return median(fmean(times[end - _GROUP_SIZE : end]) for end in ends)
