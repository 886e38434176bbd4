"""What each communication variable means, read from registry.yaml on first use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hpcrun.errors import UsageError
from hpcrun.specs.settings import CommSetting

Version = tuple[int, ...]
"""A release of NCCL: (2, 29, 7)."""

FIRST_VERSION: Version = (0,)
_VERSION = re.compile(r"v?(\d{1,3}(?:\.\d{1,3}){1,3})(?:[-+].*|\.post\d+)?", re.A)
_TEXT_FIELDS = ("left", "instead", "effect", "danger", "source")
_RELEASE_FIELDS = ("since", "removed", "deprecated", "after")
UNDOCUMENTED = "Documented nowhere we know; internal or undocumented."
_CLOSE = 0.84
"""From this likeness on a name is taken for a slip of the pen."""


def parse_version(text: str, where: str = "--nccl-version") -> Version:
    """A release such as 2.27.5, also 2.27.5-1 and 2.27; UsageError for anything else."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{where}: {text!r} is not a release of NCCL; write it as 2.27.5")
    return tuple(int(part) for part in match[1].split("."))


def required_nccl_release(setting: CommSetting) -> Version | None:
    """The release of NCCL that a setting needs; None: any, or another library's."""
    needs = setting.needs.removeprefix("NCCL ")
    return parse_version(needs, setting.name) if needs and needs != setting.needs else None


def format_version(version: Version) -> str:
    """Format a release, as 2.29.7."""
    return ".".join(map(str, version))


class VersionedValue(NamedTuple):
    """A value, and the release from which on it holds."""

    version: Version
    value: str


ValueHistory = tuple[VersionedValue, ...]


def value_in_release(history: ValueHistory, version: Version | None) -> str | None:
    """What held in a release; the newest where the release is not known, None where nothing is known."""
    held = [entry.value for entry in history if version is None or entry.version <= version]
    return held[-1] if held else None


@dataclass(frozen=True)
class CommVariable:
    """One variable: who reads it, what it takes, and what it does."""

    name: str
    owner: str = "nccl"
    kind: str = "leave"
    """system, job, tuning, debug or leave; undocumented where the name is all we know."""
    ranks: str = "same"
    """Whether it may differ: same (nowhere), node, rank."""
    since: Version | None = None
    removed: Version | None = None
    deprecated: Version | None = None
    after: Version | None = None
    """Not yet in this release, although the documentation names it."""
    values: ValueHistory = ()
    default: ValueHistory = ()
    left: str = ""
    """Values, by commas, that are dangerous when they are left over; `any` for all."""
    instead: str = ""
    effect: str = ""
    danger: str = ""
    source: str = ""

    def absence(self, version: Version | None) -> str:
        """Why a release does not read it; empty when it does, or when that is not known."""
        if version is None:
            return ""
        if self.since and version < self.since:
            return f"is read from {format_version(self.since)} on"
        if self.after and version <= self.after:
            return f"is not yet read in {format_version(self.after)}"
        if self.removed and version >= self.removed:
            return f"is not read from {format_version(self.removed)} on"
        return ""


class LookalikeVariable(NamedTuple):
    """A name in NCCL's manner that NCCL does not read."""

    name: str
    reader: str = ""
    """The program that reads it; empty: none is known."""
    instead: str = ""
    text: str = ""


@dataclass(frozen=True)
class VariableRegistry:
    """All that is known, by name."""

    library: Version
    """The release whose names are all here."""
    variables: Mapping[str, CommVariable]
    symbols: Mapping[str, str]
    """Names inside the library that are no variables, and what they are."""
    lookalikes: Mapping[str, LookalikeVariable]
    families: Mapping[str, str]
    """Name prefixes of other programs, and the programs."""

    def lookalike(self, name: str) -> LookalikeVariable | None:
        """The impostor of this name, also when only its family is known."""
        lookalike = self.lookalikes.get(name)
        family = next((start for start in self.families if name.startswith(start)), None)
        return lookalike or (LookalikeVariable(name, self.families[family]) if family else None)

    def nearest(self, name: str) -> str | None:
        """The variable that was probably meant."""
        names = [*self.variables, *self.lookalikes]
        upper = name.upper()
        if upper != name and upper in self.variables:
            return upper
        close = difflib.get_close_matches(upper, names, n=1, cutoff=_CLOSE)
        if not close:
            return None
        impostor = self.lookalikes.get(close[0])
        return impostor.instead or close[0] if impostor else close[0]


@cache
def variable_registry() -> VariableRegistry:
    """The registry, read once a process."""
    import yaml

    path = Path(__file__).with_name("registry.yaml")
    # Everything stays text, and the C parser is eight times as fast where it is there.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    return _parse_registry(yaml.load(path.read_text(encoding="utf-8"), Loader=loader))


def _parse_registry(raw: dict[str, Any]) -> VariableRegistry:
    library = parse_version(raw["library"], "registry.yaml library")
    described = raw["variables"] | raw["others"]
    variables = {name: _parse_variable(name, entry) for name, entry in described.items()}
    for name, default in raw["undocumented"].items():
        variables[name] = CommVariable(
            name,
            kind="undocumented",
            values=(VersionedValue(FIRST_VERSION, "int"),),
            default=() if default == "unknown" else (VersionedValue(library, default),),
            effect=UNDOCUMENTED,
            source="library",
        )
    symbols = {name: what for what, names in raw["symbols"].items() for name in names.split()}
    lookalikes = {name: LookalikeVariable(name, **entry) for name, entry in raw["lookalikes"].items()}
    return VariableRegistry(library, variables, symbols, lookalikes, raw["families"])


def _parse_variable(name: str, entry: dict[str, Any]) -> CommVariable:
    rules = (
        VersionedValue(version, re.sub(r",\s+", ",", value))
        for version, value in _parse_history(entry.get("values"))
    )
    texts = {key: entry[key] for key in ("owner", "ranks", *_TEXT_FIELDS) if key in entry}
    since, removed, deprecated, after = (
        parse_version(entry[key], "registry.yaml") if key in entry else None for key in _RELEASE_FIELDS
    )
    return CommVariable(
        name,
        kind=entry.get("class", "leave"),
        since=since,
        removed=removed,
        deprecated=deprecated,
        after=after,
        values=tuple(rules),
        default=_parse_history(entry.get("default")),
        **{"source": f"documentation of {entry.get('owner', 'nccl')}", **texts},
    )


def _parse_history(given: str | dict[str, str] | None) -> ValueHistory:
    if given is None:
        return ()
    if isinstance(given, str):
        return (VersionedValue(FIRST_VERSION, given),)
    return tuple(VersionedValue(tuple(map(int, key.split("."))), value) for key, value in given.items())
