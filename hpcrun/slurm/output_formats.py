"""The shapes in which Slurm prints: Key=Value records, tables under a header, JSON of any data_parser."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

SlurmFields = Mapping[str, str]

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9/:_]*)=")
_PATHS = {"Command", "SubmitLine", "WorkDir", "StdErr", "StdIn", "StdOut"}
_COMMENTS = {"Comment", "AdminComment", "SystemComment", "Extra"}
_TO_THE_END = {"JobId": {"JobName", *_PATHS, *_COMMENTS}, "NodeName": {"Reason", *_COMMENTS}}
"""Whose values may hold anything, and stand last on their line."""
_NOTHING = {"(null)", "n/a", "none", "unknown", "none assigned", "null", "n/s"}

_TIME = r"(?:[0-9]+-)?[0-9]+(?::[0-9]+)+|UNLIMITED|infinite|INVALID|NOT_SET|Partition_Limit"
_STAMP = r"\d{4}-\d\d-\d\dT\S+|N/A|Unknown"
_COLUMN = {
    "NAME": r".*?",
    "REASON": r".*?",
    "TIME": _TIME,
    "TIMELIMIT": _TIME,
    "TIME_LIMI": _TIME,
    "START_TIME": _STAMP,
    "TIMESTAMP": _STAMP,
    "NODES": r"\d\S*",
}
"""The columns whose text may hold blanks, and those whose look tells where such a text ends."""


def text_or_empty(text: str) -> str:
    """The text, empty where it is one of Slurm's words for nothing."""
    text = text.strip()
    return "" if text.lower() in _NOTHING else text


def leading_integer(text: str) -> int | None:
    """The number at the beginning, as in `64000+` and `1-1`; None where there is none."""
    match = re.match(r"\s*([0-9]{1,18})(?![\d.])", text)
    return int(match[1]) if match else None


def parse_key_value_records(text: str, key: str) -> list[dict[str, str]]:
    """scontrol's records, each from a line that begins with `key=` over its indented lines.

    The first mention of a field counts: what a job name or a reason holds cannot set another field, as long
    as jobs are asked for without `-o`. Lines outside records, such as errors, are left out.
    """
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith(f"{key}="):
            found.append({})
        elif not line[:1].isspace() or not found:
            continue
        for name, value in _fields(line, _TO_THE_END.get(key, set())):
            found[-1].setdefault(name, value)
    return found


def _fields(line: str, to_the_end: set[str]) -> list[tuple[str, str]]:
    fields: list[tuple[str, str]] = []
    keys = list(_KEY.finditer(line))
    for here, following in itertools.zip_longest(keys, keys[1:]):
        if here[1] in to_the_end:
            return [*fields, (here[1], line[here.end() :].strip())]
        fields.append((here[1], line[here.end() : following.start() if following else None].strip()))
    return fields


def parse_slurm_table(text: str, first: str) -> list[dict[str, str]]:
    """The rows under a header that begins with the column `first`; what looks like no row is left out."""
    rows: list[dict[str, str]] = []
    columns: list[str] = []
    pattern = re.compile("")
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [first]:
            columns = words
            shapes = [_COLUMN.get(word, r"\S+") for word in words[:-1]]
            pattern = re.compile(r"\s*" + "".join(rf"({shape})\s+" for shape in shapes) + r"(.*)")
        elif columns and (match := pattern.fullmatch(line.rstrip())):
            rows.append(dict(zip(columns, match.groups(), strict=True)))
    return rows


def parse_json_objects(text: str, *keys: str) -> list[dict[str, Any]]:
    """The objects listed under the first of these keys that is there; empty for text that is no such JSON."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return []
    lists = (nested_value(document, key) for key in keys)
    listed = next((items for items in lists if isinstance(items, list)), [])
    return [item for item in listed if isinstance(item, dict)]


def nested_value(value: Any, *keys: str) -> Any:
    """What stands below these keys, None where the way breaks off."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def json_number(value: Any) -> float | None:
    """A JSON number in either shape, plain or {set, infinite, number}; None where it is not set."""
    if isinstance(value, dict):
        if value.get("infinite") is True:
            return float("inf")
        value = value.get("number") if value.get("set") is not False else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def json_string(value: Any) -> str:
    """A JSON text, empty for anything else."""
    return value if isinstance(value, str) else ""
