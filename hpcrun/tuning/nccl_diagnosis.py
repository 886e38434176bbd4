"""What the warnings of an NCCL log mean, and what to do: a table held against its lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from hpcrun.specs.yaml import load_document
from hpcrun.tuning.nccl_log import Line

Level = Literal["error", "slow", "follows", "harmless", "unknown"]
LEVELS: tuple[Level, ...] = get_args(Level)
_TABLE = Path(__file__).with_name("nccl_warnings.yaml")


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

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {**vars(self.meaning), "text": self.text, "line": self.line, "times": self.times}


UNKNOWN = Meaning(
    "unknown",
    "unknown",
    "this warning is not in the table",
    "read it as it stands; NCCL_DEBUG=INFO gives the lines around it",
    "none",
    "",
)


@cache
def meanings() -> tuple[tuple[re.Pattern[str], Meaning], ...]:
    """The table, in its order."""
    rows = load_document(_TABLE).values["warnings"]
    return tuple(
        (re.compile(row["pattern"]), Meaning(**{k: v for k, v in row.items() if k != "pattern"}))
        for row in rows
    )


def diagnose(lines: Iterable[Line]) -> list[Diagnosis]:
    """What the lines tell, the worst first; a warning that is not in the table is said to be unknown."""
    found: dict[tuple[str, str], Diagnosis] = {}
    for line in lines:
        meaning = next((one for pattern, one in meanings() if pattern.search(line.text)), None)
        if meaning is None:
            if line.kind != "WARN":
                continue
            meaning = UNKNOWN
        key = meaning.id, line.text if meaning is UNKNOWN else ""
        before = found.get(key)
        first = before or Diagnosis(meaning, line.text, line.number, 0)
        found[key] = Diagnosis(meaning, first.text, first.line, first.times + 1)
    order = ("error", "unknown", "slow", "follows", "harmless")
    return sorted(found.values(), key=lambda one: (order.index(one.meaning.level), one.line))
