"""What the warnings of an NCCL log mean, and what to do: tables held against its lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from hpcrun.specs.yaml import load_document
from hpcrun.tuning.log.nccl_log import Line, NcclLog
from hpcrun.tuning.log.nccl_messages import Message, Subsystem, Whose, find_message, subsystem_of
from hpcrun.tuning.log.view import in_view

Level = Literal["error", "slow", "follows", "harmless", "unknown"]
LEVELS: tuple[Level, ...] = get_args(Level)
_TABLE = Path(__file__).with_name("nccl_warnings.yaml")
_WARNINGS = ("WARN", "TORCH")
_READ = (*_WARNINGS, "RDMA")
"""Kinds of lines that are read as warnings are; RDMA is what other programs say of the same devices."""
_OF_ROLE: dict[str, Level] = {"cause": "error", "follows": "follows", "harmless": "harmless"}
_DATA = re.compile(
    r"\S*<\d+>|\b0x[0-9a-f]+|(?<![\w.])/[^\s,:'\"]+|[0-9a-fA-F]*(?:(?:::|:)[0-9a-fA-F.]+){3,}|\S*::\S*"
    r"|\d+(?:\.\d+){3}(?::\d+)?"
)
_NUMBER = re.compile(
    r"(?P<kept>(?:status|errors?|errno|failure|failed with|event\D{0,20}|[A-Z_]\()[ =:]*)?\d+"
)


@dataclass(frozen=True)
class Meaning:
    """One entry of the table."""

    id: str
    level: Level
    meaning: str
    remedy: str
    confidence: str
    source: str


@dataclass(frozen=True)
class Diagnosis:
    """A meaning, and the lines that have it."""

    meaning: Meaning
    text: str
    """The first of the lines, without its prefix."""
    line: int
    times: int
    place: str = ""
    """The file of NCCL's source that says it; empty where it is not known."""
    subsystem: Subsystem | None = None
    whose: Whose | None = None

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        evidence = {"place": self.place, "subsystem": self.subsystem, "whose": self.whose}
        return {**vars(self.meaning), "text": self.text, "line": self.line, "times": self.times, **evidence}


@dataclass(frozen=True)
class Diagnoses:
    """All that a log's lines mean, the worst first, and how much of it was understood."""

    found: tuple[Diagnosis, ...]
    understood: int
    """Warnings, of NCCL and of PyTorch."""
    unknown: int

    def as_json(self) -> list[dict[str, object]]:
        """Plain values."""
        return [one.as_json() for one in self.found]


@dataclass(frozen=True)
class Pattern:
    """How lines of a meaning look."""

    meaning: Meaning
    expression: re.Pattern[str] | None
    """On `file: text`; None where only the whole log tells."""
    info: bool


@dataclass(frozen=True)
class _Tables:
    patterns: tuple[Pattern, ...]
    subsystems: dict[str, dict[str, str]]
    whose: dict[str, str]


UNKNOWN = Meaning(
    "unknown",
    "unknown",
    "this warning is not in the table",
    "read it as it stands; NCCL_DEBUG=INFO gives the lines around it",
    "none",
    "",
)


@cache
def _tables() -> _Tables:
    values = load_document(_TABLE).values
    return _Tables(tuple(_pattern(row) for row in values["warnings"]), values["subsystems"], values["whose"])


def _pattern(row: dict[str, Any]) -> Pattern:
    fields = {key: value for key, value in row.items() if key not in ("pattern", "info", "status")}
    text = _completion(row["status"]) if "status" in row else row.get("pattern")
    return Pattern(Meaning(**fields), re.compile(text) if text else None, bool(row.get("info")))


