"""Merges the reports of all checkpoint workers: a tier has a generation when all nodes have stored it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hpcrun.checkpoint.tier import CheckpointId, StoreResult
from hpcrun.checkpoint.worker_messages import GenerationSealed, SaveFailed
from hpcrun.specs.events.checkpoint import CheckpointFailedEvent, CheckpointStoredEvent

TierEvent = CheckpointStoredEvent | CheckpointFailedEvent

_MAX_GENERATIONS = 16
"""So many generations are followed; older ones are complete, or never will be."""


@dataclass
class _TierProgress:
    """How far one tier has come with one generation."""

    nodes: set[str] = field(default_factory=set)
    seconds: float = 0.0
    size_bytes: int = 0
    problem: str | None = None
    is_told: bool = False


class TierTracker:
    """The generations of an attempt, from what the workers of its nodes say."""

    def __init__(self, nodes: Collection[str]) -> None:
        self._nodes = frozenset(nodes)
        self._stamps: dict[str, CheckpointId] = {}
        self._shares: dict[tuple[str, str], _TierProgress] = {}
        self.complete: dict[str, int] = {}
        """The newest step that each tier has from all nodes."""
        self.whole: CheckpointId | None = None
        """The last state that all nodes have sealed in memory."""

    def handle(self, node: str, message: GenerationSealed | StoreResult | SaveFailed) -> Iterator[TierEvent]:
        """The events that a message makes: one when a tier has all of a generation, or fails to get it."""
        if node not in self._nodes:
            return
        stamp = message.stamp
        self._remember(stamp)
        tier = "memory" if isinstance(message, GenerationSealed) else message.tier
        share = self._shares.setdefault((stamp.generation, tier), _TierProgress())
        problem = message.why if isinstance(message, SaveFailed) else None
        if isinstance(message, StoreResult):
            problem = message.problem
            share.seconds = max(share.seconds, message.seconds)
        if isinstance(message, SaveFailed) or problem is not None:
            yield from self._fail(stamp, tier, share, f"{node}: {problem or 'it failed'}")
            return
        share.nodes.add(node)
        share.size_bytes += message.size_bytes
        if share.nodes >= self._nodes and not share.is_told:
            share.is_told = True
            self.complete[tier] = max(stamp.step, self.complete.get(tier, 0))
            self.whole = stamp if tier == "memory" else self.whole
            facts = (share.seconds, share.size_bytes) if share.seconds else ()
            yield CheckpointStoredEvent(stamp.step, stamp.generation, tier, *facts)

    def died(self, node: str, why: str) -> Iterator[TierEvent]:
        """What a worker had not stored when it died, it will not store any more."""
        for stamp in [*self._stamps.values()]:
            for (generation, tier), share in [*self._shares.items()]:
                if generation == stamp.generation and node not in share.nodes:
                    yield from self._fail(stamp, tier, share, f"{node}: its checkpoint worker died{why}")

    def _fail(
        self, stamp: CheckpointId, tier: str, share: _TierProgress, problem: str
    ) -> Iterator[TierEvent]:
        """Told once for a tier and generation, whoever fails besides."""
        if not share.is_told:
            share.is_told, share.problem = True, problem
            yield CheckpointFailedEvent(stamp.step, stamp.generation, tier, problem)

    def _remember(self, stamp: CheckpointId) -> None:
        if stamp.generation in self._stamps:
            return
        self._stamps[stamp.generation] = stamp
        while len(self._stamps) > _MAX_GENERATIONS:
            old = next(iter(self._stamps))
            del self._stamps[old]
            self._shares = {key: share for key, share in self._shares.items() if key[0] != old}
