"""Whether settings were taken up: applied only with the line that proves it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hpcrun.specs.settings import CommSetting, CommSettings
from hpcrun.tuning.log.nccl_log import (
    node_of_line,
    parse_choice_line,
    parse_interface_line,
    parse_nics_line,
    parse_refused_variable,
    parse_variable_line,
    parse_version_line,
    reports_no_adapter,
)
from hpcrun.tuning.registry.device_names import parse_device_list
from hpcrun.tuning.registry.nccl_grammar import parse_nccl_selection
from hpcrun.tuning.registry.registry import Version, parse_version, required_nccl_release
from hpcrun.tuning.registry.values import is_same_value

UptakeVerdict = Literal["applied", "ignored", "unknown"]

_UCX_SET = re.compile(r"UCX\s+INFO\s+UCX_\* env variables?: (.*)")
_UCX_UNUSED = re.compile(r"UCX\s+WARN\s+unused environment variables?: (.*)")


@dataclass(frozen=True)
class SettingUptake:
    """What became of one setting."""

    name: str
    value: str
    verdict: UptakeVerdict
    line: str
    """The line that proves it; for `unknown`, why there is none."""
    node: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Plain values."""
        return asdict(self)


def check_applied_settings(settings: CommSettings, log: str) -> tuple[SettingUptake, ...]:
    """What a job's log says about its settings; NCCL_DEBUG=INFO makes it say most."""
    lines = [(node_of_line(line), line) for line in log.splitlines()]
    uptakes = []
    for setting in settings.everywhere:
        others = {_short(node) for node in settings.by_node if setting.name in settings.of_node(node)}
        uptakes.append(_judge_setting(setting, [line for node, line in lines if node not in others], None))
    for node, of in settings.by_node.items():
        uptakes += [
            _judge_setting(setting, [line for who, line in lines if who == _short(node)], node)
            for setting in of
        ]
    return tuple(uptakes)


def _short(node: str) -> str:
    return node.partition(".")[0]


def _judge_setting(setting: CommSetting, lines: Sequence[str], node: str | None) -> SettingUptake:
    verdict, line = (
        _judge_ucx_setting(setting, lines)
        if setting.name.startswith("UCX_")
        else _judge_nccl_setting(setting, lines)
    )
    return SettingUptake(setting.name, setting.value, verdict, line, node)


def _judge_nccl_setting(setting: CommSetting, lines: Sequence[str]) -> tuple[UptakeVerdict, str]:
    if not setting.name.startswith("NCCL_"):
        return "unknown", "no log tells of it"
    version = _version(lines)
    against = next((line.strip() for line in lines if _contradicts(setting, line, version)), "")
    if against:
        return "ignored", against
    variables = [(parse_variable_line(line), line.strip()) for line in lines]
    proof = next((line for variable, line in variables if variable and variable[0] == setting.name), "")
    proof = proof or next((line.strip() for line in lines if _shows(setting, line)), "")
    if proof:
        return "applied", proof
    speaks = next((line for variable, line in reversed(variables) if variable), "")
    if speaks:
        return "unknown", f"the log tells of other variables and not of this one: {speaks}"
    return "unknown", "the log does not tell; run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET"


def _version(lines: Sequence[str]) -> Version | None:
    release = next((match[1] for line in lines if (match := parse_version_line(line))), None)
    return parse_version(release, "the log") if release else None


def _contradicts(setting: CommSetting, line: str, version: Version | None) -> bool:
    """Whether a line shows that it is not read, or something else in use than what was asked for."""
    printed, needs = parse_version_line(line), required_nccl_release(setting)
    if printed and needs and parse_version(printed[1], "the log") < needs:
        return True
    variable = parse_variable_line(line)
    if parse_refused_variable(line) == setting.name or (
        variable and variable[0] == setting.name and not is_same_value(variable[1], setting.value)
    ):
        return True
    devices = parse_device_list(setting.value)
    if setting.name == "NCCL_SOCKET_IFNAME":
        used = parse_interface_line(line)
        return used is not None and not devices.takes(used)
    if setting.name == "NCCL_IB_HCA":
        return reports_no_adapter(line) or any(not devices.takes(*nic) for nic in _adapters(line))
    return setting.name in ("NCCL_ALGO", "NCCL_PROTO") and _was_not_chosen(setting, line, version)


def _adapters(line: str) -> list[tuple[str, int]]:
    """Those in use, with their ports."""
    words = [nic.partition(":") for nic in parse_nics_line(line)] if "NET/IB" in line else []
    return [(name, int(match[0])) for name, _, rest in words if (match := re.match(r"\d{1,3}", rest))]


def _was_not_chosen(setting: CommSetting, line: str, version: Version | None) -> bool:
    """Whether a call went by an algorithm, or a protocol, that the value leaves out."""
    choice = parse_choice_line(line)
    if choice is None:
        return False
    allowed = parse_nccl_selection(setting.name, setting.value, version).chosen
    if choice.collective.lower() not in allowed:
        return False
    taken = choice.algo if setting.name == "NCCL_ALGO" else choice.proto
    return taken.lower() not in allowed[choice.collective.lower()]


def _shows(setting: CommSetting, line: str) -> bool:
    """Whether a line shows the interface or the devices in use, all of those that were asked for."""
    devices = parse_device_list(setting.value)
    if not devices.entries or devices.excludes:
        return False
    if setting.name == "NCCL_SOCKET_IFNAME":
        used = parse_interface_line(line)
        return used is not None and devices.takes(used)
    used_names = {name for name, _ in _adapters(line)}
    return setting.name == "NCCL_IB_HCA" and used_names == set(devices.names)


def _judge_ucx_setting(setting: CommSetting, lines: Sequence[str]) -> tuple[UptakeVerdict, str]:
    for line in lines:
        unused, given = _UCX_UNUSED.search(line), _UCX_SET.search(line)
        if unused and re.search(rf"\b{setting.name}\b", unused[1]):
            return "ignored", line.strip()
        if given and f"{setting.name}={setting.value}" in given[1].split():
            return "applied", line.strip()
    return "unknown", "the log does not tell; run with UCX_LOG_LEVEL=info"
