"""Findings as every verb prints them."""

from __future__ import annotations

from collections.abc import Iterable

from hpcrun.cli.terminal import escape_to_one_line
from hpcrun.finding import Finding


def print_findings(findings: Iterable[Finding], otherwise: str = "", *, width: int = 7) -> None:
    """One line a finding: severity, the check where it is not the subject's own, place and message."""
    lines = [
        f"{finding.severity:{width}}  {'' if finding.check == 'variable' else finding.check + '  '}{finding}"
        for finding in findings
    ]
    for line in lines or filter(None, [otherwise]):
        print(escape_to_one_line(line))
