"""A run directory belongs to one supervisor at a time, and a new one clears up after one that was killed."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.errors import UsageError
from hpcrun.shm_segments import remove_segments
from hpcrun.specs.records import read_json
from hpcrun.specs.run_variables import RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir


class RunOwnedError(UsageError):
    """Another supervisor owns the run."""


@contextmanager
def lock_run(run: RunDir) -> Iterator[None]:
    """Own a run directory inside the block; UsageError, with host and pid, when another supervisor does."""
    with hold_lock_file(run, run.lock, lambda: _owned_error(run)) as certain:
        if not certain and is_supervisor_alive_here(run):
            raise _owned_error(run)
        yield


@contextmanager
def take_over_run_lock(run: RunDir) -> Iterator[None]:
    """Own a run inside the block whose supervisor has lost it, in an epoch before ours.

    The lock of a host that is gone may linger on a shared file system: ours is another file of that name.
    """
    aside = run.lock.with_name(f".{run.lock.name}.{os.uname().nodename}.{os.getpid()}")
    with hold_lock_file(run, aside, lambda: _owned_error(run)):
        aside.replace(run.lock)
        yield


@contextmanager
def hold_lock_file(run: RunDir, path: Path, taken: Callable[[], UsageError]) -> Iterator[bool]:
    """Hold the lock file of a run inside the block, or raise what `taken` makes where another does.

    False where the file system has no locks (Lustre without -o flock): there other evidence has to do.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{run.path}: cannot be written: {error.strerror}; use a run of your own") from None
    try:
        certain = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise taken() from None
            certain = False
        yield certain
    finally:
        os.close(descriptor)


def read_supervisor_record(run: RunDir) -> dict[str, Any]:
    """What the last supervisor of a run wrote about itself (pid, start_ticks, host, …); empty if nothing."""
    for attempt in reversed(run.attempts()):
        record = read_json(attempt.supervisor)
        if isinstance(record, dict):
            return record
    return {}


def is_supervisor_alive_here(run: RunDir) -> bool:
    """Whether the supervisor in the record is a living process of this host."""
    job = read_supervisor_record(run)
    return job.get("host") == os.uname().nodename and process.is_alive(
        process.ProcessId(job["pid"], job["start_ticks"])
    )


def clean_up_leftovers(run: RunDir) -> list[str]:
    """End what a killed supervisor's attempts have left on this host; a line for each thing found."""
    notes = []
    strays = process.processes_with_env(RUN_ID_VARIABLE, run.run_id)
    if strays:
        process.kill_processes(strays)
        notes.append(f"ended {len(strays)} processes that an earlier attempt had left")
    clean_up_segments(run)
    return notes


def clean_up_segments(run: RunDir) -> None:
    """Remove the shared memory that ranks of earlier attempts have left on this host."""
    for attempt in run.attempts():
        records = [read_json(path) for path in attempt.rank_record(0).parent.glob("rank-*.json")]
        ours = [record for record in records if record and record.get("node") == os.uname().nodename]
        for record in ours:
            remove_segments(record.get("shm", ()), since=record.get("started", 0.0))


def _owned_error(run: RunDir) -> RunOwnedError:
    job = read_supervisor_record(run)
    who = f"by hpcrun on {job['host']} (pid {job['pid']})" if job else "by another hpcrun"
    return RunOwnedError(
        f"{run.id} is being run {who}; wait for it, or ask it to save and stop: hpcrun cancel {run.id}"
    )
