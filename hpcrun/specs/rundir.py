"""RunDir: the contract of names inside a run directory, and how a run is found again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.records import read_json


def runs_root() -> Path:
    """Where run directories live: HPCRUN_ROOT, else ./runs."""
    return Path(os.environ.get("HPCRUN_ROOT") or "runs").absolute()


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt of a run."""

    run: RunDir
    number: int

    @property
    def path(self) -> Path:
        """The attempt's directory."""
        return self.run.path / "attempts" / str(self.number)

    @property
    def plan(self) -> Path:
        """The parallel layout of this attempt."""
        return self.path / "plan.json"

    @property
    def launcher_log(self) -> Path:
        """What mpiexec itself printed."""
        return self.path / "logs" / "launcher.log"

    @property
    def result(self) -> Path:
        """Written by rank 0 after every rank has agreed that the attempt ended well."""
        return self.path / "result.json"

    def log(self, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.path / "logs" / f"rank-{rank}.log"

    def rank_record(self, rank: int) -> Path:
        """Who a rank is: pid, node, what it leaves in /dev/shm."""
        return self.path / "ranks" / f"rank-{rank}.json"

    def error_record(self, rank: int) -> Path:
        """Why a rank gave up, in its own words."""
        return self.path / "ranks" / f"rank-{rank}.error.json"

    def create(self) -> Attempt:
        """Make the directories."""
        for name in ("logs", "ranks"):
            (self.path / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        return self


@dataclass(frozen=True)
class RunDir:
    """One run: everything that outlives a process stands here."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id, which exists before any job does."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """The resolved job, defaults included."""
        return self.path / "spec.yaml"

    @property
    def job(self) -> Path:
        """Who runs it: pid, host, code version."""
        return self.path / "job.json"

    @property
    def lock(self) -> Path:
        """Locked by the supervisor for as long as it lives."""
        return self.path / "lock"

    @property
    def exit(self) -> Path:
        """How the run ended; absent while it goes on."""
        return self.path / "exit.json"

    @property
    def events(self) -> Path:
        """What the supervisor saw and did, a line an event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """A line a step, written by rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Saved states."""
        return self.path / "checkpoints"

    def attempt(self, number: int) -> Attempt:
        """One attempt by its number, counted from 1."""
        return Attempt(self, number)

    def attempts(self) -> list[Attempt]:
        """All attempts so far, oldest first."""
        folder = self.path / "attempts"
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []
        return [Attempt(self, number) for number in numbers]

    def next_attempt(self) -> Attempt:
        """The attempt after the newest one, with its directories made."""
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 1).create()

    def read_exit(self) -> dict[str, Any] | None:
        """The exit record, or None while there is none."""
        record = read_json(self.exit)
        return record if isinstance(record, dict) else None


def create_run(name: str, root: Path | None = None) -> RunDir:
    """Make a new run directory with an id of its own; UsageError when the place cannot be written."""
    root = root or runs_root()
    stamp = time.strftime("%m%d-%H%M%S")
    path = root / f"{name}-{stamp}-{os.urandom(3).hex()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        (path / "checkpoints").mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"{root}: cannot make a run directory here: {error.strerror}; set HPCRUN_ROOT to a directory"
            " that you may write"
        ) from None
    return RunDir(path)


def all_runs(root: Path | None = None) -> Iterator[RunDir]:
    """Every run directory under the root, oldest first."""
    root = root or runs_root()
    if not root.is_dir():
        return
    found = []
    for path in root.iterdir():
        # What other people keep under a shared root is none of ours.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found.append(((path / "spec.yaml").stat().st_mtime, path))
    for _, path in sorted(found):
        yield RunDir(path)


def find_run(word: str, root: Path | None = None) -> RunDir:
    """RUN on the command line: a run directory, a run id, or the beginning of one that is unique."""
    # os.path's look-up says no where pathlib's raises: a name that is too long, a place closed to us.
    if os.path.isfile(f"{word}/spec.yaml"):  # noqa: PTH113
        return RunDir(Path(word).resolve())
    runs = list(all_runs(root))
    exact = [run for run in runs if run.id == word]
    if exact:
        return exact[0]
    matches = [run for run in runs if run.id.startswith(word)]
    if len(matches) == 1:
        return matches[0]
    where = root or runs_root()
    if not matches:
        known = ", ".join(run.id for run in runs[-3:]) or "none"
        raise UsageError(f"{word}: no such run under {where} (newest: {known}); see `hpcrun list`")
    raise UsageError(
        f"{word}: names {len(matches)} runs: {', '.join(run.id for run in matches[-5:])}; say which"
    )
