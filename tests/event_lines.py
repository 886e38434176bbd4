"""Lines of events.jsonl for tests: whole, also where a test is about a few fields alone."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hpcrun.specs.events.log import EVENT_CLASSES


def event_line(event: str, time: float, attempt: int = 1, **values: Any) -> dict[str, Any]:
    """An event as its line says it; fields that are not given are empty, 0, or null where that may be."""
    line = {"time": time, "monotonic": time, "attempt": attempt, "host": "n01", "event": event}
    cls = EVENT_CLASSES.get(event)
    if cls is not None:
        hints = get_type_hints(cls)
        for one in fields(cls):  # type: ignore[arg-type]
            if one.default is MISSING:
                line[one.name] = _empty(hints[one.name])
    if event == "fault":
        line["kind"] = "unknown"
    return line | values


def _empty(hint: Any) -> Any:
    if type(None) in get_args(hint):
        return None
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    return {int: 0, float: 0.0, str: "", bool: False, tuple: []}.get(get_origin(hint) or hint, {})
