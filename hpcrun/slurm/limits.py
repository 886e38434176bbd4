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
    """What `scontrol show partition` reports about one partition; None for what it does not report."""

    name: str
    is_default: bool = False
    state: str = "unknown"
    max_time_s: float | None = None
    """math.inf for no limit."""
    default_time_s: float | None = None
    max_nodes: float | None = None
    """math.inf for no limit."""
    total_nodes: int | None = None
    max_memory_per_node_mib: float | None = None
    """math.inf for no limit."""
    node_memory_mib: int | None = None
    """The mean over its nodes of the memory that Slurm counts; under 1024 a job should not ask for memory."""
    exclusive: bool = False


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
        is_default=fields.get("Default") == "YES",
        state=text_or_empty(fields.get("State", "")) or "unknown",
        max_time_s=parse_slurm_time(fields.get("MaxTime", "")),
        default_time_s=parse_slurm_time(fields.get("DefaultTime", "")),
        max_nodes=math.inf if nodes == "UNLIMITED" else leading_integer(nodes),
        total_nodes=total,
        max_memory_per_node_mib=math.inf if memory == "UNLIMITED" else limit.mib if limit else None,
        node_memory_mib=all_memory.mib // total if all_memory and total else None,
        exclusive=fields.get("OverSubscribe", "").startswith("EXCLUSIVE"),
    )


@dataclass(frozen=True)
class SlurmConfiguration:
    """What `scontrol show config` reports that concerns jobs; None for what it does not report."""

    version: SlurmVersion | None = None
    cluster: str = ""
    max_array_size: int | None = None
    """Bounds the index of an element: the highest is one less."""
    mpi_default: str = ""
    topology: str = ""
    values: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def parse_slurm_configuration(text: str) -> SlurmConfiguration:
    """The `Key = value` lines of `scontrol show config`."""
    lines = (_CONFIG_LINE.fullmatch(line.strip()) for line in text.splitlines())
    values = {match[1]: match[2].strip() for match in lines if match}
    return SlurmConfiguration(
        version=parse_slurm_version(values.get("SLURM_VERSION", "")),
        cluster=text_or_empty(values.get("ClusterName", "")),
        max_array_size=leading_integer(values.get("MaxArraySize", "")),
        mpi_default=text_or_empty(values.get("MpiDefault", "")),
        topology=text_or_empty(values.get("TopologyPlugin", "").removeprefix("topology/")),
        values=values,
    )


def accepts_gpu_options(select: str) -> bool:
    """Whether a Slurm with this SelectType accepts --gpus and the like, which only one plugin does."""
    return select.removeprefix("select/") == "cons_tres"
