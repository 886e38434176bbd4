"""Partitions and the controller's configuration: the limits that a job must fit in. No parser raises."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcrun.slurm.output_formats import parse_records, said, whole_number
from hpcrun.slurm.versions import Version, parse_version
from hpcrun.units import parse_slurm_memory, parse_slurm_time

_CONFIG_LINE = re.compile(r"([A-Za-z][\w()/-]*)\s*=\s?(.*)")


@dataclass(frozen=True)
class Partition:
    """What `scontrol show partition` says of one partition; None where it does not say."""

    name: str
    nodes: str = ""
    """Host list, for hostlist.expand."""
    is_default: bool = False
    state: str = "unknown"
    max_time_s: float | None = None
    """math.inf for no limit."""
    default_time_s: float | None = None
    max_nodes: float | None = None
    """math.inf for no limit."""
    total_nodes: int | None = None
    total_cpus: int | None = None
    max_memory_per_node_mib: float | None = None
    """math.inf for no limit."""
    node_memory_mib: int | None = None
    """The mean over its nodes of the memory that Slurm counts; under 1024 a job should not ask for memory."""
    exclusive: bool = False
    preempt_mode: str = ""
    topology: str = ""
    """The topology that it uses where that is not the cluster's default."""
    fields: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def parse_partitions(text: str) -> list[Partition]:
    """The partitions of `scontrol show partition`, with -o or without."""
    return [_partition(fields) for fields in parse_records(text, "PartitionName")]


def _partition(fields: dict[str, str]) -> Partition:
    nodes, memory = fields.get("MaxNodes", ""), fields.get("MaxMemPerNode", "")
    total, limit = whole_number(fields.get("TotalNodes", "")), parse_slurm_memory(memory)
    counted = re.search(r"(?:^|,)mem=([^,]+)", fields.get("TRES", ""))
    all_memory = parse_slurm_memory(counted[1]) if counted else None
    return Partition(
        name=fields["PartitionName"],
        nodes=said(fields.get("Nodes", "")),
        is_default=fields.get("Default") == "YES",
        state=said(fields.get("State", "")) or "unknown",
        max_time_s=parse_slurm_time(fields.get("MaxTime", "")),
        default_time_s=parse_slurm_time(fields.get("DefaultTime", "")),
        max_nodes=math.inf if nodes == "UNLIMITED" else whole_number(nodes),
        total_nodes=total,
        total_cpus=whole_number(fields.get("TotalCPUs", "")),
        max_memory_per_node_mib=math.inf if memory == "UNLIMITED" else limit.mib if limit else None,
        node_memory_mib=all_memory.mib // total if all_memory and total else None,
        exclusive=fields.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        preempt_mode=said(fields.get("PreemptMode", "")),
        topology=said(fields.get("Topology", "")),
        fields=fields,
    )


@dataclass(frozen=True)
class Configuration:
    """What `scontrol show config` says that concerns jobs; None where it does not say."""

    version: Version | None = None
    cluster: str = ""
    max_array_size: int | None = None
    """Bounds the index of an element: the highest is one less."""
    kill_wait_s: int | None = None
    requeue: bool | None = None
    """Whether jobs are requeued unless they say otherwise (JobRequeue)."""
    sends_user_signal: bool | None = None
    """Whether preemption sends the signal of --signal (PreemptParameters=send_user_signal)."""
    accounting: bool | None = None
    mpi_default: str = ""
    topology: str = ""
    values: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def parse_config(text: str) -> Configuration:
    """The `Key = value` lines of `scontrol show config`."""
    lines = (_CONFIG_LINE.fullmatch(line.strip()) for line in text.splitlines())
    values = {match[1]: match[2].strip() for match in lines if match}
    requeue, storage = values.get("JobRequeue", ""), values.get("AccountingStorageType")
    preempt = values.get("PreemptParameters")
    return Configuration(
        version=parse_version(values.get("SLURM_VERSION", "")),
        cluster=said(values.get("ClusterName", "")),
        max_array_size=whole_number(values.get("MaxArraySize", "")),
        kill_wait_s=whole_number(values.get("KillWait", "")),
        requeue={"0": False, "1": True}.get(requeue),
        sends_user_signal=None if preempt is None else "send_user_signal" in preempt,
        # 25.11 prints (null) where there is none, 22.05 accounting_storage/none.
        accounting=None if storage is None else said(storage.removeprefix("accounting_storage/")) != "",
        mpi_default=said(values.get("MpiDefault", "")),
        topology=said(values.get("TopologyPlugin", "").removeprefix("topology/")),
        values=values,
    )


def takes_gpu_family(select: str) -> bool:
    """Whether a Slurm with this SelectType takes --gpus and its kin, which belong to one plugin alone."""
    return select.removeprefix("select/") == "cons_tres"
