"""A finding: what is wrong or worth knowing, where, how sure that is, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpcrun.errors import UsageError

FindingLevel = Literal["fault", "warning", "note", "unknown"]
FindingConfidence = Literal["high", "medium", "low"]
FINDING_LEVELS: tuple[FindingLevel, ...] = ("fault", "warning", "note", "unknown")
"""Worst first; `unknown` is what could not be looked at."""


@dataclass(frozen=True)
class Finding:
    """One of them; prints, dumps to JSON and reads back."""

    level: FindingLevel
    check: str
    """What was looked at, such as pci, gid, limits."""
    subject: str
    """The thing itself: a port, an interface, a node."""
    text: str
    remedy: str = ""
    confidence: FindingConfidence = "high"

    def __str__(self) -> str:
        sure = "" if self.confidence == "high" else f" ({self.confidence} confidence)"
        return f"{self.subject}: {self.text}{sure}" + (f"; {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


def parse_finding(values: Mapping[str, Any]) -> Finding:
    """A finding from as_json's values; UsageError for anything else."""
    try:
        found = Finding(**{str(key): str(value) for key, value in values.items()})  # type: ignore[arg-type]
    except (TypeError, AttributeError):
        raise UsageError(f"{values!r}: is no finding") from None
    if found.level not in FINDING_LEVELS:
        raise UsageError(f"{found.level!r}: is no level of a finding; there are {', '.join(FINDING_LEVELS)}")
    return found


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """In the order of their level, those of one level as they came."""
    return tuple(sorted(findings, key=lambda one: FINDING_LEVELS.index(one.level)))
