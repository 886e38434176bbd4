"""How a run is stopped: through its process on this host, or through Slurm."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from hpcrun import process
from hpcrun.errors import EXIT_INTERRUPTED, HpcrunError, SiteError, UsageError
from hpcrun.runs.remote_signal import signal_successor
from hpcrun.runs.run_state import RunState, read_element_states, read_run_states
from hpcrun.slurm.ids import parse_job_id
from hpcrun.slurm.queue import JobQuery, JobQueryResult, cancel_job, query_jobs
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir

_POLL_S = 0.2
_KILL_WAIT_S = 15.0


def cancel_run(run: RunDir, *, now: bool = False) -> list[str]:
    """Ask a run to save and stop, or with `now` to end at once; what waits is taken out of the queue.

    Of a sweep, all elements that are not over. A line for each thing done; UsageError where there is nothing
    to stop, SiteError where Slurm does not answer.
    """
    states = read_element_states(run) if run.sweep.is_file() else read_run_states([run])
    ahead = [one for one in states if one.state in ("running", "queued")]
    if not ahead:
        raise _nothing_to_cancel_error(read_run_states([run])[0])
    if not now:
        for one in ahead:
            # A supervisor that is lost at this moment hands nothing on.
            with suppress(OSError):
                write_json(one.run.wish, {"time": time.time(), "attempt": one.attempt})
    lines = [_cancel_process(one, now) for one in _one_per_process([one for one in ahead if not one.job])]
    by_job: dict[JobQuery, list[RunState]] = {}
    for one in ahead:
        if one.job and not now and (reached := signal_successor(one.snapshot, signal.SIGTERM, one.cluster)):
            lines.append(f"{one.run.id}: asked {reached} to save and stop")
        elif one.job:
            by_job.setdefault(_scancel_target(run, one), []).append(one)
    return [*lines, *(f"{run.id}: {_cancel_job(job, each, now)}" for job, each in by_job.items())]


def _nothing_to_cancel_error(state: RunState) -> HpcrunError:
    reason = f" ({state.message})" if state.message else ""
    if state.is_over:
        return UsageError(f"{state.run.id} is {state.state}{reason}; there is nothing to cancel")
    if state.job:
        return SiteError(f"{state.run.id}: nothing was cancelled: {state.message}")
    return UsageError(f"{state.run.id} is not known to run{reason}; there is nothing to cancel here")


def _one_per_process(states: Sequence[RunState]) -> list[RunState]:
    """Of a sweep that is one process, the element that runs, else any that waits."""
    running = [state for state in states if state.state == "running"]
    return list({one.pid: one for one in running or states}.values())


def _cancel_process(state: RunState, now: bool) -> str:
    run, found = state.run, state.snapshot.process if state.snapshot else None
    if found is None:
        return f"{run.id}: has ended just now"
    pid, handle = found[1].pid, process.ProcessHandle(found[1])
    try:
        if not now:
            handle.signal(signal.SIGTERM)
            return f"{run.id}: asked pid {pid} to save and stop"
        deadline = time.monotonic() + _KILL_WAIT_S
        # The supervisor ends its ranks at the second interrupt; two at once may arrive as one.
        while handle.signal(signal.SIGINT) and handle.is_alive():
            if time.monotonic() > deadline:
                handle.signal(signal.SIGKILL)
            time.sleep(_POLL_S)
    finally:
        handle.close()
    return f"{run.id}: ended without a save"


def _scancel_target(run: RunDir, state: RunState) -> JobQuery:
    """The job to name to scancel: of a sweep the whole array."""
    job_id = parse_job_id(state.job or "")
    assert job_id is not None
    return JobQuery(job_id.job, None if run.sweep.is_file() else job_id.element, state.cluster)


def _cancel_job(job: JobQuery, states: Sequence[RunState], now: bool) -> str:
    waiting = [state.run for state in states if state.state == "queued"]
    if waiting:
        # What waits comes first, and then a second look: nothing may start behind our back.
        cancel_job(job, "pending")
    taken = _dequeued_runs(waiting)
    for run in taken:
        _record_cancellation(run, job)
    actions = [f"{len(taken)} taken out of the queue"] if taken else []
    if running := len(states) - len(taken):
        cancel_job(job, "now" if now else "save")
        actions.append(f"{running} ended without a save" if now else f"{running} asked to save and stop")
    if len(states) == 1:
        return f"job {job} was {actions[0].partition(' ')[2]}"
    return f"of job {job}, {' and '.join(actions)}"


def _dequeued_runs(waiting: Sequence[RunDir]) -> list[RunDir]:
    """Those of the waiting that are out of the queue now."""
    states = read_run_states(waiting)
    # Slurm forgets an element that had not started as soon as it is cancelled; the accounts may be down.
    queries: dict[RunDir, JobQuery] = {}
    for one in states:
        if one.state == "unknown" and (job_id := parse_job_id(one.job or "")) is not None:
            queries[one.run] = JobQuery(job_id.job, job_id.element, one.cluster)
    answers = query_jobs(queries.values(), in_accounts=False) if queries else {}
    gone = [run for run, question in queries.items() if answers[question] == JobQueryResult()]
    return [one.run for one in states if one.state in ("cancelled", "lost") or one.run in gone]


def _record_cancellation(run: RunDir, job: JobQuery) -> None:
    """An end that no supervisor is there to write down, and that Slurm forgets in some minutes."""
    attempts = run.attempts()
    number = attempts[-1].number if attempts else None
    text = f"job {job} was taken out of the queue"
    record = {"status": "cancelled", "exit_code": EXIT_INTERRUPTED, "message": text, "attempt": number}
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(run.exit, record | {"step": None, "slurm_job": job.job, "ended": time.time()})
