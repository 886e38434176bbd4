"""A save on its way from the memory of a node, as one rank sees it, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.checkpoint.commit import locate_draft
from hpcrun.checkpoint.levels import CheckpointLevel, GenerationId
from hpcrun.runtime.storage_wait import BackgroundPoll
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.metrics import FlushMetric, Metric

SAVE_WINDOW = 24
"""Of so many saves ranks speak with one another."""
MetricWriter = Callable[[Metric], None]
"""Takes a line for metrics.jsonl."""
_REPORT_EVERY_S = 2.0


@dataclass
class PendingSave:
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
    waits_for: str = ""
    """What its worker waits for, once that has been long."""

    @property
    def pending_levels(self) -> list[CheckpointLevel]:
        """The levels that nothing is known of yet."""
        return [level for level in self.levels if level not in self.outcomes]


class PendingSaves:
    """The saves that were begun last, in order; all ranks number them alike."""

    def __init__(self) -> None:
        self.serial = 0
        self.published: str | None = None
        """The newest generation that is whole on all nodes: what is older is needed no more."""
        self._saves: dict[int, PendingSave] = {}

    def __iter__(self) -> Iterator[PendingSave]:
        return iter(list(self._saves.values()))

    def next_serial(self) -> int:
        """The number of a save that is tried now."""
        self.serial += 1
        self._saves.pop(self.serial - SAVE_WINDOW, None)
        return self.serial

    def add(self, save: PendingSave) -> None:
        """A save that was begun under the number given last."""
        self._saves[save.serial] = save

    def clear(self) -> None:
        """Forget all of them; the next one is the first."""
        self._saves.clear()
        self.serial = 0

    @property
    def newest(self) -> PendingSave | None:
        """The one tried last, if it was begun."""
        return self._saves.get(self.serial)

    @property
    def oldest_unfinished(self) -> PendingSave | None:
        """The first that is still on its way to some level."""
        return next((save for save in self if save.pending_levels), None)

    @property
    def waits_for(self) -> str:
        """What the oldest one that is held up waits for, where that has been long."""
        return next((save.waits_for for save in self if save.pending_levels and save.waits_for), "")

    def find(self, generation: str | None) -> PendingSave | None:
        """The save that made a generation."""
        return next((save for save in self if save.stamp.generation == generation), None)

    def compare(self, save: PendingSave, content: str) -> None:
        """Note whether a save holds the same bytes as the one before it."""
        save.content = content
        before = self._saves.get(save.serial - 1)
        save.is_new = before is None or before.content != content

    def missing_bits(self) -> int:
        """A bit for each save that is not sealed here, and above them for each not known to be unchanged."""
        bits = 0
        for serial in self._serials:
            save, place = self._saves.get(serial), self.serial - serial
            if save is None or not save.is_sealed:
                bits |= 1 << place
            if save is None or save.is_new:
                bits |= 1 << (SAVE_WINDOW + place)
        return bits

    def learn(self, missing: int) -> list[PendingSave]:
        """Take the union of all ranks: gives the saves that are unchanged on all of them, once each."""
        sealed = [serial for serial in self._serials if not missing >> (self.serial - serial) & 1]
        if sealed:
            self.published = self._saves[sealed[-1]].stamp.generation
        places = ((serial, SAVE_WINDOW + self.serial - serial) for serial in self._serials)
        unchanged = [self._saves[serial] for serial, place in places if not missing >> place & 1]
        for save in unchanged:
            save.is_new = True
        return unchanged

    @property
    def _serials(self) -> range:
        return range(max(1, self.serial - SAVE_WINDOW + 1), self.serial + 1)


def target_levels(
    spec: CheckpointSpec, step: int, *, lasting: bool, is_single: bool
) -> list[CheckpointLevel]:
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


class SaveProgressReporter:
    """Tells now and then how far a save has come that is waited for."""

    def __init__(self, checkpoints: Path, tell: MetricWriter) -> None:
        self._root, self._tell = checkpoints, tell
        self._said_at = 0.0
        self._bytes = BackgroundPoll(self._written)

    def say(self, flight: PendingSave) -> None:
        """If it is time to."""
        now = time.time()
        if now - max(flight.begun, self._said_at) < _REPORT_EVERY_S:
            return
        self._said_at = now
        self._tell(
            FlushMetric(
                flight.stamp.step,
                tuple(flight.pending_levels),
                flight.size_bytes,
                done_bytes=self._bytes.latest(flight) if "durable" in flight.pending_levels else None,
                seconds=now - flight.begun,
            )
        )

    def _written(self, flight: PendingSave) -> int:
        """What all nodes have written so far, as far as their files show it."""
        stamp = flight.stamp
        aside = locate_draft(self._root, stamp.step, stamp.attempt, bytes.fromhex(stamp.generation)).aside
        size = 0
        for path in aside.glob("data-*.bin"):
            with suppress(OSError):
                size += path.stat().st_blocks * 512
        return size
