"""The shapes in which Slurm prints: Key=Value records, and values nested in JSON or YAML."""

from __future__ import annotations

import itertools
import re
from typing import Any

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9/:_]*)=")
_PATHS = {"Command", "SubmitLine", "WorkDir", "StdErr", "StdIn", "StdOut"}
_COMMENTS = {"Comment", "AdminComment", "SystemComment", "Extra"}
_TO_THE_END = {"JobId": {"JobName", *_PATHS, *_COMMENTS}, "NodeName": {"Reason", *_COMMENTS}}
"""Fields whose values may contain anything; they are last on their line."""
_NOTHING = {"(null)", "n/a", "none", "unknown", "none assigned", "null", "n/s"}


def text_or_empty(text: str) -> str:
    """The text, empty where it is one of Slurm's words for nothing."""
    text = text.strip()
    return "" if text.lower() in _NOTHING else text


def leading_integer(text: str) -> int | None:
    """The number at the beginning, as in `64000+` and `1-1`; None where there is none."""
    match = re.match(r"\s*([0-9]{1,18})(?![\d.])", text)
    return int(match[1]) if match else None


def parse_key_value_records(text: str, key: str) -> list[dict[str, str]]:
    """Parse scontrol's records, each from a line that begins with `key=` and the indented lines below it.

    The first mention of a field counts: the text of a job name or a reason cannot set another field, as long
    as jobs are queried without `-o`. Lines outside records, such as errors, are ignored.
    """
    records: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith(f"{key}="):
            records.append({})
        elif not line[:1].isspace() or not records:
            continue
        for name, value in _fields(line, _TO_THE_END.get(key, set())):
            records[-1].setdefault(name, value)
    return records


def _fields(line: str, to_the_end: set[str]) -> list[tuple[str, str]]:
    fields: list[tuple[str, str]] = []
    keys = list(_KEY.finditer(line))
    for here, following in itertools.zip_longest(keys, keys[1:]):
        if here[1] in to_the_end:
            return [*fields, (here[1], line[here.end() :].strip())]
        fields.append((here[1], line[here.end() : following.start() if following else None].strip()))
    return fields


def nested_value(value: Any, *keys: str) -> Any:
    """Return the value below these keys; None if one of them is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def json_string(value: Any) -> str:
    """A JSON text, empty for anything else."""
    return value if isinstance(value, str) else ""
