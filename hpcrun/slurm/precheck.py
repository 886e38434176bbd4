"""Checks before a job is submitted: whether it fits the cluster, and where its run directory is. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.finding import Finding, count_severities
from hpcrun.hostlist import expand_hosts, fold_hosts
from hpcrun.local_identity import expand_path
from hpcrun.slurm.cluster_state import LiveCluster
from hpcrun.slurm.directives import GPU_FAMILY, find_partition_spec, requested_gpus_per_node
from hpcrun.slurm.limits import Partition, accepts_gpu_options
from hpcrun.slurm.nodes import NodeRecord
from hpcrun.specs.cluster import ClusterSpec, GpuSpec, PartitionSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.timing import check_times_within
from hpcrun.units import parse_memory, parse_time, render_memory, render_time

_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
_COUNTED_MIB = 1024
_FEATURE = re.compile(r"[A-Za-z_][\w.:-]*")


def make_refusal(key: str, text: str) -> Finding:
    """Return a finding that the job cannot run as requested."""
    return Finding("error", "request", key, text)


def make_precheck_warning(key: str, text: str) -> Finding:
    """Return a finding that the user should know."""
    return Finding("warning", "request", key, text)


@dataclass(frozen=True)
class _PartitionLimits:
    """The limits of a partition by the live Slurm, else by the profile; None and math.inf: no limit is
    known."""

    name: str
    max_time_s: float = math.inf
    default_time_s: float | None = None
    max_nodes: float = math.inf
    total_nodes: float = math.inf
    max_memory_mib: float = math.inf
    cpus: int | None = None
    gpus: int | None = None
    state: str = ""
    nodes: tuple[NodeRecord, ...] = ()


def _known_or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _partition_limits(name: str, profile: PartitionSpec | None, live: LiveCluster | None) -> _PartitionLimits:
    spec = profile or PartitionSpec()
    shown = _live_partition(name, live) or Partition(name)
    nodes = tuple(live.nodes_of(name)) if live else ()
    profile_time = parse_time(spec.max_time).seconds if spec.max_time else math.inf
    profile_memory = (parse_memory(spec.mem_per_node) if spec.mem_per_node else 0) or math.inf
    return _PartitionLimits(
        name=name,
        max_time_s=profile_time if shown.max_time_s is None else shown.max_time_s,
        default_time_s=shown.default_time_s,
        max_nodes=_known_or_infinite(spec.max_nodes if shown.max_nodes is None else shown.max_nodes),
        total_nodes=_known_or_infinite(shown.total_nodes),
        max_memory_mib=min(
            _known_or_infinite(shown.max_memory_per_node_mib), math.inf if nodes else profile_memory
        ),
        cpus=None if nodes else spec.cpus_per_node,
        gpus=None if nodes else spec.gpus_per_node,
        state=shown.state,
        nodes=nodes,
    )


def _live_partition(name: str, live: LiveCluster | None) -> Partition | None:
    return (
        next((partition for partition in live.partitions if partition.name == name), None) if live else None
    )


def check_partition_fit(job: JobSpec, cluster: ClusterSpec | None, live: LiveCluster | None) -> list[Finding]:
    """Check whether the job fits a partition, by the live Slurm and the profile.

    Several partitions may be named; the job fits if one of them accepts it. A QOS or a reservation may lift a
    partition's limits: then exceeding one is a warning and no refusal.
    """
    names, findings = _requested_partitions(job, cluster, live)
    if live and live.nodes and job.resources.nodelist:
        existing = {node.name for node in live.nodes}
        gone = [node for node in expand_hosts(job.resources.nodelist) if node not in existing]
        findings += (
            [make_refusal("resources.nodelist", f"{fold_hosts(gone)}: no such node here")] if gone else []
        )
    if not schedules_memory(job, cluster, live):
        job = job.model_copy(update={"resources": job.resources.model_copy(update={"mem": None})})
    profiles = cluster.partitions if cluster else {}
    verdicts = []
    for name in names:
        limits = _partition_limits(name, profiles.get(name), live)
        lifted = job.resources.reservation or job.resources.qos or (profiles.get(name) or PartitionSpec()).qos
        verdicts.append(
            [
                *_check_policy(job, limits, refuse=not lifted),
                *_check_node_sizes(job, limits, requested_gpus_per_node(job, cluster)),
            ]
        )
    fits = [verdict for verdict in verdicts if not count_severities(verdict)["error"]]
    return findings + (fits or verdicts or [[]])[0]


def check_gpus(job: JobSpec, cluster: ClusterSpec | None, live: LiveCluster | None) -> Iterator[Finding]:
    """Check that GPUs are requested in a way that this Slurm accepts and that gives every node its own."""
    count, style = requested_gpus_per_node(job, cluster), cluster.gpus if cluster else GpuSpec()
    if not count or style.request == "none":
        return
    where, key = (
        f"the profile {cluster.name}" if cluster else "there is no profile, so",
        "resources.gpus_per_node",
    )
    select = live.config.values.get("SelectType", "") if live else ""
    if select and style.request in GPU_FAMILY and not accepts_gpu_options(select):
        text = f"{where} asks with --{style.request}, and this Slurm ({select}) takes --gres alone"
        yield make_refusal(key, f"{text}; set gpus.request: gres in a profile")
    nodes = job.resources.all_nodes
    if style.request == "gpus" and nodes > 1 and not _is_exclusive(job, cluster):
        text = f"{where} asks with --gpus, and Slurm may share the {count * nodes} out unevenly among {nodes}"
        text += " nodes; use gpus-per-node or gres there, or exclusive nodes"
        yield make_precheck_warning(key, text)
    if style.request == "gpus-per-task" and style.bind != "none" and job.ranks_per_node > 1:
        text = f"{where} asks with --gpus-per-task, so ranks do not see the GPUs of their neighbours"
        yield make_precheck_warning(key, f"{text}, and NCCL may fall back to slow paths; set gpus.bind: none")
    kind = find_partition_spec(job, cluster).gpu_type if style.typed else None
    there = {node.gpu_type for node in live.nodes if node.gpu_type} if live else set()
    if kind and there and kind.lower() not in {gpu_type.lower() for gpu_type in there}:
        text = f"{where} asks for GPUs of type {kind}, Slurm knows {', '.join(sorted(there))}"
        yield make_refusal(key, f"{text}; correct gpu_type there")


def _is_exclusive(job: JobSpec, cluster: ClusterSpec | None) -> bool:
    requested = job.resources.exclusive
    return find_partition_spec(job, cluster).exclusive if requested is None else requested


def schedules_memory(job: JobSpec, cluster: ClusterSpec | None, live: LiveCluster | None) -> bool:
    """Whether a job may ask for memory: where no memory is configured, nodes count as having next to none."""
    shown = [_live_partition(name, live) for name in _requested_partitions(job, cluster, live)[0]]
    amounts = [
        partition.node_memory_mib
        for partition in shown
        if partition and partition.node_memory_mib is not None
    ]
    return not amounts or max(amounts) >= _COUNTED_MIB


def _requested_partitions(
    job: JobSpec, cluster: ClusterSpec | None, live: LiveCluster | None
) -> tuple[list[str], list[Finding]]:
    """Return the partitions that the job may be placed in, and findings about their names."""
    requested = job.resources.partition or (cluster.default_partition if cluster else None)
    there = (
        [partition.name for partition in live.partitions]
        if live
        else list(cluster.partitions)
        if cluster
        else []
    )
    if requested is None:
        return [partition.name for partition in live.partitions if partition.is_default] if live else [], []
    names = [name.strip() for name in requested.split(",") if name.strip()]
    absent = [name for name in names if name not in there] if there else []
    text = "{} is not a partition of {}; there are: {}"
    where = "this cluster" if live else f"the profile {cluster.name if cluster else ''}"
    make = make_precheck_warning if live is None else make_refusal
    findings = [make("resources.partition", text.format(name, where, ", ".join(there))) for name in absent]
    return [name for name in names if name not in absent], findings


def _check_policy(job: JobSpec, limits: _PartitionLimits, *, refuse: bool) -> Iterator[Finding]:
    """What a policy of the partition forbids."""
    resources, where = job.resources, f"partition {limits.name}"
    make = make_refusal if refuse else make_precheck_warning
    if resources.time is not None:
        seconds = parse_time(resources.time).seconds
        if seconds > limits.max_time_s:
            text = f"{resources.time} is more than {where} allows ({render_time(limits.max_time_s)})"
            yield make("resources.time", f"{text}; ask for less or for another partition")
    elif limits.default_time_s is not None and not math.isinf(limits.default_time_s):
        text = f"is not given, so {where} gives {render_time(limits.default_time_s)}"
        yield make_precheck_warning("resources.time", text)
        what = f"the {render_time(limits.default_time_s)} of {where}"
        for problem in check_times_within(limits.default_time_s, what, job.retry, job.watch, job.checkpoint):
            yield make_refusal(problem.key, problem.text)
    if limits.max_nodes < resources.all_nodes <= limits.total_nodes:
        text = f"{resources.all_nodes} is more than {where} allows ({limits.max_nodes:.0f})"
        yield make("resources.nodes", f"{text}; ask for fewer or for another partition")
    memory = parse_memory(resources.mem) if resources.mem else 0
    if memory > limits.max_memory_mib:
        most = render_memory(int(limits.max_memory_mib))
        text = f"{resources.mem} is more than {where} allows a node ({most})"
        yield make("resources.mem", f"{text}; ask for less")
    if limits.state not in ("", "unknown", "UP"):
        text = f"{where} is {limits.state} now: the job waits until an administrator changes that"
        yield make_precheck_warning("resources.partition", text)


def _check_node_sizes(job: JobSpec, limits: _PartitionLimits, gpus: int) -> Iterator[Finding]:
    """What the partition's nodes cannot give: such a job would wait for ever."""
    resources, where = job.resources, f"partition {limits.name}"
    if resources.all_nodes > limits.total_nodes:
        text = f"{resources.all_nodes} can never start: {where} has {limits.total_nodes:.0f}"
        yield make_refusal("resources.nodes", f"{text}; ask for fewer")
        return
    cpus = job.ranks_per_node * (resources.cpus_per_rank or 1)
    if not limits.nodes:
        if limits.cpus is not None and cpus > limits.cpus:
            yield make_refusal(
                "resources.cpus_per_rank", _never_starts_message(f"{cpus} CPUs a node", where, limits.cpus)
            )
        if limits.gpus is not None and gpus > limits.gpus:
            text = _never_starts_message(f"{gpus} GPUs a node", where, limits.gpus)
            yield make_refusal("resources.gpus_per_node", text)
        return
    yield from _unfit_nodes(job, limits, cpus, gpus)


