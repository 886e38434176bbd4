"""One doctor a node of an allocation, started as steps of Slurm's, and their reports gathered."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hpcrun import process
from hpcrun.errors import HpcrunError, SiteError
from hpcrun.finding import Finding
from hpcrun.launcher_world import without_rank_variables
from hpcrun.process import environment_with_package
from hpcrun.slurm.allocation import Allocation, node_step, step_environment
from hpcrun.tuning.host.checks import check_clock_skew

_MAX_PARALLEL = 16
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class NodeDoctorResult:
    """The result of one node's doctor."""

    node: str
    report: dict[str, Any] | None
    """None where there is no report; then the findings say why."""
    findings: tuple[Finding, ...] = ()


def doctor_command(node: str, options: Sequence[str]) -> list[str]:
    """A step on one node, with the limits that a rank would have."""
    # --always-0: an exit code above 0 is srun's.
    return [
        *node_step(node, "--input=none"),
        sys.executable,
        "-P",
        "-m",
        "hpcrun",
        "doctor",
        "--json",
        "--always-0",
        *options,
    ]


def run_fleet_doctor(allocation: Allocation, options: Sequence[str]) -> list[NodeDoctorResult]:
    """Run the doctor on every node, a few at a time; a node without a report gets a finding."""
    environ = step_environment(without_rank_variables(environment_with_package(os.environ)))

    def visit(node: str) -> NodeDoctorResult:
        return _run_node_doctor(node, doctor_command(node, options), environ)

    with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
        return list(pool.map(visit, allocation.nodes))


def _run_node_doctor(node: str, command: Sequence[str], environ: dict[str, str]) -> NodeDoctorResult:
    started = time.time()
    try:
        done = process.run(command, timeout_s=_TIMEOUT_S, env=environ).require_success()
        report = json.loads(done.stdout)
    except (HpcrunError, ValueError) as error:
        text = f"its doctor gave no report: {error}"
        return NodeDoctorResult(
            node, None, (Finding("error", "report", node, text, "look at the node with sinfo -R"),)
        )
    if not isinstance(report, dict):
        return NodeDoctorResult(node, None, (Finding("error", "report", node, "its doctor gave no report"),))
    report["node"] = node  # by Slurm's name: its own may have a domain
    clock = report.get("time")
    skew = check_clock_skew(node, clock, started, time.time()) if isinstance(clock, float) else []
    return NodeDoctorResult(node, report, tuple(skew))


def require_allocation(allocation: Allocation | None) -> Allocation:
    """The allocation; SiteError outside of one."""
    if allocation is None:
        raise SiteError("doctor --all needs an allocation; run it in one: salloc -N4 hpcrun doctor --all")
    return allocation
