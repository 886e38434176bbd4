"""`hpcrun tune predict` and `tune read`: which algorithm wins at which size, and what an NCCL log tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.findings import print_findings
from hpcrun.errors import SiteError, UsageError
from hpcrun.files import write_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcrun.tuning.log.changes import AlgorithmChange
    from hpcrun.tuning.log.diagnosis import LogDiagnoses
    from hpcrun.tuning.log.nccl_log import NcclLog
    from hpcrun.tuning.model.platforms import CollectiveLibrary, ModelErrorSpec, PlatformSpec
    from hpcrun.tuning.model.predict import AlphaBetaInput, PredictedCollective, Prediction

SCHEMA_VERSION = 2
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def predict(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB [key=value]...]", help="A job file: its ranks where they would stand."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Instead of a job.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, metavar="R", help="Default: all GPUs.")] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="From the platform table, or your own.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A captured topology, as for `fabric show`.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which profile tells what the levels carry.")
    ] = None,
    collective: Annotated[
        str, typer.Option(help="allreduce, allgather, reducescatter, broadcast, reduce, alltoall.")
    ] = "allreduce",
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="1K..1G, or 64K,3M; powers of 1024.")
    ] = "1K..1G",
    library: Annotated[str, typer.Option(help="nccl, mpi or gloo.")] = "nccl",
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An NCCL log (INFO; INIT,GRAPH,TUNING).")
    ] = None,
    nccl_version: Annotated[
        str, typer.Option(metavar="X", help="With --platform: whose model, such as 2.31.")
    ] = "2.30",
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw it.")] = None,
    as_json: _Json = False,
) -> None:
    """Which algorithm wins at which size, by how much, and whether the model can tell."""
    from hpcrun.tuning.model.predict import parse_message_sizes

    asked = _RankLayoutOptions(words or [], nodes, ranks_per_node, platform, topology, cluster)
    wanted = parse_message_sizes(sizes)
    kind, chosen = _parse_collective(collective), _parse_library(library)
    if log is not None and chosen != "nccl":
        raise UsageError(f"--log: an NCCL log says nothing of {library}; leave one of the two out")
    found = _predict(asked, kind, chosen, wanted, log, _parse_version(nccl_version))
    if plot is not None:
        _plot_prediction(plot, found)
    if as_json:
        _print_json(found.as_json())
    else:
        _print_table(found)


def read(
    path: Annotated[Path, typer.Argument(metavar="LOG", help="What NCCL has printed (NCCL_DEBUG=INFO).")],
    before: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD", help="An earlier log of the job: which calls go by another algorithm now."
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="Where nccl-tests ran, for the times in a log."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """What a log of NCCL or nccl-tests tells: ways, algorithms used, what warnings mean, what times lack."""
    from hpcrun.tuning.log.changes import compare_algorithms
    from hpcrun.tuning.log.checks import check_nccl_log
    from hpcrun.tuning.log.diagnosis import diagnose_nccl_log
    from hpcrun.tuning.log.nccl_log import parse_nccl_log
    from hpcrun.tuning.model.platforms import find_platform
    from hpcrun.tuning.policy.nccl_tests import parse_nccl_tests
    from hpcrun.tuning.policy.sweep_findings import check_sweep
    from hpcrun.tuning.registry.registry import format_version
    from hpcrun.tuning.versions import check_versions, list_compatible_pairs, parse_versions

    text = _read_text(path)
    log, versions = parse_nccl_log(text), parse_versions(text)
    sweep = check_sweep(parse_nccl_tests(text), log, find_platform(platform) if platform else None)
    old = None if before is None else parse_nccl_log(_read_text(before))
    moved = () if old is None else compare_algorithms(old, log)
    findings = diagnose_nccl_log(log)
    if as_json:
        told: dict[str, Any] = {} if old is None else {"before": old.version}
        if old is not None:
            told |= {"changes": [one.as_json() for one in moved]}
        told |= {"findings": findings.as_json()}
        told |= {"warnings": {"understood": findings.understood, "unknown": findings.unknown}}
        checks = [*sweep, *check_nccl_log(log), *check_versions(versions)]
        told |= {"versions": {name: [format_version(one) for one in of] for name, of in versions.items()}}
        _print_json({**log.as_json(), **told, "checks": [one.as_json() for one in checks]})
        return
    print_findings(sweep, width=11)
    if not log.lines and log.version is None:
        if sweep:
            return
        lines = f"{log.read} line{'' if log.read == 1 else 's'} read"
        print(f"{path}: no line of NCCL's in it ({lines}); NCCL_DEBUG=INFO makes NCCL print them")
        _print_errors(log)
        return
    _print_log(log)
    if old is not None:
        _print_changes(moved, old, log)
    _print_diagnoses(findings, log)
    for line in list_compatible_pairs(versions):
        print(f"versions    {line}")
    print_findings([*check_nccl_log(log), *check_versions(versions)], width=11)


class _RankLayoutOptions:
    """Where the ranks are, as it was said on the command line."""

    def __init__(
        self,
        words: list[str],
        nodes: int | None,
        per_node: int | None,
        platform: str | None,
        topology: Path | None,
        cluster: str | None,
    ) -> None:
        from hpcrun.tuning.model.platforms import find_platform

        self._words, self._topology, self._cluster = words, topology, cluster
        self.nodes, self.per_node = nodes, per_node
        self.platform: PlatformSpec | None = find_platform(platform) if platform else None
        self.name = platform
        if words and nodes is not None:
            raise UsageError(f"--nodes: {words[0]} says how many already; leave one of the two out")

    def size(self) -> tuple[int, int]:
        """Nodes and ranks on each."""
        if self._words:
            spec = self._job().spec
            return -(-spec.ranks // spec.ranks_per_node), spec.ranks_per_node
        if self.nodes is None:
            raise UsageError("nothing is said about the ranks; give a JOB, or --nodes N, or --log FILE")
        known = self.platform.gpus_per_node if self.platform else None
        per_node = self.per_node or known
        if per_node is None:
            raise UsageError("--ranks-per-node: is missing, and no platform says how many GPUs a node has")
        return self.nodes, per_node

    def ground(self) -> AlphaBetaInput:
        """Nodes and ranks in the network: the platform's own levels, or the cluster's."""
        from hpcrun.specs.placement import place_in_blocks
        from hpcrun.tuning.model.predict import AlphaBetaInput

        nodes, per_node = self.size()
        platform = self.platform
        fabric = platform.fabric(nodes) if platform and not self._topology else None
        inside = platform.within if platform else None
        reduce_s = 1 / (platform.reduce_GBps * 1e9) if platform and platform.reduce_GBps else 0.0
        if fabric is not None:
            ranks = place_in_blocks(fabric.nodes, nodes * per_node, per_node).ranks
            assert platform is not None
            small = platform.small_fabric(nodes)
            up_to = platform.small_messages.up_to_bytes if platform.small_messages else 0
            return AlphaBetaInput(fabric, ranks, inside, reduce_s, small, up_to)
        if platform and not (self._topology or self._cluster or self._words):
            raise UsageError(
                f"--platform {self.name}: does not say what its network's levels carry; --topology FILE"
                " --cluster NAME tells it, or a platform FILE.yaml with `levels`"
            )
        from hpcrun.cli.fabric import require_network

        resolved = self._job() if self._words else None
        partition = resolved.spec.resources.partition if resolved else None
        cluster = self._cluster or (resolved.spec.cluster if resolved else None)
        try:
            network = require_network(self._topology, cluster, partition)
        except SiteError as error:
            raise SiteError(f"{error}; --platform NAME|FILE.yaml needs no cluster") from None
        if resolved is None:
            if len(network.fabric.nodes) < nodes:
                raise UsageError(f"--nodes {nodes}: the topology has {len(network.fabric.nodes)}")
            ranks = place_in_blocks(network.fabric.nodes, nodes * per_node, per_node).ranks
        else:
            from hpcrun.submission.placement_preview import preview_placement

            ranks = preview_placement(resolved.spec, resolved.plan, network).placed.placement.ranks
        return AlphaBetaInput(network.fabric, ranks, inside, reduce_s)

    def _job(self) -> Any:
        from hpcrun.specs.load import load_job

        names_job = "=" not in self._words[0]
        return load_job(Path(self._words[0]) if names_job else None, self._words[names_job:])


def _predict(
    asked: _RankLayoutOptions,
    collective: PredictedCollective,
    library: CollectiveLibrary,
    sizes: list[int],
    path: Path | None,
    version: tuple[int, int],
) -> Prediction:
    from hpcrun.tuning.model.predict import predict_alpha_beta

    if path is not None:
        return _predict_from_log(asked, collective, sizes, path)
    if library == "nccl":
        nodes, per_node = asked.size()
        if asked.platform is None:
            note = (
                "nothing is known of NCCL's graphs here (--platform NAME, or --log FILE): α-β times of"
                " algorithms like NCCL's, good for their order alone"
            )
            return predict_alpha_beta(
                asked.ground(),
                library,
                collective,
                sizes,
                lambda _: None,
                "as the cluster's levels say",
                [note],
            )
        from hpcrun.tuning.model.nccl_model import model_version_notes
        from hpcrun.tuning.model.predict import predict_nccl

        machine = asked.platform.machine(nodes, per_node, version)
        if machine is None:
            kind = "one node" if nodes == 1 else "several nodes"
            raise UsageError(
                f"--platform {asked.name}: NCCL's graphs for {kind} are not known; use --log FILE"
            )
        source = f"{asked.name}: {asked.platform.source}"
        errors = _load_errors(asked, library, nodes)
        notes = model_version_notes(version)
        return predict_nccl(machine, collective, sizes, errors, source, notes=notes)
    ground = asked.ground()
    nodes = len({*ground.ranks})
    source = (
        f"{asked.name}: {asked.platform.source}" if asked.platform else f"levels of {ground.fabric.source}"
    )
    return predict_alpha_beta(ground, library, collective, sizes, _load_errors(asked, library, nodes), source)


def _load_errors(
    asked: _RankLayoutOptions, library: CollectiveLibrary, nodes: int
) -> Callable[[int], ModelErrorSpec | None]:
    from hpcrun.tuning.model.platforms import find_model_error

    return lambda size: find_model_error(asked.platform, library, nodes, size)


def _predict_from_log(
    asked: _RankLayoutOptions, collective: PredictedCollective, sizes: list[int], path: Path
) -> Prediction:
    """By the table in the log, or by the graphs in it."""
    from hpcrun.tuning.log.nccl_log import machine_from_log, parse_nccl_log
    from hpcrun.tuning.model.predict import predict_nccl

    log = parse_nccl_log(_read_text(path))
    capability = asked.platform.capability if asked.platform else None
    machine, notes = machine_from_log(log, str(path), asked.nodes, asked.per_node, capability)
    if asked.platform is not None:
        machine = replace(machine, cpu=asked.platform.cpu, nic_latency_us=asked.platform.nic_latency_us)
    table = log.expectations(collective) if collective != "alltoall" else {}
    errors = _load_errors(asked, "nccl", machine.nodes)
    source = f"{path}, {log.library or 'NCCL'} {log.version or 'of unknown version'}"
    return predict_nccl(machine, collective, sizes, errors, source, table or None, notes)


def _parse_collective(word: str) -> PredictedCollective:
    from hpcrun.tuning.model.predict import PREDICTED_COLLECTIVES

    plain = word.lower().replace("_", "").replace("-", "")
    for kind in PREDICTED_COLLECTIVES:
        if kind == plain:
            return kind
    raise UsageError(f"--collective {word}: is not known; use {', '.join(PREDICTED_COLLECTIVES)}")


def _parse_version(word: str) -> tuple[int, int]:
    from hpcrun.tuning.registry.registry import parse_version

    major, minor, *_ = parse_version(word)
    return major, minor


def _parse_library(word: str) -> CollectiveLibrary:
    names: tuple[CollectiveLibrary, ...] = ("nccl", "mpi", "gloo")
    for name in names:
        if name == word.lower():
            return name
    raise UsageError(f"--library {word}: is not known; use {', '.join(names)}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; name a file") from None


def _plot_prediction(path: Path, found: Prediction) -> None:
    from hpcrun.tuning.model.plot import plot_prediction_svg

    try:
        write_output(path, plot_prediction_svg(found))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; --plot FILE writes elsewhere"
        ) from None
    typer.echo(f"hpcrun: drawn in {path}", err=True)


def _print_table(found: Prediction) -> None:
    from hpcrun.tuning.model.plot import format_binary_size

    ranks = found.nodes * found.per_node
    print(f"{found.collective}, {found.library}: {ranks} ranks on {found.nodes} nodes")
    print(f"by {found.basis}")
    for note in found.notes:
        print(f"note: {note}")
    width = max(len(name) for row in found.rows for name, _ in row.times)
    if not found.timed:
        print(f"{'size':>7}  order, the fastest first")
        for row in found.rows:
            print(f"{format_binary_size(row.size_bytes):>7}  {' > '.join(name for name, _ in row.times)}")
        print("The model's error here is unknown: it stands for the order alone, not for times.")
        return
    names = f"{'winner':{width}}  {'second':{width}}"
    print(f"{'size':>7}  {'time us':>10}  {'algbw':>8}  {'busbw':>8}  {names}  {'margin':>7}  verdict")
    for row in found.rows:
        second = row.times[1][0] if len(row.times) > 1 else "-"
        margin = "-" if row.margin is None else f"{100 * row.margin:.0f} %"
        print(
            f"{format_binary_size(row.size_bytes):>7}  {row.seconds * 1e6:10.4g}  {row.algbw_GBps:8.4g}"
            f"  {row.busbw_GBps:8.4g}  {row.winner:{width}}  {second:{width}}  {margin:>7}  {row.verdict}"
        )
    print("algbw and busbw in GB/s, as nccl-tests defines them")
    for share, source in dict.fromkeys((r.error.share, r.error.source) for r in found.rows if r.error):
        print(f"model's error {100 * share:.0f} %: {source}")


def _print_log(log: NcclLog) -> None:
    from hpcrun.tuning.model.plot import format_binary_size

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
    for one, calls in sorted(log.chosen.items(), key=lambda pair: (pair[0].collective, pair[0].size_bytes)):
        channels = f", {one.channels} channels" if one.channels else ""
        size = format_binary_size(one.size_bytes)
        print(f"used        {one.collective} {size}: {one.algo}/{one.proto}{channels}, {calls} calls")
    if not log.chosen:
        print("used        unknown: NCCL from 2.20 on says it with NCCL_DEBUG_SUBSYS=TUNING")


def _print_changes(moved: Sequence[AlgorithmChange], old: NcclLog, log: NcclLog) -> None:
    from hpcrun.tuning.model.plot import format_binary_size

    for one in moved:
        differs = one.expected_now is not None and (one.expected_now,) != one.now
        expected = f", where its table has {one.expected_now}" if differs else ""
        ways = f"{' and '.join(one.before)} before, {' and '.join(one.now)} now{expected}"
        print(f"changed     {one.collective} {format_binary_size(one.size_bytes)}: {ways}")
    if not (old.chosen and log.chosen):
        print("changed     unknown: one of the logs does not tell what was used")
    elif not moved:
        print("changed     nothing that both logs have")


def _print_diagnoses(findings: LogDiagnoses, log: NcclLog) -> None:
    for one in findings.found:
        meaning = one.meaning
        if meaning.level == "harmless":
            print(f"harmless    line {one.line}: {meaning.meaning}")
            continue
        print(f"{meaning.level:11} line {one.line}, {one.times} times: {one.text}")
        if one.place:
            print(f"            from: {one.place} of NCCL's source")
        print(f"            means: {meaning.meaning} (confidence: {meaning.confidence})")
        print(f"            to do: {meaning.remedy}")
    own = f"{log.read} lines, {len(log.lines)} of NCCL's"
    print(f"read        {own}: {findings.understood} warnings understood, {findings.unknown} not understood")
    _print_errors(log)
    if not log.lines:
        print("warnings    unknown: NCCL has printed its version alone; NCCL_DEBUG=WARN makes it tell them")
    elif not any(one.meaning.level != "harmless" for one in findings.found):
        print("warnings    none " + ("among NCCL's own lines" if log.errors else "that matters"))


def _print_errors(log: NcclLog) -> None:
    if log.errors:
        first = log.errors[0]
        count = f"{len(log.errors)} lines that are not NCCL's speak of errors"
        print(f"not read    {count}; the first is line {first.number}: {first.text[:160]}")


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
