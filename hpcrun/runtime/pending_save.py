"""Saves on their way from the memory of the nodes, as one rank sees them, and how far they have come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.checkpoint.commit import locate_draft
from hpcrun.checkpoint.tier import CheckpointId, TierName
from hpcrun.runtime.control import Control
from hpcrun.runtime.storage_wait import BackgroundPoll
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.metrics import (
    FlushMetric,
    Metric,
    SaveFailedMetric,
    SaveStalledMetric,
    metric_as_json,
    parse_unstamped_metric,
)

SAVE_WINDOW = 24
"""The number of latest saves that ranks exchange facts about."""
MetricWriter = Callable[[Metric], None]
"""Takes a line for metrics.jsonl."""
_REPORT_EVERY_S = 2.0


@dataclass
class PendingSave:
    """A save that was begun, as this rank sees it."""

    serial: int
    stamp: CheckpointId
    slot: int
    key: int
    """The plan by which its slot was filled."""
    tiers: list[TierName]
    size_bytes: int
    begun: float
    stall_s: float
    is_sealed: bool = False
    content: str = ""
    is_new: bool = True
    """False once its bytes are known to equal those of the save before."""
    outcomes: dict[str, str | None] = field(default_factory=dict)
    """By tier: None where it is stored, else why not."""
    waits_for: str = ""
    """What its worker has been waiting for, if for long."""

    @property
    def pending_tiers(self) -> list[TierName]:
        """The tiers without an outcome yet."""
        return [tier for tier in self.tiers if tier not in self.outcomes]


class PendingSaves:
    """The latest saves in order; all ranks number them alike."""

    def __init__(self) -> None:
        self.serial = 0
        self.published: str | None = None
        """The newest generation that is complete on all nodes; older ones are not needed any more."""
        self._saves: dict[int, PendingSave] = {}

    def __iter__(self) -> Iterator[PendingSave]:
        return iter(list(self._saves.values()))

    def next_serial(self) -> int:
        """Return the number of the save that begins now."""
        self.serial += 1
        self._saves.pop(self.serial - SAVE_WINDOW, None)
        return self.serial

    def add(self, save: PendingSave) -> None:
        """Add the save that has begun under the last number."""
        self._saves[save.serial] = save

    def clear(self) -> None:
        """Forget all saves and number from 1 again."""
        self._saves.clear()
        self.serial = 0

    @property
    def newest(self) -> PendingSave | None:
        """The save of the last number, if it was begun."""
        return self._saves.get(self.serial)

    @property
    def oldest_unfinished(self) -> PendingSave | None:
        """The oldest save that has a tier without an outcome."""
        return next((save for save in self if save.pending_tiers), None)

    @property
    def waits_for(self) -> str:
        """What the oldest save that is held up waits for; empty if none is."""
        return next((save.waits_for for save in self if save.pending_tiers and save.waits_for), "")

    def find(self, generation: str | None) -> PendingSave | None:
        """Return the save of a generation."""
        return next((save for save in self if save.stamp.generation == generation), None)

    def compare(self, save: PendingSave, content: str) -> None:
        """Note whether a save holds the same bytes as the one before it."""
        save.content = content
        before = self._saves.get(save.serial - 1)
        save.is_new = before is None or before.content != content

    def missing_bits(self) -> int:
        """Return a bit for each save not sealed here, and above them for each not known to be unchanged."""
        bits = 0
        for serial in self._serials:
            save, place = self._saves.get(serial), self.serial - serial
            if save is None or not save.is_sealed:
                bits |= 1 << place
            if save is None or save.is_new:
                bits |= 1 << (SAVE_WINDOW + place)
        return bits

    def learn(self, missing: int) -> list[PendingSave]:
        """Take the union of all ranks' bits; return the saves that are unchanged on all ranks, once each."""
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


