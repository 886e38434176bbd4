"""What is told of levels of checkpoints, in words, for the story of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVENTS = ("restore", "checkpoint", "erasure sets", "undurable", "drain died", "poison")


def in_words(name: str, event: Mapping[str, Any]) -> str:
    """One of these events; empty for what is not worth a line."""
    step, generation = event.get("step"), event.get("generation")
    match name:
        case "restore":
            return _restore(event)
        case "checkpoint":
            level, problem = event.get("level"), event.get("problem")
            # One a level and save: only the run directory's is news, and what went wrong.
            if problem:
                return f"step {step} is not stored ({level}): {problem}"
            return f"step {step} is in the run directory" if level == "durable" else ""
        case "drain died":
            return f"the drain worker on {event.get('node')} died; another one is started"
        case "poison":
            count = event.get("count")
            times = "once" if count == 1 else f"{count} times"
            return f"what went on from step {step} (generation {generation}) has failed {times}"
    return str(event.get("message") or name).replace("\n", "; ")


def _restore(event: Mapping[str, Any]) -> str:
    step, levels, rebuilt = event.get("step"), event.get("levels"), event.get("rebuilt")
    lost, passed_over = event.get("lost_steps"), event.get("passed_over")
    if not levels:
        text = "starts from the beginning"
    else:
        where = " and ".join(map(str, levels)) if isinstance(levels, list) else str(levels)
        text = f"goes on from step {step}, out of {where}"
    if rebuilt:
        text += f"; {rebuilt} part{'s' * (rebuilt != 1)} rebuilt"
    if lost:
        text += f"; {lost} step{'s' * (lost != 1)} of saves lost"
    if isinstance(passed_over, list) and passed_over:
        text += f": {passed_over[0]}" + (f" and {len(passed_over) - 1} more" if len(passed_over) > 1 else "")
    return text
