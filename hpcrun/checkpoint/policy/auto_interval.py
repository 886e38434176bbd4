"""Saves by the clock (`checkpoint.every: auto`): the interval follows from what saves are measured to cost.

The first save comes early, and is the first measure. From then on the interval is the one that loses least
time by what is published of failures (Daly), between LEAST_S and MOST_S, but never so short that training
waits for more than the bound's share of its time, or that a save is due before the last one is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.checkpoint.policy.failure_rates import Seen, estimate, in_words
from hpcrun.checkpoint.policy.interval import BOUND, Cost, Tier, daly

LEAST_S, MOST_S = 300.0, 3600.0
IN_WORDS = f"as often as its measured cost allows, {in_words(LEAST_S)} to {in_words(MOST_S)} apart"
"""What `auto` means, for those who plan."""
_NEWEST = 4
"""So many saves are looked back on."""
_CHANGE = 0.1
"""A smaller change of the interval is not worth a word."""


@dataclass(frozen=True)
class Chosen:
    """An interval, and why it is that."""

    every_s: float
    stall_s: float
    drain_s: float
    why: str


def choose(nodes: int, stall_s: float, drain_s: float) -> Chosen:
    """The interval for a job of so many nodes whose saves cost so much."""
    tier = Tier((Cost("memory", stall_s), Cost("durable", 0.0, drain_s)))
    rate = sum(one.per_s or 0.0 for one in estimate(Seen(), nodes) if one.kind in tier.survives)
    best = daly(stall_s, rate)
    found = min(MOST_S, max(LEAST_S, best))
    least = max(stall_s / BOUND, drain_s)
    nodes_told = f"{nodes} node{'s' * (nodes > 1)}"
    why = (
        f"training waits {in_words(stall_s)} a save and it is stored after {in_words(drain_s)};"
        f" with one failure of {nodes_told} in {in_words(1 / rate)} least is lost at {in_words(best)} (Daly)"
    )
    if least > found:
        what = f"a cost of {BOUND:.0%}" if stall_s / BOUND >= drain_s else "the last save to be stored"
        return Chosen(least, stall_s, drain_s, f"{why}; made longer for {what}")
    if found != best:
        why += f"; saves stay between {in_words(LEAST_S)} and {in_words(MOST_S)} apart"
    return Chosen(found, stall_s, drain_s, why)


class AutoInterval:
    """Says when a save is due; the clock is the caller's."""

    def __init__(self, nodes: int, now: float) -> None:
        self._nodes, self._since = nodes, now
        self._stalls, self._drains = deque[float](maxlen=_NEWEST), deque[float](maxlen=_NEWEST)
        self._told_s = 0.0
        self.every_s = LEAST_S
        """Until the first save has shown what it costs."""

    def is_due(self, now: float) -> bool:
        """Whether the next save is."""
        return now - self._since >= self.every_s

    def saved(self, now: float) -> None:
        """A save was begun, for whatever reason."""
        self._since = now

    def take(self, line: Mapping[str, Any]) -> Chosen | None:
        """Learn from a line of metrics.jsonl; the interval where it is another one now, worth a word."""
        if line.get("kind") == "save":
            self._stalls.append(float(line["seconds"]))
        elif line.get("kind") == "stored" and line.get("level") == "durable":
            self._drains.append(float(line.get("lag_s") or 0.0))
        else:
            return None
        if not self._stalls:
            return None
        found = choose(self._nodes, max(self._stalls), max(self._drains, default=0.0))
        self.every_s = found.every_s
        if abs(found.every_s - self._told_s) <= _CHANGE * self._told_s:
            return None
        self._told_s = found.every_s
        return found
