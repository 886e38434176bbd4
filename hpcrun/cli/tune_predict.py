"""`hpcrun tune predict` and `tune read`: predict algorithms by message size, analyse an NCCL log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hpcrun.cli.options import AsJson, Cluster, JobWords, Topology, parse_name, split_job_words
from hpcrun.cli.output import note, print_findings, print_json, print_lines, read_file, write_file
from hpcrun.errors import UsageError
from hpcrun.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcrun.tuning.log.changes import AlgorithmChange
    from hpcrun.tuning.log.diagnosis import LogDiagnoses
    from hpcrun.tuning.log.nccl_log import NcclLog
    from hpcrun.tuning.model.platforms import CollectiveLibrary
    from hpcrun.tuning.model.predict import PredictedCollective, Prediction

_LIBRARIES = ("nccl", "mpi", "gloo")
_Collective = Annotated[
    str,
    typer.Option(metavar="NAME", help="allreduce, allgather, reducescatter, broadcast, reduce or alltoall."),
]


def predict(
    words: JobWords = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of nodes, instead of a job.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="R", help="Ranks per node; default: all GPUs.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="Known platform, or a description of one.")
    ] = None,
    topology: Topology = None,
    cluster: Cluster = None,
    collective: _Collective = "allreduce",
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="1K..1G, or 64K,3M; powers of 1024.")
    ] = "1K..1G",
    library: Annotated[str, typer.Option(metavar="NAME", help="nccl, mpi or gloo.")] = "nccl",
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="NCCL log (NCCL_DEBUG=INFO; INIT,GRAPH,TUNING).")
    ] = None,
    nccl_version: Annotated[
        str, typer.Option(metavar="X", help="With --platform: NCCL release to model, such as 2.31.")
    ] = "2.30",
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict which algorithm is fastest at which message size.

    Also by how much, and whether that is more than the model's error.
    """
    from hpcrun.submission.collective_prediction import RankLayout, predict_collective, predict_from_log
    from hpcrun.tuning.log.nccl_log import parse_nccl_log
    from hpcrun.tuning.model.plot import plot_prediction_svg
    from hpcrun.tuning.model.predict import PREDICTED_COLLECTIVES, parse_message_sizes
    from hpcrun.tuning.registry.registry import parse_version

    job, overrides = split_job_words(words)
    layout = RankLayout(job, overrides, nodes, ranks_per_node, platform, topology, cluster)
    message_sizes = parse_message_sizes(sizes)
    kind = cast("PredictedCollective", parse_name(collective, "--collective", PREDICTED_COLLECTIVES))
    chosen = cast("CollectiveLibrary", parse_name(library, "--library", _LIBRARIES))
    major, minor, *_ = parse_version(nccl_version)
    if log is not None and chosen != "nccl":
        raise UsageError(f"--log: an NCCL log says nothing of {library}; leave one of the two out")
    if log is not None:
        result = predict_from_log(layout, kind, message_sizes, parse_nccl_log(read_file(log)), log)
    else:
        result = predict_collective(layout, kind, chosen, message_sizes, (major, minor))
    if plot is not None:
        write_file(plot, plot_prediction_svg(result), "--plot FILE writes elsewhere")
        note(f"drawn in {plot}")
    if as_json:
        print_json(**result.as_json())
    else:
        _print_prediction(result)


