"""What spares hold, in words."""

from __future__ import annotations

from collections.abc import Iterable

from hpcrun.specs.events.checkpoint import SpareReplicaEvent
from hpcrun.specs.events.log import EventRecord


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
