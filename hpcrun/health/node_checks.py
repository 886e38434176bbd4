"""The pure rules behind the findings of a preflight; no finding means that all is well."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hpcrun.fabric.ports import RdmaPort
from hpcrun.finding import Finding, Severity
from hpcrun.units import format_bytes

_LEAST_FREE, _LITTLE_FREE = 16 << 20, 1 << 30
_LEAST_SHARED, _LITTLE_SHARED = 1 << 20, 64 << 20
_LEAST_INODES, _FEW_INODES = 100, 10000
_LEAST_MEMLOCK = 1 << 30
_LIMITS = {"nofile": (128, 1024), "nproc": (64, 1024), "stack": (1 << 20, 8 << 20)}
"""Below the first a rank cannot work, below the second it may find it too little."""
_LIMIT_DESCRIPTIONS = {
    "nofile": "open files",
    "nproc": "processes and threads of the user",
    "stack": "bytes of stack",
    "memlock": "bytes of locked memory",
}
_CLOCK_WARN_S, _CLOCK_FAIL_S = 2.0, 300.0
"""With clocks five minutes apart, munge and Slurm refuse each other's messages."""
_NAGIOS_SEVERITIES: dict[int, Severity | None] = {0: None, 1: "warning", 2: "error", 3: "unknown"}
_UP, _DOWN = "up", ("down", "lowerlayerdown", "notpresent")


def judge_limits(soft: Mapping[str, float], *, is_infiniband: bool) -> list[Finding]:
    """Check the limits of a process (math.inf: none); the one on locked memory matters to RDMA alone."""
    findings = []
    for name, value in soft.items():
        if name in _LIMITS:
            least, usual = _LIMITS[name]
            severity: Severity = "error" if value < least else "warning"
            if value < usual:
                text = (
                    f"{value:.0f} {_LIMIT_DESCRIPTIONS[name]} are allowed (ulimit, {name}); {usual} are usual"
                )
                findings.append(Finding(severity, "limits", "", text))
    locked = soft.get("memlock", math.inf)
    if is_infiniband and locked < _LEAST_MEMLOCK:
        what = _LIMIT_DESCRIPTIONS["memlock"]
        text = f"{locked:.0f} {what} are allowed (ulimit, memlock), and RDMA locks all it uses"
        findings.append(Finding("warning", "limits", "", text))
    return findings


def judge_space(
    path: str, free_bytes: int, free_inodes: int | None, *, is_shared: bool = False, is_memory: bool = False
) -> list[Finding]:
    """Check the room for files; None inodes: this file system does not count them."""
    least, little = (_LEAST_SHARED, _LITTLE_SHARED) if is_memory else (_LEAST_FREE, _LITTLE_FREE)
    inodes = math.inf if free_inodes is None else free_inodes
    counted = "" if free_inodes is None else f" and {free_inodes} inodes"
    text = f"{format_bytes(free_bytes)}{counted} are free"
    if free_bytes < least or inodes < _LEAST_INODES:
        return [Finding("error", "space", path, text, is_shared=is_shared)]
    if free_bytes < little or inodes < _FEW_INODES:
        return [Finding("warning", "space", path, text, is_shared=is_shared)]
    return []


def judge_interface(name: str, state: str | None, flags: int) -> list[Finding]:
    """Check a network interface by its operstate (None: it does not exist) and its flags (1: configured)."""
    if state is None:
        text = "there is no such network interface (network.interface of the profile)"
        return [Finding("error", "interface", name, text)]
    if state in _DOWN or not flags & 1:
        return [Finding("error", "interface", name, "the network interface is down")]
    # Interfaces without a carrier, such as loopback or a tunnel, are in state `unknown`.
    if state in (_UP, "unknown"):
        return []
    return [Finding("unknown", "interface", name, f"is in state {state}")]


def judge_ports(ports: Collection[RdmaPort], used: Collection[str]) -> list[Finding]:
    """Check the ports of InfiniBand and RoCE devices; those devices that the job uses have to work."""
    findings = []
    for device in sorted({*(port.device for port in ports), *used}):
        own = [port for port in ports if port.device == device]
        idle = [port for port in own if not port.is_active]
        states = "; ".join(f"port {port.number} is {port.state or 'unreadable'}" for port in idle)
        if device in used and len(idle) == len(own):
            text = f"{states or 'there is no such device'}, and the job uses it (NCCL_IB_HCA)"
            findings.append(Finding("error", "nic", device, text))
        elif idle and not used:
            findings.append(Finding("warning", "nic", device, states))
    return findings


def judge_clock(sent: float, received: float, shown: float, took_s: float) -> list[Finding]:
    """Check a node's clock against ours: it showed `shown` between our sending and receiving, less its work.

    Only what is certain counts: half the rest of the round trip either way is not.
    """
    slack = max(0.0, received - sent - took_s) / 2
    offset = shown - (sent + slack)
    least = abs(offset) - slack
    if least < _CLOCK_WARN_S:
        return []
    way = "ahead of" if offset > 0 else "behind"
    text = f"its clock is {abs(offset):.1f} s (give or take {slack:.1f} s) {way} the supervisor's"
    return [Finding("error" if least >= _CLOCK_FAIL_S else "warning", "clock", "", text)]


def judge_program(path: str, exit_code: int, printed: str) -> list[Finding]:
    """Judge a site's own check by the exit codes of Nagios."""
    severity = _NAGIOS_SEVERITIES.get(exit_code, "unknown")
    if severity is None:
        return []
    line = next((line.strip() for line in printed.splitlines() if line.strip()), "it printed nothing")
    shown = "".join(letter for letter in line if letter.isprintable()).partition("|")[0].strip()[:200]
    code = "" if exit_code in _NAGIOS_SEVERITIES else f" (exit code {exit_code})"
    return [Finding(severity, "site", f"{path}{code}", shown)]
