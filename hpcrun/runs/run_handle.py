"""Runs for Python programs: a handle that reads a run's directory and asks the run to save or stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.specs import run_lookup
from hpcrun.specs.rundir import RunDir

if TYPE_CHECKING:
    from hpcrun.runs.event_text import EventLine
    from hpcrun.runs.run_state import RunState
    from hpcrun.specs.saves import SavedCheckpoint


@dataclass(frozen=True)
class Run:
    """A run, seen through its directory; every call reads it anew, nothing is cached."""

    files: RunDir
    """The paths of the run's files."""

    @property
    def id(self) -> str:
        """The run id, as `hpcrun list` prints it; of a sweep's element SWEEP/NUMBER."""
        return self.files.id

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.files.path

    @property
    def state(self) -> str:
        """queued, running, done, saved, failed, …: all are in docs/python.md."""
        return self.status().state

    def status(self) -> RunState:
        """State, message, exit code, attempt, step, loss, job; asks Slurm where no record shows the end."""
        from hpcrun.runs.run_state import read_run_states

        return read_run_states([self.files])[0]

    def done(self) -> bool:
        """Whether the run is over, well or not."""
        return self.status().is_over

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run is over; False if `timeout_s` seconds pass before."""
        return self._wait(timeout_s).is_over

    def cancel(self, *, now: bool = False) -> None:
        """Ask the run to save and stop, or remove its job from the queue; `now` ends it without saving.

        Does nothing if the run is over. Of a local array, whose calls run one after the other, the waiting
        calls stop as well.
        """
        from hpcrun.runs.cancel import cancel_run

        if not self.done():
            cancel_run(run_lookup.find_run(str(self.directory), use="act"), now=now)

    def save(self) -> None:
        """Ask the run to save at its next step and continue; UsageError or SiteError if it cannot."""
        from hpcrun.runs.requests import request_save

        request_save(run_lookup.find_run(str(self.directory), use="act"))

    def events(self) -> list[EventLine]:
        """The event log: time (wall clock), attempt, kind and text of each event, in order."""
        from hpcrun.runs.event_text import format_events

        return format_events(self.files)

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl; `kind` is step, eval, …, a step's record has loss and step_time_s."""
        from hpcrun.specs.records import read_json_lines

        return list(read_json_lines(self.files.metrics))

    def checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints that the run may resume from, oldest first."""
        from hpcrun.specs.saves import resumable_checkpoints

        return resumable_checkpoints(self.files.checkpoints)

    def stdout(self, rank: int = 0) -> str:
        """Output of a rank in the newest attempt, standard error included; empty before it starts."""
        attempts = self.files.attempts()
        path = attempts[-1].log(rank) if attempts else None
        return path.read_text(encoding="utf-8", errors="replace") if path and path.exists() else ""

    def _wait(self, timeout_s: float | None) -> RunState:
        from hpcrun.runs.follow import wait_for_runs

        return wait_for_runs([self.files], lambda _: None, timeout_s=timeout_s)[0]


def find_run(name: str) -> Run:
    """The run of an id or its beginning, a run directory, or a Slurm job id; UsageError if not just one."""
    return Run(run_lookup.find_run(name))


def list_runs(root: Path | str | None = None) -> list[Run]:
    """Your runs under a root, default HPCRUN_ROOT, the profile's or ./runs; oldest first."""
    return [Run(run) for run in run_lookup.all_runs(None if root is None else Path(root))]
