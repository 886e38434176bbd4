"""A cluster's profile against the live cluster: a first draft of it, and what has changed since. Pure."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError

from hpcrun.finding import Finding
from hpcrun.hostlist import fold_hosts
from hpcrun.slurm.cluster_state import LiveCluster
from hpcrun.slurm.directives import GPU_FAMILY
from hpcrun.slurm.limits import Partition, accepts_gpu_options
from hpcrun.slurm.nodes import NodeRecord
from hpcrun.slurm.topology import TopologyUnit
from hpcrun.specs.cluster import ClusterSpec, MpiSpec, PartitionSpec, TopologySpec
from hpcrun.specs.fields import SystemName
from hpcrun.specs.yaml import render_yaml
from hpcrun.units import parse_memory, parse_time, render_memory, render_time

UNNAMED = "unnamed"
"""The draft's name for a cluster that does not say its own."""
_COUNTED_MIB = 1024
"""Slurm that does not count memory gives each node 1 MiB."""
_RESERVED_SHARE = 0.1
"""A profile may keep this part of a node's memory back for the system."""
_Hardware = Literal["gpus_per_node", "gpu_type", "cpus_per_node", "mem_per_node"]
_MEASURED: dict[_Hardware, str] = {
    "gpus_per_node": "GPUs",
    "gpu_type": "GPU type",
    "cpus_per_node": "CPUs",
    "mem_per_node": "memory",
}


def _value(node: NodeRecord, key: _Hardware) -> Any:
    """What a node has, in the profile's words; None where Slurm does not say."""
    if key == "gpus_per_node":
        return node.gpus
    if key == "gpu_type":
        return node.gpu_type or None
    if key == "cpus_per_node":
        return node.cpus
    memory_mib = node.memory_mib or 0
    return render_memory(memory_mib) if memory_mib >= _COUNTED_MIB else None


@dataclass(frozen=True)
class ProfileDraft:
    """A profile as far as Slurm reports it; its text has comments for what only an admin knows."""

    cluster: ClusterSpec
    text: str
    """YAML with comments; parse_cluster reads it back to `cluster`."""


def draft_profile(live: LiveCluster) -> ProfileDraft:
    """The profile that a live cluster suggests."""
    parts = [
        _DraftSection(_HEAD, {}),
        _identity(live),
        _partitions(live),
        _gpus(live),
        _mpi(live),
        _topology(live),
        _DraftSection(["What no Slurm command reports; the values are examples."], {}, _REST),
    ]
    values: dict[str, Any] = {}
    for part in parts:
        values |= part.values
    return ProfileDraft(ClusterSpec.model_validate(values), "\n".join(part.render() for part in parts))


class _DraftSection(NamedTuple):
    """Remarks, the keys below them, and further keys to be filled in by hand."""

    remarks: list[str]
    values: dict[str, Any]
    by_hand: str = ""
    text: str = ""
    """The keys as text, where they have remarks of their own."""

    def render(self) -> str:
        text = self.text or (render_yaml(self.values) if self.values else "")
        by_hand = "".join(f"#{line}\n" for line in self.by_hand.strip("\n").splitlines())
        return f"{_remarks(self.remarks)}{text}{by_hand}"


