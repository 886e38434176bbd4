"""The verdict on one thing that was looked at before an attempt, and the pure rules behind such verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpcrun.fabric.ports import RdmaPort

Verdict = Literal["ok", "warn", "fail", "unknown"]
"""Only `fail` keeps a node out; what is unknown is told, and nothing else."""
_VERDICTS = get_args(Verdict)
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
_NAGIOS_VERDICTS: dict[int, Verdict] = {0: "ok", 1: "warn", 2: "fail", 3: "unknown"}
_UP, _DOWN = "up", ("down", "lowerlayerdown", "notpresent")


@dataclass(frozen=True)
class CheckResult:
    """What a check has found; the text is one line."""

    check: str
    verdict: Verdict = "ok"
    text: str = ""
    common: bool = False
    """Whether it is about something that all nodes share, such as the run directory."""

    def __str__(self) -> str:
        return f"{self.check}: {self.text}" if self.text else self.check

    def as_json(self) -> dict[str, Any]:
        """Plain values; without what says nothing."""
        return {key: value for key, value in vars(self).items() if value not in ("", False)}


def parse_check_result(found: Any) -> CheckResult | None:
    """What as_json made; None for anything else."""
    if not isinstance(found, dict) or found.get("verdict") not in _VERDICTS:
        return None
    text = str(found.get("text", ""))
    return CheckResult(str(found.get("check")), found["verdict"], text, found.get("common") is True)


def judge_limits(soft: Mapping[str, float], *, is_infiniband: bool) -> list[CheckResult]:
    """The limits of a process (math.inf: none); that on locked memory matters to RDMA alone."""
    found = []
    for name, value in soft.items():
        if name in _LIMITS:
            least, usual = _LIMITS[name]
            verdict: Verdict = "fail" if value < least else "warn" if value < usual else "ok"
            if verdict != "ok":
                text = (
                    f"{value:.0f} {_LIMIT_DESCRIPTIONS[name]} are allowed (ulimit, {name}); {usual} are usual"
                )
                found.append(CheckResult("limits", verdict, text))
    locked = soft.get("memlock", math.inf)
    if is_infiniband and locked < _LEAST_MEMLOCK:
        what = _LIMIT_DESCRIPTIONS["memlock"]
        text = f"{locked:.0f} {what} are allowed (ulimit, memlock), and RDMA locks all it uses"
        found.append(CheckResult("limits", "warn", text))
    return found or [CheckResult("limits")]


def judge_space(
    path: str, free_bytes: int, free_inodes: int | None, *, common: bool = False, is_memory: bool = False
) -> CheckResult:
    """Room for files; None inodes: this file system does not count them."""
    least, little = (_LEAST_SHARED, _LITTLE_SHARED) if is_memory else (_LEAST_FREE, _LITTLE_FREE)
    inodes = math.inf if free_inodes is None else free_inodes
    left = f"{free_bytes / 2**20:.0f} MiB and {inodes:.0f} inodes" if free_inodes is not None else ""
    text = f"{path}: {left or f'{free_bytes / 2**20:.0f} MiB'} are free"
    if free_bytes < least or inodes < _LEAST_INODES:
        return CheckResult("space", "fail", text, common)
    if free_bytes < little or inodes < _FEW_INODES:
        return CheckResult("space", "warn", text, common)
    return CheckResult("space")


def judge_interface(name: str, state: str | None, flags: int) -> CheckResult:
    """A network interface by its operstate, None where there is none, and its flags (1: it was set up)."""
    if state is None:
        text = f"{name}: there is no such network interface (network.interface of the profile)"
        return CheckResult("interface", "fail", text)
    if state in _DOWN or not flags & 1:
        return CheckResult("interface", "fail", f"{name}: the network interface is down")
    # What has no carrier to tell of, such as loopback or a tunnel, says `unknown`.
    known = state in (_UP, "unknown")
    return (
        CheckResult("interface")
        if known
        else CheckResult("interface", "unknown", f"{name}: is in state {state}")
    )


def judge_ports(ports: Collection[RdmaPort], wanted: Collection[str]) -> list[CheckResult]:
    """The ports of InfiniBand and RoCE devices; those devices that the job uses have to work."""
    found = []
    for device in sorted({*(port.device for port in ports), *wanted}):
        its = [port for port in ports if port.device == device]
        idle = [port for port in its if not port.is_active]
        what = "; ".join(f"port {port.number} is {port.state or 'unreadable'}" for port in idle)
        if device in wanted and len(idle) == len(its):
            text = f"{device}: {what or 'there is no such device'}, and the job uses it (NCCL_IB_HCA)"
            found.append(CheckResult("nic", "fail", text))
        elif idle and not wanted:
            found.append(CheckResult("nic", "warn", f"{device}: {what}"))
    return found or [CheckResult("nic")]


def judge_clock(sent: float, received: float, told: float, took_s: float) -> CheckResult:
    """A node's clock against ours: it showed `told` between our sending and receiving, less its work.

    Only what is certain counts: half the rest of the round trip either way is not.
    """
    slack = max(0.0, received - sent - took_s) / 2
    offset = told - (sent + slack)
    least = abs(offset) - slack
    if least < _CLOCK_WARN_S:
        return CheckResult("clock")
    way = "ahead of" if offset > 0 else "behind"
    text = f"its clock is {abs(offset):.1f} s (give or take {slack:.1f} s) {way} the supervisor's"
    return CheckResult("clock", "fail" if least >= _CLOCK_FAIL_S else "warn", text)


def judge_program(path: str, exit_code: int, printed: str) -> CheckResult:
    """A site's own check, by the exit codes of Nagios."""
    said = next((line.strip() for line in printed.splitlines() if line.strip()), "it printed nothing")
    shown = "".join(letter for letter in said if letter.isprintable()).partition("|")[0].strip()[:200]
    verdict = _NAGIOS_VERDICTS.get(exit_code, "unknown")
    code = "" if exit_code in _NAGIOS_VERDICTS else f" (exit code {exit_code})"
    return CheckResult("site", verdict, "" if verdict == "ok" else f"{path}{code}: {shown}")
