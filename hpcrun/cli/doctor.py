"""`hpcrun doctor`: what is wrong with a node's network, and which of several nodes is the odd one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.findings import print_findings
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, UsageError

if TYPE_CHECKING:
    from hpcrun.finding import Finding
    from hpcrun.specs.cluster import ClusterSpec
    from hpcrun.tuning.host.node_report import HostReport
    from hpcrun.tuning.registry.nccl_library import NcclLibraryChoice

SCHEMA_VERSION = 2

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[compare FILE...|pairs NODES [FILE...]]",
        help="Reports of --json to compare, or trials of pairs; nothing: look at this node.",
    ),
]
_Root = Annotated[
    Path, typer.Option(metavar="DIR", help="Look at a captured tree, or at a host's root in a container.")
]
_All = Annotated[bool, typer.Option("--all", help="Every node of this allocation, compared.")]
_Connect = Annotated[bool, typer.Option("--connect", help="With --all: try a connection between each two.")]
_Take = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Take all counters into a file; nothing else.")
]
_Since = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What counters did since the look in FILE.")
]
_Cluster = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which profile; default: the default one.")
]
_Nccl = Annotated[
    str | None,
    typer.Option(
        metavar="X", help="For this NCCL, such as 2.19.3; default: the installed one, else a new one."
    ),
]
_Clock = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="The time now since 1970, by a clock that you trust.")
]
_AtLeast = Annotated[
    float | None, typer.Option(metavar="GBPS", help="With pairs: slower is slow; default: 0.8 of the usual.")
]
_Hca = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="With pairs: try these adapters of the nodes, such as mlx5_[0-7]."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def doctor(
    words: _Words = None,
    root: _Root = Path("/"),
    everywhere: _All = False,
    connect: _Connect = False,
    counters: _Take = None,
    since: _Since = None,
    cluster: _Cluster = None,
    nccl_version: _Nccl = None,
    reference_time: _Clock = None,
    at_least: _AtLeast = None,
    hca: _Hca = None,
    as_json: _Json = False,
    always_0: Annotated[bool, typer.Option("--always-0", hidden=True)] = False,
) -> None:
    """Look at this node's network without root: adapters, addresses, PCI links, PFC, limits, /dev/shm.

    Also: doctor compare A.json B.json ..., which names the odd one out; doctor pairs n[01-16] OUTPUT...,
    which says which two nodes to try next until a slow one is named; doctor --counters FILE before a job and
    doctor --since FILE after it. Ends with 1 where something is broken.
    """
    if connect and not everywhere:
        raise UsageError("--connect goes with --all: it tries the nodes of an allocation")
    if hca and (not words or words[0] != "pairs"):
        raise UsageError("--hca goes with pairs: it names the adapters to try between nodes")
    if words and words[0] == "pairs":
        from hpcrun.cli.doctor_pairs import compare_pairs
        from hpcrun.hostlist import expand_hosts

        findings = compare_pairs(words[1:], list(expand_hosts(hca)) if hca else [], at_least, as_json)
    elif words:
        findings = _compare_reports(words, cluster, as_json)
    elif everywhere:
        findings = _examine_all_nodes(cluster, nccl_version, connect, as_json)
    elif counters is not None or since is not None:
        findings = _check_counters(root, counters, since, as_json)
    else:
        findings = _examine_node(root, cluster, nccl_version, reference_time, as_json)
    broken = any(finding.severity == "error" for finding in findings)
    raise typer.Exit(EXIT_CHECK_FAILED if broken and not always_0 else EXIT_DONE)


def _examine_node(
    root: Path, cluster: str | None, nccl: str | None, reference: float | None, as_json: bool
) -> list[Finding]:
    from hpcrun.specs.cluster import NetworkSpec
    from hpcrun.tuning.host.checks import HostCheckInput, check_clock_skew
    from hpcrun.tuning.host.doctor_report import examine_host

    profile, notes = _load_profile(cluster)
    network = profile.network if profile else NetworkSpec()
    uses_ucx = profile is not None and profile.mpi.library == "openmpi"
    library = _find_nccl_version(nccl, is_here=root == Path("/"))
    advised = _advised_settings(profile, library.version, notes)
    host = _read_node(root, advised)
    report = examine_host(HostCheckInput(host, network, library.version, uses_ucx, advised, library.cuda))
    skew = check_clock_skew(host.node, host.time, reference, reference) if reference and host.time else []
    findings = [*skew, *report.findings]
    if as_json:
        _print_json(report.as_json() | {"findings": [one.as_json() for one in findings], "notes": notes})
        return findings
    for line in notes:
        typer.echo(f"hpcrun: {line}", err=True)
    for port in host.ports:
        rate = f"{port.rate_Gbps:g} Gb/s" if port.rate_Gbps else "rate unknown"
        gid = f", GID {report.gid_index[port.name]}" if port.name in report.gid_index else ""
        told = (port.state or "state unknown", rate, port.layer or "layer unknown")
        print(f"port       {port.name}  {', '.join(told)}{gid}")
    print(f"sockets    {report.socket_interface or 'no interface'}")
    print_findings(findings, f"{host.node}: nothing found")
    return findings


def _read_node(root: Path, advised: Mapping[str, str] | None = None) -> HostReport:
    from hpcrun.tuning.host.node_report import read_host_report

    if not root.is_dir():
        raise UsageError(f"--root {root}: is no directory; give the root of a captured tree")
    # Only / itself is looked at live.
    return read_host_report(Path(os.path.realpath(root)) if root.is_absolute() else root, advised=advised)


def _load_profile(name: str | None) -> tuple[ClusterSpec | None, list[str]]:
    """The profile; without a name a doctor does without, where it cannot tell which one holds."""
    from hpcrun.specs.cluster import find_cluster

    try:
        found = find_cluster(name)
    except UsageError as error:
        if name is not None:
            raise
        return None, [f"no profile: {error}"]
    return found, [] if found else ["no profile: every active adapter counts as one for jobs"]


def _find_nccl_version(text: str | None, *, is_here: bool) -> NcclLibraryChoice:
    from hpcrun.tuning.registry.nccl_library import NcclLibrary, NcclLibraryChoice, find_nccl_library
    from hpcrun.tuning.registry.registry import parse_version

    if text is not None:
        return NcclLibraryChoice(NcclLibrary(parse_version(text), "--nccl-version"))
    return find_nccl_library(environ=os.environ) if is_here else NcclLibraryChoice(None)


def _advised_settings(
    profile: ClusterSpec | None, version: tuple[int, ...] | None, notes: list[str]
) -> dict[str, str]:
    """What jobs get by the profile; where that is wrong, they get no advice, and a note says so."""
    from hpcrun.tuning.advice import AdviceContext, advise_settings

    named = {name: value for name, value in profile.env.items() if value is not None} if profile else {}
    try:
        return advise_settings(AdviceContext(profile, 0, nccl=version)).environment() | named
    except UsageError as error:
        notes.append(f"jobs get no settings: {error}")
        return named


def _examine_all_nodes(cluster: str | None, nccl: str | None, connect: bool, as_json: bool) -> list[Finding]:
    from hpcrun.finding import Finding, sort_findings
    from hpcrun.health.connectivity import check_all_connections
    from hpcrun.health.fleet_doctor import require_allocation, run_fleet_doctor
    from hpcrun.slurm.allocation import find_allocation
    from hpcrun.tuning.host.fleet import compare_nodes
    from hpcrun.typed_json import parse_typed

    profile, notes = _load_profile(cluster)
    _find_nccl_version(nccl, is_here=False)
    options = [*(["--cluster", cluster] if cluster else []), *(["--nccl-version", nccl] if nccl else [])]
    allocation = require_allocation(find_allocation(os.environ))
    answers = run_fleet_doctor(allocation, options)
    reports = {one.node: one.report for one in answers if one.report is not None}
    findings = [finding for one in answers for finding in one.findings]
    interface = profile.network.interface if profile else None
    if len(reports) > 1:
        findings += compare_nodes(reports, interface)
    if connect and len(reports) > 1:
        findings += check_all_connections(allocation, interface)
    own = {
        node: [parse_typed(Finding, values) for values in report.get("findings", ())]
        for node, report in reports.items()
    }
    every = [*sort_findings(findings), *(finding for of in own.values() for finding in of)]
    if as_json:
        between = [one.as_json() for one in sort_findings(findings)]
        _print_json({"nodes": list(reports.values()), "findings": between, "notes": notes})
        return every
    for line in notes:
        typer.echo(f"hpcrun: {line}", err=True)
    print(f"{len(reports)} of {len(answers)} nodes have answered")
    print_findings(sort_findings(findings), "the nodes are alike")
    _print_by_node(own)
    return every


def _print_by_node(own: Mapping[str, list[Finding]]) -> None:
    """Findings of the nodes themselves, each once with the nodes that have it."""
    from hpcrun.finding import sort_findings
    from hpcrun.hostlist import fold_hosts

    nodes_of: dict[Finding, list[str]] = {}
    for node, findings in own.items():
        for one in findings:
            nodes_of.setdefault(one, []).append(node)
    for finding in sort_findings(nodes_of):
        print_findings([replace(finding, where=fold_hosts(nodes_of[finding]))])


def _compare_reports(words: list[str], cluster: str | None, as_json: bool) -> list[Finding]:
    from hpcrun.tuning.host.doctor_report import parse_doctor_reports
    from hpcrun.tuning.host.fleet import compare_nodes

    if words[0] != "compare":
        raise UsageError(
            f"doctor {words[0]}: is not known; write doctor, doctor compare A.json B.json ..., or doctor"
            " pairs NODES [FILE...]"
        )
    profile, _ = _load_profile(cluster)
    reports: dict[str, dict[str, Any]] = {}
    for word in words[1:]:
        reports |= parse_doctor_reports(_read_json(Path(word)), word)
    findings = list(compare_nodes(reports, profile.network.interface if profile else None))
    if as_json:
        _print_json({"compared": list(reports), "findings": [one.as_json() for one in findings]})
    else:
        print_findings(findings, f"{len(reports)} nodes are alike")
    return findings


def _read_json(path: Path) -> Any:
    from hpcrun.specs.records import read_json

    try:
        found = read_json(path)
    except UsageError:
        raise UsageError(f"{path}: is not what `hpcrun doctor` writes: it holds no JSON") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if found is None:
        raise UsageError(f"{path}: there is no such file")
    return found


def _check_counters(root: Path, target: Path | None, since: Path | None, as_json: bool) -> list[Finding]:
    from hpcrun.files import check_output
    from hpcrun.specs.records import write_json
    from hpcrun.tuning.host.counters import (
        compare_counters,
        diagnose_counters,
        parse_counters,
        read_host_counters,
    )
    from hpcrun.tuning.host.node_report import captured_command_runner, run_host_command

    host = _read_node(root)
    now = read_host_counters(host, root, run_host_command if host.time else captured_command_runner(root))
    if host.time:
        now = replace(now, time=time.time())
    if target is not None:
        check_output(target)
        try:
            write_json(target, now.as_json())
        except OSError as error:
            raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
        typer.echo(f"hpcrun: {len(now.values)} counters of {now.node} in {target}", err=True)
    if since is None:
        if as_json:
            _print_json({"node": now.node, "counters": len(now.values), "file": str(target)})
        return []
    grown = compare_counters(parse_counters(_read_json(since), str(since)), now)
    findings = list(diagnose_counters(grown))
    if as_json:
        _print_json({"growth": grown.as_json(), "findings": [one.as_json() for one in findings]})
    else:
        took = "" if grown.seconds is None else f" in {grown.seconds:.0f} s"
        alone = f"; {len(grown.missing)} are in one look alone" if grown.missing else ""
        looked = f"{grown.node}: of {len(grown.values)} counters none has grown{took}"
        print_findings(findings, f"{looked} that speaks of trouble{alone}")
    return findings


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
