"""Runs followed over time: what they print, over attempts and requeues, and until when."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.files import open_regular
from hpcrun.runs.run_state import RunState, read_run_states
from hpcrun.runs.snapshot import RunSnapshot
from hpcrun.specs.metrics import Metric, MetricReader
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.units import format_bytes

_CHUNK_BYTES = 65536
_MAX_LOG_BYTES = 16 << 30


@dataclass(frozen=True)
class PollIntervals:
    """How often to look, in seconds: at the run's own records, and at Slurm, ever more seldom."""

    records: float = 0.5
    slurm: float = 5.0
    slurm_max: float = 30.0
    believe: float = 10.0
    """How long an end that only Slurm tells of may be contradicted by a record that comes late (NFS)."""


class RunWatcher:
    """Looks at the same runs again and again, without a burden on Slurm."""

    def __init__(self, runs: Sequence[RunDir], pace: PollIntervals | None = None) -> None:
        self.pace = pace or PollIntervals()
        self._states: dict[RunDir, RunState | None] = dict.fromkeys(runs)
        self._told: dict[RunDir, RunState] = {}
        self._suspected: dict[RunDir, float] = {}
        self._due, self._gap = float("-inf"), self.pace.slurm

    def look(self) -> list[RunState]:
        """The states now; the end of a run is final."""
        ahead = [run for run, state in self._states.items() if state is None or not state.is_over]
        seen = dict(zip(ahead, read_run_states(ahead, ask=False), strict=True))
        unclear = [run for run, state in seen.items() if state.state == "unknown" and state.job]
        if unclear and (time.monotonic() >= self._due or any(map(self._has_moved, seen.values()))):
            self._ask(unclear)
        for run, state in seen.items():
            self._states[run] = self._merged(state) if run in unclear else state
        return [state for state in self._states.values() if state is not None]

    def _has_moved(self, state: RunState) -> bool:
        before = self._states[state.run]
        return before is not None and before.attempt != state.attempt

    def _ask(self, runs: Sequence[RunDir]) -> None:
        states = {state.run: state for state in read_run_states(runs)}
        changed = any(
            self._told.get(run) is None or self._told[run].state != states[run].state for run in runs
        )
        self._gap = self.pace.slurm if changed else min(self._gap * 1.5, self.pace.slurm_max)
        self._told |= states
        self._due = time.monotonic() + self._gap

    def _merged(self, state: RunState) -> RunState:
        answer = self._told.get(state.run, state)
        if answer.is_over and answer.exit_code is None:
            since = self._suspected.setdefault(state.run, time.monotonic())
            if time.monotonic() - since < self.pace.believe:
                return replace(state, message=answer.message)
        elif answer.is_over:
            return answer
        return replace(
            state, state=answer.state, message=answer.message, nodes=answer.nodes, start=answer.start
        )


def wait_for_runs(
    runs: Sequence[RunDir],
    note: Callable[[str], None],
    *,
    timeout_s: float | None = None,
    pace: PollIntervals | None = None,
) -> list[RunState]:
    """Wait until all runs are over, or the time is; what changes is noted. Also a lost job is an end.

    UsageError for a run that nobody has started.
    """
    watch = RunWatcher(runs, pace)
    noted: dict[RunDir, tuple[str, str]] = {}
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        states = watch.look()
        for state in states:
            _require_observable_end(state)
            if noted.get(state.run) != (state.state, state.message):
                noted[state.run] = state.state, state.message
                note(format_run_state(state))
        if all(state.is_over for state in states) or (end is not None and time.monotonic() >= end):
            return states
        left = watch.pace.records if end is None else end - time.monotonic()
        time.sleep(max(0.0, min(watch.pace.records, left)))


def format_run_state(state: RunState) -> str:
    """One line that says where a run stands, and why."""
    return f"{state.run.id} is {state.shown}" + (f": {state.message}" if state.message else "")


def _require_observable_end(state: RunState) -> None:
    # A record of its end may come from another host, too.
    if state.state == "unknown" and not (state.job or state.host):
        raise UsageError(f"{format_run_state(state)}; there is nothing to wait for here")


