"""Releases of NCCL, its network plugin, libfabric, CUDA and the driver, held against each other.

Only what versions.yaml has a source for is judged; of every other pair it is said that nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hpcrun.finding import Finding, sort_findings
from hpcrun.specs.yaml import load_yaml
from hpcrun.tuning.log.line import strip_log_prefix
from hpcrun.tuning.registry.registry import Version, format_version

_TABLE = Path(__file__).with_name("versions.yaml")
_PLUGIN = "aws-ofi-nccl"
_PARTNERS: Mapping[str, tuple[str, ...]] = {
    _PLUGIN: ("libfabric", "nccl"),
    "cuda": ("driver", "cuda-driver"),
    "nccl": ("cuda-driver",),
}
"""What a component is held against."""
_NUMBER = r"v?(\d{1,4}(?:\.\d{1,4}){1,3})"
_SAID = {
    "nccl": re.compile(rf"(?<![\w-])NCCL version {_NUMBER}"),
    "cuda": re.compile(r"(?<![\w-])NCCL version \S+?\+cuda(\d+\.\d+)"),
    _PLUGIN: re.compile(rf"(?:Initializing|Using) aws-ofi-nccl {_NUMBER}"),
    "libfabric": re.compile(rf"Using Libfabric version {_NUMBER}|\blibfabric: {_NUMBER}"),
    "driver": re.compile(rf"Driver Version: {_NUMBER}|Kernel Module\b.*?\s{_NUMBER}"),
}
_CUDA_DRIVER = re.compile(r"cudaDriverVersion (\d{4,6})\b")
_ANY = re.compile(r"version|Version|aws-ofi-nccl|libfabric|Kernel Module")


@dataclass(frozen=True)
class _Requirement:
    """A requirement, and where it is written."""

    of: str
    first: Version
    before: Version
    source: str
    needs: Mapping[str, Version] = field(default_factory=dict)
    known: Mapping[str, Version] = field(default_factory=dict)


@cache
def _load_requirements() -> tuple[_Requirement, ...]:
    return tuple(
        _Requirement(
            row["of"],
            _version(row["from"]),
            _version(row["before"]),
            row["source"],
            {name: _version(text) for name, text in row.get("needs", {}).items()},
            {name: _version(text) for name, text in row.get("known", {}).items()},
        )
        for row in load_yaml(_TABLE).values["rows"]
    )


def _find_requirement(name: str, version: Version) -> _Requirement | None:
    return next(
        (
            requirement
            for requirement in _load_requirements()
            if requirement.of == name and requirement.first <= version < requirement.before
        ),
        None,
    )


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def parse_versions(text: str) -> dict[str, tuple[Version, ...]]:
    """The releases that a log tells, of NCCL's lines, the plugin's, nvidia-smi's and fi_info's."""
    releases: dict[str, dict[Version, None]] = {}
    for line in text.splitlines():
        if not _ANY.search(line):
            continue
        plain = strip_log_prefix(line)
        for name, pattern in _SAID.items():
            if match := pattern.search(plain):
                release = next(group for group in match.groups() if group)
                releases.setdefault(name, {})[_version(release)] = None
        if match := _CUDA_DRIVER.search(plain):
            number = int(match[1])
            releases.setdefault("cuda-driver", {})[number // 1000, number % 1000 // 10] = None
    return {name: tuple(of) for name, of in releases.items()}


def check_versions(versions: Mapping[str, tuple[Version, ...]]) -> tuple[Finding, ...]:
    """What does not go together, what differs, and of which pairs nothing is known; worst first."""
    findings = [*_differing(versions)]
    for name, partners in _PARTNERS.items():
        for own in versions.get(name, ()):
            for other in partners:
                findings += _check_pair(name, own, other, versions.get(other, ()))
    return sort_findings(findings)


def _differing(versions: Mapping[str, tuple[Version, ...]]) -> Iterator[Finding]:
    for name, of in versions.items():
        if len(of) > 1:
            listed = " and ".join(_shown(name, release) for release in sorted(of))
            remedy = "let all nodes and containers have the same"
            yield Finding("warning", "versions", name, f"is {listed} on different ranks", remedy)


def _check_pair(name: str, own: Version, other: str, theirs: tuple[Version, ...]) -> Iterator[Finding]:
    row = _find_requirement(name, own)
    subject = f"{name} {format_version(own)}"
    if not theirs:
        if name == _PLUGIN:
            yield Finding("unknown", "versions", subject, f"which {other} it runs with is not told")
        return
    for version in theirs:
        least = row.needs.get(other) if row else None
        newest = row.known.get(other) if row else None
        here = _shown(other, version)
        if row is None or (least is None and newest is None):
            text = f"nothing on record says whether it goes with {other} {here}"
            yield Finding("unknown", "versions", subject, text)
        elif least is not None and _is_older(version, least):
            text = f"needs {other} {_shown(other, least)}, and this is {here} ({row.source})"
            yield Finding("error", "versions", subject, text, f"take a newer {other}, or an older {name}")
        elif newest is not None and _is_older(newest, version):
            text = f"its release notes name {other} up to {_shown(other, newest)}, this is {here}"
            remedy = f"a newer {name} where something fails"
            yield Finding("unknown", "versions", subject, f"{text} ({row.source})", remedy)


def _shown(name: str, version: Version) -> str:
    """Format a version as its vendor does: a driver's last part has two digits, 515.65.01."""
    if name == "driver" and len(version) == 3:
        return f"{version[0]}.{version[1]}.{version[2]:02}"
    return format_version(version)


def _is_older(version: Version, other: Version) -> bool:
    """As far as both say: 1.22, which a log shortens, is not below 1.22.1."""
    length = min(len(version), len(other))
    return version[:length] < other[:length]


def list_compatible_pairs(versions: Mapping[str, tuple[Version, ...]]) -> Iterator[str]:
    """The pairs that a source says go together, in words."""
    for name, partners in _PARTNERS.items():
        for own in versions.get(name, ()):
            row = _find_requirement(name, own)
            for other in partners:
                of = versions.get(other, ())
                is_told = row is not None and (other in row.needs or other in row.known)
                if row and is_told and of and not [*_check_pair(name, own, other, of)]:
                    listed = ", ".join(_shown(other, release) for release in of)
                    yield f"{name} {_shown(name, own)} goes with {other} {listed} ({row.source})"
