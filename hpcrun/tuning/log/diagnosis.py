"""What the warnings of an NCCL log mean, and what to do: tables held against its lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hpcrun.specs.yaml import load_yaml
from hpcrun.tuning.log.nccl_log import NcclLog, NcclLogLine
from hpcrun.tuning.log.nccl_messages import (
    MessageOwner,
    NcclMessage,
    NcclSubsystem,
    find_nccl_message,
    subsystem_of_source,
)
from hpcrun.tuning.log.view import meanings_in_context

MeaningLevel = Literal["error", "slow", "follows", "harmless", "unknown"]
_TABLE = Path(__file__).with_name("nccl_warnings.yaml")
_WARNINGS = ("WARN", "TORCH")
_READ = (*_WARNINGS, "RDMA")
"""Kinds of lines that are read as warnings are; RDMA is what other programs say of the same devices."""
_OF_ROLE: dict[str, MeaningLevel] = {"cause": "error", "follows": "follows", "harmless": "harmless"}
_DATA = re.compile(
    r"\S*<\d+>|\b0x[0-9a-f]+|(?<![\w.])/[^\s,:'\"]+|[0-9a-fA-F]*(?:(?:::|:)[0-9a-fA-F.]+){3,}|\S*::\S*"
    r"|\d+(?:\.\d+){3}(?::\d+)?"
)
_NUMBER = re.compile(
    r"(?P<kept>(?:status|errors?|errno|failure|failed with|event\D{0,20}|[A-Z_]\()[ =:]*)?\d+"
)


@dataclass(frozen=True)
class LogMeaning:
    """One entry of the table."""

    id: str
    level: MeaningLevel
    meaning: str
    remedy: str
    confidence: str
    source: str


@dataclass(frozen=True)
class LogDiagnosis:
    """A meaning, and the lines that have it."""

    meaning: LogMeaning
    text: str
    """The first of the lines, without its prefix."""
    line: int
    times: int
    place: str = ""
    """The file of NCCL's source that says it; empty where it is not known."""
    subsystem: NcclSubsystem | None = None
    whose: MessageOwner | None = None

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        evidence = {"place": self.place, "subsystem": self.subsystem, "whose": self.whose}
        return {**vars(self.meaning), "text": self.text, "line": self.line, "times": self.times, **evidence}


@dataclass(frozen=True)
class LogDiagnoses:
    """All that a log's lines mean, the worst first, and how much of it was understood."""

    found: tuple[LogDiagnosis, ...]
    understood: int
    """Warnings, of NCCL and of PyTorch."""
    unknown: int

    def as_json(self) -> list[dict[str, object]]:
        """Plain values."""
        return [diagnosis.as_json() for diagnosis in self.found]


@dataclass(frozen=True)
class LogPattern:
    """The pattern of the lines that have a meaning."""

    meaning: LogMeaning
    expression: re.Pattern[str] | None
    """On `file: text`; None where only the whole log tells."""
    info: bool


@dataclass(frozen=True)
class _DiagnosisTables:
    patterns: tuple[LogPattern, ...]
    subsystems: dict[str, dict[str, str]]
    whose: dict[str, str]


UNKNOWN_MEANING = LogMeaning(
    "unknown",
    "unknown",
    "this warning is not in the table",
    "read it as it stands; NCCL_DEBUG=INFO gives the lines around it",
    "none",
    "",
)


@cache
def _tables() -> _DiagnosisTables:
    values = load_yaml(_TABLE).values
    return _DiagnosisTables(
        tuple(_pattern(row) for row in values["warnings"]), values["subsystems"], values["whose"]
    )


def _pattern(row: dict[str, Any]) -> LogPattern:
    fields = {key: value for key, value in row.items() if key not in ("pattern", "info", "status")}
    text = _completion(row["status"]) if "status" in row else row.get("pattern")
    return LogPattern(LogMeaning(**fields), re.compile(text) if text else None, bool(row.get("info")))


def _completion(statuses: list[str]) -> str:
    """The pattern of a failed work request: status=4, error 4, IBV_WC_LOC_PROT_ERR(4); the first counts."""
    numbers, names = zip(*(status.split() for status in statuses), strict=True)
    introduction = r"(?:status|error)[ =:]*(?:IBV_WC_\w+ ?\(?)?"
    number = rf"^(?:(?!\b{introduction}\d).)*\b{introduction}(?:{'|'.join(numbers)})\b(?![.:]\d)"
    about = "(?=.*(?:completion|CQE|vendor|syndrom|wr_id))"
    return rf"(?i){about}(?:{number}|.*IBV_WC_(?:{'|'.join(names)})\b)"


