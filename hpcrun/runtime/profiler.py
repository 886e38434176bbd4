"""Profiles a window of steps with torch's profiler: one trace a rank (chrome://tracing, Perfetto)."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from hpcrun.specs.job import ProfileSpec


class StepProfiler:
    """Records steps [start, start + steps) of a run if the job has a profile section."""

    def __init__(self, spec: ProfileSpec | None, directory: Path, rank: int) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._spec = spec if spec is not None and rank in spec.ranks else None
        self._trace = directory / f"rank-{rank}.json"

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._finish()

    def step(self, finished: int) -> None:
        """Start or stop the profiler after a finished step, at the edges of the window."""
        if self._spec is None:
            return
        if self._profiler is None and finished + 1 == self._spec.start:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif self._profiler is not None and finished + 1 == self._spec.start + self._spec.steps:
            self._finish()

    def _finish(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._trace))
        self._profiler, self._spec = None, None
