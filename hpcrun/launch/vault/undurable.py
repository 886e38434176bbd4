"""How long a run goes on without anything new that would survive the loss of all its nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import saved_steps
from hpcrun.units import parse_time

_MOST_OFTEN_S = 5.0


class Undurable:
    """Watches the age of the newest save in the run directory."""

    def __init__(self, run: RunDir, spec: CheckpointSpec, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = run, clock
        self._limit_s = parse_time(spec.max_undurable).seconds if spec.max_undurable else math.inf
        self._text = spec.max_undurable
        self._since = self._looked = clock()
        self._is_told = False

    def begin(self) -> None:
        """An attempt begins: what was before is not its fault."""
        self._since, self._is_told = self._clock(), False

    def look(self) -> str | None:
        """What is to be said when the limit has just passed; None otherwise."""
        now = self._clock()
        if now - self._since <= self._limit_s or now - self._looked < min(_MOST_OFTEN_S, self._limit_s / 4):
            return None
        self._looked = now
        steps = saved_steps(self._run.checkpoints)
        written = steps[-1].written if steps else None
        if written is not None and written > self._since:
            self._since, self._is_told = written, False
        if now - self._since <= self._limit_s or self._is_told:
            return None
        self._is_told = True
        newest = f"the newest is of step {steps[-1].step}" if steps else "there is none yet"
        return (
            f"checkpoint.max_undurable: for more than {self._text} no save has reached the run directory;"
            f" {newest}"
        )
