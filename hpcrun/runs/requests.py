"""Ask a run to save now and go on, and wait for its save."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcrun import process
from hpcrun.errors import HpcrunError, SiteError, UsageError
from hpcrun.runs.follow import PollIntervals, RunWatcher, format_run_state
from hpcrun.runs.remote_signal import signal_successor
from hpcrun.runs.run_state import RunState, read_element_states, read_run_states
from hpcrun.slurm.answers import parse_slurm_problem
from hpcrun.slurm.client import cluster_option, run_slurm_client
from hpcrun.specs.metrics import MetricReader, SaveMetric, StoredMetric
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.rundir import RunDir

_SCANCEL_S = 30.0


@dataclass(frozen=True)
class SaveRequest:
    """What was asked of whom, and where the answers of those who were asked will appear."""

    lines: list[str]
    """In words, a line each."""
    answers: dict[RunDir, MetricReader]
    """The metrics of every run that was asked, from that moment on."""


def request_save(run: RunDir, *, force: bool = False) -> SaveRequest:
    """Ask a run to save at its next step and go on; of a sweep, every element that has begun.

    A program of the user's own gets the signal with `force` only: it ends one that does not handle it.
    UsageError where there is nothing to save, SiteError where Slurm does not answer.
    """
    _require_savable_run(run, force)
    states = read_element_states(run) if run.sweep.is_file() else read_run_states([run])
    begun = [one for one in states if one.state == "running" and _has_supervisor(one)]
    if not begun:
        raise _nothing_to_save_error(read_run_states([run])[0] if run.sweep.is_file() else states[0])
    answers = {one.run: MetricReader(one.run, from_now=True) for one in begun}
    lines = [_signal_process(one) for one in begun if not one.job]
    by_cluster: defaultdict[str, list[str]] = defaultdict(list)
    for one in begun:
        if one.job and (reached := signal_successor(one.snapshot, signal.SIGUSR1, one.cluster)):
            lines.append(f"{one.run.id}: asked {reached} to save and continue")
        elif one.job:
            by_cluster[one.cluster].append(one.job)
    for cluster, jobs in by_cluster.items():
        _signal_batch_jobs(jobs, cluster)
        lines.append(f"{run.id}: asked job {', '.join(jobs)} to save and continue")
    return SaveRequest(lines, answers)


def wait_for_saves(
    asked: SaveRequest,
    note: Callable[[str], None],
    *,
    timeout_s: float | None = None,
    pace: PollIntervals | None = None,
) -> bool:
    """Wait until all who were asked have saved, which is noted; False where one ended without, or is late."""
    ahead, all_saved = dict(asked.answers), True
    watch = RunWatcher(list(ahead), pace)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while ahead:
        # Looked at first: what was written until then is still read.
        states = watch.look()
        for state in states:
            if state.run not in ahead:
                continue
            if saved := _next_save_text(ahead[state.run]):
                note(f"{state.run.id}: {saved}")
            elif state.is_over:
                note(f"{format_run_state(state)}; it has written no further save")
                all_saved = False
            else:
                continue
            del ahead[state.run]
        if ahead and end is not None and time.monotonic() >= end:
            note(f"no save within {timeout_s:g} s: {', '.join(run.id for run in ahead)}")
            return False
        if ahead:
            time.sleep(watch.pace.records)
    return all_saved


def _next_save_text(reader: MetricReader) -> str:
    for record in reader.read():
        match record.metric:
            case StoredMetric(lag_s=seconds) | SaveMetric(seconds=seconds) if record.metric.is_durable_save:
                return f"step {record.metric.step} was saved in {seconds:.1f} s"
    return ""


def _require_savable_run(run: RunDir, force: bool) -> None:
    origin = read_provenance(run.sweep_of_element or run)
    if origin is None or origin.steps is not None:
        return
    if origin.kind == "function":
        raise UsageError(f"{run.id} is a function, which cannot be asked to save; `hpcrun stop` ends it")
    if not force:
        raise UsageError(
            f"{run.id} is a program of your own: SIGUSR1 ends it unless it handles that signal; --force sends"
            " it all the same"
        )


def _has_supervisor(state: RunState) -> bool:
    """Whether the newest attempt has a supervisor: that knows the signal, a shell may die of it."""
    view = state.snapshot
    return view is not None and view.has_begun and not view.attempts[-1].outcome.exists()


def _nothing_to_save_error(state: RunState) -> HpcrunError:
    why = f" ({state.message})" if state.message else ""
    if state.state == "running":
        return UsageError(
            f"{state.run.id} is about to start{why}; there is nothing to save yet, ask again later"
        )
    if state.state == "unknown" and state.job:
        return SiteError(f"{state.run.id}: nothing was asked: {state.message}")
    return UsageError(f"{state.run.id} is {state.state}{why}; there is nothing to save")


def _signal_process(state: RunState) -> str:
    run, supervisor = state.run, state.snapshot.process if state.snapshot else None
    handle = process.ProcessHandle(supervisor[1]) if supervisor else None
    if handle is None or not handle.signal(signal.SIGUSR1):
        return f"{run.id}: has ended just now"
    handle.close()
    return f"{run.id}: asked pid {handle.process.pid} to save and continue"


def _signal_batch_jobs(jobs: Sequence[str], cluster: str) -> None:
    """Through the batch shell, which hands it on; SiteError with scancel's words."""
    words = ["scancel", "--state=RUNNING", "--batch", "--signal=USR1", *cluster_option(cluster), *jobs]
    done = run_slurm_client(words, timeout_s=_SCANCEL_S)
    trouble = parse_slurm_problem(done.stderr)
    if trouble is None or trouble.kind not in ("no-job", "ended"):
        done.require_success()
