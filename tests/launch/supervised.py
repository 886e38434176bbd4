"""Worlds of ranks without torch: each starts in well under a second."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.launch.attempt_monitor import AttemptLimits, AttemptOutcome
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.specs.metrics import Metric
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.prepare import prepare_job
from tests.leftovers import check_no_new_segments, shared_segments

PROGRAM = Path(__file__).with_name("rank_program.py")
LIMITS = AttemptLimits(start_s=30, stop_s=20, settle_s=0.3, leave_s=0.5, finish_s=5)
JOB = """\
name: t
model: tiny
data: {text: corpus.txt, seq_len: 16, holdout: 0}
train: {steps: 3}
env: {FROM_JOB: "yes"}
retry: {crash: 0, node: 0}
"""


@dataclass
class Recorder:
    """An observer that remembers, and that may act when the ranks are ready or at a note."""

    on_ready: Callable[[], None] = lambda: None
    on_note: Callable[[str], None] = lambda text: None
    notes: list[str] = field(default_factory=list)
    steps: list[Metric] = field(default_factory=list)
    ready: int = 0
    outcome: AttemptOutcome | None = None

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.on_note(text)

    def ranks_ready(self, ranks: int, seconds: float) -> None:
        self.ready = ranks
        self.on_ready()

    def step(self, metric: Metric) -> None:
        self.steps.append(metric)

    def finished(self, outcome: AttemptOutcome) -> None:
        self.outcome = outcome


@dataclass
class Site:
    """A place with a job file, where worlds can be run."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def only_run(self) -> RunDir:
        (path,) = (self.path / "runs").iterdir()
        return RunDir(path)

    def run(
        self,
        mode: str,
        *overrides: str,
        ranks: int = 2,
        observer: Recorder | None = None,
        resume: RunDir | None = None,
        limits: AttemptLimits = LIMITS,
        before: Callable[[], None] = lambda: None,
        at_launch: Callable[[], None] = lambda: None,
    ) -> AttemptOutcome:
        """Run a world of rank_program.py in this mode; `before` is called when the inbox is open."""
        given = [] if resume else [f"parallel.dp_replicate={ranks}"]
        prepared = prepare_job(self.job, [*given, *overrides], resume=resume)

        def command(attempt: Any) -> list[str]:
            at_launch()
            return [sys.executable, str(PROGRAM), mode, str(attempt.run.path), str(attempt.number)]

        with SignalQueue() as inbox:
            before()
            return Supervisor(prepared, inbox, observer or Recorder(), command=command, limits=limits).run()


@pytest.fixture
def site(tmp_path: Path, runs_root: Path) -> Site:
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "job.yaml").write_text(JOB)
    return Site(tmp_path)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a process below us, nor a segment in /dev/shm, nor a changed signal handler."""
    segments, handler = shared_segments(), signal.getsignal(signal.SIGTERM)
    yield
    assert process.descendants(os.getpid()) == []
    check_no_new_segments(segments)
    assert signal.getsignal(signal.SIGTERM) == handler


def send(number: int) -> Callable[[], None]:
    """Send a signal to ourselves, who are the supervisor."""
    return lambda: os.kill(os.getpid(), number)
