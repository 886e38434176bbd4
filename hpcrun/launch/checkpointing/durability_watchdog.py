"""How long a run continues without anything new that would survive the loss of all its nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import SavedCheckpoint, resumable_checkpoints
from hpcrun.units import parse_time

_MIN_POLL_S = 5.0


class DurabilityWatchdog:
    """Watches for new saves in the run directory; by this host's clock, for the saves are of others."""

    def __init__(
        self, run: RunDir, spec: CheckpointSpec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._clock = run, clock
        self._limit_s = parse_time(spec.max_durable_age).seconds if spec.max_durable_age else math.inf
        self._text = spec.max_durable_age
        self._since = self._looked = clock()
        self._is_told = False
        self._newest: SavedCheckpoint | None = None

    def begin(self) -> None:
        """An attempt begins: what was before is not its fault."""
        self._since = self._looked = self._clock()
        self._is_told = False
        if self._limit_s < math.inf:
            self._newest = self._look()

    def look(self) -> str | None:
        """What is to be said when the limit has just passed; None otherwise."""
        now = self._clock()
        due = self._since + self._limit_s
        # A save counts from the look that found it, which a tenth of the limit makes early enough.
        pause = min(_MIN_POLL_S, self._limit_s / 4) if self._looked > due else self._limit_s / 10
        if now - self._looked < pause and not self._looked <= due < now:
            return None
        self._looked = now
        newest = self._look()
        if newest is not None and newest != self._newest:
            self._newest, self._since, self._is_told = newest, now, False
        if now - self._since <= self._limit_s or self._is_told:
            return None
        self._is_told = True
        newest_text = f"the newest is of step {newest.step}" if newest else "there is none yet"
        return (
            f"checkpoint.max_durable_age: for more than {self._text} no save has reached the run directory;"
            f" {newest_text}"
        )

    def _look(self) -> SavedCheckpoint | None:
        steps = resumable_checkpoints(self._run.checkpoints)
        return steps[-1] if steps else None
