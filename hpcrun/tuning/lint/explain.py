"""All that is known of one variable: what it does, whether this NCCL reads it, who set it, what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.tuning.issue import Complaint, show
from hpcrun.tuning.lint.environment import Chain, printable
from hpcrun.tuning.lint.lint import Report, chain_json
from hpcrun.tuning.lint.traffic_classes import TRAFFIC, decode
from hpcrun.tuning.registry.registry import FIRST, History, Variable, Version, at, registry, show_version
from hpcrun.tuning.registry.values import number

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
class Explanation:
    """What is known of a name; `variable` is None for one that is no variable."""

    name: str
    variable: Variable | None
    version: Version | None
    chain: Chain | None
    findings: tuple[Complaint, ...]

    @property
    def is_read(self) -> bool | None:
        """Whether the NCCL in use reads it; None where that is not known."""
        if self.variable is None or self.variable.owner != "nccl":
            return False
        if self.version is None:
            return None
        if self.variable.kind == "undocumented" and self.version != registry().library:
            return None
        return not self.variable.absence(self.version)

    @property
    def value(self) -> str | None:
        """What counts now; None where nothing does."""
        winner = self.chain.winner if self.chain else None
        return printable(winner) if winner else None

    def lines(self) -> Iterator[str]:
        """As text."""
        yield self.name
        if self.variable is not None:
            yield from self._known(self.variable)
        else:
            yield _line("what", what_is(self.name))
        for setting, fate in self.chain.steps if self.chain else ():
            value = printable(setting)
            shown = "(computed)" if value is None else value if value.isprintable() else ascii(value)
            yield _line("set", f"{setting.where}: {shown}: {fate}")
        if self.chain is None:
            yield _line("set", "nowhere that was looked at")
        for one in self.findings:
            yield _line(one.level, one.text)

    def _known(self, known: Variable) -> Iterator[str]:
        owner = "" if known.owner == "nccl" else f"of {known.owner}; "
        yield _line("what", known.effect)
        if known.danger:
            yield _line("risk", known.danger)
        yield _line("kind", f"{owner}{_KINDS[known.kind]}; {_RANKS[known.ranks]}")
        yield _line("read", self._reading(known))
        yield _line("values", _history(known.values))
        if known.default:
            yield _line("default", _default(known, self.version))
        figure = number(self.value or "")
        if known.name in TRAFFIC and figure is not None and 0 <= figure <= 255:
            yield _line("value", str(decode(figure)))
        if known.instead:
            yield _line("instead", known.instead)
        yield _line("source", _SOURCES.get(known.source, known.source))

    def _reading(self, known: Variable) -> str:
        if known.owner != "nccl":
            return f"by {known.owner}, not by NCCL"
        span = f"from {show_version(known.since)} on" if known.since else ""
        if known.kind == "undocumented":
            span = f"by {show_version(registry().library)}; other releases are not known"
        if known.after:
            span = f"not yet by {show_version(known.after)}; its documentation names it"
        if known.removed:
            span += f"{', ' if span else ''}no longer from {show_version(known.removed)} on"
        if known.deprecated:
            span += f"{', ' if span else ''}deprecated since {show_version(known.deprecated)}"
        if self.version is None:
            return f"{span or 'in all releases that we know'} (which NCCL is used here is not known)"
        release = show_version(self.version)
        verdict = {
            True: f"yes, by {release}",
            False: f"no, not by {release}",
            None: f"not known for {release}",
        }
        return f"{verdict[self.is_read]}{f' ({span})' if span else ''}"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        known = self.variable
        return {
            "name": self.name,
            "is_known": known is not None,
            "what": known.effect if known else what_is(self.name),
            "owner": known.owner if known else None,
            "kind": known.kind if known else None,
            "ranks": known.ranks if known else None,
            "risk": known.danger if known else "",
            "is_read": self.is_read,
            "since": _release(known.since if known else None),
            "removed": _release(known.removed if known else None),
            "deprecated": _release(known.deprecated if known else None),
            "values": {show_version(v): rule for v, rule in known.values} if known else {},
            "default": at(known.default, self.version) if known else None,
            "default_history": {show_version(v): value for v, value in known.default} if known else {},
            "instead": known.instead if known else "",
            "source": known.source if known else "",
            "setting": chain_json(self.chain) if self.chain else None,
            "findings": [one.as_json() for one in self.findings],
        }


def explain(name: str, report: Report, version: Version | None) -> Explanation:
    """What is known of a name, also without its NCCL_ and in small letters; UsageError where it is none."""
    known = registry().variables
    if not _NAME.fullmatch(name):
        raise UsageError(f"{show(name)} is no name of a variable; write letters, digits and _, as NCCL_IB_TC")
    for guess in (name, name.upper(), f"NCCL_{name.upper()}"):
        if guess in known or guess in registry().lookalikes or guess in registry().symbols:
            name = guess
            break
    findings = tuple(one for one in report.findings if one.name == name)
    return Explanation(name, known.get(name), version, report.chains.get(name), findings)


def what_is(name: str) -> str:
    """In a sentence, what a name is that is no variable."""
    impostor = registry().lookalike(name)
    if impostor is not None:
        reader = f"read by {impostor.reader}" if impostor.reader else "read by nobody that we know"
        instead = f"; use {impostor.instead}" if impostor.instead else ""
        return f"no variable of NCCL; {reader}{instead}{f'; {impostor.text}' if impostor.text else ''}"
    if name in registry().symbols:
        return f"no variable: {registry().symbols[name]}"
    close = registry().nearest(name)
    library = show_version(registry().library)
    return f"not known up to NCCL {library}{f'; did you mean {close}?' if close else ''}"


def _release(version: Version | None) -> str | None:
    return show_version(version) if version else None


def _line(key: str, text: str) -> str:
    return f"  {key:{_WIDTH}} {text}"


def _history(history: History) -> str:
    parts = [
        value if version == FIRST else f"{value} from {show_version(version)} on"
        for version, value in history
    ]
    return "; ".join(parts) or "not known"


def _default(known: Variable, version: Version | None) -> str:
    now = at(known.default, version)
    if version is None or len(known.default) == 1:
        return _history(known.default)
    return f"{now or 'not known'} in {show_version(version)} ({_history(known.default)})"
