"""Generations from which attempts went on and failed: the state may be bad, though it is whole."""

from __future__ import annotations

from hpcrun.checkpoint.restore.decide import SUSPECT_AFTER_FAILURES, node_failure_key
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir

NEARBY_STEPS = 3
"""A failure within so many steps may come from the state that it began with."""


def read_suspect_saves(run: RunDir) -> dict[str, int]:
    """The failures of each generation, by its id."""
    record = read_json(run.poison)
    return {str(name): count for name, count in record.items()} if isinstance(record, dict) else {}


def record_failed_restart(run: RunDir, generation: str, *, is_proved: bool = False) -> int:
    """Count a failure, or all that it takes where the generation has proved to be damaged; how many now."""
    counts = read_suspect_saves(run)
    counts[generation] = (
        max(SUSPECT_AFTER_FAILURES, counts.get(generation, 0)) if is_proved else counts.get(generation, 0) + 1
    )
    run.checkpoints.mkdir(exist_ok=True, mode=0o700)
    write_json(run.poison, counts)
    return counts[generation]


def record_load_failure(run: RunDir, generation: str) -> None:
    """What nodes hold of a generation could not be loaded: it has to prove itself before it is used again."""
    if not read_suspect_saves(run).get(node_failure_key(generation)):
        record_failed_restart(run, node_failure_key(generation))


def generations_to_verify(run: RunDir) -> set[str]:
    """The generations that could not be loaded from nodes, and are not given up yet."""
    prefix = node_failure_key("")
    counts = read_suspect_saves(run).items()
    return {
        key.removeprefix(prefix)
        for key, count in counts
        if key.startswith(prefix) and 0 < count < SUSPECT_AFTER_FAILURES
    }


def implicates_save(outcome: AttemptOutcome, step: int, newest: int) -> bool:
    """Whether a failed attempt tells against the state of a step that it went on from.

    `newest`: the newest step that was saved by now. A node that is lost says nothing of the state.
    """
    reached = step if outcome.step is None else outcome.step
    return (
        outcome.status == "failed" and not outcome.lost and newest <= step and reached <= step + NEARBY_STEPS
    )
