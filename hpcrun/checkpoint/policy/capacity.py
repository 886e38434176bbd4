"""The place for a job's saves, asked before the job runs: whether one can succeed there at all."""

from __future__ import annotations

import threading
from pathlib import Path

from hpcrun.checkpoint.lustre.lfs import LfsClient
from hpcrun.checkpoint.lustre.storage import StorageFinding, StoragePlan, make_storage_plan
from hpcrun.checkpoint.policy.retention import RetentionRule, count_kept_saves
from hpcrun.checkpoint.policy.size import SaveSizes, compute_save_sizes
from hpcrun.errors import SiteError
from hpcrun.specs.job import JobSpec
from hpcrun.specs.plan import Plan

_MAX_TOTAL_S, _ANSWER_TIMEOUT_S = 10.0, 4.0
"""Nobody waits longer for a file system before a job: what it would say stays unknown."""


def max_kept_saves(spec: JobSpec) -> int:
    """How many saves lie in the run directory at most."""
    checkpoint = spec.checkpoint
    every = checkpoint.durable.every or checkpoint.every_steps
    if checkpoint.every == "auto":
        every = 1  # there may be one of any step
    return count_kept_saves(spec.train.steps, every, RetentionRule(checkpoint.keep, checkpoint.keep_every))


def plan_save_storage(
    spec: JobSpec, sizes: SaveSizes, place: Path, *, held: int = 0, lfs: LfsClient | None = None
) -> StoragePlan | None:
    """What is to be said of a directory for saves; None where the size of a save is not known.

    `held`: saves that are there already.
    """
    if sizes.whole.value is None:
        return None
    checkpoint = spec.checkpoint
    return make_storage_plan(
        place,
        checkpoint.durable,
        save_bytes=int(sizes.whole.value),
        nodes=spec.resources.nodes,
        keep=max_kept_saves(spec) - 1,
        held=held,
        writers=1 if checkpoint.memory else spec.ranks_per_node,
        lfs=lfs,
    )


def plan_save_storage_in_time(
    spec: JobSpec, plan: Plan | None, place: Path, *, held: int = 0, most_s: float = _MAX_TOTAL_S
) -> StoragePlan | None:
    """The same, but never for long: a file system that does not answer is told of as a warning.

    None also for a job that is to be saved at a signal only, which may never come.
    """
    if not spec.checkpoint.every and not spec.checkpoint.at_end:
        return None
    plans: list[StoragePlan | None] = []

    def look() -> None:
        try:
            plans.append(
                plan_save_storage(
                    spec, compute_save_sizes(spec, plan), place, held=held, lfs=LfsClient(_ANSWER_TIMEOUT_S)
                )
            )
        except (OSError, SiteError) as error:
            plans.append(_unresponsive_storage(place, str(error)))

    thread = threading.Thread(target=look, name="place for saves", daemon=True)
    thread.start()
    thread.join(most_s)
    return plans[0] if plans else _unresponsive_storage(place, f"it has not answered in {most_s:g} s")


def _unresponsive_storage(place: Path, why: str) -> StoragePlan:
    text = f"{place}: whether saves fit there is not known: {why}"
    return StoragePlan(place, "unknown", None, (), (StorageFinding("warning", text),))


def format_storage_refusal(place: Path, refusal: str) -> str:
    """The one line that a person gets."""
    return f"{place}: no save can be kept here: {refusal}; make room, or set HPCRUN_ROOT to another place"
