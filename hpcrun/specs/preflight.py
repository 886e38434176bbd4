"""What is checked on every node before an attempt, and what a job or a site may say about it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from hpcrun.specs.fields import ExpandablePath, SpecSection

PreflightCheck = Literal[
    "limits", "space", "write", "clock", "interface", "leftovers", "shm", "sums", "gpu", "nic", "site"
]
PREFLIGHT_CHECKS: tuple[PreflightCheck, ...] = get_args(PreflightCheck)
"""limits of a process · space and inodes · a file written and read back · the clock · the profile's network
interface · processes of other runs · shared memory left behind · arithmetic · GPUs · network adapters · the
site's own checks."""


def _known(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    words = value if isinstance(value, list) else [value]
    strange = [word for word in words if word not in PREFLIGHT_CHECKS]
    if strange or not isinstance(value, list):
        what = f"{strange[0]!r} is not a check" if strange else "the names of checks are a list"
        raise ValueError(f"{what}; write true, false, or those to leave out: [{', '.join(PREFLIGHT_CHECKS)}]")
    return value


PreflightSelection = Annotated[bool | list[PreflightCheck], BeforeValidator(_known)]
"""Whether nodes are checked before an attempt; a list: all checks but these."""


def selected_preflight_checks(preflight: bool | list[PreflightCheck]) -> tuple[PreflightCheck, ...]:
    """The checks that are made."""
    if isinstance(preflight, bool):
        return PREFLIGHT_CHECKS if preflight else ()
    return tuple(check for check in PREFLIGHT_CHECKS if check not in preflight)


class SitePreflightSpec(SpecSection):
    """The site's own checks of a node; the admin's code."""

    checks: list[ExpandablePath] = Field(
        default=[],
        description="programs that check a node before an attempt; exit code 0: fine, 1: warning, 2: bad"
        " (the node is left out), 3: unknown, as in Nagios",
    )
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=8,
        description="seconds allowed per check; a check that takes longer counts as unknown",
    )
    xids: dict[
        Annotated[int, Field(ge=1, le=9999)], Literal["ignore", "restart", "reset", "reboot", "look"]
    ] = Field(
        default={},
        description="actions for XIDs of NVIDIA's driver where the site differs from NVIDIA's catalogue;"
        " reset and reboot leave the node out",
    )
