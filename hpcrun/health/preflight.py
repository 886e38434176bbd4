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
from hpcrun.specs.preflight import PreflightCheck
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import Tagged

_PROBE_S = 3.0
_GPU_S = 6.0
_SLACK_S = 0.5
MAX_PREFLIGHT_S = 9.0
"""No node takes longer than this; a healthy one answers in far less than a second."""
Probe = Callable[[CheckTarget], list[Finding]]
_PROBES: dict[PreflightCheck, Probe | None] = {
    "limits": probes.probe_limits,
    "space": probes.probe_space,
    "write": probes.probe_write,
    # The supervisor judges the clock, by the time in the node's answer (launch.admission).
    "clock": None,
    "interface": probes.probe_interface,
    "leftovers": probes.probe_leftovers,
    "shm": probes.probe_shared_memory,
    "sums": probes.probe_arithmetic,
    "gpu": probes.probe_gpus,
    "nic": probes.probe_nics,
    # One thread for each of the site's programs, see run_probes.
    "site": None,
}


@dataclass(frozen=True)
class PreflightRequest(Tagged):
    """What a node is asked to check, as it is sent to the agents."""

    checks: Sequence[PreflightCheck]
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
        """Return the request to one node."""
        return replace(self, hcas=self.hcas_of.get(node.partition(".")[0], self.hcas), hcas_of={})

    def place(self, run: RunDir, root: Path = Path("/")) -> CheckTarget:
        """Return what the probes look at."""
        scratch, hcas = tuple(self.scratch), tuple(self.hcas)
        xids = {int(code): action for code, action in self.xids.items()}
        return CheckTarget(run, self.attempt, scratch, self.interface, hcas, self.gpus, xids, root)


@dataclass(frozen=True)
class PreflightReport(Tagged):
    """The findings of a node."""

    attempt: int
    time: float
    """By the node's clock, when it began to look."""
    seconds: float
    checks: tuple[Finding, ...]
    """Those that are not well."""


class _ProbeThread(threading.Thread):
    """Runs one probe in its own thread: a file system or tool that hangs must not delay the others."""

    def __init__(self, check: str, probe: Callable[[], list[Finding]], limit_s: float) -> None:
        super().__init__(name=f"preflight {check}", daemon=True)
        self.limit_s = limit_s
        self._check, self._probe = check, probe
        self.findings = [Finding("unknown", check, "", f"gave no answer within {limit_s:g} s")]

    def run(self) -> None:
        """Run the probe."""
        try:
            self.findings = self._probe()
        except (HpcrunError, OSError, ValueError) as error:
            self.findings = [Finding("unknown", self._check, "", " ".join(str(error).split())[:200])]


def run_probes(place: CheckTarget, request: PreflightRequest) -> list[Finding]:
    """Run the probes of all requested checks at the same time.

    KeyError for a check that has no entry in _PROBES.
    """
    selected = [(name, _PROBES[name]) for name in request.checks]
    threads = [
        _ProbeThread(name, partial(probe, place), _GPU_S if name == "gpu" else _PROBE_S)
        for name, probe in selected
        if probe is not None
    ]
    limit_s = min(request.program_s, MAX_PREFLIGHT_S - 2 * _SLACK_S)
    threads += [
        _ProbeThread("site", partial(probes.run_site_check, path, limit_s), limit_s + _SLACK_S)
        for path in (request.programs if "site" in request.checks else ())
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + thread.limit_s - time.monotonic()))
    return [finding for thread in threads for finding in thread.findings]


def answer_preflight(run: RunDir, request: PreflightRequest) -> PreflightReport:
    """Look at this node: its clock, the time it took, and what is not well."""
    clock, began = time.time(), time.monotonic()
    checks = tuple(run_probes(request.place(run), request))
    return PreflightReport(request.attempt, clock, time.monotonic() - began, checks)
