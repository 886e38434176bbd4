"""What is told of levels of checkpoints, in words, for the story of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LEVEL_EVENTS = ("restore", "checkpoint", "spare copies", "erasure sets", "undurable", "drain died", "poison")


def describe_level_event(name: str, event: Mapping[str, Any]) -> str:
    """One of these events; empty for what is not worth a line."""
    step, generation = event.get("step"), event.get("generation")
    match name:
        case "restore":
            return _describe_restore(event)
        case "checkpoint":
            level, problem = event.get("level"), event.get("problem")
            # One a level and save: only the run directory's is news, and what went wrong.
            if problem:
                return f"step {step} is not stored ({level}): {problem}"
            return f"step {step} is in the run directory" if level == "durable" else ""
        case "spare copies":
            # One a spare and save: only whose parts it has is news, when that has changed.
            return str(event.get("message") or "")
        case "drain died":
            return f"the checkpoint worker on {event.get('node')} died; another one is started"
        case "poison":
            count = event.get("count")
            times = "once" if count == 1 else f"{count} times"
            return f"what went on from step {step} (generation {generation}) has failed {times}"
    return str(event.get("message") or name).replace("\n", "; ")


def _describe_restore(event: Mapping[str, Any]) -> str:
    step, levels, rebuilt = event.get("step"), event.get("levels"), event.get("rebuilt")
    lost, passed_over = event.get("lost_steps"), event.get("passed_over")
    if not levels:
        text = "starts from the beginning"
    else:
        where = " and ".join(map(str, levels)) if isinstance(levels, list) else str(levels)
        text = f"goes on from step {step}, out of {where}"
    if copied := event.get("from_spares"):
        text += f"; {copied} part{'s' * (copied != 1)} from the memory of spares"
    if rebuilt:
        text += f"; {rebuilt} part{'s' * (rebuilt != 1)} rebuilt"
    if lost:
        text += f"; {lost} step{'s' * (lost != 1)} of saves lost"
    if isinstance(passed_over, list) and passed_over:
        text += f": {passed_over[0]}" + (f" and {len(passed_over) - 1} more" if len(passed_over) > 1 else "")
    return text


def describe_spare_replicas(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for what spares hold of the newest save of which any has something, as far as events tell."""
    steps: dict[int, list[str]] = {}
    attempt = None
    for event in events:
        if event.get("attempt") != attempt:
            steps, attempt = {}, event.get("attempt")
        step, nodes = event.get("step"), event.get("of")
        if (
            event.get("event") == "spare copies"
            and isinstance(step, int)
            and isinstance(nodes, list)
            and nodes
        ):
            steps.setdefault(step, []).append(f"{', '.join(map(str, nodes))} on {event.get('node')}")
    return [f"spares: copies of step {max(steps)}: {'; '.join(steps[max(steps)])}"] if steps else []
