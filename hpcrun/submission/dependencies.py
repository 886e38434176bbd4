"""The jobs that a submission waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrun.errors import UsageError
from hpcrun.runs.run_state import RunState, read_run_states
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.rundir import RunDir

NoteCallback = Callable[[str], None]
"""Takes a line for the user who submits."""


def find_dependencies(
    after: Sequence[RunDir], after_any: Sequence[RunDir], cluster: ClusterSpec | None, note: NoteCallback
) -> tuple[list[str], tuple[RunDir, ...]]:
    """Return the value of --dependency for these runs, and the runs that must end well.

    Slurm waits until the jobs are over. Whether a run ended well is in its record, which the job reads when
    it starts (launch.predecessors).
    """
    dependencies, must_end_well = list[str](), list[RunDir]()
    for runs in (after, after_any):
        states = read_run_states(runs) if runs else []
        for state in states:
            jobs = _dependency_jobs(state, runs is after, note)
            _check_same_cluster(state, cluster, jobs)
            dependencies += [job for job in jobs if job not in dependencies]
            must_end_well += [state.run] if jobs and runs is after else []
    return [":".join(["afterany", *dependencies])] if dependencies else [], tuple(must_end_well)


def _dependency_jobs(state: RunState, must_be_done: bool, note: NoteCallback) -> list[str]:
    run = state.run
    if state.is_over and (not must_be_done or state.state == "done"):
        note(f"{run.id} has ended already ({state.state}); there is nothing to wait for")
        return []
    if state.is_over:
        remedy = f"submit it again (--resume {run.id}) or use --after-any"
        raise UsageError(f"--after {run.id}: it is {state.state}, so this would never start; {remedy}")
    if run.sweep_of_element and state.job:
        jobs = [state.job]
    else:
        record = read_provenance(run)
        made = (
            [submission for submission in record.submissions if submission.job is not None] if record else []
        )
        jobs = [str(submission.job) for submission in made if submission.time == made[-1].time]
    if not jobs:
        raise UsageError(f"{run.id}: was not submitted to Slurm, so no job can wait for it")
    if must_be_done and state.state == "unknown":
        remedy = "try again when it is, or use --after-any"
        raise UsageError(f"--after {run.id}: its state is not known: {state.message}; {remedy}")
    return jobs


def _check_same_cluster(state: RunState, cluster: ClusterSpec | None, jobs: Sequence[str]) -> None:
    """A job's number means another job on another cluster."""
    own = cluster.slurm_cluster if cluster else None
    if jobs and own and state.cluster and own != state.cluster:
        raise UsageError(
            f"--after {state.run.id}: it runs on cluster {state.cluster}, this is for {own}, and Slurm waits"
            " for jobs of the same cluster only; submit both to one"
        )
