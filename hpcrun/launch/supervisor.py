"""Supervisor: owns a run directory, launches a prepared job there, and records how it ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hpcrun
from hpcrun import process
from hpcrun.errors import EXIT_INTERRUPTED, HpcrunError, SiteError
from hpcrun.launch.attempt import Launch
from hpcrun.launch.course import Course, Limits, Observer, Outcome
from hpcrun.launch.hydra import find_mpiexec
from hpcrun.launch.inbox import Inbox
from hpcrun.launch.ownership import hold, sweep_leftovers
from hpcrun.launch.prepare import Prepared
from hpcrun.launch.shim import RUN_ID_VARIABLE
from hpcrun.launch.world import without_world
from hpcrun.specs.load import render_job
from hpcrun.specs.records import LineReader, LineWriter, write_json, write_whole
from hpcrun.specs.rundir import Attempt, RunDir, create_run


def rank_command(attempt: Attempt) -> tuple[str, ...]:
    """The command of every rank of an attempt."""
    # -P: a file of the user's that is called like a module must not become that module.
    return (sys.executable, "-P", "-m", "hpcrun", "_rank", str(attempt.run.path), str(attempt.number))


class Supervisor:
    """Runs a prepared job, as one attempt, from its launch to its exit record."""

    def __init__(
        self,
        prepared: Prepared,
        inbox: Inbox,
        observer: Observer,
        *,
        command: Callable[[Attempt], Sequence[str]] = rank_command,
        limits: Limits | None = None,
    ) -> None:
        self._prepared, self._inbox, self._observer = prepared, inbox, observer
        self._command, self._limits = command, limits or Limits()

    def run(self) -> Outcome:
        """Run the job; the outcome says how it ended. HpcrunError when it could not be started at all."""
        mpiexec = find_mpiexec()
        prepared = self._prepared
        run = prepared.resume or create_run(prepared.spec.name)
        with hold(run):
            try:
                outcome = self._run_attempt(self._open(run), mpiexec)
            except (HpcrunError, OSError) as error:
                failure = _as_site_error(error, run) if isinstance(error, OSError) else error
                _record_exit(run, "failed", failure.exit_code, str(failure))
                raise failure from error
            except KeyboardInterrupt:
                _record_exit(
                    run, "interrupted", EXIT_INTERRUPTED, "interrupted before the ranks were started"
                )
                raise
            _record_exit(
                run, outcome.status, outcome.exit_code, outcome.message, outcome.attempt, outcome.step
            )
        self._observer.finished(outcome)
        return outcome

    def _open(self, run: RunDir) -> Attempt:
        """The next attempt of a run, with all that stands in its directory before the ranks start."""
        spec, plan = self._prepared.spec, self._prepared.plan
        run.exit.unlink(missing_ok=True)
        for note in sweep_leftovers(run):
            self._observer.note(note)
        attempt = run.next_attempt()
        write_whole(run.spec, render_job(spec))
        write_whole(attempt.plan, plan.model_dump_json(indent=2) + "\n")
        write_json(run.job, _job_record(attempt.number, spec.train.steps))
        return attempt

    def _run_attempt(self, attempt: Attempt, mpiexec: Path) -> Outcome:
        ranks = self._prepared.ranks
        launch = Launch(attempt, ranks, tuple(self._command(attempt)), self._environ(attempt), mpiexec)
        events = LineWriter(attempt.run.events)
        metrics = attempt.run.metrics
        reader = LineReader(metrics, metrics.stat().st_size if metrics.exists() else 0)
        course = Course(launch, self._observer, self._limits, events, reader)
        try:
            return course.run(self._inbox)
        finally:
            events.close()

    def _environ(self, attempt: Attempt) -> dict[str, str]:
        environ = without_world(os.environ)
        threads = max(1, len(os.sched_getaffinity(0)) // self._prepared.ranks)
        environ.setdefault("OMP_NUM_THREADS", str(threads))
        package = Path(hpcrun.__file__).parent.parent
        if package.name not in ("site-packages", "dist-packages"):
            # Run from its source tree, the package is on nobody's path but ours.
            before = environ.get("PYTHONPATH")
            environ["PYTHONPATH"] = f"{package}{os.pathsep}{before}" if before else str(package)
        return environ | self._prepared.spec.env | {RUN_ID_VARIABLE: attempt.run.id}


def _record_exit(
    run: RunDir,
    status: str,
    exit_code: int,
    message: str,
    attempt: int | None = None,
    step: int | None = None,
) -> None:
    record = {"status": status, "exit_code": exit_code, "message": message, "attempt": attempt, "step": step}
    # Where even this cannot be written, the message on the terminal says so.
    with suppress(OSError):
        write_json(run.exit, record | {"ended": time.time()})


def _as_site_error(error: OSError, run: RunDir) -> SiteError:
    place = f"{error.filename}: " if error.filename else ""
    return SiteError(f"{place}{error.strerror or error}; the run was ended: {run.path}")


def _job_record(attempt: int, steps: int) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "start_ticks": process.start_ticks(os.getpid()),
        "host": os.uname().nodename,
        "user": os.environ.get("USER") or str(os.getuid()),
        "attempt": attempt,
        "steps": steps,
        "started": time.time(),
        "hpcrun": hpcrun.__version__,
        "python": sys.version.split()[0],
        "argv": sys.argv,
        "directory": str(Path.cwd()),
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    with suppress(SiteError):
        found = process.run(["git", "rev-parse", "HEAD"], timeout_s=5)
        if found.exit_code == 0:
            return found.stdout.strip()
    return None
