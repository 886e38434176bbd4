"""A finding: something wrong or worth knowing that a check reports, with its place and its remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "note", "unknown"]
Confidence = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Worst first; `unknown`: the check could not be made."""


@dataclass(frozen=True)
class Finding:
    """One finding; hpcrun.typed_json reads back what as_json writes."""

    severity: Severity
    check: str
    """The check that reports it, such as pci, gid, limits; `variable` for lint."""
    subject: str
    """What it is about: a port, a node, a variable, a key of the job; empty: the text says it."""
    text: str
    remedy: str = ""
    confidence: Confidence = "high"
    where: str = ""
    """File and line, or another source."""
    proposal: str | None = None
    """The value that the remedy of a variable amounts to."""
    is_shared: bool = False
    """Whether it is about something that all nodes share, such as the run directory."""

    @property
    def message(self) -> str:
        """The text and the remedy, without the place."""
        confidence = "" if self.confidence == "high" else f" ({self.confidence} confidence)"
        return f"{self.text}{confidence}" + (f"; {self.remedy}" if self.remedy else "")

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.where, self.subject)))
        return f"{place}: {self.message}" if place else self.message

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once, worst first; findings of one severity keep their order."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))


def count_severities(findings: Iterable[Finding]) -> Counter[Severity]:
    """How many findings there are of each severity."""
    return Counter(finding.severity for finding in findings)
