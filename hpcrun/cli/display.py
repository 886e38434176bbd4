"""Progress of a run: a progress bar on a terminal, plain lines at a reading pace elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hpcrun.cli.terminal import escape_control_characters, unescaped_stream
from hpcrun.local_identity import display_path
from hpcrun.specs.metrics import Metric, RestoreMetric, StartMetric, StepMetric
from hpcrun.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from hpcrun.launch.attempt_monitor import AttemptOutcome

_LINE_EVERY_S = 5.0
_REFRESH_S = 0.1


def make_display(steps: int, stream: TextIO | None = None) -> LineDisplay:
    """The display for a stream, default stderr; rich is loaded only for a terminal."""
    stream = stream or sys.stderr
    # The steps of a user's command are unknown.
    return ProgressBarDisplay(steps, stream) if steps and stream.isatty() else LineDisplay(steps, stream)


class LineDisplay:
    """Prints a step every tenth of the run or five seconds, whichever is later, and all rare events."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps, self._stream = steps, stream
        self._shown_at, self._shown_step = float("-inf"), 0

    def note(self, text: str) -> None:
        """Print a message."""
        # A terminal that was closed must not take the run with it.
        with contextlib.suppress(OSError):
            self._stream.write(f"hpcrun: {escape_control_characters(text)}\n")
            self._stream.flush()

    def ranks_ready(self, ranks: int, seconds: float) -> None:
        """Report that all ranks are connected."""
        self.note(f"{ranks} rank{'s' * (ranks > 1)} ready after {seconds:.1f} s")

    def step(self, metric: Metric) -> None:
        """Show a record of metrics.jsonl."""
        match metric:
            case StepMetric():
                self._step(metric)
            case StartMetric():
                self.note(f"computing on {metric.device_name} ({metric.reason})")
            case RestoreMetric(passed_over=problems) if problems:
                for problem in problems:
                    self.note(f"passed over: {problem}")
                self.note(f"resumes from step {metric.step}; {metric.lost_steps} saved steps are lost")
            case _ if text := str(metric):
                self.note(text)

    def _step(self, metric: StepMetric) -> None:
        now, step = time.monotonic(), metric.step
        due = now - self._shown_at >= _LINE_EVERY_S and step - self._shown_step >= self._steps / 100
        if due or step == self._steps or step - self._shown_step >= max(1, self._steps // 10):
            self._shown_at, self._shown_step = now, step
            self.note(f"step {step}/{self._steps}  {format_step(metric, self._steps)}")

    def finished(self, outcome: AttemptOutcome) -> None:
        """End the display; the command prints the outcome."""
        self.close()

    def close(self) -> None:
        """End the display."""


class ProgressBarDisplay(LineDisplay):
    """A progress bar with the live loss; notes scroll above it."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        super().__init__(steps, stream)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._drawn = 0.0

    def note(self, text: str) -> None:
        """Print a message."""
        if self._progress is None:
            super().note(text)
            return
        with contextlib.suppress(OSError):
            self._progress.console.print(
                f"hpcrun: {escape_control_characters(text)}", markup=False, highlight=False
            )

    def ranks_ready(self, ranks: int, seconds: float) -> None:
        """Report that all ranks are connected, and start the progress bar."""
        super().ranks_ready(ranks, seconds)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        # Without rich's refresh thread: the supervisor has one thread, and forks.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(file=unescaped_stream(self._stream)),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("step", total=self._steps, figures="")
        self._progress.start()

    def _step(self, metric: StepMetric) -> None:
        if self._progress is None or self._task is None:
            return
        figures = format_step(metric, self._steps)
        self._progress.update(self._task, completed=metric.step, figures=figures)
        now = time.monotonic()
        if now - self._drawn >= _REFRESH_S or metric.step == self._steps:
            self._drawn = now
            with contextlib.suppress(OSError):
                self._progress.refresh()

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
            self._progress = None


def format_step(metric: StepMetric, steps: int) -> str:
    """Loss, speed and time left of a step."""
    parts = [f"loss {metric.loss:.4f}", f"{format_short_number(metric.tokens_per_s)} tokens/s"]
    if metric.mfu is not None:
        parts.append(f"mfu {metric.mfu:.1%}")
    seconds = metric.step_time_s
    left = seconds * (steps - metric.step)
    parts.append(f"{format_duration(left)} left" if left >= 1 else f"{format_duration(seconds)} per step")
    return "  ".join(parts)


def command_name() -> str:
    """How to call hpcrun from this shell: by name if that finds this installation, else by path."""
    ours = Path(sys.executable).parent / "hpcrun"
    on_path = shutil.which("hpcrun")
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(ours):
        return "hpcrun"
    if not ours.exists():
        return f"{sys.executable} -m hpcrun"
    return display_path(ours)


def format_short_number(number: float) -> str:
    """A large number in three figures: 1.23k, 45.6M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"
