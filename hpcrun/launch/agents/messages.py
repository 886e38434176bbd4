"""What a supervisor and its agents may say to each other, as data: anything else ends that connection.

Both have proved that they are of the run. A message that makes no sense all the same, of a version that is
not ours or of memory gone bad, must not take down more than the connection that it came over.
"""

from __future__ import annotations

import math
from typing import Any

MessageShape = Any
"""A type; None; a tuple of shapes, one of which fits; a list or a dict whose values all have one shape."""

_TEXTS: MessageShape = [str]
_MAYBE_COUNT: MessageShape = (int, None)
_NUMBER: MessageShape = (int, float)

_STAMP = {"generation": str, "step": int, "position": int, "world_size": int, "attempt": int}
WORKER_MESSAGE_FIELDS: dict[str, MessageShape] = {
    **_STAMP,
    "kind": str,
    "id": int,
    "stamp": dict,
    "level": str,
    "why": (str, None),
    "problem": (str, None),
    "text": str,
    "address": (str, None),
    "port": (int, None),
    "size_bytes": int,
    "seconds": _NUMBER,
    "holdings": [dict],
    "more": bool,
    "nodes": _TEXTS,
    "no_room": _TEXTS,
    "problems": {str: str},
    "status": _MAYBE_COUNT,
}
"""What the checkpoint worker of a node tells, whatever it tells of; there may be more."""

_ATTEMPT = {"attempt": int}
AGENT_MESSAGES: dict[str, dict[str, MessageShape]] = {
    "beat": {},
    "hello": {"node": str, "pid": int, "address": _TEXTS, "called": bool, "inside": (dict, None)},
    "left": {},
    "watching": _ATTEMPT,
    "preflight": {**_ATTEMPT, "time": _NUMBER, "seconds": _NUMBER, "checks": [dict]},
    "dumped": {**_ATTEMPT, "ranks": {str: {str: str}}},
    "meeting": {
        **_ATTEMPT,
        "address": str,
        "interface": str,
        "port": int,
        "notes": _TEXTS,
        "warning": str,
        "problem": str,
    },
    "trial listen": {**_ATTEMPT, "place": ([(str, int)], None)},
    "trial try": {**_ATTEMPT, "failed": {str: str}},
    "trial end": {**_ATTEMPT, "failed": {str: str}},
    "cleared": {"attempt": _MAYBE_COUNT, "stuck": [int]},
    "drain": {"node": str, "told": dict},
    "up": {**_ATTEMPT, "rank": int, "node": str, "pid": int},
    "met": {**_ATTEMPT, "rank": int},
    "ended": {
        "attempt": _MAYBE_COUNT,
        "rank": int,
        "node": str,
        "pid": _MAYBE_COUNT,
        "wait_status": _MAYBE_COUNT,
        "time": _NUMBER,
        "ahead_s": _NUMBER,
    },
    "stopped": {**_ATTEMPT, "rank": int, "node": str, "is_stopped": bool},
    "progress": {
        **_ATTEMPT,
        "rank": int,
        "node": str,
        "section": str,
        "step": _MAYBE_COUNT,
        "longest_s": {str: _NUMBER},
        "probes_s": [_NUMBER],
    },
}
"""What an agent says, by its kind."""

_ANY_ATTEMPT = {"attempt": _MAYBE_COUNT}
AGENT_ORDERS: dict[str, dict[str, MessageShape]] = {
    "beat": {},
    "leave": {},
    "warm": _ATTEMPT,
    "preflight": {
        **_ATTEMPT,
        "checks": _TEXTS,
        "scratch": _TEXTS,
        "interface": (str, None),
        "hcas": _TEXTS,
        "hcas_of": {str: _TEXTS},
        "gpus": int,
        "xids": {str: str},
        "programs": _TEXTS,
        "program_s": _NUMBER,
    },
    "meeting": {
        **_ATTEMPT,
        "nodes": _TEXTS,
        "interface": (str, None),
        "suffix": str,
        "seed": int,
        "wants_port": bool,
    },
    "trial": {**_ATTEMPT, "step": str},
    "watch": {**_ATTEMPT, "ranks": [int], "hears": str},
    "start": {**_ANY_ATTEMPT, "argv": _TEXTS, "log": str},
    "signal": {**_ANY_ATTEMPT, "number": int, "rank": _MAYBE_COUNT},
    "dump": {**_ANY_ATTEMPT, "timeout_s": _NUMBER},
    "kill": _ANY_ATTEMPT,
    "clear": {**_ANY_ATTEMPT, "spared": [int]},
    "drain": {"told": dict},
}
"""What a supervisor orders, by its verb."""


def check_agent_message(message: dict[str, Any]) -> str:
    """What is wrong with what an agent has said; empty where nothing is."""
    problem = _check_message(message, "kind", AGENT_MESSAGES)
    if problem or message["kind"] != "drain":
        return problem
    told: dict[str, Any] = message["told"]
    wrong = [
        name
        for name, value in told.items()
        if name in WORKER_MESSAGE_FIELDS and not _has_shape(value, WORKER_MESSAGE_FIELDS[name])
    ]
    stamp = told.get("stamp", {})
    if type(stamp) is dict:
        wrong += [
            name for name, value in stamp.items() if name in _STAMP and not _has_shape(value, _STAMP[name])
        ]
    return f"its checkpoint worker's {told.get('kind')} has a wrong {wrong[0]}" if wrong else ""


def check_agent_order(message: dict[str, Any]) -> str:
    """What is wrong with an order; empty where nothing is."""
    return _check_message(message, "do", AGENT_ORDERS)


def _check_message(message: dict[str, Any], by: str, known: dict[str, dict[str, MessageShape]]) -> str:
    kind = message.get(by)
    shape = known.get(kind) if type(kind) is str else None
    if shape is None:
        return f"what came is none of {', '.join(known)}"
    values = {name: value for name, value in message.items() if name != by}
    if kind == "trial":
        # Only one of its steps has them.
        shape = {**shape, **({"places": {str: [(str, int)]}} if values.get("step") == "try" else {})}
    if values.keys() != shape.keys():
        return f"{kind} has {', '.join(values) or 'nothing'} where {', '.join(shape) or 'nothing'} belongs"
    wrong = [name for name, value in values.items() if not _has_shape(value, shape[name])]
    return f"{kind} has a wrong {wrong[0]}" if wrong else ""


def _has_shape(value: Any, shape: MessageShape) -> bool:
    if shape is None:
        return value is None
    if isinstance(shape, tuple):
        return any(_has_shape(value, one) for one in shape)
    if isinstance(shape, list):
        return type(value) is list and all(_has_shape(one, shape[0]) for one in value)
    if isinstance(shape, dict):
        ((_, inner),) = shape.items()
        return type(value) is dict and all(_has_shape(one, inner) for one in value.values())
    # Not isinstance: true is no number here, nor is what no C integer holds, nor infinity.
    if type(value) is not shape:
        return False
    return -(1 << 63) <= value < 1 << 63 if shape is int else shape is not float or math.isfinite(value)