def read(
    path: Annotated[Path, typer.Argument(metavar="LOG", help="Output of NCCL (NCCL_DEBUG=INFO).")],
    before: Annotated[
        Path | None, typer.Option(metavar="OLD", help="Earlier log of the job, to compare algorithms with.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="Platform of the times of nccl-tests.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Analyse a log of NCCL or nccl-tests.

    Shows connections, algorithms used, what warnings mean, and what times fall short of.
    """
    from hpcrun.tuning.log.changes import compare_algorithms
    from hpcrun.tuning.log.checks import check_nccl_log
    from hpcrun.tuning.log.diagnosis import diagnose_nccl_log
    from hpcrun.tuning.log.nccl_log import parse_nccl_log
    from hpcrun.tuning.model.platforms import find_platform
    from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests
    from hpcrun.tuning.policy.sweep_findings import check_sweep
    from hpcrun.tuning.registry.registry import format_version
    from hpcrun.tuning.versions import check_versions, list_compatible_pairs, parse_versions

    text = read_file(path)
    log, versions = parse_nccl_log(text), parse_versions(text)
    sweep = check_sweep(parse_nccl_tests(text), log, find_platform(platform) if platform else None)
    old = None if before is None else parse_nccl_log(read_file(before))
    changes = () if old is None else compare_algorithms(old, log)
    findings = diagnose_nccl_log(log)
    checks = [*check_nccl_log(log), *check_versions(versions)]
    if as_json:
        compared: dict[str, Any] = {}
        if old is not None:
            compared = {"before": old.version, "changes": [change.as_json() for change in changes]}
        releases = {name: [format_version(each) for each in every] for name, every in versions.items()}
        print_json(
            **log.as_json(),
            **compared,
            findings=findings.as_json(),
            warnings={"understood": findings.understood, "unknown": findings.unknown},
            versions=releases,
            checks=[check.as_json() for check in (*sweep, *checks)],
        )
        return
    print_findings(sweep, width=11)
    if not log.lines and log.version is None:
        if not sweep:
            lines = f"{log.read} line{'' if log.read == 1 else 's'} read"
            print(f"{path}: no line of NCCL's in it ({lines}); NCCL_DEBUG=INFO makes NCCL print them")
            _print_errors(log)
        return
    _print_log(log)
    if old is not None:
        _print_changes(changes, old, log)
    _print_diagnoses(findings, log)
    print_lines(f"versions    {line}" for line in list_compatible_pairs(versions))
    print_findings(checks, width=11)


def _print_prediction(prediction: Prediction) -> None:
    ranks = prediction.nodes * prediction.per_node
    print(f"{prediction.collective}, {prediction.library}: {ranks} ranks on {prediction.nodes} nodes")
    print(f"by {prediction.basis}")
    for line in prediction.notes:
        print(f"note: {line}")
    width = max(len(name) for row in prediction.rows for name, _ in row.times)
    if not prediction.timed:
        print(f"{'size':>9}  order, the fastest first")
        for row in prediction.rows:
            print(f"{format_bytes(row.size_bytes):>9}  {' > '.join(name for name, _ in row.times)}")
        print("The model's error here is unknown: it predicts the order only, not times.")
        return
    names = f"{'winner':{width}}  {'second':{width}}"
    print(f"{'size':>9}  {'time us':>10}  {'algbw':>8}  {'busbw':>8}  {names}  {'margin':>7}  verdict")
    for row in prediction.rows:
        second = row.times[1][0] if len(row.times) > 1 else "-"
        margin = "-" if row.margin is None else f"{100 * row.margin:.0f} %"
        print(
            f"{format_bytes(row.size_bytes):>9}  {row.seconds * 1e6:10.4g}  {row.algbw_GBps:8.4g}"
            f"  {row.busbw_GBps:8.4g}  {row.winner:{width}}  {second:{width}}  {margin:>7}  {row.verdict}"
        )
    print("algbw and busbw in GB/s, as nccl-tests defines them")
    for share, source in dict.fromkeys((r.error.share, r.error.source) for r in prediction.rows if r.error):
        print(f"model's error {100 * share:.0f} %: {source}")


def _print_log(log: NcclLog) -> None:
    print(f"version     {log.library or 'NCCL'} {log.version or 'unknown'}")
    shape = f"{log.ranks or '?'} ranks on {log.nodes or '?'} nodes"
    print(f"world       {shape}" + (f", {log.channels} channels" if log.channels else ""))
    print(f"network     {log.network or 'unknown'}" + (f": {', '.join(log.nics)}" if log.nics else ""))
    for way, count in log.ways.most_common():
        print(f"connection  {way}, {count} times")
    for name, value in log.env.items():
        print(f"set         {name}={value}")
    print(f"tuner       {log.tuner or 'none seen'}")
    for name, graph in log.graphs.items():
        speeds = f"{graph.bw_intra:g} GB/s inside a node, {graph.bw_inter:g} between"
        ways = f"{graph.type_intra}/{graph.type_inter}"
        print(f"graph       {name}: {graph.channels} channels of {speeds}, {ways}")
    if log.table:
        print(f"table       of {len(log.table)} latencies and bandwidths (`tune predict --log` uses it)")
    for call, count in sorted(log.chosen.items(), key=lambda pair: (pair[0].collective, pair[0].size_bytes)):
        channels = f", {call.channels} channels" if call.channels else ""
        size = format_bytes(call.size_bytes)
        print(f"used        {call.collective} {size}: {call.algo}/{call.proto}{channels}, {count} calls")
    if not log.chosen:
        print("used        unknown: NCCL from 2.20 on says it with NCCL_DEBUG_SUBSYS=TUNING")


def _print_changes(changes: Sequence[AlgorithmChange], old: NcclLog, log: NcclLog) -> None:
    for change in changes:
        differs = change.expected_now is not None and (change.expected_now,) != change.now
        expected = f", where its table has {change.expected_now}" if differs else ""
        ways = f"{' and '.join(change.before)} before, {' and '.join(change.now)} now{expected}"
        print(f"changed     {change.collective} {format_bytes(change.size_bytes)}: {ways}")
    if not (old.chosen and log.chosen):
        print("changed     unknown: one of the logs does not tell what was used")
    elif not changes:
        print("changed     nothing that both logs have")


def _print_diagnoses(findings: LogDiagnoses, log: NcclLog) -> None:
    for diagnosis in findings.found:
        meaning = diagnosis.meaning
        if meaning.level == "harmless":
            print(f"harmless    line {diagnosis.line}: {meaning.meaning}")
            continue
        print(f"{meaning.level:11} line {diagnosis.line}, {diagnosis.times} times: {diagnosis.text}")
        if diagnosis.place:
            print(f"            from: {diagnosis.place} of NCCL's source")
        print(f"            means: {meaning.meaning} (confidence: {meaning.confidence})")
        print(f"            to do: {meaning.remedy}")
    own = f"{log.read} lines, {len(log.lines)} of NCCL's"
    print(f"read        {own}: {findings.understood} warnings understood, {findings.unknown} not understood")
    _print_errors(log)
    if not log.lines:
        print("warnings    unknown: NCCL has printed its version alone; NCCL_DEBUG=WARN makes it tell them")
    elif not any(each.meaning.level != "harmless" for each in findings.found):
        print("warnings    none " + ("among NCCL's own lines" if log.errors else "that matters"))


def _print_errors(log: NcclLog) -> None:
    if log.errors:
        first = log.errors[0]
        count = f"{len(log.errors)} lines that are not NCCL's speak of errors"
        print(f"not read    {count}; the first is line {first.number}: {first.text[:160]}")
