"""Counters of adapters and interfaces: two looks, what has grown between them, and what that means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.fabric.node_topology import list_sysfs_entries, read_sysfs_line
from hpcrun.finding import Confidence, Finding, Severity, sort_findings
from hpcrun.specs.yaml import parse_yaml
from hpcrun.tuning.host.node_report import CommandRunner, HostReport
from hpcrun.typed_json import WrongValue, parse_typed

_FILE = Path(__file__).with_name("counters.yaml")
_STATISTIC = re.compile(r"\s*([A-Za-z0-9_.\[\]-]+):\s+([0-9]{1,20})\s*")
_MARKED, _SENT = "np_ecn_marked_roce_packets", "np_cnp_sent"
_HANDLED = "rp_cnp_handled"
_PAUSED = "paused"
_QUANTA_BITS = 65535 * 512
"""What one pause frame holds a link for at most, in the time that bits take on it."""
_MANY_FRAMES = 10
"""A second: so many are told of where nothing says how long they hold the link."""


@dataclass(frozen=True)
class CounterReading:
    """One look: the time, and what every counter said, as rdma.mlx5_0.1.NAME or net.eth0.NAME."""

    node: str
    time: float | None
    values: Mapping[str, int] = field(default_factory=dict)
    speeds_Gbps: Mapping[str, float] = field(default_factory=dict)
    """Speeds of the interfaces that report one."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class CounterGrowth:
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
    speeds_Gbps: Mapping[str, float] = field(default_factory=dict)
    """Speeds of the interfaces at the second look."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; counters that stood still are left out."""
        return asdict(self) | {"values": {name: growth for name, growth in self.values.items() if growth}}


@dataclass(frozen=True)
class _CounterRule:
    name: str
    where: str
    names: tuple[str, ...]
    severity: Severity
    confidence: Confidence
    means: str
    remedy: str
    share: float | None = None
    frames: tuple[str, ...] = ()


def read_host_counters(host: HostReport, root: Path, ask: CommandRunner) -> CounterReading:
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
            f"{prefix}.{_plain_counter_name(name)}": n
            for name, n in parse_ethtool(ask("ethtool", "-S", interface.name)).items()
        }
    speeds = {interface.name: interface.speed_Gbps for interface in host.interfaces if interface.speed_Gbps}
    return CounterReading(host.node, host.time, dict(sorted(values.items())), speeds)


def _plain_counter_name(name: str) -> str:
    """A counter's name without the dots of Intel's drivers, as in port.rx_bytes, tx_priority_0_xoff.nic."""
    return name.removeprefix("port.").removesuffix(".nic").replace(".", "_")


def _numbers(folder: Path, prefix: str) -> dict[str, int]:
    texts = {f"{prefix}.{entry.name}": read_sysfs_line(entry) for entry in list_sysfs_entries(folder)}
    return {name: int(text) for name, text in texts.items() if re.fullmatch(r"[0-9]{1,20}", text)}


def parse_ethtool(text: str) -> dict[str, int]:
    """The answer of `ethtool -S`; lines that are no counter are left out."""
    matches = map(_STATISTIC.fullmatch, text.splitlines())
    return {match[1]: int(match[2]) for match in matches if match}


def parse_counters(values: Any, where: str) -> CounterReading:
    """Counters from as_json's values; UsageError for anything else."""
    try:
        return parse_typed(CounterReading, values)
    except WrongValue as error:
        text = f"{where}: holds no counters ({error}); make it with `hpcrun doctor --counters FILE`"
        raise UsageError(text) from None


def compare_counters(before: CounterReading, after: CounterReading) -> CounterGrowth:
    """What has grown; raw values count since boot and say nothing. UsageError for looks at two nodes."""
    if before.node != after.node:
        raise UsageError(f"counters of {before.node} and of {after.node}: compare looks at the same node")
    both = before.values.keys() & after.values.keys()
    change = {name: after.values[name] - before.values[name] for name in sorted(both)}
    seconds = None if before.time is None or after.time is None else after.time - before.time
    return CounterGrowth(
        after.node,
        seconds if seconds is None or seconds > 0 else None,
        {name: growth for name, growth in change.items() if growth >= 0},
        tuple(name for name, growth in change.items() if growth < 0),
        tuple(sorted(before.values.keys() ^ after.values.keys())),
        after.speeds_Gbps,
    )


def diagnose_counters(grown: CounterGrowth) -> tuple[Finding, ...]:
    """What the growth means, worst first; nothing where all is well."""
    findings = [finding for rule in _rules() for finding in _apply_counter_rule(rule, grown)]
    findings += [*_marks_without_answers(grown), *_pauses_without_marks(grown)]
    if not grown.values and not grown.restarted:
        text = "no counter is in both looks, so that nothing is known of what its network did"
        remedy = "take both looks on the node itself"
        findings.append(Finding("unknown", "counters", grown.node, text, remedy))
    if grown.restarted:
        names = ", ".join(grown.restarted[:3])
        text = f"{len(grown.restarted)} counter(s) went back, such as {names}: their growth is unknown"
        findings.append(Finding("unknown", "counters", grown.node, text))
    return sort_findings(findings)


