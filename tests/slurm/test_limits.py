"""The limits that partitions and the controller set."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpcrun.slurm.limits import SlurmConfiguration, parse_partitions, parse_slurm_configuration
from hpcrun.slurm.versions import SlurmVersion

Captured = Callable[[str, str], str]


def test_partitions(captured: Captured, version: str) -> None:
    first, *others = parse_partitions(captured(version, "show-partition"))
    assert (first.name, first.is_default, first.state) == ("main", True, "UP")
    assert (first.max_time_s, first.max_nodes, first.default_time_s) == (math.inf, math.inf, None)
    assert (first.total_nodes, first.max_memory_per_node_mib) == (8, math.inf)
    assert first.node_memory_mib == 64000
    assert first.exclusive is False
    assert [(other.name, other.is_default) for other in others] == (
        [("blk", False)] if version == "25.11.7" else []
    )


def test_a_partition_with_limits() -> None:
    (partition,) = parse_partitions(
        "PartitionName=short Default=NO DefaultTime=00:30:00 MaxNodes=16 MaxTime=365-00:00:00"
        " Nodes=,c005,c[007-008]"
        " OverSubscribe=EXCLUSIVE State=DRAIN TotalNodes=3 MaxMemPerNode=8G TRES=cpu=6,mem=3M,node=3\n"
    )
    assert (partition.default_time_s, partition.max_nodes, partition.max_time_s) == (1800, 16, 365 * 86400)
    assert (partition.max_memory_per_node_mib, partition.exclusive, partition.state) == (8192, True, "DRAIN")
    # memory that the cluster does not count comes out as 1 MB a node
    assert partition.node_memory_mib == 1


CONFIG = """\
Configuration data as of 2026-11-29T15:06:51
AccountingStorageType   = accounting_storage/none
ClusterName             = lab
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 1001
MpiDefault              = none
PreemptParameters       = send_user_signal,youngest_first
SLURM_VERSION           = 22.05.8
SchedulerParameters     = bf_max_job_test=100,default_queue_depth=50
TopologyPlugin          = topology/tree

Slurmctld(primary) at login1 is UP
"""


def test_the_configuration() -> None:
    config = parse_slurm_configuration(CONFIG)
    assert (config.version, config.cluster, config.max_array_size) == (SlurmVersion(22, 5, 8), "lab", 1001)
    assert (config.mpi_default, config.topology) == ("", "tree")
    assert config.values["SchedulerParameters"] == "bf_max_job_test=100,default_queue_depth=50"


def test_no_configuration() -> None:
    assert (
        parse_slurm_configuration("slurm_load_ctl_conf error: Unable to contact slurm controller\n")
        == SlurmConfiguration()
    )