def _completion(statuses: list[str]) -> str:
    """How a failed work request is told: status=4, error 4, IBV_WC_LOC_PROT_ERR(4); the first one counts."""
    numbers, names = zip(*(one.split() for one in statuses), strict=True)
    told = r"(?:status|error)[ =:]*(?:IBV_WC_\w+ ?\(?)?"
    number = rf"^(?:(?!\b{told}\d).)*\b{told}(?:{'|'.join(numbers)})\b(?![.:]\d)"
    about = "(?=.*(?:completion|CQE|vendor|syndrom|wr_id))"
    return rf"(?i){about}(?:{number}|.*IBV_WC_(?:{'|'.join(names)})\b)"


def patterns() -> tuple[Pattern, ...]:
    """The table of meanings, in its order."""
    return _tables().patterns


def meaning_named(name: str) -> Meaning:
    """One entry by its id."""
    return next(one.meaning for one in patterns() if one.meaning.id == name)


def diagnose(log: NcclLog) -> Diagnoses:
    """What the lines tell; a warning that is not in the tables is said to be unknown, with its place."""
    decided = in_view(log)
    alike: dict[tuple[str, str, str], Diagnosis | None] = {}
    found: dict[tuple[str, str], Diagnosis] = {}
    understood = unknown = 0
    for line in log.lines:
        cause = cause_of(line.text)
        # Lines that differ in names and numbers alone are judged once: a log may have a hundred thousand.
        kind = line.kind, line.place, cause
        if kind not in alike:
            alike[kind] = _judge(line)
        one = alike[kind]
        if name := decided.get(line.number):
            one = Diagnosis(meaning_named(name), line.text, line.number, 0, line.place)
        if one is None:
            continue
        if line.kind in _WARNINGS:
            understood += one.meaning.level != "unknown"
            unknown += one.meaning.level == "unknown"
        key = one.meaning.id, "" if line.kind == "TORCH" or one.meaning.level == "harmless" else cause
        before = found.get(key, one)
        found[key] = replace(before, times=before.times + 1)
    order = ("error", "unknown", "slow", "follows", "harmless")
    ranked = sorted(found.values(), key=lambda one: (order.index(one.meaning.level), one.line))
    return Diagnoses(tuple(ranked), understood, unknown)


def explain(text: str, place: str = "", kind: str = "WARN") -> Meaning | None:
    """The entry that one line has by itself; None where it has none of its own."""
    subject = f"{place}: {text}"
    for one in patterns():
        if one.expression and (one.info or kind in _READ) and one.expression.search(subject):
            return one.meaning
    return None


def cause_of(text: str) -> str:
    """A text without what differs from rank to rank: what is left tells two causes of one kind apart."""
    plain = _DATA.sub("#", text)
    plain = _NUMBER.sub(lambda match: match[0] if match["kept"] else "#", plain)
    return " ".join(plain.split())


def _judge(line: Line) -> Diagnosis | None:
    """One line by itself."""
    known = find_message(line.text, line.place) if line.kind in _WARNINGS else None
    meaning = explain(line.text, line.place, line.kind)
    if meaning is None and line.kind in _WARNINGS:
        meaning = meaning_named(known.meaning) if known and known.meaning else _placed(line, known)
    if meaning is None:
        return None
    subsystem = subsystem_of(line.place) or (known.subsystem if known else None)
    return Diagnosis(
        meaning, line.text, line.number, 0, line.place, subsystem, known.whose if known else None
    )


def _placed(line: Line, known: Message | None) -> Meaning:
    """What can be said of a warning without an entry of its own: where it comes from, and where to look."""
    subsystem = known.subsystem if known else subsystem_of(line.place)
    if subsystem is None:
        return UNKNOWN
    words = _tables().subsystems[subsystem]
    if known is None:
        text = f"this warning is not in the table; {line.place} is about {words['what']}"
        return replace(UNKNOWN, meaning=text, remedy=f"look at {words['look']}", confidence="low")
    text = f"{words['what']}: {_tables().whose[known.whose]} is at fault"
    remedy = f"look at {words['look']}"
    return Meaning("placed", _OF_ROLE[known.role], text, remedy, "low", ", ".join(known.files))
