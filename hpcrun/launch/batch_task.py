"""What a job that was submitted runs: the supervisor, over the nodes that Slurm has given it, or here."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcrun.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_SAVED,
    EXIT_USAGE,
    HpcrunError,
    SiteError,
    UsageError,
)
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.failover.guardian import SupervisorCrash
from hpcrun.launch.failover.local_recovery import LocalRecovery
from hpcrun.launch.outcome import record_run_exit
from hpcrun.launch.predecessors import check_predecessors
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.signal_queue import SignalQueue, block_signals
from hpcrun.launch.supervisor import Supervisor
from hpcrun.runs.run_lock import RunOwnedError, lock_run
from hpcrun.slurm.allocation import find_allocation
from hpcrun.specs.cluster import ClusterSpec, load_cluster
from hpcrun.specs.identity import check_run_schema
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.metrics import Metric, StepMetric
from hpcrun.specs.provenance import Provenance, read_provenance
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.sweep import read_sweep
from hpcrun.submission.launch_checks import missing_modules
from hpcrun.submission.prepare import prepare_job

SWEEP_ELEMENT_VARIABLE = "HPCRUN_ELEMENT"
"""Set by the array template: which element of the sweep this job is."""
_LOG_INTERVAL_S = 30.0
_PICKLE_TIMEOUT_S = 60.0
"""So long what submits a job may take to put its pickle there: the job may be quicker."""


class BatchLog:
    """Writes what is worth knowing into the batch job's own log."""

    def __init__(self) -> None:
        self._said = 0.0

    def note(self, text: str) -> None:
        """A line of its own."""
        log_line(text)

    def ranks_ready(self, ranks: int, seconds: float) -> None:
        """All ranks have met."""
        self.note(f"{ranks} rank{'s' * (ranks > 1)} ready after {seconds:.1f} s")

    def step(self, metric: Metric) -> None:
        """A step now and then; metrics.jsonl has them all."""
        if isinstance(metric, StepMetric) and time.monotonic() - self._said > _LOG_INTERVAL_S:
            self._said = time.monotonic()
            self.note(f"step {metric.step}: loss {metric.loss:.4f}")

    def finished(self, outcome: AttemptOutcome) -> None:
        """The attempt is over."""
        self.note(outcome.message)


_exit_codes: list[int] = []
_crashes: list[SupervisorCrash] = []


def run_submitted(folder: str, fall: SupervisorCrash | None = None) -> int:
    """Run the pickle that submitit has put there for this job, which is run_task; gives its exit code.

    `fall`: it is not the first to do so here.
    """
    if fall is None and (stray := why_foreign_job(Path(folder))):
        log_line(stray)
        return EXIT_USAGE
    _crashes.extend([] if fall is None else [fall])
    # It loads numpy where there is one, which a login node is spared.
    process_job = importlib.import_module("submitit.core.submission").process_job
    _await_private_pickle(folder)
    try:
        process_job(folder)
    except OSError:
        # Where its own record of the result cannot be written, ours, or the code alone, says how it went.
        if not _exit_codes:
            raise
    return _exit_codes.pop()


def why_foreign_job(folder: Path) -> str | None:
    """Why this job is none of those that hpcrun has submitted from a folder; None where it is one of them.

    Its pickle says so. While somebody submits, it may still be on its way: then the script lies there under
    the name that it has until then.
    """
    run = RunDir(folder.parent)
    try:
        check_run_schema(run.path)
    except UsageError as error:
        return str(error)
    remedy = f"submit the run with `hpcrun submit --resume {run.id}`"
    if "SLURM_JOB_ID" not in os.environ:
        return f"{run.script} is started by Slurm, and this is not a job; {remedy}"
    job_environment = importlib.import_module("submitit.core.job_environment")
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    here = job_environment.JobEnvironment()
    pickle, end = here.paths.submitted_pickle, time.monotonic() + _PICKLE_TIMEOUT_S
    begun = [path for path in folder.glob(".submission_file_*.sh") if not path.is_symlink()]
    while not pickle.exists():
        if not begun or time.monotonic() > end:
            problem = f"job {here.job_id} was not submitted by hpcrun, which would know nothing of it"
            return f"{problem}: it ends here, and {run.id} is left alone; {remedy}"
        time.sleep(0.2)
    return None


