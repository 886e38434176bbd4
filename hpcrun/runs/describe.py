"""Everything that is known of one run, in plain values: what `hpcrun describe` shows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hpcrun.files import read_filesystem_clock
from hpcrun.masking import Masker
from hpcrun.runs.checkpoint_stats import CheckpointStats
from hpcrun.runs.follow import find_batch_logs
from hpcrun.runs.ledger import GoodputLedger, read_ledger, sum_ledgers
from hpcrun.runs.run_state import RunState, read_element_states, read_run_states, with_slurm_state
from hpcrun.runs.snapshot import read_replica_counts
from hpcrun.specs.events.checkpoint import SpareReplicaEvent
from hpcrun.specs.events.log import EventRecord, read_events
from hpcrun.specs.metrics import read_metrics
from hpcrun.specs.predecessors import read_predecessors
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.specs.saves import resumable_checkpoints
from hpcrun.specs.sweep import read_sweep


def describe_run(run: RunDir) -> tuple[dict[str, Any], GoodputLedger]:
    """The state of a run, its origin and jobs, files, attempts and saves, and where its time went.

    Of an element of a sweep also what it changes.
    """
    state = with_slurm_state(read_run_states([run])[0])
    owner = run.sweep_of_element or run
    origin, tiers = read_provenance(owner), read_checkpoint_stats(run)
    description = {
        **state.as_json(),
        "files": _list_files(owner, run),
        "overrides": _element_overrides(run),
        "after": [one.id for one in read_predecessors(owner).runs],
        "origin": asdict(origin) | {"argv": Masker().mask_words(origin.argv)} if origin else None,
        "attempts": [_describe_attempt(one, state) for one in run.attempts()],
        "saved_steps": [one.step for one in resumable_checkpoints(run.checkpoints)],
        "save_tiers": tiers.as_json(),
        "save_lines": tiers.lines() + describe_spare_replicas(read_events(run.events)),
    }
    return description, compute_run_ledger(state)


def compute_run_ledger(state: RunState) -> GoodputLedger:
    """Where the time of a run went, until now where it goes on; of a sweep the sum over its elements."""
    if not state.run.sweep.is_file():
        # Where nobody knows whether it goes on, what it has written is the last that is known.
        now = (
            None
            if state.is_over
            else _event_clock_time(state.run, state.changed if state.state == "unknown" else None)
        )
        return read_ledger(state.run, now=now)
    # Slurm is spared the question: an element that goes on is counted up to what it wrote last.
    return sum_ledgers(compute_run_ledger(element) for element in read_element_states(state.run, ask=False))


def _event_clock_time(run: RunDir, at: float | None) -> float:
    """The time `at` on the clock of the file system, by default now, by the clock of who writes the events.

    That is the time of the last event, and what has passed on the file system since: this host's clock may be
    another than both.
    """
    last = max((record.time for record in read_events(run.events)), default=None)
    if at is None:
        try:
            at = read_filesystem_clock(run.path)
        except OSError:  # not ours to write
            at = time.time()
    return at if last is None else last + max(0.0, at - run.events.stat().st_mtime)


def read_checkpoint_stats(run: RunDir) -> CheckpointStats:
    """What its saves have come to at each tier; of a sweep nothing."""
    return CheckpointStats().take_all(read_metrics(run))


def describe_spare_replicas(records: Iterable[EventRecord]) -> list[str]:
    """A line for what spares hold of the newest save of which any has something, as far as events tell."""
    steps: dict[int, list[str]] = {}
    attempt = None
    for record in records:
        if record.attempt != attempt:
            steps, attempt = {}, record.attempt
        event = record.event
        if isinstance(event, SpareReplicaEvent) and event.of:
            steps.setdefault(event.step, []).append(f"{', '.join(event.of)} on {event.node}")
    return [f"spares: copies of step {max(steps)}: {'; '.join(steps[max(steps)])}"] if steps else []


def read_sweep_results(run: RunDir) -> list[tuple[dict[str, Any], RunState]]:
    """The results of a sweep: for each element what it changes, and where it stands."""
    return list(zip(read_sweep(run), read_element_states(run), strict=True))


def _list_files(owner: RunDir, run: RunDir) -> dict[str, str | list[str]]:
    named = {"spec": run.spec, "script": owner.script, "code difference": owner.code_diff}
    files: dict[str, str | list[str]] = {name: str(path) for name, path in named.items() if path.is_file()}
    return files | {"batch logs": [str(path) for path in find_batch_logs(run)]}


def _element_overrides(run: RunDir) -> dict[str, Any] | None:
    sweep = run.sweep_of_element
    return None if sweep is None else read_sweep(sweep)[int(run.path.name)]


def _describe_attempt(attempt: Attempt, state: RunState) -> dict[str, Any]:
    supervisor, ended = (_dict_or_empty(read_json(path)) for path in (attempt.supervisor, attempt.outcome))
    fields = {name: supervisor.get(name) for name in ("host", "slurm_job", "restarts", "started")}
    outcome = {
        name: ended.get(name) for name in ("status", "message", "step", "requeued", "relaunched", "ended")
    }
    if not ended:
        is_newest = attempt.number == state.attempt
        words = None if is_newest and state.state == "running" else "it left no word"
        outcome |= {"status": state.state if is_newest else "unknown", "message": words}
    replicas = read_replica_counts(attempt)
    fields["replicas"] = None if replicas is None else {"there": replicas[0], "whole": replicas[1]}
    return {"attempt": attempt.number, **fields, **outcome, "logs": str(attempt.log(0).parent)}


def _dict_or_empty(record: Any) -> dict[str, Any]:
    return record if isinstance(record, dict) else {}
