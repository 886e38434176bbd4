"""The preflight of a node: every check in a time of its own, run on the node, answered in one message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hpcrun.errors import HpcrunError
from hpcrun.finding import Finding
from hpcrun.health import probes
from hpcrun.health.probes import CheckTarget
from hpcrun.health.xids import XidAction
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import Tagged

_PROBE_S = 3.0
_GPU_S = 6.0
_SLACK_S = 0.5
MAX_PREFLIGHT_S = 9.0
"""No node looks for longer than this; it answers in far less than a second when it is well."""
_PROBES: dict[str, Callable[[CheckTarget], list[Finding]]] = {
    "limits": probes.probe_limits,
    "space": probes.probe_space,
    "write": probes.probe_write,
    "interface": probes.probe_interface,
    "leftovers": probes.probe_leftovers,
    "shm": probes.probe_shared_memory,
    "sums": probes.probe_arithmetic,
    "gpu": probes.probe_gpus,
    "nic": probes.probe_nics,
}


@dataclass(frozen=True)
class PreflightRequest(Tagged):
    """What a node is asked to look at, as it travels to the agents."""

    checks: Sequence[str]
    attempt: int = 1
    scratch: Sequence[str] = ()
    """Directories of the node's own, besides /tmp."""
    interface: str | None = None
    hcas: Sequence[str] = ()
    """The adapters that the job uses."""
    hcas_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Those of nodes where it uses others, by the short name."""
    gpus: int = 0
    xids: Mapping[str, XidAction] = field(default_factory=dict)
    """The site's own actions for numbers in the kernel's log, which travel as text."""
    programs: Sequence[str] = ()
    program_s: float = 5.0

    def of(self, node: str) -> PreflightRequest:
        """The same for one node."""
        return replace(self, hcas=self.hcas_of.get(node.partition(".")[0], self.hcas), hcas_of={})

    def place(self, run: RunDir, root: Path = Path("/")) -> CheckTarget:
        """What the probes look at."""
        scratch, hcas = tuple(self.scratch), tuple(self.hcas)
        xids = {int(code): action for code, action in self.xids.items()}
        return CheckTarget(run, self.attempt, scratch, self.interface, hcas, self.gpus, xids, root)


@dataclass(frozen=True)
class PreflightReport(Tagged):
    """What a node has found."""

    attempt: int
    time: float
    """By the node's clock, when it began to look."""
    seconds: float
    checks: tuple[Finding, ...]
    """Those that are not well."""


class _ProbeThread(threading.Thread):
    """One check, in a thread of its own: a file system or a tool that hangs must not hold up the others."""

    def __init__(self, check: str, look: Callable[[], list[Finding]], limit_s: float) -> None:
        super().__init__(name=f"preflight {check}", daemon=True)
        self.check, self.limit_s = check, limit_s
        self._look = look
        self.found: list[Finding] | None = None

    def run(self) -> None:
        """Look."""
        try:
            self.found = self._look()
        except (HpcrunError, OSError, ValueError) as error:
            self.found = [Finding("unknown", self.check, "", " ".join(str(error).split())[:200])]

    @property
    def findings(self) -> list[Finding]:
        """What it has found; that it is unknown where it has not come back."""
        late = Finding("unknown", self.check, "", f"gave no answer within {self.limit_s:g} s")
        return [late] if self.found is None else self.found


def run_probes(place: CheckTarget, ask: PreflightRequest) -> list[Finding]:
    """Everything that was asked for, all at once."""
    waiting = [
        _ProbeThread(name, partial(probe, place), _GPU_S if name == "gpu" else _PROBE_S)
        for name, probe in _PROBES.items()
        if name in ask.checks
    ]
    limit_s = min(ask.program_s, MAX_PREFLIGHT_S - 2 * _SLACK_S)
    waiting += [
        _ProbeThread("site", partial(probes.run_site_check, path, limit_s), limit_s + _SLACK_S)
        for path in ask.programs
        if "site" in ask.checks
    ]
    began = time.monotonic()
    for one in waiting:
        one.start()
    for one in waiting:
        one.join(max(0.0, began + one.limit_s - time.monotonic()))
    return [found for one in waiting for found in one.findings]


def answer_preflight(run: RunDir, request: PreflightRequest) -> PreflightReport:
    """Look at this node: its clock, the time it took, and what is not well."""
    clock, began = time.time(), time.monotonic()
    checks = tuple(run_probes(request.place(run), request))
    return PreflightReport(request.attempt, clock, time.monotonic() - began, checks)
