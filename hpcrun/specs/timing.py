"""Times of a job that must come one after the other: nothing that waits longer than the job may act in it."""

from __future__ import annotations

import math

from hpcrun.errors import SpecProblem
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.resources import ResourcesSpec, RetrySpec
from hpcrun.specs.watch import WatchSpec
from hpcrun.units import parse_time

FINAL_SAVE_MARGIN = 1.5
"""Of what saves took until now: the last one finds the file system as busy as it happens to be."""


def check_times(
    resources: ResourcesSpec, retry: RetrySpec | None, watch: WatchSpec, checkpoint: CheckpointSpec
) -> list[SpecProblem]:
    """What of a job waits longer than its own time limit; a default is never at fault."""
    if resources.time is None:
        return []
    limit = parse_time(resources.time).seconds
    return check_times_within(limit, f"resources.time {resources.time}", retry, watch, checkpoint)


def check_times_within(
    limit_s: float, what: str, retry: RetrySpec | None, watch: WatchSpec, checkpoint: CheckpointSpec
) -> list[SpecProblem]:
    """The same for a limit that somebody else sets, such as a partition's default; `what` names it."""
    if math.isinf(limit_s):
        return []
    slow = None if watch.slow == WatchSpec.model_fields["slow"].default else watch.slow
    limits = {
        "retry.grace": (retry.grace if retry else None, "the save would begin at once"),
        "watch.floor": (watch.floor if watch.hangs else None, "the job would end before a hang is noticed"),
        "watch.slow": (slow if watch.hangs else None, "the job would end before a hang is noticed"),
        "checkpoint.max_durable_age": (checkpoint.max_durable_age, "the job would end before it has passed"),
    }
    return [
        SpecProblem(key, f"{text} is no less than {what}, so {why}; use less")
        for key, (text, why) in limits.items()
        if text is not None and parse_time(text).seconds >= limit_s
    ]
