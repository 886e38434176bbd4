"""What `hpcrun doctor` examines: this node, all nodes of an allocation, counters over time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.finding import Finding, sort_findings
from hpcrun.health.connectivity import check_all_connections
from hpcrun.health.fleet_doctor import require_allocation, run_fleet_doctor
from hpcrun.slurm.allocation import find_allocation
from hpcrun.specs.cluster import ClusterSpec, NetworkSpec, find_cluster
from hpcrun.tuning.advice import AdviceContext, advise_settings
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.checks import check_clock_skew
from hpcrun.tuning.host.counters import CounterReading, read_host_counters
from hpcrun.tuning.host.doctor_report import DoctorReport, examine_host
from hpcrun.tuning.host.fleet import compare_nodes
from hpcrun.tuning.host.node_report import (
    HostReport,
    captured_command_runner,
    read_host_report,
    run_host_command,
)
from hpcrun.tuning.registry.nccl_library import NcclLibrary, NcclLibraryChoice, find_nccl_library
from hpcrun.tuning.registry.registry import parse_version
from hpcrun.typed_json import parse_typed


@dataclass(frozen=True)
class NodeExamination:
    """This node's report, all findings, and what could not be looked at."""

    report: DoctorReport
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FleetExamination:
    """The reports of an allocation's nodes, findings between them and of each, and notes."""

    nodes: int
    reports: Mapping[str, dict[str, Any]]
    between: tuple[Finding, ...]
    own: Mapping[str, list[Finding]]
    notes: tuple[str, ...]


def examine_node(
    root: Path, cluster: str | None, nccl: str | None, reference_time: float | None
) -> NodeExamination:
    """Examine the node whose file system is `root`."""
    profile, notes = load_doctor_profile(cluster)
    network = profile.network if profile else NetworkSpec()
    uses_ucx = profile is not None and profile.mpi.library == "openmpi"
    library = _choose_nccl(nccl, is_live=root == Path("/"))
    advised = _advised_settings(profile, library.version, notes)
    host = read_node(root, advised)
    report = examine_host(HostCheckInput(host, network, library.version, uses_ucx, advised, library.cuda))
    skew: list[Finding] = []
    if reference_time and host.time:
        skew = check_clock_skew(host.node, host.time, reference_time, reference_time)
    return NodeExamination(report, (*skew, *report.findings), tuple(notes))


def examine_allocation(cluster: str | None, nccl: str | None, *, connect: bool) -> FleetExamination:
    """Examine and compare all nodes of this allocation; `connect` tries a connection between each two."""
    profile, notes = load_doctor_profile(cluster)
    _choose_nccl(nccl, is_live=False)
    options = [*(["--cluster", cluster] if cluster else []), *(["--nccl-version", nccl] if nccl else [])]
    allocation = require_allocation(find_allocation(os.environ))
    results = run_fleet_doctor(allocation, options)
    reports = {result.node: result.report for result in results if result.report is not None}
    findings = [finding for result in results for finding in result.findings]
    interface = profile.network.interface if profile else None
    if len(reports) > 1:
        findings += compare_nodes(reports, interface)
    if connect and len(reports) > 1:
        findings += check_all_connections(allocation, interface)
    own = {
        node: [parse_typed(Finding, values) for values in report.get("findings", ())]
        for node, report in reports.items()
    }
    return FleetExamination(len(results), reports, sort_findings(findings), own, tuple(notes))


def read_node(root: Path, advised: Mapping[str, str] | None = None) -> HostReport:
    """What the node says about itself: live for /, else from a captured tree."""
    if not root.is_dir():
        raise UsageError(f"--root {root}: is not a directory; give the root of a captured tree")
    # Only / itself is looked at live.
    return read_host_report(Path(os.path.realpath(root)) if root.is_absolute() else root, advised=advised)


def read_node_counters(root: Path) -> CounterReading:
    """All counters of the node's adapters now."""
    host = read_node(root)
    reading = read_host_counters(host, root, run_host_command if host.time else captured_command_runner(root))
    return replace(reading, time=time.time()) if host.time else reading


def load_doctor_profile(name: str | None) -> tuple[ClusterSpec | None, list[str]]:
    """The profile, and notes; without a name there may be none."""
    try:
        profile = find_cluster(name)
    except UsageError as error:
        if name is not None:
            raise
        return None, [f"no profile: {error}"]
    return profile, [] if profile else ["no profile: every active adapter counts as one for jobs"]


def _choose_nccl(text: str | None, *, is_live: bool) -> NcclLibraryChoice:
    if text is not None:
        return NcclLibraryChoice(NcclLibrary(parse_version(text), "--nccl-version"))
    return find_nccl_library(environ=os.environ) if is_live else NcclLibraryChoice(None)


def _advised_settings(
    profile: ClusterSpec | None, version: tuple[int, ...] | None, notes: list[str]
) -> dict[str, str]:
    """The settings that jobs get with the profile; a note where it is wrong and they get none."""
    named = {name: value for name, value in profile.env.items() if value is not None} if profile else {}
    try:
        return advise_settings(AdviceContext(profile, 0, nccl=version)).environment() | named
    except UsageError as error:
        notes.append(f"jobs get no settings: {error}")
        return named
