"""The internal verb `_failover`: the supervisor after a failover, on another node, without a batch shell."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hpcrun.errors import SiteError
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.batch_task import BatchLog, record_failed_run, run_supervisor_process
from hpcrun.launch.failover.state import FailoverState
from hpcrun.launch.run_context import RunContext
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.runs.lease import read_leader
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.slurm.allocation import Allocation, batch_identity, find_allocation
from hpcrun.slurm.client import run_slurm_client
from hpcrun.specs.cluster import load_cluster
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.prepare import prepare_job
from hpcrun.units import parse_time

_QUERY_INTERVAL_S = 300.0
"""How often to ask Slurm for the time left: the limit may have been changed."""
_SCANCEL_TIMEOUT_S = 60.0


def run_failover(run_path: str, epoch: str) -> int:
    """Continue a run in the epoch that this node's agent has claimed; returns the exit code.

    Slurm does not know this process: it ends the job when the run has ended; the exit record has the outcome.
    """
    run, log = RunDir(Path(run_path)), BatchLog()
    allocation = find_allocation(os.environ)
    if allocation is None:
        raise SiteError("_failover: not inside a Slurm allocation")
    record, identity = run.read_exit(), batch_identity(os.environ)
    if record is not None and identity and identity.items() <= record.items():
        # The former supervisor was lost between the end of the run and that of the job.
        code = int(record["exit_code"])
    else:
        code = _supervise(run, int(epoch), allocation, log)
        record = run.read_exit()
    if record is not None:
        # Slurm will report CANCELLED, whatever the outcome of the run.
        with contextlib.suppress(OSError):
            write_json(run.exit, record | {"slurm_state": "CANCELLED"})
        log.note(f"ending job {allocation.id}, whose batch script is gone")
        run_slurm_client(["scancel", allocation.id], timeout_s=_SCANCEL_TIMEOUT_S)
    return code


def _supervise(run: RunDir, epoch: int, allocation: Allocation, log: BatchLog) -> int:
    former = read_leader(run)
    host = former.host if former else str(read_supervisor_record(run).get("host", ""))

    def work(inbox: SignalQueue) -> AttemptOutcome:
        cluster = load_cluster(run.cluster) if run.cluster.exists() else None
        prepared = prepare_job(None, resume=run)
        log.note(f"{prepared.spec.name}: takes over from {host or 'nobody'} in epoch {epoch}")
        site, succession = RunContext(allocation, cluster), FailoverState(epoch, host)
        grace = prepared.spec.retries.grace if prepared.spec.retries else None
        with _signal_before_time_limit(allocation, parse_time(grace).seconds if grace else None):
            return Supervisor(prepared, inbox, log, site=site, succession=succession).run()

    return run_supervisor_process(work, log, partial(record_failed_run, run), f"see {run.agent_logs}")


@contextlib.contextmanager
def _signal_before_time_limit(allocation: Allocation, grace_s: float | None) -> Iterator[None]:
    """Send this process the signal that Slurm would have sent to the batch shell before the time limit."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            left = allocation.seconds_left()
            pause = (
                _QUERY_INTERVAL_S
                if left is None or grace_s is None
                else min(_QUERY_INTERVAL_S, left - grace_s)
            )
            if pause <= 0:
                os.kill(os.getpid(), signal.SIGUSR2)
                return
            over.wait(pause)

    thread = threading.Thread(target=watch, daemon=True)
    if grace_s is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