def log_patterns() -> tuple[LogPattern, ...]:
    """The table of meanings, in its order."""
    return _tables().patterns


def find_log_meaning(name: str) -> LogMeaning:
    """One entry by its id."""
    return next(pattern.meaning for pattern in log_patterns() if pattern.meaning.id == name)


def diagnose_nccl_log(log: NcclLog) -> LogDiagnoses:
    """What the lines tell; a warning that is not in the tables is said to be unknown, with its place."""
    decided = meanings_in_context(log)
    alike: dict[tuple[str, str, str], LogDiagnosis | None] = {}
    diagnoses: dict[tuple[str, str], LogDiagnosis] = {}
    understood = unknown = 0
    for line in log.lines:
        cause = normalize_cause(line.text)
        # Lines that differ in names and numbers alone are judged once: a log may have a hundred thousand.
        kind = line.kind, line.place, cause
        if kind not in alike:
            alike[kind] = _diagnose_line(line)
        diagnosis = alike[kind]
        if name := decided.get(line.number):
            diagnosis = LogDiagnosis(find_log_meaning(name), line.text, line.number, 0, line.place)
        if diagnosis is None:
            continue
        if line.kind in _WARNINGS:
            understood += diagnosis.meaning.level != "unknown"
            unknown += diagnosis.meaning.level == "unknown"
        key = (
            diagnosis.meaning.id,
            "" if line.kind == "TORCH" or diagnosis.meaning.level == "harmless" else cause,
        )
        before = diagnoses.get(key, diagnosis)
        diagnoses[key] = replace(before, times=before.times + 1)
    order = ("error", "unknown", "slow", "follows", "harmless")
    ranked = sorted(
        diagnoses.values(), key=lambda diagnosis: (order.index(diagnosis.meaning.level), diagnosis.line)
    )
    return LogDiagnoses(tuple(ranked), understood, unknown)


def explain_log_line(text: str, place: str = "", kind: str = "WARN") -> LogMeaning | None:
    """The entry that one line has by itself; None where it has none of its own."""
    subject = f"{place}: {text}"
    for pattern in log_patterns():
        if pattern.expression and (pattern.info or kind in _READ) and pattern.expression.search(subject):
            return pattern.meaning
    return None


def normalize_cause(text: str) -> str:
    """A text without what differs from rank to rank: what is left tells two causes of one kind apart."""
    plain = _DATA.sub("#", text)
    plain = _NUMBER.sub(lambda match: match[0] if match["kept"] else "#", plain)
    return " ".join(plain.split())


def _diagnose_line(line: NcclLogLine) -> LogDiagnosis | None:
    """Diagnose one line by itself."""
    message = find_nccl_message(line.text, line.place) if line.kind in _WARNINGS else None
    meaning = explain_log_line(line.text, line.place, line.kind)
    if meaning is None and line.kind in _WARNINGS:
        meaning = (
            find_log_meaning(message.meaning)
            if message and message.meaning
            else _meaning_by_place(line, message)
        )
    if meaning is None:
        return None
    subsystem = subsystem_of_source(line.place) or (message.subsystem if message else None)
    return LogDiagnosis(
        meaning, line.text, line.number, 0, line.place, subsystem, message.whose if message else None
    )


def _meaning_by_place(line: NcclLogLine, message: NcclMessage | None) -> LogMeaning:
    """What can be said of a warning without an entry of its own: where it comes from, and where to look."""
    subsystem = message.subsystem if message else subsystem_of_source(line.place)
    if subsystem is None:
        return UNKNOWN_MEANING
    words = _tables().subsystems[subsystem]
    if message is None:
        text = f"this warning is not in the table; {line.place} is about {words['what']}"
        return replace(UNKNOWN_MEANING, meaning=text, remedy=f"look at {words['look']}", confidence="low")
    text = f"{words['what']}: {_tables().whose[message.whose]} is at fault"
    remedy = f"look at {words['look']}"
    return LogMeaning("placed", _OF_ROLE[message.role], text, remedy, "low", ", ".join(message.files))