def target_tiers(spec: CheckpointSpec, step: int, *, lasting: bool, is_single: bool) -> list[TierName]:
    """Return the tiers for the save of a step; `is_single`: memory has room for one state only."""
    tiers = list[TierName]()
    durable = lasting or not spec.durable.every or step % spec.durable.every == 0
    durable |= is_single and spec.local is None
    if spec.local is not None:
        tiers.append("local")
    if spec.parity.scheme != "none":
        tiers.append("parity")
    if durable:
        tiers.append("durable")
    copied = spec.object is not None and (not spec.object.every or step % spec.object.every == 0)
    if durable and copied:
        tiers.append("object")
    return tiers


class SaveProgressReporter:
    """Records from time to time how far a save has come that is waited for."""

    def __init__(self, checkpoints: Path, record: MetricWriter) -> None:
        self._root, self._record = checkpoints, record
        self._reported_at = 0.0
        self._bytes = BackgroundPoll(self._written)

    def report(self, save: PendingSave) -> None:
        """Record the progress of a save, if the last record is old enough."""
        now = time.time()
        if now - max(save.begun, self._reported_at) < _REPORT_EVERY_S:
            return
        self._reported_at = now
        self._record(
            FlushMetric(
                save.stamp.step,
                tuple(save.pending_tiers),
                save.size_bytes,
                done_bytes=self._bytes.latest(save) if "durable" in save.pending_tiers else None,
                seconds=now - save.begun,
            )
        )

    def _written(self, save: PendingSave) -> int:
        """Return the bytes that all nodes have written so far, by the sizes of their files."""
        stamp = save.stamp
        aside = locate_draft(self._root, stamp.step, stamp.attempt, bytes.fromhex(stamp.generation)).aside
        size = 0
        for path in aside.glob("data-*.bin"):
            with suppress(OSError):
                size += path.stat().st_blocks * 512
        return size


class SaveReports:
    """Collects what this rank sees, which reaches rank 0 at the next exchange."""

    def __init__(self, control: Control, record: MetricWriter) -> None:
        self.local_ranks = list[int]()
        """Ranks of this node: all hear the same from its worker, and the first one reports it."""
        self._control, self._write = control, record
        self._unreported: list[SaveFailedMetric | SaveStalledMetric] = []
        self._reported: set[tuple[int, str]] = set()

    @property
    def has_unreported(self) -> bool:
        """Whether this rank has something to report to rank 0."""
        return bool(self._unreported)

    @property
    def is_speaker(self) -> bool:
        """Whether this rank reports what all ranks of its node hear."""
        return self._control.rank == self.local_ranks[0]

    def record(self, metric: Metric) -> None:
        """Record, on rank 0, a metric that every rank has."""
        if self._control.rank == 0:
            self._write(metric)

    def fail(self, step: int, tier: str, why: str) -> None:
        """Report that a save does not reach a tier."""
        self._report(SaveFailedMetric(step, tier, self._place + why))

    def stall(self, step: int, tier: str, seconds: float, why: str) -> None:
        """Report that a save has waited for long."""
        self._report(SaveStalledMetric(step, tier, seconds, self._place + why))

    def exchange(self) -> None:
        """Bring all unreported facts to rank 0; every rank calls it."""
        unreported, self._unreported = self._unreported, []
        for rank in self._control.allgather([metric_as_json(metric) for metric in unreported]):
            for values in rank:
                metric = parse_unstamped_metric(values, {})
                if isinstance(metric, SaveFailedMetric | SaveStalledMetric):
                    self._record_once(metric)

    def clear(self) -> None:
        """Forget what has not been reported."""
        self._unreported.clear()

    @property
    def _place(self) -> str:
        return f"rank {self._control.rank} on {self._control.node}: "

    def _report(self, metric: SaveFailedMetric | SaveStalledMetric) -> None:
        if self._control.rank == 0:
            self._record_once(metric)
        elif isinstance(metric, SaveFailedMetric) or self.is_speaker:
            self._unreported.append(metric)

    def _record_once(self, metric: SaveFailedMetric | SaveStalledMetric) -> None:
        """Record on rank 0, failures once for a save and a tier, which many ranks may have seen."""
        failure = (metric.step, metric.tier)
        is_failure = isinstance(metric, SaveFailedMetric)
        if self._control.rank == 0 and not (is_failure and failure in self._reported):
            self._reported.update([failure] if is_failure else [])
            self._write(metric)
