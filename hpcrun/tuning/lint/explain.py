"""All that is known of one variable: what it does, whether this NCCL reads it, who set it, what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.finding import Finding
from hpcrun.tuning.lint.environment import PrecedenceChain, printable_value
from hpcrun.tuning.lint.lint import LintReport, chain_as_json
from hpcrun.tuning.lint.traffic_classes import CLASS_VARIABLES, decode_traffic_class
from hpcrun.tuning.registry.registry import (
    FIRST_VERSION,
    CommVariable,
    ValueHistory,
    Version,
    format_version,
    value_in_release,
    variable_registry,
)
from hpcrun.tuning.registry.values import parse_c_integer
from hpcrun.tuning.variable_findings import quote_value

_KINDS = {
    "system": "a fact of the site: belongs into its profile",
    "job": "per job",
    "tuning": "for tuning experiments: keep it with a measured gain alone",
    "debug": "for debugging: take it out afterwards",
    "leave": "leave it alone",
    "undocumented": "undocumented: leave it alone",
}
_RANKS = {
    "same": "equal on all ranks",
    "node": "may differ between nodes, not within one",
    "rank": "may differ between ranks",
}
_SOURCES = {
    "docs": "NVIDIA's NCCL user guide",
    "source": "NCCL's source, by release",
    "library": "the library itself",
}
_WIDTH = 9
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class VariableExplanation:
    """What is known of a name; `variable` is None for one that is not a variable."""

    name: str
    variable: CommVariable | None
    version: Version | None
    chain: PrecedenceChain | None
    findings: tuple[Finding, ...]

    @property
    def is_read(self) -> bool | None:
        """Whether the NCCL in use reads it; None where that is not known."""
        if self.variable is None or self.variable.owner != "nccl":
            return False
        if self.version is None:
            return None
        if self.variable.kind == "undocumented" and self.version != variable_registry().library:
            return None
        return not self.variable.absence(self.version)

    @property
    def value(self) -> str | None:
        """What counts now; None where nothing does."""
        winner = self.chain.winner if self.chain else None
        return printable_value(winner) if winner else None

    def lines(self) -> Iterator[str]:
        """As text."""
        yield self.name
        if self.variable is not None:
            yield from self._known(self.variable)
        else:
            yield _format_line("what", describe_non_variable(self.name))
        for setting, fate in self.chain.steps if self.chain else ():
            value = printable_value(setting)
            shown = "(computed)" if value is None else value if value.isprintable() else ascii(value)
            yield _format_line("set", f"{setting.where}: {shown}: {fate}")
        if self.chain is None:
            yield _format_line("set", "nowhere that was looked at")
        for finding in self.findings:
            yield _format_line(finding.severity, finding.message)

    def _known(self, variable: CommVariable) -> Iterator[str]:
        owner = "" if variable.owner == "nccl" else f"of {variable.owner}; "
        yield _format_line("what", variable.effect)
        if variable.danger:
            yield _format_line("risk", variable.danger)
        yield _format_line("kind", f"{owner}{_KINDS[variable.kind]}; {_RANKS[variable.ranks]}")
        yield _format_line("read", self._reading(variable))
        yield _format_line("values", _format_history(variable.values))
        if variable.default:
            yield _format_line("default", _default(variable, self.version))
        figure = parse_c_integer(self.value or "")
        if variable.name in CLASS_VARIABLES and figure is not None and 0 <= figure <= 255:
            yield _format_line("value", str(decode_traffic_class(figure)))
        if variable.instead:
            yield _format_line("instead", variable.instead)
        yield _format_line("source", _SOURCES.get(variable.source, variable.source))

    def _reading(self, variable: CommVariable) -> str:
        if variable.owner != "nccl":
            return f"by {variable.owner}, not by NCCL"
        span = f"from {format_version(variable.since)} on" if variable.since else ""
        if variable.kind == "undocumented":
            span = f"by {format_version(variable_registry().library)}; other releases are not known"
        if variable.after:
            span = f"not yet by {format_version(variable.after)}; its documentation names it"
        if variable.removed:
            span += f"{', ' if span else ''}no longer from {format_version(variable.removed)} on"
        if variable.deprecated:
            span += f"{', ' if span else ''}deprecated since {format_version(variable.deprecated)}"
        if self.version is None:
            return f"{span or 'in all releases that we know'} (which NCCL is used here is not known)"
        release = format_version(self.version)
        verdict = {
            True: f"yes, by {release}",
            False: f"no, not by {release}",
            None: f"not known for {release}",
        }
        return f"{verdict[self.is_read]}{f' ({span})' if span else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        variable = self.variable
        return {
            "name": self.name,
            "is_known": variable is not None,
            "what": variable.effect if variable else describe_non_variable(self.name),
            "owner": variable.owner if variable else None,
            "kind": variable.kind if variable else None,
            "ranks": variable.ranks if variable else None,
            "risk": variable.danger if variable else "",
            "is_read": self.is_read,
            "since": _release_text(variable.since if variable else None),
            "removed": _release_text(variable.removed if variable else None),
            "deprecated": _release_text(variable.deprecated if variable else None),
            "values": {format_version(v): rule for v, rule in variable.values} if variable else {},
            "default": value_in_release(variable.default, self.version) if variable else None,
            "default_history": {format_version(v): value for v, value in variable.default}
            if variable
            else {},
            "instead": variable.instead if variable else "",
            "source": variable.source if variable else "",
            "setting": chain_as_json(self.chain) if self.chain else None,
            "findings": [finding.as_json() for finding in self.findings],
        }


def explain_variable(name: str, report: LintReport, version: Version | None) -> VariableExplanation:
    """What is known of a name, also without its NCCL_ and in small letters; UsageError where it is none."""
    variables = variable_registry().variables
    if not _NAME.fullmatch(name):
        text = f"{quote_value(name)} is not a name of a variable; write letters, digits and _, as NCCL_IB_TC"
        raise UsageError(text)
    for guess in (name, name.upper(), f"NCCL_{name.upper()}"):
        if (
            guess in variables
            or guess in variable_registry().lookalikes
            or guess in variable_registry().symbols
        ):
            name = guess
            break
    findings = tuple(finding for finding in report.findings if finding.subject == name)
    return VariableExplanation(name, variables.get(name), version, report.chains.get(name), findings)


def describe_non_variable(name: str) -> str:
    """In a sentence, what a name is that is not a variable."""
    impostor = variable_registry().lookalike(name)
    if impostor is not None:
        reader = f"read by {impostor.reader}" if impostor.reader else "not read by anything we know"
        instead = f"; use {impostor.instead}" if impostor.instead else ""
        return f"no variable of NCCL; {reader}{instead}{f'; {impostor.text}' if impostor.text else ''}"
    if name in variable_registry().symbols:
        return f"no variable: {variable_registry().symbols[name]}"
    close = variable_registry().nearest(name)
    library = format_version(variable_registry().library)
    return f"not known up to NCCL {library}{f'; did you mean {close}?' if close else ''}"


def _release_text(version: Version | None) -> str | None:
    return format_version(version) if version else None


def _format_line(key: str, text: str) -> str:
    return f"  {key:{_WIDTH}} {text}"


def _format_history(history: ValueHistory) -> str:
    parts = [
        value if version == FIRST_VERSION else f"{value} from {format_version(version)} on"
        for version, value in history
    ]
    return "; ".join(parts) or "not known"


def _default(variable: CommVariable, version: Version | None) -> str:
    now = value_in_release(variable.default, version)
    if version is None or len(variable.default) == 1:
        return _format_history(variable.default)
    return f"{now or 'not known'} in {format_version(version)} ({_format_history(variable.default)})"
