"""The sbatch options of a job, from its request and the cluster's profile, in a readable order."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hpcrun.errors import UsageError
from hpcrun.hostlist import expand_hosts, fold_hosts
from hpcrun.slurm.versions import SlurmFeature, SlurmVersion, has_feature, require_feature
from hpcrun.specs.cluster import ClusterSpec, GpuSpec, PartitionSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.resources import ResourcesSpec
from hpcrun.units import parse_memory, parse_time, render_memory, render_time

OptionValue = str | int | Literal[True]
"""The value of an option; True: it has none."""

GPU_FAMILY = ("gpus-per-node", "gpus", "gpus-per-task")
"""Ways of asking for GPUs that are options of their own; --gres is the older one."""
_FEATURE_OF_OPTION: dict[str, SlurmFeature] = {
    "spread-segments": "spread-segments",
    "consolidate-segments": "spread-segments",
}
"""Raw options that not every release has."""


class SbatchDirectives(NamedTuple):
    """The options in order, and what the person should know about them."""

    options: dict[str, OptionValue]
    notes: tuple[str, ...] = ()


def build_directives(
    job: JobSpec, cluster: ClusterSpec | None, version: SlurmVersion | None, *, leaves: int | None = None
) -> SbatchDirectives:
    """The options of a job on a cluster; UsageError for one that the release does not have.

    `leaves`: under how few leaf switches the job's nodes find room; None where no switches are known.
    """
    resources = job.resources
    partition = resources.partition or (cluster.default_partition if cluster else None)
    profile = _merge_partition_specs(cluster, partition)
    notes: list[str] = []
    options: dict[str, OptionValue | None] = {
        "partition": partition,
        "account": resources.account or (cluster.account if cluster else None),
        "qos": resources.qos or profile.qos,
        "nodes": resources.all_nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": resources.cpus_per_rank,
        **_gpu_request(job, cluster, version),
    }
    if resources.mem is not None:
        if cluster is None or profile.mem_per_node is not None or partition not in cluster.partitions:
            amount = parse_memory(resources.mem, "resources.mem")
            options["mem"] = render_memory(amount) if amount else "0"
        else:
            notes.append(
                f"resources.mem: left out: the profile {cluster.name} gives no mem_per_node for the partition"
                f" {partition}, so memory is not counted there"
            )
    if resources.time is not None:
        limit = parse_time(resources.time, "resources.time")
        options["time"] = "UNLIMITED" if limit.minutes is None else limit.minutes
        notes += [limit.warning] if limit.warning else []
    options |= {
        "constraint": resources.constraint,
        "reservation": resources.reservation,
        "exclude": resources.exclude,
        # With a spare, or with fewer replicas, it outlives a node; else Slurm's own requeue is better.
        "no-kill": True if resources.spares or job.elastic else None,
        "exclusive": True
        if (profile.exclusive if resources.exclusive is None else resources.exclusive)
        else None,
    }
    steering, reasons = _topology_options(resources, version, leaves)
    options |= steering
    notes += reasons
    options |= _raw_options(job, options, version)
    return SbatchDirectives(
        {name: value for name, value in options.items() if value is not None}, tuple(notes)
    )


def requested_gpus_per_node(job: JobSpec, cluster: ClusterSpec | None) -> int:
    """The GPUs requested on each node: the job's number, else that of the partition's nodes, else none."""
    if job.resources.gpus_per_node is not None:
        return job.resources.gpus_per_node
    return find_partition_spec(job, cluster).gpus_per_node or 0


def find_partition_spec(job: JobSpec, cluster: ClusterSpec | None) -> PartitionSpec:
    """Return what the profile states about the partition of a job."""
    return _merge_partition_specs(
        cluster, job.resources.partition or (cluster.default_partition if cluster else None)
    )


def _gpu_spec(cluster: ClusterSpec | None) -> GpuSpec:
    return cluster.gpus if cluster else GpuSpec()


def _merge_partition_specs(cluster: ClusterSpec | None, names: str | None) -> PartitionSpec:
    """Return what the profile states about a partition; for several only what holds for all of them."""
    if cluster is None or not names:
        return PartitionSpec()
    specs = [cluster.partitions.get(name.strip(), PartitionSpec()) for name in names.split(",")]
    first = specs[0].model_dump()
    shared = {
        key: value for key, value in first.items() if all(getattr(spec, key) == value for spec in specs)
    }
    return PartitionSpec(**shared)


def _gpu_request(
    job: JobSpec, cluster: ClusterSpec | None, version: SlurmVersion | None
) -> dict[str, OptionValue]:
    """The GPUs of a node in the form that the site takes."""
    count, style = requested_gpus_per_node(job, cluster), _gpu_spec(cluster)
    if count == 0 or style.request == "none":
        return {}
    kind = find_partition_spec(job, cluster).gpu_type if style.typed else None
    if style.request == "gres":
        return {"gres": f"gpu:{kind}:{count}" if kind else f"gpu:{count}"}
    require_feature(
        version, "gpus-options", "gpus.request in the profile" if cluster else "resources.gpus_per_node"
    )
    if style.request == "gpus":
        count *= job.resources.all_nodes
    if style.request == "gpus-per-task":
        ranks = job.ranks_per_node
        if count % ranks:
            raise UsageError(
                f"resources.gpus_per_node: {count} cannot be shared out among {ranks} ranks a node, as"
                f" gpus-per-task does; use a multiple of {ranks}"
            )
        count //= ranks
    return {style.request: f"{kind}:{count}" if kind else count}


def _raw_options(
    job: JobSpec, options: dict[str, OptionValue | None], version: SlurmVersion | None
) -> dict[str, OptionValue | None]:
    """The options given raw, which win; false and null take one away."""
    raw: dict[str, OptionValue | None] = {}
    for name, value in job.resources.sbatch.items():
        if value is None or value is False:
            raw[name] = None
            continue
        if name in _FEATURE_OF_OPTION:
            require_feature(version, _FEATURE_OF_OPTION[name], f"resources.sbatch.{name}")
        if name == "gres" and isinstance(before := options.get("gres"), str) and "gpu" not in str(value):
            value = f"{before},{value}"  # A raw gres would otherwise remove the request for GPUs.
        raw[name] = value
    return raw


def _topology_options(
    resources: ResourcesSpec, version: SlurmVersion | None, leaves: int | None
) -> tuple[dict[str, OptionValue | None], list[str]]:
    """Return the options that tell Slurm which nodes to give, each with its reason."""
    options: dict[str, OptionValue | None] = {}
    notes: list[str] = []
    if resources.placement == "pin":
        pinned = expand_hosts(resources.nodelist or "", "resources.nodelist")
        if len(pinned) > resources.all_nodes:
            require_feature(version, "nodelist-longer-than-nodes", "resources.nodelist")
        options["nodelist"] = fold_hosts(pinned, suffixes=False)
        notes.append(
            f"--nodelist={options['nodelist']}: placement pin; the job waits until all of these are free, and"
            " where Slurm plans in blocks it may never start"
        )
        left, both = _separate_pinned(resources.exclude, pinned)
        if both:
            options["exclude"] = left
            notes.append(f"exclude: {both}: not excluded, because resources.nodelist names it")
    elif resources.placement == "pack":
        options["switches"], reasons = _switch_options(resources, leaves)
        notes += reasons
        if resources.segment is not None:
            unknown = _require_known_feature(version, "segment", "resources.segment")
            options["segment"] = resources.segment
            size, reason = resources.segment, "nodes in one block, as resources.segment asks"
            notes.append(f"--segment={size}: every {size} of the {resources.nodes} {reason}{unknown}")
    if resources.topo_exclusive:
        unknown = _require_known_feature(version, "exclusive-topo", "resources.topo_exclusive")
        options["exclusive"] = "topo"
        reason = "no other job under the same switch or in the block, as resources.topo_exclusive asks"
        notes.append(f"--exclusive=topo: {reason}{unknown}")
    return options, notes


def _switch_options(resources: ResourcesSpec, leaves: int | None) -> tuple[str | None, list[str]]:
    """Return --switches, which counts leaf switches and only delays, and the reasons for it."""
    count = resources.switches
    if count is None and (leaves is None or resources.nodes == 1 or resources.segment is not None):
        return None, []
    wait = render_time(parse_time(resources.switches_wait).seconds)
    nodes = f"{resources.nodes} node{'s' * (resources.nodes > 1)}"
    if count is None:
        count, reason = leaves, f"{nodes} find room under {leaves} leaf switch{'es' * (leaves != 1)}"
    else:
        reason = "as resources.switches asks"
    option = f"{count}@{wait}"
    notes = [
        f"--switches={option}: {reason}; Slurm may wait {wait} for that, at most the site's max_switch_wait,"
        " and then takes any nodes"
    ]
    if leaves is not None and count is not None and count < leaves:
        text = f"resources.switches: {count} cannot hold {nodes}, so the job would only wait; use {leaves}"
        notes.append(text)
    return option, notes


def _separate_pinned(exclude: str | None, pinned: tuple[str, ...]) -> tuple[str | None, str]:
    """What is excluded and not pinned, and what is both: known bad nodes may have been added to a job's."""
    excluded = expand_hosts(exclude or "", "resources.exclude")
    left = [host for host in excluded if host not in pinned]
    both = [host for host in excluded if host in pinned]
    return fold_hosts(left, suffixes=False) if left else None, fold_hosts(both) if both else ""


def _require_known_feature(version: SlurmVersion | None, feature: SlurmFeature, where: str) -> str:
    """UsageError if a release is known to lack a feature; returns a remark if the release is not known."""
    require_feature(version, feature, where)
    unknown = "; which Slurm this is for is not known, and before 24.05 it refuses that"
    return unknown if has_feature(version, feature) is None else ""
