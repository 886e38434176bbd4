"""What goes wrong with saves on any rank, told once, by rank 0."""

from __future__ import annotations

from typing import Any

from hpcrun.runtime.control import Control
from hpcrun.runtime.pending_save import MetricWriter


class SaveReports:
    """Takes what this rank sees; what other nodes know reaches rank 0 when the ranks next agree."""

    def __init__(self, control: Control, tell: MetricWriter) -> None:
        self.local_ranks = list[int]()
        """Of this node: they all hear the same from its worker, and the first one passes it on."""
        self._control, self._tell = control, tell
        self._unreported: list[dict[str, Any]] = []
        self._reported: set[tuple[int, str]] = set()

    @property
    def has_unreported(self) -> bool:
        """Whether rank 0 has something to hear from here."""
        return bool(self._unreported)

    @property
    def is_speaker(self) -> bool:
        """Whether this is the rank that passes on what all of its node hear."""
        return self._control.rank == self.local_ranks[0]

    def record(self, record: dict[str, Any]) -> None:
        """Write a line that every rank has; rank 0 does."""
        if self._control.rank == 0:
            self._tell(record)

    def fail(self, step: int, level: str, why: str) -> None:
        """A save does not reach a level, by what this rank knows."""
        self._report({"kind": "save_failed", "step": step, "level": level, "why": self._place + why})

    def stall(self, step: int, level: str, seconds: object, why: str) -> None:
        """A save has waited long for something."""
        told = {"step": step, "level": level, "seconds": seconds, "why": self._place + why}
        self._report({"kind": "save_stalled", **told})

    def exchange(self) -> None:
        """Bring to rank 0 what ranks have not reported; all of them call it."""
        unreported, self._unreported = self._unreported, []
        for rank in self._control.allgather(unreported):
            for record in rank:
                self._record_once(record)

    def clear(self) -> None:
        """Forget what was not reported."""
        self._unreported.clear()

    @property
    def _place(self) -> str:
        return f"rank {self._control.rank} on {self._control.node}: "

    def _report(self, record: dict[str, Any]) -> None:
        if self._control.rank == 0:
            self._record_once(record)
        elif record["kind"] == "save_failed" or self.is_speaker:
            self._unreported.append(record)

    def _record_once(self, record: dict[str, Any]) -> None:
        """On rank 0, once for a save and a level: many ranks may have seen it fail."""
        which = (record["step"], record["level"])
        is_failure = record["kind"] == "save_failed"
        if self._control.rank == 0 and not (is_failure and which in self._reported):
            self._reported.update([which] if is_failure else [])
            self._tell(record)
