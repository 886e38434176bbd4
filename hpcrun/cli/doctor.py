"""`hpcrun doctor`: find faults in a node's network, and the node that differs from the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.options import AsJson, Cluster, NcclVersion, make_app
from hpcrun.cli.output import note, print_findings, print_json
from hpcrun.errors import EXIT_CHECK_FAILED, EXIT_DONE, UsageError

if TYPE_CHECKING:
    from hpcrun.finding import Finding

app = make_app()

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[compare FILE...|pairs NODES [FILE...]]",
        help="Reports of --json to compare, or trials of pairs; default: examine this node.",
    ),
]
_Root = Annotated[
    Path, typer.Option(metavar="DIR", help="Root of a captured tree, or of a container's host.")
]
_All = Annotated[bool, typer.Option("--all", help="Examine all nodes of this allocation, and compare them.")]
_Connect = Annotated[bool, typer.Option("--connect", help="With --all: try a connection between each two.")]
_Counters = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Only write all counters into this file.")
]
_Since = Annotated[Path | None, typer.Option(metavar="FILE", help="Compare counters with those in FILE.")]
_Clock = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Time now since 1970, by a clock that you trust."),
]
_AtLeast = Annotated[
    float | None,
    typer.Option(metavar="GBPS", help="With pairs: slower is slow; default: 0.8 of the usual."),
]
_Hca = Annotated[
    str | None, typer.Option(metavar="NAMES", help="With pairs: adapters to try, such as mlx5_[0-7].")
]


@app.command()
def doctor(
    words: _Words = None,
    root: _Root = Path("/"),
    everywhere: _All = False,
    connect: _Connect = False,
    counters: _Counters = None,
    since: _Since = None,
    cluster: Cluster = None,
    nccl_version: NcclVersion = None,
    reference_time: _Clock = None,
    at_least: _AtLeast = None,
    hca: _Hca = None,
    as_json: AsJson = False,
    always_0: Annotated[bool, typer.Option("--always-0", hidden=True)] = False,
) -> None:
    """Examine this node's network: adapters, addresses, PCI links, PFC, limits, /dev/shm.

    Needs no root. `doctor compare A.json B.json ...` names the node that differs; `doctor pairs n[01-16]
    OUTPUT...` says which two nodes to try next until a slow one is named; run `doctor --counters FILE` before
    a job and `doctor --since FILE` after it. Exits with 1 if something is broken.
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
        findings = _examine_allocation(cluster, nccl_version, connect, as_json)
    elif counters is not None or since is not None:
        findings = _check_counters(root, counters, since, as_json)
    else:
        findings = _examine_node(root, cluster, nccl_version, reference_time, as_json)
    is_broken = any(finding.severity == "error" for finding in findings)
    raise typer.Exit(EXIT_CHECK_FAILED if is_broken and not always_0 else EXIT_DONE)


def _examine_node(
    root: Path, cluster: str | None, nccl: str | None, reference_time: float | None, as_json: bool
) -> list[Finding]:
    from hpcrun.health.doctor import examine_node

    result = examine_node(root, cluster, nccl, reference_time)
    report, findings = result.report, list(result.findings)
    if as_json:
        print_json(**report.as_json() | _as_json(findings, result.notes))
        return findings
    for line in result.notes:
        note(line)
    for port in report.host.ports:
        rate = f"{port.rate_Gbps:g} Gb/s" if port.rate_Gbps else "rate unknown"
        gid = f", GID {report.gid_index[port.name]}" if port.name in report.gid_index else ""
        facts = (port.state or "state unknown", rate, port.layer or "layer unknown")
        print(f"port       {port.name}  {', '.join(facts)}{gid}")
    print(f"sockets    {report.socket_interface or 'no interface'}")
    print_findings(findings, f"{report.host.node}: nothing found")
    return findings


