"""Partitions and the controller's configuration: the limits that a job must fit in. No parser raises."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcrun.slurm.output_formats import leading_integer, parse_key_value_records, text_or_empty
from hpcrun.slurm.versions import SlurmVersion, parse_slurm_version
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
    return [_parse_partition(fields) for fields in parse_key_value_records(text, "PartitionName")]


def _parse_partition(fields: dict[str, str]) -> Partition:
    nodes, memory = fields.get("MaxNodes", ""), fields.get("MaxMemPerNode", "")
    total, limit = leading_integer(fields.get("TotalNodes", "")), parse_slurm_memory(memory)
    counted = re.search(r"(?:^|,)mem=([^,]+)", fields.get("TRES", ""))
    all_memory = parse_slurm_memory(counted[1]) if counted else None
    return Partition(
        name=fields["PartitionName"],
        nodes=text_or_empty(fields.get("Nodes", "")),
        is_default=fields.get("Default") == "YES",
        state=text_or_empty(fields.get("State", "")) or "unknown",
        max_time_s=parse_slurm_time(fields.get("MaxTime", "")),
        default_time_s=parse_slurm_time(fields.get("DefaultTime", "")),
        max_nodes=math.inf if nodes == "UNLIMITED" else leading_integer(nodes),
        total_nodes=total,
        total_cpus=leading_integer(fields.get("TotalCPUs", "")),
        max_memory_per_node_mib=math.inf if memory == "UNLIMITED" else limit.mib if limit else None,
        node_memory_mib=all_memory.mib // total if all_memory and total else None,
        exclusive=fields.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        preempt_mode=text_or_empty(fields.get("PreemptMode", "")),
        topology=text_or_empty(fields.get("Topology", "")),
        fields=fields,
    )


@dataclass(frozen=True)
class SlurmConfiguration:
    """What `scontrol show config` says that concerns jobs; None where it does not say."""

    version: SlurmVersion | None = None
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


def parse_slurm_configuration(text: str) -> SlurmConfiguration:
    """The `Key = value` lines of `scontrol show config`."""
    lines = (_CONFIG_LINE.fullmatch(line.strip()) for line in text.splitlines())
    values = {match[1]: match[2].strip() for match in lines if match}
    requeue, storage = values.get("JobRequeue", ""), values.get("AccountingStorageType")
    preempt = values.get("PreemptParameters")
    return SlurmConfiguration(
        version=parse_slurm_version(values.get("SLURM_VERSION", "")),
        cluster=text_or_empty(values.get("ClusterName", "")),
        max_array_size=leading_integer(values.get("MaxArraySize", "")),
        kill_wait_s=leading_integer(values.get("KillWait", "")),
        requeue={"0": False, "1": True}.get(requeue),
        sends_user_signal=None if preempt is None else "send_user_signal" in preempt,
        # 25.11 prints (null) where there is none, 22.05 accounting_storage/none.
        accounting=None
        if storage is None
        else text_or_empty(storage.removeprefix("accounting_storage/")) != "",
        mpi_default=text_or_empty(values.get("MpiDefault", "")),
        topology=text_or_empty(values.get("TopologyPlugin", "").removeprefix("topology/")),
        values=values,
    )


def accepts_gpu_options(select: str) -> bool:
    """Whether a Slurm with this SelectType takes --gpus and its kin, which belong to one plugin alone."""
    return select.removeprefix("select/") == "cons_tres"