def _remarks(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


_HEAD = [
    "A draft of a cluster's profile. Keys without a `#` were measured (scontrol). A `#` right before",
    "a key or its indentation marks what Slurm does not know: fill it in and remove the `#`. What is left",
    "out keeps its default. Later, `hpcrun cluster check` compares the measured part with the cluster.",
]
_REST = """
account: proj                   # for jobs that name none
python: {path: /opt/hpc/python/bin/python, checks: [torch, mpi4py]}   # on the compute nodes
container: {runtime: none}      # pyxis, apptainer, singularity or none
modules: {load: []}             # for every job
network: {interface: ib0, hcas: [mlx5_0]}
file_systems:
  scratch: {path: /scratch/$USER, kind: lustre}
  local: {path: /tmp, kind: local, shared: false}
quota: [lfs, quota, -h, /scratch]
env_deny: [TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, "*_CACHE_PATH"]   # not inherited from login shells
root: /scratch/$USER/runs       # where run directories are made
log_roots: [/scratch, /home]    # a run directory elsewhere is refused
"""


def _identity(live: LiveCluster) -> _DraftSection:
    name = _word(live.slurm_cluster or live.config.cluster)
    values: dict[str, Any] = {"name": name or UNNAMED}
    remarks = [] if name else ["name: unknown, Slurm does not report it; write it here"]
    if "config" in live.unknown:
        remarks.append(f"the configuration: {live.unknown['config']}")
    by_hand = "default: true                   # taken when a job names no cluster"
    if live.slurm_cluster:
        values["slurm_cluster"] = live.slurm_cluster
    if live.version:
        values["slurm_version"] = _release(live)
    else:
        remarks.append(f"slurm_version: {live.unknown['version']}")
    controller = live.config.version
    if live.version and controller and controller[:2] != live.version[:2]:
        remarks.append(f"slurm_version: the commands here are {live.version}, the controller is {controller}")
    return _DraftSection(remarks, values, by_hand)


def _release(live: LiveCluster) -> str:
    return str(live.version).rpartition(".")[0]


def _word(text: str) -> str | None:
    """The text where a profile can hold it as a name."""
    try:
        return TypeAdapter(SystemName).validate_python(text)
    except ValidationError:
        return None


def _partitions(live: LiveCluster) -> _DraftSection:
    remarks = [f"nodes: {live.unknown['nodes']}"] if "nodes" in live.unknown else []
    partitions: dict[str, dict[str, Any]] = {}
    text = "partitions:\n"
    for partition in live.partitions:
        if _word(partition.name) is None:
            remarks.append(f"{partition.name!r} is left out: a profile cannot hold this name")
            continue
        values, notes = _partition(partition, live)
        values["default"] = partition.is_default and not any(p["default"] for p in partitions.values())
        partitions[partition.name] = values
        body = {key: value for key, value in values.items() if value is not False} or {"default": False}
        text += textwrap.indent(f"{_remarks(notes)}{render_yaml({partition.name: body})}", "  ")
        if values.get("gpus_per_node") != 0 and "gpu_type" not in values:
            text += "#    gpu_type: h100              # the GPUs' name, which Slurm does not tell\n"
    if not partitions:
        return _DraftSection([*remarks, "partitions: unknown"], {})
    return _DraftSection(remarks, {"partitions": partitions}, text=text)


def _partition(partition: Partition, live: LiveCluster) -> tuple[dict[str, Any], list[str]]:
    """One partition's keys, and the remarks above them."""
    nodes = live.nodes_of(partition.name)
    notes = (
        [f"{_nodes(len(nodes))}: {fold_hosts(node.name for node in nodes)}"]
        if nodes
        else ["no nodes are known"]
    )
    values: dict[str, Any] = {"exclusive": partition.exclusive}
    if partition.max_time_s is None:
        notes.append("max_time: unknown")
    else:
        values["max_time"] = render_time(partition.max_time_s)
    if partition.max_nodes is None:
        notes.append("max_nodes: unknown")
    elif not math.isinf(partition.max_nodes) and partition.max_nodes >= 1:
        values["max_nodes"] = int(partition.max_nodes)
    for key, words in _MEASURED.items():
        if key == "gpu_type" and not any(node.gpu_type for node in nodes):
            continue
        counts = Counter(_value(node, key) for node in nodes)
        if len(counts) == 1 and (value := next(iter(counts))) is not None:
            values[key] = value
        elif len(counts) > 1:
            notes.append(f"{key}: the nodes differ in their {words}: {_listed(counts)}; write what jobs get")
        else:
            notes.append(f"{key}: unknown, Slurm does not report it")
    return values, notes


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(
        f"{'unknown' if value is None else value} ({_nodes(count)})" for value, count in counts.most_common()
    )


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _gpus(live: LiveCluster) -> _DraftSection:
    typed = "typed: true                   # put the partition's gpu_type into the request"
    by_hand = f"gpus:\n  request: gpus-per-node         # or gres, gpus, gpus-per-task, none\n  {typed}"
    select = live.config.values.get("SelectType", "")
    if not live.nodes or all(node.gpus is None for node in live.nodes):
        return _DraftSection(["gpus.request: unknown, no node says whether it has GPUs"], {}, by_hand)
    if not any(node.gpus for node in live.nodes):
        return _DraftSection(["No node has GPUs that Slurm counts."], {"gpus": {"request": "none"}})
    if not select:
        return _DraftSection(["gpus.request: unknown, Slurm does not report its SelectType"], {}, by_hand)
    request = "gpus-per-node" if accepts_gpu_options(select) else "gres"
    kinds = sorted({node.gpu_type for node in live.nodes if node.gpu_type})
    remarks = [f"SelectType={select}" + (f"; types of GPUs: {', '.join(kinds)}" if kinds else "")]
    return _DraftSection(remarks, {"gpus": {"request": request}}, f"  {typed}")


def _mpi(live: LiveCluster) -> _DraftSection:
    default = live.config.mpi_default
    is_pmix = default.startswith("pmix")
    pmi, library, launcher = ("pmix", "openmpi", "srun") if is_pmix else ("pmi2", "mpich", "hydra")
    by_hand = (
        f"  library: {library}                # mpich, openmpi, intel, cray or none\n"
        f"  launcher: {launcher}               # hydra, srun or mpirun"
    )
    if default in get_args(MpiSpec.model_fields["pmi"].annotation):
        return _DraftSection([f"MpiDefault={default}"], {"mpi": {"pmi": default}}, by_hand)
    remark = f"mpi.pmi: unknown, MpiDefault is {default or 'not set'}; `srun --mpi=list` lists what there is"
    return _DraftSection(
        [remark], {}, f"mpi:\n  pmi: {pmi}                     # mpich speaks pmi2, Open MPI pmix\n{by_hand}"
    )


def _topology(live: LiveCluster) -> _DraftSection:
    if live.is_flat is None:
        return _DraftSection([f"topology: {live.unknown['topology']}"], {})
    plugin = f"TopologyPlugin={live.plugin}"
    if live.is_flat:
        return _DraftSection([f"{plugin}: Slurm knows no switches"], {"topology": {"source": "none"}})
    kinds = Counter(unit.kind for unit in live.units)
    counts = ", ".join(f"{kind}: {count}" for kind, count in kinds.items())
    levels = _levels(live.units) or 1
    names = ["leaf", "spine", "core", *(f"level{level}" for level in range(3, levels))][:levels]
    by_hand = "  levels:                         # what the link of one node carries, from the leaf upwards\n"
    by_hand += "\n".join(f"    - {{name: {name}, bandwidth_GBps: 50, oversubscription: 1}}" for name in names)
    return _DraftSection([f"{plugin}; {counts}"], {"topology": {"source": "slurm"}}, by_hand)


def _levels(units: Iterable[TopologyUnit]) -> int | None:
    """How many levels of switches there are; None where the units have no levels."""
    levels = [unit.level for unit in units if unit.level is not None]
    return max(levels) + 1 if levels else None


def find_profile_differences(profile: ClusterSpec, live: LiveCluster) -> list[str]:
    """Return one line for each statement of the profile that the live cluster contradicts.

    Only what the profile states is compared: a key or partition that it leaves out is no difference.
    """
    return [str(finding) for finding in _profile_differences(profile, live) if finding.severity == "error"]


def find_profile_warnings(profile: ClusterSpec) -> list[str]:
    """Return one line for each value in the profile that may be meant otherwise."""
    limits = (
        parse_time(spec.max_time, f"partitions.{name}.max_time")
        for name, spec in profile.partitions.items()
        if spec.max_time is not None
    )
    return [limit.warning for limit in limits if limit.warning]


def find_unconfirmed_keys(profile: ClusterSpec, live: LiveCluster) -> list[str]:
    """What the profile states and Slurm did not say, a line each."""
    return [str(finding) for finding in _profile_differences(profile, live) if finding.severity == "unknown"]


def _profile_differences(profile: ClusterSpec, live: LiveCluster) -> Iterator[Finding]:
    yield from _compare_version(profile, live)
    there = {partition.name: partition for partition in live.partitions}
    for name, spec in profile.partitions.items():
        if name in there:
            yield from _compare_limits(spec, there[name])
            yield from _compare_nodes(name, spec, live.nodes_of(name))
        else:
            text = f"is gone; there are: {', '.join(there) or 'none'}"
            yield Finding("error", "profile", f"partitions.{name}", text)
    select = live.config.values.get("SelectType", "")
    takes = profile.gpus.request not in GPU_FAMILY or accepts_gpu_options(select)
    asks = any(spec.gpus_per_node for spec in profile.partitions.values())
    if asks and not takes:
        line = f"the profile says {profile.gpus.request}, {select} takes only gres"
        unknown = "unknown: Slurm does not report its SelectType"
        text = line if select else unknown
        yield Finding("error" if select else "unknown", "profile", "gpus.request", text)
    yield from _compare_topology(profile.topology, live)


def _compare_version(profile: ClusterSpec, live: LiveCluster) -> Iterator[Finding]:
    stated = profile.slurm_version
    if stated is None:
        return
    if live.version is None:
        yield Finding("unknown", "profile", "slurm_version", live.unknown["version"])
    elif not f"{live.version}.".startswith(f"{stated}."):
        text = f"the profile says {stated}, Slurm is {live.version}"
        yield Finding("error", "profile", "slurm_version", text)


def _compare_limits(spec: PartitionSpec, partition: Partition) -> Iterator[Finding]:
    where = f"partitions.{partition.name}"
    if spec.max_time is not None:
        yield from _compare_limit(
            f"{where}.max_time", spec.max_time, parse_time(spec.max_time).seconds, partition.max_time_s, True
        )
    if spec.max_nodes is not None:
        yield from _compare_limit(
            f"{where}.max_nodes", str(spec.max_nodes), spec.max_nodes, partition.max_nodes, False
        )
    if partition.exclusive and not spec.exclusive:
        text = "the profile says false, the partition gives whole nodes only"
        yield Finding("error", "profile", f"{where}.exclusive", text)


def _compare_limit(
    key: str, written: str, stated: float, actual: float | None, is_time: bool
) -> Iterator[Finding]:
    if actual is None:
        yield Finding("unknown", "profile", key, "unknown: Slurm does not report it")
    elif stated != actual:
        shown = render_time(actual) if is_time else "UNLIMITED" if math.isinf(actual) else f"{actual:g}"
        text = f"the profile says {written}, the partition allows {shown}"
        yield Finding("error", "profile", key, text)


def _compare_nodes(name: str, spec: PartitionSpec, nodes: list[NodeRecord]) -> Iterator[Finding]:
    """Compare what the profile states about a node: it must hold for at least one kind of node."""
    for key, words in _MEASURED.items():
        stated = getattr(spec, key)
        if stated is None:
            continue
        where = f"partitions.{name}.{key}"
        actual = [value for node in nodes if (value := _value(node, key)) is not None]
        if not actual:
            text = f"unknown: Slurm does not report its nodes' {words}"
            yield Finding("unknown", "profile", where, text)
        elif not any(_agree(key, stated, value) for value in actual):
            text = f"the profile says {stated}, the nodes have {_listed(Counter(actual))}"
            yield Finding("error", "profile", where, text)


def _agree(key: _Hardware, stated: Any, actual: Any) -> bool:
    if key == "mem_per_node":
        stated_mib, there = parse_memory(stated), parse_memory(actual)
        return there * (1 - _RESERVED_SHARE) <= stated_mib <= there
    if key == "gpu_type":
        return str(stated).lower() == str(actual).lower()
    return bool(stated == actual)


def _compare_topology(spec: TopologySpec, live: LiveCluster) -> Iterator[Finding]:
    if spec.source not in ("slurm", "none"):
        return
    if live.is_flat is None:
        yield Finding("unknown", "profile", "topology", live.unknown["topology"])
        return
    plugin = live.plugin
    if spec.source == "slurm" and live.is_flat:
        text = f"the profile says slurm, TopologyPlugin is {plugin}, which knows no switches"
        yield Finding("error", "profile", "topology.source", text)
    elif spec.source == "none" and not live.is_flat:
        kinds = ", ".join(dict.fromkeys(unit.kind for unit in live.units))
        text = f"the profile says none, TopologyPlugin is {plugin} and lists units: {kinds}"
        yield Finding("error", "profile", "topology.source", text)
    levels = _levels(live.units)
    if spec.source == "slurm" and spec.levels and levels and levels != len(spec.levels):
        text = f"the profile says {len(spec.levels)}, Slurm knows {levels} levels of switches"
        yield Finding("error", "profile", "topology.levels", text)