@cache
def _rules() -> tuple[_CounterRule, ...]:
    text = "rules:\n" + _FILE.read_text(encoding="utf-8")
    return tuple(
        _CounterRule(**{**values, "names": tuple(values["names"]), "frames": tuple(values.get("frames", ()))})
        for values in parse_yaml(text, _FILE.name).values["rules"]
    )


def _apply_counter_rule(rule: _CounterRule, grown: CounterGrowth) -> list[Finding]:
    by_device: dict[str, list[str]] = {}
    for device, name, growth in _matching_counters(grown, rule.where, rule.names):
        if growth and (described := _describe_growth(rule, grown, name, growth)):
            by_device.setdefault(device, []).append(described)
    timed = {device for device, _, _ in _matching_counters(grown, rule.where, rule.names)}
    for device, name, growth in _matching_counters(grown, rule.where, rule.frames):
        if (
            growth
            and device not in timed
            and (described := _describe_pause_frames(rule, grown, device, name, growth))
        ):
            by_device.setdefault(device, []).append(described)
    return [
        Finding(
            rule.severity,
            rule.name,
            device,
            f"{', '.join(described)}: {rule.means}",
            rule.remedy,
            rule.confidence if device in timed else "low",
        )
        for device, described in by_device.items()
    ]


def _matching_counters(
    grown: CounterGrowth, kind: str, names: Sequence[str]
) -> Iterator[tuple[str, str, int]]:
    """Device, name and growth of the counters that bear one of the names, those that stood still included."""
    for full, growth in grown.values.items():
        where, device, name = _split_counter_name(full)
        if kind in ("any", where) and any(re.fullmatch(pattern, name) for pattern in names):
            yield device, name, growth


def _describe_growth(rule: _CounterRule, grown: CounterGrowth, name: str, growth: int) -> str:
    """A counter's growth in words; empty where it is too small a share of the time."""
    if rule.share is None:
        return f"{name} +{growth}"
    if grown.seconds is None:
        return f"{name} +{growth} us in an unknown time"
    share = growth / 1e6 / grown.seconds
    return f"{name} +{growth} us, {share:.1%} of the time" if share >= rule.share else ""


def _describe_pause_frames(
    rule: _CounterRule, grown: CounterGrowth, device: str, name: str, growth: int
) -> str:
    """The growth of pause frames in words; their number bounds the time that they hold the link."""
    speed = grown.speeds_Gbps.get(device)
    if grown.seconds is None:
        return f"{name} +{growth} frames in an unknown time"
    if speed is None:
        a_second = growth / grown.seconds
        described = (
            f"{name} +{growth} frames, {a_second:.3g} a second; the link's speed and their time are unknown"
        )
        return described if a_second >= _MANY_FRAMES else ""
    share = growth * _QUANTA_BITS / (speed * 1e9) / grown.seconds
    described = f"{name} +{growth} frames, {min(share, 1.0):.1%} of the time at most"
    return described if share >= (rule.share or 0.0) else ""


def _split_counter_name(full: str) -> tuple[str, str, str]:
    """rdma.mlx5_0.1.NAME: kind, device and name; an interface may have dots (bond0.209)."""
    where, _, rest = full.partition(".")
    device, _, name = rest.rpartition(".")
    return where, device.replace(".", ":", 1) if where == "rdma" else device, name


def _growth_by_device(grown: CounterGrowth, counter: str) -> dict[str, int]:
    """The growth of a counter by device."""
    parts = ((*_split_counter_name(full), growth) for full, growth in grown.values.items())
    return {device: growth for _, device, name, growth in parts if name == counter}


def _marks_without_answers(grown: CounterGrowth) -> list[Finding]:
    """Marks came in, and this node, as their receiver, sent no CNP."""
    sent = _growth_by_device(grown, _SENT)
    remedy = "turn roce_np on for the priority"
    texts = {
        device: f"{_MARKED} +{growth}, {_SENT} +0: marks are seen and nobody is told"
        for device, growth in _growth_by_device(grown, _MARKED).items()
        if growth and sent.get(device) == 0
    }
    return [Finding("warning", "cnp", device, text, remedy, "medium") for device, text in texts.items()]


def _pauses_without_marks(grown: CounterGrowth) -> list[Finding]:
    """Pauses alone, without a mark anywhere: ECN does not work on this class."""
    held = next(rule for rule in _rules() if rule.name == _PAUSED)
    pauses = {
        device: (name, growth)
        for device, name, growth in _matching_counters(grown, held.where, held.frames)
        if growth
    }
    marks, handled = _growth_by_device(grown, _MARKED), _growth_by_device(grown, _HANDLED)
    if not marks or any(marks.values()) or any(handled.values()):
        return []
    remedy = "traffic class, ECT bits, and the switch's ECN profile for that class"
    texts = {
        device: f"{name} +{growth} and no packet marked: pauses alone hold senders back"
        for device, (name, growth) in pauses.items()
    }
    return [Finding("warning", "ecn", device, text, remedy, "medium") for device, text in texts.items()]
