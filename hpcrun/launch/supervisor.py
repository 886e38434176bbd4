"""Supervisor: owns a run directory, launches a prepared job there, and records how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from hpcrun import process
from hpcrun.errors import EXIT_INTERRUPTED, HpcrunError, SiteError
from hpcrun.launch import requeue
from hpcrun.launch.command import rank_command
from hpcrun.launch.course import Course, Limits, Observer, Outcome
from hpcrun.launch.inbox import Inbox
from hpcrun.launch.launchers import Launch, Launcher
from hpcrun.launch.ownership import hold, sweep_leftovers
from hpcrun.launch.prepare import Prepared
from hpcrun.launch.shim import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from hpcrun.launch.site import Site, with_our_package
from hpcrun.launch.snapshot import record_origin
from hpcrun.launch.world import without_world
from hpcrun.specs.load import render_job
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import LineReader, LineWriter, write_json, write_whole
from hpcrun.specs.rundir import Attempt, RunDir, create_run
from hpcrun.specs.secrets import read_secrets
from hpcrun.units import parse_time

_FIRST_PORT, _PORTS = 20000, 10000
"""Below those that the kernel gives out by itself (from 32768 on)."""


class Supervisor:
    """Runs a prepared job, as one attempt, from its launch to its exit record."""

    def __init__(
        self,
        prepared: Prepared,
        inbox: Inbox,
        observer: Observer,
        *,
        site: Site | None = None,
        command: Callable[[Attempt], Sequence[str]] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._prepared, self._inbox, self._observer = prepared, inbox, observer
        self._site, self._limits = site or Site(), limits or Limits()
        self._began_at = 0
        self._command = command

    def run(self) -> Outcome:
        """Run the job; the outcome says how it ended. HpcrunError when it could not be started at all."""
        placement, launcher = self._site.place(self._prepared.spec), self._site.launcher(self._prepared.spec)
        prepared = self._prepared
        run = prepared.resume or create_run(prepared.spec.name)
        if prepared.resume is None:
            record_origin(run, prepared.spec)
        with hold(run):
            try:
                outcome = self._run_attempt(self._open(run, placement), placement, launcher)
            except (HpcrunError, OSError) as error:
                failure = _as_site_error(error, run) if isinstance(error, OSError) else error
                record_exit(run, "failed", failure.exit_code, str(failure))
                raise failure from error
            except KeyboardInterrupt:
                record_exit(run, "interrupted", EXIT_INTERRUPTED, "interrupted before the ranks were started")
                raise
            self._close(outcome)
        self._observer.finished(outcome)
        return outcome

    def _open(self, run: RunDir, placement: Placement) -> Attempt:
        """The next attempt of a run, with all that stands in its directory before the ranks start."""
        spec, plan = self._prepared.spec, self._prepared.plan
        run.exit.unlink(missing_ok=True)
        for note in sweep_leftovers(run):
            self._observer.note(note)
        attempt = run.next_attempt()
        self._began_at = requeue.saved_step(run)
        write_whole(run.spec, render_job(spec))
        if plan is not None:
            write_whole(attempt.plan, plan.model_dump_json(indent=2) + "\n")
        write_json(attempt.placement, placement.as_json())
        write_json(attempt.supervisor, self._identity())
        return attempt

    def _identity(self) -> dict[str, Any]:
        allocation = self._site.allocation
        return {
            "pid": os.getpid(),
            "start_ticks": process.start_ticks(os.getpid()),
            "host": os.uname().nodename,
            "started": time.time(),
            "slurm_job": None if allocation is None else allocation.job,
            "restarts": None if allocation is None else allocation.restarts,
        }

    def _run_attempt(self, attempt: Attempt, placement: Placement, launcher: Launcher) -> Outcome:
        spec = self._prepared.spec
        command = (
            tuple(self._command(attempt))
            if self._command
            else rank_command(attempt, spec, placement, os.environ)
        )
        launch = Launch(
            attempt,
            placement,
            command,
            self._environ(attempt, placement),
            launcher,
            judges_exits=spec.command is not None,
        )
        events = LineWriter(attempt.run.events)
        metrics = attempt.run.metrics
        reader = LineReader(metrics, metrics.stat().st_size if metrics.exists() else 0)
        try:
            with self._site.nodes(attempt.run, placement) as nodes:
                again: Literal["train", "submit"] = "submit" if self._site.is_batch else "train"
                course = Course(launch, nodes, self._observer, self._limits, events, reader, again)
                return course.run(self._inbox)
        finally:
            events.close()

    def _environ(self, attempt: Attempt, placement: Placement) -> dict[str, str]:
        spec, cluster = self._prepared.spec, self._site.cluster
        environ = with_our_package(without_world(os.environ))
        cores = max(1, len(os.sched_getaffinity(0)) // placement.per_node)
        environ.setdefault("OMP_NUM_THREADS", str(spec.resources.cpus_per_rank or cores))
        number = self._site.allocation.job if self._site.allocation else os.getpid()
        port = _FIRST_PORT + (number * 7 + attempt.number) % _PORTS
        suffix = cluster.network.fabric_suffix if cluster else ""
        meeting = {"MASTER_ADDR": f"{placement.ranks[0]}{suffix}", "MASTER_PORT": str(port)}
        if spec.command is None:
            meeting = {}
        marks = {RUN_ID_VARIABLE: attempt.run.id, ATTEMPT_VARIABLE: str(attempt.number)}
        return environ | spec.env | meeting | read_secrets(spec.secrets) | marks

    def _close(self, outcome: Outcome) -> None:
        """Record how the attempt ended, and queue the job again where that is called for."""
        cause, told = self._queue_again(outcome)
        record: dict[str, Any] = {
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "message": outcome.message,
        }
        record |= {"step": outcome.step, "requeued": cause, "ended": time.time()}
        run = outcome.run
        with suppress(OSError):
            write_json(run.attempt(outcome.attempt).outcome, record)
        if cause is None:
            message = f"{outcome.message}; not queued again: {told}" if told else outcome.message
            record_exit(run, outcome.status, outcome.exit_code, message, outcome.attempt, outcome.step)

    def _queue_again(self, outcome: Outcome) -> tuple[requeue.Cause | None, str]:
        """The cause for which the job was queued again, or why it was not, where one might expect it."""
        allocation, spec, run = self._site.allocation, self._prepared.spec, outcome.run
        if allocation is None or not self._site.is_batch:
            return None, ""
        grace = parse_time(spec.retries.grace).seconds if spec.retries else 0.0
        cause = requeue.cause_of(outcome, grace, allocation.seconds_left())
        if cause is None or (cause == "crash" and spec.retries is None):
            return None, ""
        progress = None if spec.command else requeue.saved_step(run) - self._began_at
        refused = requeue.refusal(run, spec, cause, progress)
        if refused is None:
            try:
                allocation.requeue()
            except SiteError as error:
                refused = str(error)
        if refused is not None:
            return None, refused
        self._observer.note(f"{cause.replace('_', ' ')}: queued again as job {allocation.id}")
        return cause, ""


def record_exit(
    run: RunDir,
    status: str,
    exit_code: int,
    message: str,
    attempt: int | None = None,
    step: int | None = None,
) -> None:
    """Write how a run has ended."""
    record = {"status": status, "exit_code": exit_code, "message": message, "attempt": attempt, "step": step}
    # Where even this cannot be written, the message on the terminal says so.
    with suppress(OSError):
        write_json(run.exit, record | {"ended": time.time()})


def _as_site_error(error: OSError, run: RunDir) -> SiteError:
    place = f"{error.filename}: " if error.filename else ""
    return SiteError(f"{place}{error.strerror or error}; the run was ended: {run.path}")
