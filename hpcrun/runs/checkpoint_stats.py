"""What lines of metrics.jsonl say of saves and the levels that they go through; other lines say nothing here.

{"kind": "save", "step", "seconds"}                     the ranks wrote it into the run directory, and waited
{"kind": "save", "level": "memory", ..., "size_bytes"}       a copy in memory: training waited so long for it
{"kind": "stored", "level", "seconds", "size_bytes", "lag_s"}  a level has it, so long after the save
{"kind": "save_failed", "step", "level", "why"}         a level does not get it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.checkpoint.levels import CHECKPOINT_LEVELS
from hpcrun.runs.save_text import is_durable_save
from hpcrun.units import format_bandwidth

Record = Mapping[str, Any]

_MAX_VALUE = 1e15


@dataclass
class LevelStats:
    """What the saves of one level have come to; seconds and bytes only ever grow."""

    saves: int = 0
    failures: int = 0
    stall_s: float = 0.0
    """For which training waited."""
    flush_s: float = 0.0
    """That the level took in the background."""
    size_bytes: float = 0.0
    """Of the saves, as the node of rank 0 wrote them; of saves that ranks write themselves unknown, and 0."""
    lag_s: float | None = None
    """From the newest save until the level had it."""
    ratio: float | None = None
    """Bytes that the newest save took at the level, to those of its parts."""


@dataclass
class CheckpointStats:
    """All levels of a run, and since when nothing was durable; dumps to JSON and reads back."""

    levels: dict[str, LevelStats] = field(default_factory=dict)
    undurable_since: float | None = None
    """When the newest durable save was complete (wall clock), or the first step, where there was none."""

    def take(self, line: Record) -> None:
        """One more line."""
        kind, now = line.get("kind", "step"), line.get("time")
        if self.undurable_since is None and kind == "step" and isinstance(now, int | float):
            self.undurable_since = float(now)
        if is_durable_save(line) and isinstance(now, int | float):
            self.undurable_since = float(now)
        level = str(line.get("level", "durable"))
        if kind not in ("save", "stored", "save_failed") or level not in CHECKPOINT_LEVELS:
            return
        sums = self.levels.setdefault(level, LevelStats())
        if kind == "save_failed":
            sums.failures += 1
            return
        sums.saves += 1
        sums.size_bytes += _valid_number(line.get("size_bytes")) or 0.0
        if kind == "save":
            sums.stall_s += _valid_number(line.get("seconds")) or 0.0
            return
        sums.flush_s += _valid_number(line.get("seconds")) or 0.0
        sums.lag_s = _valid_number(line.get("lag_s"))
        size = _valid_number(line.get("size_bytes"))
        stored = _valid_number(line.get("stored_bytes"))
        sums.ratio = (size if stored is None else stored) / size if size else None

    def take_all(self, lines: Iterable[Record]) -> CheckpointStats:
        """Several lines; returns itself."""
        for line in lines:
            self.take(line)
        return self

    def lines(self) -> list[str]:
        """A line a level, in plain text, from the quickest to the safest."""
        return [
            f"{level}: {_format_level_stats(self.levels[level])}"
            for level in CHECKPOINT_LEVELS
            if level in self.levels
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def parse_checkpoint_stats(told: Any) -> CheckpointStats | None:
    """Sums that were dumped; None where they are damaged, or of another version."""
    try:
        levels = {name: LevelStats(**one) for name, one in told["levels"].items()}
        found = CheckpointStats(levels, told["undurable_since"])
    except (TypeError, KeyError, AttributeError):
        return None
    values = [value for one in levels.values() for value in asdict(one).values()]
    since = found.undurable_since
    are_numbers = all(value is None or _valid_number(value) is not None for value in (*values, since))
    return found if are_numbers and levels.keys() <= set(CHECKPOINT_LEVELS) else None


def _format_level_stats(sums: LevelStats) -> str:
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


def _valid_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MAX_VALUE else None
