"""A save on its way from the memory of a node, as one rank sees it, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import locate_draft
from hpcrun.checkpoint.levels import CheckpointLevel, GenerationId
from hpcrun.runtime.storage_wait import Glimpse
from hpcrun.specs.checkpoint import CheckpointSpec

Tell = Callable[[dict[str, Any]], None]
"""Takes a line for metrics.jsonl."""
_NOTE_EVERY_S = 2.0


@dataclass
class Flight:
    """A save that was begun, as this rank sees it."""

    serial: int
    stamp: GenerationId
    slot: int
    key: int
    """Of the plan that its slot was filled by."""
    levels: list[CheckpointLevel]
    size_bytes: int
    begun: float
    stall_s: float
    is_sealed: bool = False
    content: str = ""
    is_new: bool = True
    """Its bytes are not those of the save before, or nobody knows yet."""
    outcomes: dict[str, str | None] = field(default_factory=dict)
    """What came of it at each level: None where it is stored, else why not."""
    held_up: str = ""
    """What its worker waits for, once that has been long."""

    @property
    def ahead(self) -> list[CheckpointLevel]:
        """The levels that nothing is known of yet."""
        return [level for level in self.levels if level not in self.outcomes]


def levels_of(spec: CheckpointSpec, step: int, *, lasting: bool, is_single: bool) -> list[CheckpointLevel]:
    """Where the save of a step is to go; `is_single`: memory has room for one state alone."""
    found = list[CheckpointLevel]()
    durable = lasting or not spec.durable.every or step % spec.durable.every == 0
    durable |= is_single and spec.local is None
    if spec.local is not None:
        found.append("local")
    if spec.parity.scheme != "none":
        found.append("parity")
    if durable:
        found.append("durable")
    copied = spec.object is not None and (not spec.object.every or step % spec.object.every == 0)
    if durable and copied:
        found.append("object")
    return found


class HowFar:
    """Tells now and then how far a save has come that is waited for."""

    def __init__(self, checkpoints: Path, tell: Tell) -> None:
        self._root, self._tell = checkpoints, tell
        self._said_at = 0.0
        self._bytes = Glimpse(self._written)

    def say(self, flight: Flight) -> None:
        """If it is time to."""
        now = time.time()
        if now - max(flight.begun, self._said_at) < _NOTE_EVERY_S:
            return
        self._said_at = now
        self._tell(
            {
                "kind": "draining",
                "step": flight.stamp.step,
                "levels": list(flight.ahead),
                "bytes": flight.size_bytes,
                "done_bytes": self._bytes.latest(flight) if "durable" in flight.ahead else None,
                "seconds": now - flight.begun,
            }
        )

    def _written(self, flight: Flight) -> int:
        """What all nodes have written so far, as far as their files show it."""
        stamp = flight.stamp
        aside = locate_draft(self._root, stamp.step, stamp.attempt, bytes.fromhex(stamp.generation)).aside
        size = 0
        for path in aside.glob("data-*.bin"):
            with suppress(OSError):
                size += path.stat().st_blocks * 512
        return size