def _examine_allocation(cluster: str | None, nccl: str | None, connect: bool, as_json: bool) -> list[Finding]:
    from hpcrun.health.doctor import examine_allocation

    result = examine_allocation(cluster, nccl, connect=connect)
    every = [*result.between, *(finding for findings in result.own.values() for finding in findings)]
    if as_json:
        print_json(nodes=list(result.reports.values()), **_as_json(result.between, result.notes))
        return every
    for line in result.notes:
        note(line)
    print(f"{len(result.reports)} of {result.nodes} nodes have answered")
    print_findings(result.between, "the nodes are alike")
    _print_by_node(result.own)
    return every


def _print_by_node(own: Mapping[str, list[Finding]]) -> None:
    """Print findings of the nodes themselves, each once with the nodes that have it."""
    from dataclasses import replace

    from hpcrun.finding import sort_findings
    from hpcrun.hostlist import fold_hosts

    nodes_of: dict[Finding, list[str]] = {}
    for node, findings in own.items():
        for finding in findings:
            nodes_of.setdefault(finding, []).append(node)
    print_findings(
        replace(finding, where=fold_hosts(nodes_of[finding])) for finding in sort_findings(nodes_of)
    )


def _compare_reports(words: list[str], cluster: str | None, as_json: bool) -> list[Finding]:
    from hpcrun.health.doctor import load_doctor_profile
    from hpcrun.tuning.host.doctor_report import parse_doctor_reports
    from hpcrun.tuning.host.fleet import compare_nodes

    if words[0] != "compare":
        raise UsageError(
            f"doctor {words[0]}: is not known; write doctor, doctor compare A.json B.json ..., or doctor"
            " pairs NODES [FILE...]"
        )
    profile, _ = load_doctor_profile(cluster)
    reports: dict[str, dict[str, Any]] = {}
    for word in words[1:]:
        reports |= parse_doctor_reports(_read_json(Path(word)), word)
    findings = list(compare_nodes(reports, profile.network.interface if profile else None))
    if as_json:
        print_json(compared=list(reports), findings=[finding.as_json() for finding in findings])
    else:
        print_findings(findings, f"{len(reports)} nodes are alike")
    return findings


def _read_json(path: Path) -> Any:
    from hpcrun.specs.records import read_json

    try:
        content = read_json(path)
    except UsageError:
        raise UsageError(f"{path}: is not what `hpcrun doctor` writes: it holds no JSON") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if content is None:
        raise UsageError(f"{path}: there is no such file")
    return content


def _check_counters(root: Path, target: Path | None, since: Path | None, as_json: bool) -> list[Finding]:
    from hpcrun.files import check_output
    from hpcrun.health.doctor import read_node_counters
    from hpcrun.specs.records import write_json
    from hpcrun.tuning.host.counters import compare_counters, diagnose_counters, parse_counters

    reading = read_node_counters(root)
    if target is not None:
        check_output(target)
        try:
            write_json(target, reading.as_json())
        except OSError as error:
            raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
        note(f"{len(reading.values)} counters of {reading.node} in {target}")
    if since is None:
        if as_json:
            print_json(node=reading.node, counters=len(reading.values), file=str(target))
        return []
    growth = compare_counters(parse_counters(_read_json(since), str(since)), reading)
    findings = list(diagnose_counters(growth))
    if as_json:
        print_json(growth=growth.as_json(), findings=[finding.as_json() for finding in findings])
    else:
        period = "" if growth.seconds is None else f" in {growth.seconds:.0f} s"
        partial = f"; {len(growth.missing)} are in one reading only" if growth.missing else ""
        none = f"{growth.node}: of {len(growth.values)} counters none that indicates a fault has grown"
        print_findings(findings, f"{none}{period}{partial}")
    return findings


def _as_json(findings: Iterable[Finding], notes: Iterable[str]) -> dict[str, Any]:
    return {"findings": [finding.as_json() for finding in findings], "notes": list(notes)}
