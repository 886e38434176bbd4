"""XIDs: the numbers with which NVIDIA's driver reports in the kernel's log what has happened to a GPU.

The action for a number comes from NVIDIA's catalogue of XIDs (October 2025); other lists differ, and a site
may have its own. The action that the driver itself requests (gpu_recovery_action) takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.finding import Finding, Severity

XidAction = Literal["ignore", "restart", "reset", "reboot", "look"]
"""nothing · the program starts again · the GPU needs a reset · the node needs a reboot · a person must
look."""

_CATALOGUE: dict[XidAction, tuple[int, ...]] = {
    "restart": (13, 31, 69, 94),
    "reset": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "reboot": (79,),
    "look": (45, 48, 74, *range(144, 151)),
    "ignore": (43, 63, 92, 121, 154),
}
_ACTION_OF = {code: action for action, codes in _CATALOGUE.items() for code in codes}
_ACTION_TEXT = {
    "reset": "the GPU needs a reset",
    "reboot": "the node needs a reboot",
    "look": "somebody has to look",
}
_XID_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\): (\d+)")
_XID_IN_TEXT = re.compile(r"\bXid\b:?\s*(?:\([^)]*\):?\s*)?(\d+)")
_STAMP = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:[.,]\d+)?[+-]\d{2}:?\d{2}")
_LOOK_BACK = timedelta(hours=2)
"""What is older has had its remedy, or shows in nvidia-smi."""


@dataclass(frozen=True, order=True)
class Xid:
    """One number that one GPU has given."""

    gpu: str
    """Its PCI address."""
    code: int


def parse_xids(text: str, now: datetime | None = None) -> list[Xid]:
    """Those in a kernel log, each once for a GPU; with `now`, those of the last two hours.

    A line whose time cannot be read counts.
    """
    xids = dict[Xid, None]()
    for line in text.splitlines():
        match = _XID_LINE.search(line)
        if match and not (now and _is_old(line, now)):
            xids[Xid(match[1].lower(), int(match[2]))] = None
    return list(xids)


def xid_action(code: int, site: Mapping[int, XidAction] | None = None) -> XidAction | None:
    """Return the action for a number, by the site's list, else the catalogue; None if neither has it."""
    return (site or {}).get(code, _ACTION_OF.get(code))


def is_program_xid(text: str) -> bool:
    """Whether a message names XIDs, and none but those after which the program just starts again."""
    codes = [int(code) for code in _XID_IN_TEXT.findall(text)]
    return bool(codes) and all(xid_action(code) in ("restart", "ignore") for code in codes)


def judge_xids(
    xids: Iterable[Xid], site: Mapping[int, XidAction] | None = None, *, is_asked: bool | None = None
) -> list[Finding]:
    """Report the numbers that keep an attempt away from the node, or that somebody should know of.

    `is_asked`: whether the driver itself requests an action; if it says that none is needed, a list only
    warns.
    """
    findings = []
    for xid in sorted(xids):
        action = xid_action(xid.code, site)
        if action in ("ignore", "restart"):
            continue
        what = _ACTION_TEXT[action] if action else "no list knows this number"
        is_bad = action in ("reset", "reboot") and is_asked is not False
        severity: Severity = "error" if is_bad else "warning"
        findings.append(Finding(severity, "gpu", f"GPU at {xid.gpu}", f"Xid {xid.code}: {what}"))
    return findings


def read_recent_xids(timeout_s: float) -> list[Xid]:
    """Those in this kernel's log; none where it is not for us to read, which many sites have so."""
    try:
        done = process.run(["dmesg", "--time-format=iso"], timeout_s=timeout_s)
    except SiteError:
        return []
    return parse_xids(done.stdout, datetime.now().astimezone()) if done.exit_code == 0 else []


def _is_old(line: str, now: datetime) -> bool:
    match = _STAMP.search(line)
    if match is None:
        return False
    try:
        return now - datetime.fromisoformat(match[0].replace(",", ".")) > _LOOK_BACK
    except ValueError:
        return False