def _never_starts_message(what: str, where: str, most: object) -> str:
    return f"{what} can never start: the nodes of {where} have {most}"


def _unfit_nodes(job: JobSpec, limits: _PartitionLimits, cpus: int, gpus: int) -> Iterator[Finding]:
    """Filter the nodes that can take the job, one requirement after the other; report the one that leaves too
    few."""
    resources, left = job.resources, list(limits.nodes)
    memory = parse_memory(resources.mem) if resources.mem else 0
    excluded = set(expand_hosts(resources.exclude)) if resources.exclude else set()
    needs: list[tuple[str, str, Callable[[NodeRecord], bool], Callable[[NodeRecord], object]]] = [
        ("exclude", "", lambda node: node.name not in excluded, lambda node: 0),
        (
            "constraint",
            str(resources.constraint),
            lambda node: _has_features(node, resources.constraint or ""),
            lambda node: ",".join(node.features),
        ),
        (
            "gpus_per_node",
            f"{gpus} GPUs a node",
            lambda node: gpus <= _known_or_infinite(node.gpus),
            lambda node: node.gpus,
        ),
        ("mem", str(resources.mem), lambda node: memory <= _known_or_infinite(node.memory_mib), _memory_of),
        (
            "cpus_per_rank",
            f"{cpus} CPUs a node",
            lambda node: cpus <= _known_or_infinite(node.cpus),
            lambda node: node.cpus,
        ),
    ]
    for key, what, fits, shown in needs:
        fitting = [node for node in left if fits(node)]
        if len(fitting) < resources.all_nodes:
            yield make_refusal(
                f"resources.{key}",
                _too_few_nodes(resources.all_nodes, key, what, limits.name, left, fitting, shown),
            )
            return
        left = fitting
    usable = [node for node in left if node.state.usable is not False]
    if len(usable) < resources.all_nodes:
        text = f"{resources.all_nodes} must wait: of the {len(left)} nodes that could take the job"
        yield make_precheck_warning(
            "resources.nodes", f"{text} in partition {limits.name} only {len(usable)} are up"
        )