def follow_logs(
    run: RunDir,
    write: Callable[[str], None],
    note: Callable[[str], None],
    *,
    rank: int | None = None,
    attempt: int | None = None,
    batch: bool = False,
    step: Callable[[Metric], None] | None = None,
    pace: PollIntervals | None = None,
) -> int:
    """Write what a rank (default 0) prints, over attempts and requeues, until the run is over; its exit code.

    It begins with the newest attempt, or with `attempt`; with `batch` it is what the batch shell prints. What
    is waited for, and each new attempt, is noted; `step` gets the lines that come to metrics.jsonl.
    """
    log = _RunLog(run, rank, batch, attempt)
    metrics = MetricReader(run, from_now=True)

    def render() -> None:
        for text in log.read(note):
            write(text)
        if step is not None:
            for record in metrics.read():
                step(record.metric)

    return follow_until_end(run, render, note, pace)


def follow_until_end(
    run: RunDir, render: Callable[[], None], note: Callable[[str], None], pace: PollIntervals | None = None
) -> int:
    """Render what is new until the run is over; what is waited for is noted; its exit code."""
    watch, noted = RunWatcher([run], pace), ""
    while True:
        # Looked at first: what was written until then is still rendered.
        (state,) = watch.look()
        render()
        line = format_run_state(state)
        if line != noted and (state.state != "running" or state.message):
            note(line)
        noted = line
        if state.is_over:
            return state.code
        _require_observable_end(state)
        time.sleep(watch.pace.records)


class _RunLog:
    """The logs of a run, one attempt after another."""

    def __init__(self, run: RunDir, rank: int | None, batch: bool, attempt: int | None) -> None:
        self._run, self._rank, self._batch = run, rank, batch
        self._first = attempt
        self._shown: int | None = None
        self._files: dict[Path, _GrowingFile] = {}

    def read(self, note: Callable[[str], None]) -> Iterator[str]:
        """What is new."""
        if self._batch:
            yield from self._new(find_batch_logs(self._run))
            return
        attempts = self._run.attempts()
        first = self._first if self._first is not None else attempts[-1].number if attempts else None
        if self._shown is None:
            self._shown = first
        for attempt in attempts:
            if self._shown is None or attempt.number < self._shown:
                continue
            if attempt.number > self._shown:
                note(f"attempt {attempt.number} of {self._run.id} begins")
                self._shown = attempt.number
            yield from self._new(_attempt_logs(attempt, self._rank))

    def _new(self, paths: Sequence[Path]) -> Iterator[str]:
        for path in paths:
            if path not in self._files:
                self._files[path] = _GrowingFile(path)
            yield from self._files[path].read()


def _attempt_logs(attempt: Attempt, rank: int | None) -> list[Path]:
    """A rank's log; before it is there, the launcher's where nobody asked for a certain rank."""
    own = attempt.log(rank or 0)
    if own.is_file():
        return [own]
    return [attempt.launcher_log] if rank is None and attempt.launcher_log.is_file() else []


class _GrowingFile:
    """A file that grows; opened anew each time, because that is when NFS looks what is new."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> Iterator[str]:
        with os.fdopen(open_regular(self._path), "rb") as file:
            if os.fstat(file.fileno()).st_size - self._offset > _MAX_LOG_BYTES:
                raise UsageError(
                    f"{self._path}: is larger than {format_bytes(_MAX_LOG_BYTES)}; use less or tail"
                )
            file.seek(self._offset)
            while data := file.read(_CHUNK_BYTES):
                self._offset += len(data)
                yield self._decoder.decode(data)


def find_batch_logs(run: RunDir) -> list[Path]:
    """What the batch shell of the newest job has printed into; empty before it has."""
    return RunSnapshot(run, read_provenance(run.sweep_of_element or run)).batch_logs()


def find_rank_logs(run: RunDir, rank: int | None = None, attempt: int | None = None) -> list[Path]:
    """The log of a rank (default 0) of an attempt (default the newest); UsageError says which there are."""
    attempts = run.attempts()
    if not attempts:
        raise UsageError(
            f"{run.id} has no attempt yet, so there are no logs; -f waits for them, --batch shows what the"
            " batch shell printed"
        )
    numbers = [one.number for one in attempts]
    if attempt is not None and attempt not in numbers:
        raise UsageError(f"{run.id} has no attempt {attempt}; there are {', '.join(map(str, numbers))}")
    chosen = run.attempt(attempt or numbers[-1])
    if paths := _attempt_logs(chosen, rank):
        return paths
    path = chosen.log(rank or 0)
    there = sorted(p.name for p in path.parent.glob("*.log")) if path.parent.is_dir() else []
    raise UsageError(f"{path}: there is no such log; there are: {', '.join(there) or 'none'}")


def read_file_chunks(paths: Sequence[Path]) -> Iterator[str]:
    """Their text, piece by piece."""
    for path in paths:
        yield from _GrowingFile(path).read()
