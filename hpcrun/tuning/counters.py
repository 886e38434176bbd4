"""Counters of adapters and interfaces: two looks, what has grown between them, and what that means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.fabric.host import entries_of, line_of
from hpcrun.specs.yaml import parse_document
from hpcrun.tuning.finding import Confidence, Finding, Level, worst_first
from hpcrun.tuning.host import Ask, Host

_FILE = Path(__file__).with_name("counters.yaml")
_STATISTIC = re.compile(r"\s*([A-Za-z0-9_.\[\]-]+):\s+([0-9]{1,20})\s*")
_MARKED, _SENT = "np_ecn_marked_roce_packets", "np_cnp_sent"
_HANDLED = "rp_cnp_handled"
_PAUSE = re.compile(r"rx_prio([0-7])_pause\Z")


@dataclass(frozen=True)
class Counters:
    """One look: the time, and what every counter said, as rdma.mlx5_0.1.NAME or net.eth0.NAME."""

    node: str
    time: float | None
    values: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Growth:
    """What has grown between two looks."""

    node: str
    seconds: float | None
    """None where a clock did not tell."""
    values: Mapping[str, int] = field(default_factory=dict)
    """By how much each grew that both looks know; 0 for those that stood still."""
    restarted: tuple[str, ...] = ()
    """Those that went back: the driver was loaded again, and their growth is unknown."""
    missing: tuple[str, ...] = ()
    """Those of which one look knows nothing."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; counters that stood still are left out."""
        return asdict(self) | {"values": {name: more for name, more in self.values.items() if more}}


@dataclass(frozen=True)
class _Rule:
    name: str
    where: str
    names: tuple[str, ...]
    level: Level
    confidence: Confidence
    means: str
    remedy: str
    share: float | None = None


def take(host: Host, root: Path, ask: Ask) -> Counters:
    """Read all counters of a node."""
    values: dict[str, int] = {}
    for port in host.ports:
        folder = root / "sys/class/infiniband" / port.device / "ports" / str(port.number)
        for kind in ("counters", "hw_counters"):
            values |= _numbers(folder / kind, f"rdma.{port.device}.{port.number}")
    for interface in host.interfaces:
        if interface.kind != "physical":
            continue
        prefix = f"net.{interface.name}"
        values |= _numbers(root / "sys/class/net" / interface.name / "statistics", prefix)
        values |= {
            f"{prefix}.{name}": n for name, n in parse_ethtool(ask("ethtool", "-S", interface.name)).items()
        }
    return Counters(host.node, host.time, dict(sorted(values.items())))


def _numbers(folder: Path, prefix: str) -> dict[str, int]:
    found = {f"{prefix}.{entry.name}": line_of(entry) for entry in entries_of(folder)}
    return {name: int(text) for name, text in found.items() if re.fullmatch(r"[0-9]{1,20}", text)}


def parse_ethtool(text: str) -> dict[str, int]:
    """The answer of `ethtool -S`; lines that are no counter are left out."""
    matches = map(_STATISTIC.fullmatch, text.splitlines())
    return {match[1]: int(match[2]) for match in matches if match}


def read_counters(values: Any, where: str) -> Counters:
    """Counters from as_json's values; UsageError for anything else."""
    try:
        kept = {str(name): int(number) for name, number in values["values"].items()}
        moment = values["time"]
        return Counters(str(values["node"]), None if moment is None else float(moment), kept)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UsageError(
            f"{where}: holds no counters; make it with `hpcrun doctor --counters FILE`"
        ) from None


def growth(before: Counters, after: Counters) -> Growth:
    """What has grown; raw values count since boot and say nothing. UsageError for looks at two nodes."""
    if before.node != after.node:
        raise UsageError(f"counters of {before.node} and of {after.node}: compare looks at the same node")
    both = before.values.keys() & after.values.keys()
    change = {name: after.values[name] - before.values[name] for name in sorted(both)}
    seconds = None if before.time is None or after.time is None else after.time - before.time
    return Growth(
        after.node,
        seconds if seconds is None or seconds > 0 else None,
        {name: more for name, more in change.items() if more >= 0},
        tuple(name for name, more in change.items() if more < 0),
        tuple(sorted(before.values.keys() ^ after.values.keys())),
    )


