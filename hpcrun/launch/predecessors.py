"""The start of a job that was submitted with --after: the records of the runs before it decide.

A job can end otherwise than its run. After a failover Slurm calls it CANCELLED, whatever was trained, and a
run that has saved and is to go on exits with a code of its own. So Slurm is only asked to wait until the jobs
are over, and whether the runs ended well is settled here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hpcrun.errors import EXIT_INTERRUPTED, EXIT_SAVED, SiteError
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.outcome import record_run_exit
from hpcrun.runs.run_state import RunState, read_run_states
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.predecessors import read_predecessors
from hpcrun.specs.rundir import RunDir

RECORD_DELAY_S = 20.0
"""For so long a record from another host may still be hidden by the caches of a file system."""
_POLL_S = 4.0


def check_predecessors(
    run: RunDir, allocation: Allocation | None, note: Callable[[str], None]
) -> AttemptOutcome | None:
    """None where a run, or an element of a sweep, may start; else how its job ends.

    Either it is recorded that the run was not started, or the job waits again, where a run before it was
    resumed or queued again meanwhile.
    """
    predecessors = read_predecessors(run.sweep_of_element or run)
    # Once begun, it goes on by itself, whatever becomes of the others.
    if not predecessors.runs or predecessors.has_begun(run):
        return None
    pending = _unfinished_runs(predecessors.runs)
    if not pending:
        return None
    refused = ""
    if all(state.state in ("running", "queued") for state in pending):
        ids = ", ".join(state.run.id for state in pending)
        refused = _requeue_behind(allocation, pending)
        if not refused:
            text = f"waits again: {ids} is not over yet"
            note(text)
            return AttemptOutcome(run, 0, "saved", EXIT_SAVED, text, None)
        refused = f", and the job cannot wait again: {refused}"
    text = f"not started: {_describe_state(pending[0])}{refused}"
    text += f"; to start it anyway: hpcrun submit --resume {(run.sweep_of_element or run).id}"
    note(text)
    record_run_exit(run, "cancelled", EXIT_INTERRUPTED, text)
    return AttemptOutcome(run, 0, "interrupted", EXIT_INTERRUPTED, text, None)


def _unfinished_runs(runs: Sequence[RunDir]) -> list[RunState]:
    """Those that have not ended well, the ones that never will first."""
    until = time.monotonic() + RECORD_DELAY_S
    while True:
        unfinished = [state for state in read_run_states(runs) if state.state != "done"]
        # An end on record is final; what only Slurm says may be contradicted by a record that comes late.
        failed = [state for state in unfinished if state.is_over and state.exit_code is not None]
        if not unfinished or failed or time.monotonic() > until:
            return sorted(
                unfinished,
                key=lambda state: (state not in failed, not state.is_over, state.state != "unknown"),
            )
        time.sleep(_POLL_S)


def _describe_state(state: RunState) -> str:
    message = f": {state.message}" if state.message else ""
    if not state.run.path.is_dir():
        return f"{state.run.path} is gone, so it is unknown whether it ended well"
    if state.state == "unknown":
        return f"whether {state.run.id} ended well is not known{message}"
    return f"{state.run.id} is {state.state}{message}"


def _requeue_behind(allocation: Allocation | None, states: Sequence[RunState]) -> str:
    """Put the job back into the queue, behind the newest jobs of these runs; why not, where that fails."""
    jobs = [state.job for state in states if state.job]
    if allocation is None or not allocation.is_batch or len(jobs) < len(states):
        return "there is no job of Slurm's to wait for"
    # A job without retries was submitted as one that is not queued again.
    if refused := allocation.update("Requeue=1"):
        return refused
    try:
        allocation.requeue()
    except SiteError as error:
        return str(error)
    # Where this is lost, it looks again when it has come to its turn.
    allocation.update(f"Dependency=afterany:{':'.join(jobs)}")
    return ""
