"""What lines of metrics.jsonl say of saves and the tiers that they go through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.checkpoint.tier import TIER_NAMES
from hpcrun.specs.metrics import MetricRecord, SaveFailedMetric, SaveMetric, StepMetric, StoredMetric
from hpcrun.units import format_bandwidth


@dataclass
class TierStats:
    """What the saves of one tier have come to; seconds and bytes only ever grow."""

    saves: int = 0
    failures: int = 0
    stall_s: float = 0.0
    """For which training waited."""
    flush_s: float = 0.0
    """That the tier took in the background."""
    size_bytes: float = 0.0
    """Of the saves, as the node of rank 0 wrote them; of saves that ranks write themselves unknown, and 0."""
    lag_s: float | None = None
    """From the newest save until the tier had it."""
    ratio: float | None = None
    """Bytes that the newest save took at the tier, to those of its parts."""


@dataclass
class CheckpointStats:
    """All tiers of a run, and since when nothing was durable; dumps to JSON and reads back."""

    tiers: dict[str, TierStats] = field(default_factory=dict)
    durable_since: float | None = None
    """When the newest durable save was complete (wall clock), or the first step, where there was none."""

    def take(self, record: MetricRecord) -> None:
        """One more line."""
        metric = record.metric
        is_first_step = self.durable_since is None and isinstance(metric, StepMetric)
        if is_first_step or metric.is_durable_save:
            self.durable_since = record.time
        if not isinstance(metric, SaveMetric | StoredMetric | SaveFailedMetric):
            return
        if metric.tier not in TIER_NAMES:
            return
        sums = self.tiers.setdefault(metric.tier, TierStats())
        match metric:
            case SaveFailedMetric():
                sums.failures += 1
            case SaveMetric():
                sums.saves += 1
                sums.size_bytes += metric.size_bytes or 0
                sums.stall_s += metric.seconds
            case StoredMetric(size_bytes=size, stored_bytes=stored):
                sums.saves += 1
                sums.size_bytes += size
                sums.flush_s += metric.seconds
                sums.lag_s = metric.lag_s
                sums.ratio = (size if stored is None else stored) / size if size else None

    def take_all(self, records: Iterable[MetricRecord]) -> CheckpointStats:
        """Several lines; returns itself."""
        for record in records:
            self.take(record)
        return self

    def lines(self) -> list[str]:
        """A line a tier, in plain text, from the quickest to the safest."""
        return [
            f"{tier}: {_format_tier_stats(self.tiers[tier])}" for tier in TIER_NAMES if tier in self.tiers
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _format_tier_stats(sums: TierStats) -> str:
    parts = [f"{sums.saves} save{'s' * (sums.saves != 1)}"]
    if sums.stall_s and sums.saves:
        parts.append(f"training waited {sums.stall_s / sums.saves:.2g} s each")
    if sums.flush_s and sums.saves:
        rate = f", {format_bandwidth(sums.size_bytes / sums.flush_s)}" if sums.size_bytes else ""
        parts.append(f"{sums.flush_s / sums.saves:.2g} s each in the background{rate}")
    if sums.lag_s is not None:
        parts.append(f"the newest {sums.lag_s:.2g} s after the save")
    if sums.ratio not in (None, 1.0):
        parts.append(f"{sums.ratio:.2f} of its bytes")
    if sums.failures:
        parts.append(f"{sums.failures} failed")
    return ", ".join(parts)
