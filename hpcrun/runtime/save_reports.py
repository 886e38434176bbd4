"""What goes wrong with saves on any rank, told once, by rank 0."""

from __future__ import annotations

from hpcrun.runtime.control import Control
from hpcrun.runtime.pending_save import MetricWriter
from hpcrun.specs.metrics import (
    Metric,
    SaveFailedMetric,
    SaveStalledMetric,
    metric_as_json,
    parse_unstamped_metric,
)


class SaveReports:
    """Takes what this rank sees; what other nodes know reaches rank 0 when the ranks next agree."""

    def __init__(self, control: Control, tell: MetricWriter) -> None:
        self.local_ranks = list[int]()
        """Of this node: they all hear the same from its worker, and the first one passes it on."""
        self._control, self._tell = control, tell
        self._unreported: list[SaveFailedMetric | SaveStalledMetric] = []
        self._reported: set[tuple[int, str]] = set()

    @property
    def has_unreported(self) -> bool:
        """Whether rank 0 has something to hear from here."""
        return bool(self._unreported)

    @property
    def is_speaker(self) -> bool:
        """Whether this is the rank that passes on what all of its node hear."""
        return self._control.rank == self.local_ranks[0]

    def record(self, metric: Metric) -> None:
        """Write a line that every rank has; rank 0 does."""
        if self._control.rank == 0:
            self._tell(metric)

    def fail(self, step: int, level: str, why: str) -> None:
        """A save does not reach a level, by what this rank knows."""
        self._report(SaveFailedMetric(step, level, self._place + why))

    def stall(self, step: int, level: str, seconds: float, why: str) -> None:
        """A save has waited long for something."""
        self._report(SaveStalledMetric(step, level, seconds, self._place + why))

    def exchange(self) -> None:
        """Bring to rank 0 what ranks have not reported; all of them call it."""
        unreported, self._unreported = self._unreported, []
        for rank in self._control.allgather([metric_as_json(metric) for metric in unreported]):
            for values in rank:
                metric = parse_unstamped_metric(values, {})
                if isinstance(metric, SaveFailedMetric | SaveStalledMetric):
                    self._record_once(metric)

    def clear(self) -> None:
        """Forget what was not reported."""
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
        """On rank 0, once for a save and a level: many ranks may have seen it fail."""
        failure = (metric.step, metric.level)
        is_failure = isinstance(metric, SaveFailedMetric)
        if self._control.rank == 0 and not (is_failure and failure in self._reported):
            self._reported.update([failure] if is_failure else [])
            self._tell(metric)