def diagnose(grown: Growth) -> tuple[Finding, ...]:
    """What the growth means, worst first; nothing where all is well."""
    found = [finding for rule in _rules() for finding in _apply(rule, grown)]
    found += [*_marks_without_answers(grown), *_pauses_without_marks(grown)]
    if grown.restarted:
        names = ", ".join(grown.restarted[:3])
        text = f"{len(grown.restarted)} counter(s) went back, such as {names}: their growth is unknown"
        found.append(Finding("unknown", "counters", grown.node, text))
    return worst_first(found)


@cache
def _rules() -> tuple[_Rule, ...]:
    text = "rules:\n" + _FILE.read_text(encoding="utf-8")
    return tuple(
        _Rule(**{**values, "names": tuple(values["names"])})
        for values in parse_document(text, _FILE.name).values["rules"]
    )


def _apply(rule: _Rule, grown: Growth) -> list[Finding]:
    by_device: dict[str, list[str]] = {}
    for full, more in grown.values.items():
        where, device, name = _split(full)
        if (
            not more
            or rule.where not in ("any", where)
            or not any(re.fullmatch(one, name) for one in rule.names)
        ):
            continue
        told = f"{name} +{more}"
        if rule.share is not None:
            if grown.seconds is None:
                told += " us in an unknown time"
            elif more / 1e6 / grown.seconds < rule.share:
                continue
            else:
                told += f" us, {more / 1e6 / grown.seconds:.1%} of the time"
        by_device.setdefault(device, []).append(told)
    return [
        Finding(
            rule.level, rule.name, device, f"{', '.join(told)}: {rule.means}", rule.remedy, rule.confidence
        )
        for device, told in by_device.items()
    ]


def _split(full: str) -> tuple[str, str, str]:
    """rdma.mlx5_0.1.NAME: kind, device and name; an interface may have dots (bond0.209)."""
    where, _, rest = full.partition(".")
    device, _, name = rest.rpartition(".")
    return where, device.replace(".", ":", 1) if where == "rdma" else device, name


def _of(grown: Growth, wanted: str) -> dict[str, int]:
    """How much a counter grew, by device."""
    parts = ((*_split(full), more) for full, more in grown.values.items())
    return {device: more for _, device, name, more in parts if name == wanted}


def _marks_without_answers(grown: Growth) -> list[Finding]:
    """Marks came in, and this node, as their receiver, sent no CNP."""
    sent = _of(grown, _SENT)
    return [
        Finding(
            "warning", "cnp", device, f"{_MARKED} +{more}, {_SENT} +0: marks are seen and nobody is told",
            "turn roce_np on for the priority", "medium",
        )
        for device, more in _of(grown, _MARKED).items()
        if more and sent.get(device) == 0
    ]  # fmt: skip


def _pauses_without_marks(grown: Growth) -> list[Finding]:
    """Pauses alone, without a mark anywhere: ECN does not work on this class."""
    pauses = {
        device: (name, more)
        for full, more in grown.values.items()
        for _, device, name in [_split(full)]
        if more and _PAUSE.fullmatch(name)
    }
    marks, handled = _of(grown, _MARKED), _of(grown, _HANDLED)
    if not marks or any(marks.values()) or any(handled.values()):
        return []
    return [
        Finding(
            "warning", "ecn", device, f"{name} +{more} and no packet marked: pauses alone hold senders back",
            "traffic class, ECT bits, and the switch's ECN profile for that class", "medium",
        )
        for device, (name, more) in pauses.items()
    ]  # fmt: skip
