"""Whether settings were taken up: applied only with the line that proves it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hpcrun.specs.settings import Setting, Settings
from hpcrun.tuning.advice import parse_version
from hpcrun.tuning.names import parse_names

Verdict = Literal["applied", "ignored", "unknown"]

_SET = re.compile(r"NCCL INFO (?:\S+ )?(NCCL_\w+) set (?:by environment )?to (.*?)\.?\s*$")
_INVALID = re.compile(r"Invalid value (\S+) for (NCCL_\w+), using default")
_VERSION = re.compile(r"NCCL version ([0-9][0-9.]*)")
_WHO = re.compile(r"^(?:\[[^\]]*\] )?([A-Za-z0-9][\w.-]*):[0-9]+:[0-9]+ ")
_BOOTSTRAP = re.compile(r"(?:Bootstrap|NET/Socket) ?: ?Using (?:\[0\])?([A-Za-z][\w.-]*):")
_DEVICES = re.compile(r"NET/IB : Using (.*)")
_DEVICE = re.compile(r"\[[0-9]+\](\w+):([0-9]+)/")
_NO_DEVICE = re.compile(r"NET/IB : No device found|Using network Socket")
_UCX_SET = re.compile(r"UCX\s+INFO\s+UCX_\* env variables?: (.*)")
_UCX_UNUSED = re.compile(r"UCX\s+WARN\s+unused environment variables?: (.*)")


@dataclass(frozen=True)
class Uptake:
    """What became of one setting."""

    name: str
    value: str
    verdict: Verdict
    line: str
    """The line that proves it; for `unknown`, why there is none."""
    node: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Plain values."""
        return asdict(self)


def prove(settings: Settings, log: str) -> tuple[Uptake, ...]:
    """What a job's log says about its settings; NCCL_DEBUG=INFO makes it say most."""
    lines = log.splitlines()
    found = []
    for one in settings.everywhere:
        others = {node for node in settings.by_node if one.name in settings.of_node(node)}
        found.append(_judge(one, [line for line in lines if _speaker(line) not in map(_short, others)], None))
    for node, of in settings.by_node.items():
        found += [_judge(one, [line for line in lines if _speaker(line) == _short(node)], node) for one in of]
    return tuple(found)


def _short(node: str) -> str:
    return node.partition(".")[0]


def _speaker(line: str) -> str:
    """The node of a line of NCCL's; empty where it does not say."""
    who = _WHO.match(line)
    return _short(who[1]) if who else ""


def _judge(one: Setting, lines: Sequence[str], node: str | None) -> Uptake:
    verdict, line = _of_ucx(one, lines) if one.name.startswith("UCX_") else _of_nccl(one, lines)
    return Uptake(one.name, one.value, verdict, line, node)


def _of_nccl(one: Setting, lines: Sequence[str]) -> tuple[Verdict, str]:
    if not one.name.startswith("NCCL_"):
        return "unknown", "no log tells of it"
    needs = parse_version(one.needs.removeprefix("NCCL "))
    speaks = ""
    proof = ""
    for line in lines:
        version = _VERSION.search(line)
        if version and needs and (parse_version(version[1]) or needs) < needs:
            return "ignored", line.strip()
        refused = _INVALID.search(line)
        if refused and refused[2] == one.name:
            return "ignored", line.strip()
        if contrary := _contradicts(one, line):
            return "ignored", contrary
        match = _SET.search(line)
        if match:
            speaks = line.strip()
            if match[1] == one.name:
                if match[2] != one.value:
                    return "ignored", line.strip()
                proof = proof or line.strip()
    if proof:
        return "applied", proof
    proof = next((line.strip() for line in lines if _shows(one, line)), "")
    if proof:
        return "applied", proof
    if speaks:
        return "unknown", f"the log tells of other variables and not of this one: {speaks}"
    return "unknown", "the log does not tell; run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET"


def _contradicts(one: Setting, line: str) -> str:
    """A line that shows something else in use than what was asked for; empty where it does not."""
    wanted = parse_names(one.value)
    if wanted is None:
        return ""
    if one.name == "NCCL_SOCKET_IFNAME" and (used := _BOOTSTRAP.search(line)):
        return "" if wanted.takes(used[1]) else line.strip()
    if one.name == "NCCL_IB_HCA":
        if _NO_DEVICE.search(line):
            return line.strip()
        devices = _DEVICES.search(line)
        used_ports = _DEVICE.findall(devices[1]) if devices else []
        if any(not wanted.takes(device, int(port)) for device, port in used_ports):
            return line.strip()
    return ""


def _shows(one: Setting, line: str) -> bool:
    """Whether a line shows the interface or the devices in use, all of those that were asked for."""
    wanted = parse_names(one.value)
    if wanted is None or wanted.excluded:
        return False
    if one.name == "NCCL_SOCKET_IFNAME":
        used = _BOOTSTRAP.search(line)
        return used is not None and wanted.takes(used[1])
    if one.name == "NCCL_IB_HCA" and (devices := _DEVICES.search(line)):
        return {device for device, _ in _DEVICE.findall(devices[1])} == {
            n.partition(":")[0] for n in wanted.names
        }
    return False


def _of_ucx(one: Setting, lines: Sequence[str]) -> tuple[Verdict, str]:
    for line in lines:
        unused, given = _UCX_UNUSED.search(line), _UCX_SET.search(line)
        if unused and re.search(rf"\b{one.name}\b", unused[1]):
            return "ignored", line.strip()
        if given and f"{one.name}={one.value}" in given[1].split():
            return "applied", line.strip()
    return "unknown", "the log does not tell; run with UCX_LOG_LEVEL=info"