def _too_few_nodes(
    nodes: int,
    key: str,
    what: str,
    partition: str,
    before: Sequence[NodeRecord],
    fitting: Sequence[NodeRecord],
    shown: Callable[[NodeRecord], object],
) -> str:
    if key == "exclude":
        return (
            f"leaves {len(fitting)} nodes of partition {partition}, the job asks for {nodes}; exclude fewer"
        )
    if not fitting:
        there = ", ".join(
            str(value) for value in dict.fromkeys(map(shown, before)) if value not in ("", None)
        )
        return _never_starts_message(what, f"partition {partition}", there or "nothing of this")
    return f"{what} can never start: {len(fitting)} nodes of partition {partition} have that, not {nodes}"


def _memory_of(node: NodeRecord) -> str:
    return "" if node.memory_mib is None else render_memory(node.memory_mib)


def _has_features(node: NodeRecord, constraint: str) -> bool:
    """Whether a node may serve a --constraint; what is more than a list of names is given the doubt."""
    names = _FEATURE.findall(constraint)
    has = [name in node.features for name in names]
    return all(has) if re.fullmatch(r"[\w.:&,-]*", constraint) else any(has)


def check_run_root_visibility(root: Path, cluster: ClusterSpec | None, file_system: str) -> list[Finding]:
    """Whether compute nodes will see run directories under `root`, on a file system of this type."""
    if cluster is not None:
        allowed = [Path(expand_path(path)) for path in cluster.log_roots]
        if allowed and not any(_is_under(root, place) for place in allowed):
            there = ", ".join(map(str, allowed))
            text = f"{root}: the profile {cluster.name} allows run directories under {there} only"
            return [make_refusal("", f"{text}; set HPCRUN_ROOT to a place there")]
        systems = [(Path(expand_path(system.path)), system) for system in cluster.file_systems.values()]
        holding = [(place, system) for place, system in systems if _is_under(root, place)]
        if holding:
            place, system = max(holding, key=lambda pair: len(pair[0].parts))
            if system.shared:
                return []
            text = f"{root}: is on {place}, which every node has for itself"
            return [make_refusal("", f"{text}; set HPCRUN_ROOT to a shared file system")]
        if allowed:
            return []
    own = next((place for place in _NODE_LOCAL if root.is_relative_to(place)), None)
    if own is None and file_system not in _MEMORY_FILE_SYSTEMS:
        return []
    location = f"under {own}" if own else f"on a {file_system}"
    text = f"{root}: is {location}, which compute nodes rarely share; if they do not, the job cannot start"
    return [make_precheck_warning("", f"{text} (HPCRUN_ROOT chooses another place)")]


def _is_under(path: Path, place: Path) -> bool:
    """Whether a path is in a place, by its name or by where links lead."""
    return path.is_relative_to(place) or path.resolve().is_relative_to(place.resolve())


def exceeded_quota_lines(printed: str) -> list[str]:
    """The lines of a quota command that say a limit is passed: there `quota` and `lfs quota` write a `*`."""
    return [
        " ".join(line.split()) for line in printed.splitlines() if re.search(r"\d[\d.]*[kKMGTP]?\*", line)
    ]