def _await_private_pickle(folder: str) -> None:
    """Wait for the job's pickle, which may come after the job; UsageError where others could have written it.

    What an attempt that was killed has left of its own result is removed: submitit refuses to write over it.
    """
    os.environ["SUBMITIT_FOLDER"] = folder
    paths = importlib.import_module("submitit.core.job_environment").JobEnvironment().paths
    paths.result_pickle.with_suffix(".pkl.save_tmp").unlink(missing_ok=True)
    end = time.monotonic() + _PICKLE_TIMEOUT_S
    while not paths.submitted_pickle.exists():
        if time.monotonic() > end:
            raise SiteError(
                f"{paths.submitted_pickle}: did not appear in {_PICKLE_TIMEOUT_S:g} s; is the folder on a"
                " file system that this node shares with the one that submitted?"
            )
        time.sleep(0.1)
    importlib.import_module("hpcrun.slurm.executor").require_private_file(paths.submitted_pickle)


def run_task(run_path: str, fall: SupervisorCrash | None = None) -> int:
    """Run what was submitted: a run, an element of a sweep, or (without an array) a sweep's elements in turn.

    Gives the exit code; whatever goes wrong stands in the run's exit record.
    """
    _crashes.extend([] if fall is None else [fall])
    _exit_codes.append(_run_all(RunDir(Path(run_path))))
    return _exit_codes[-1]


def _run_all(run: RunDir) -> int:
    element = os.environ.get(SWEEP_ELEMENT_VARIABLE)
    if element is not None:
        return _run(run.element(int(element)), run)
    if not run.sweep.exists():
        return _run(run, run)
    codes: list[int] = []
    for number in _pending_elements(run):
        codes.append(_run(run.element(number), run))
        # Whoever told one to stop meant them all.
        if codes[-1] in (EXIT_SAVED, EXIT_INTERRUPTED):
            break
    return max(codes, default=EXIT_DONE)


def _pending_elements(run: RunDir) -> list[int]:
    """The elements that have no end yet."""
    return [number for number in range(len(read_sweep(run))) if run.element(number).read_exit() is None]


def _run(run: RunDir, origin: RunDir) -> int:
    log = BatchLog()

    def work(inbox: SignalQueue) -> AttemptOutcome:
        allocation = find_allocation(os.environ)
        if (held := check_predecessors(run, allocation, log.note)) is not None:
            return held
        record = read_provenance(origin)
        cluster = load_cluster(origin.cluster) if origin.cluster.exists() else None
        _check_python(record, cluster, log)
        prepared, site = prepare_job(None, resume=run), RunContext(allocation, cluster)
        log.note(f"{prepared.spec.name}: {prepared.describe()}")
        # Only of the first run, of several in turn, the supervisor was killed.
        fall = _crashes.pop() if _crashes else None
        after = LocalRecovery(run, prepared.spec, site, fall, inbox, log.note).decide() if fall else None
        if isinstance(after, AttemptOutcome):
            return after
        return Supervisor(prepared, inbox, log, site=site, succession=after).run()

    def record_failure(code: int, message: str) -> None:
        # Unless it is somebody else's.
        with contextlib.suppress(RunOwnedError), lock_run(run):
            record_failed_run(run, code, message)

    return run_supervisor_process(work, log, record_failure, "see the batch log")


def run_supervisor_process(
    work: Callable[[SignalQueue], AttemptOutcome],
    log: BatchLog,
    record: Callable[[int, str], None],
    where: str,
) -> int:
    """The outermost frame of a supervisor's process: does the work, and gives its exit code.

    Whatever goes wrong is told, and recorded as the run's end; but a run that is another's is left alone.
    """
    try:
        with SignalQueue() as inbox:
            outcome = work(inbox)
            # The outcome stands: a late signal must not change the exit code.
            block_signals()
            return outcome.exit_code
    except RunOwnedError as error:
        log.note(str(error))
        return error.exit_code
    except (HpcrunError, OSError) as error:
        failure = error if isinstance(error, HpcrunError) else SiteError(str(error))
        log.note(str(failure))
        record(failure.exit_code, str(failure))
        return failure.exit_code
    except Exception as error:  # the outermost frame of the process
        record(EXIT_CHECK_FAILED, f"{type(error).__name__}: {error}; {where}")
        raise


def record_failed_run(run: RunDir, code: int, message: str) -> None:
    """Write that a run has failed, unless it has an end already."""
    if run.read_exit() is None:
        record_run_exit(run, "failed", code, message)


def _check_python(record: Provenance | None, cluster: ClusterSpec | None, log: BatchLog) -> None:
    """Say where this node's Python differs from the one that submitted, and what it lacks."""
    here = sys.version.split()[0]
    if record is not None and record.python != here:
        log.note(
            f"this is Python {here} ({sys.executable}), the job was submitted with {record.python} on"
            f" {record.host}; set python in the job, or python.path in the profile, if that is not meant"
        )
    modules = cluster.python.checks if cluster else []
    if lacks := missing_modules(modules, sys.executable, os.uname().nodename):
        raise SiteError(lacks)
