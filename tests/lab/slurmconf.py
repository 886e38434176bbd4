"""The configuration of the lab's Slurm: pure text, made from the shape of the racks."""

from __future__ import annotations

from collections.abc import Sequence

GPUS, CPUS, MEMORY_MIB = 4, 8, 64000
HEAD_ADDRESS, LOGIN_ADDRESS = "10.77.255.254", "10.77.255.1"

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job is held until its credential expires; two minutes would be too long for a test.
AuthInfo=cred_expire=5
StateSaveLocation=/run/lab/state
SlurmdSpoolDir=/run/lab/spool/%n
SlurmctldPidFile=/run/lab/slurmctld.pid
SlurmdPidFile=/run/lab/slurmd-%n.pid
SlurmctldLogFile=/run/lab/log/slurmctld
SlurmdLogFile=/run/lab/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
TopologyPlugin=topology/tree
GresTypes=gpu
MpiDefault=pmi2
ReturnToService=2
SlurmdParameters=config_overrides
# No shorter: one ping goes to all nodes together and waits three times TCPTimeout for a dead one, and a node
# that has not answered within SlurmdTimeout counts as dead too. On a busy machine 20 s took down healthy
# nodes. Tests that cannot wait that long set a dead node down as an admin would (Lab.give_up_lost).
SlurmdTimeout=60
TCPTimeout=1
KillWait=5
SchedulerParameters=batch_sched_delay=0,bf_interval=1
"""

WITHOUT_ACCOUNTING = "AccountingStorageType=accounting_storage/none\n"
WITH_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=head
AccountingStoreFlags=job_comment
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=head
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PidFile=/run/lab/slurmdbd.pid
LogFile=/run/lab/log/slurmdbd
"""

# Never looks for, and never makes, control groups of the host.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/run/lab/cgroup\nCgroupAutomount=no\n"
# All nodes share /tmp, where a step's folder on one node would stand in the way of that on the next.
MPI_CONF = "PMIxCliTmpDirBase=/run/scratch\nPMIxTimeout=20\n"
GRES_CONF = f"Name=gpu File=/run/lab/gpu[0-{GPUS - 1}]\n"


def node_names(racks: Sequence[int]) -> list[list[str]]:
    """n01, n02, … rack by rack."""
    names = iter(f"n{number:02d}" for number in range(1, sum(racks) + 1))
    return [[next(names) for _ in range(size)] for size in racks]


def hostlist(names: Sequence[str]) -> str:
    """Consecutive nodes as people write them: Slurm shows a leaf's nodes with the words of topology.conf."""
    return names[0] if len(names) == 1 else f"n[{names[0][1:]}-{names[-1][1:]}]"


def node_address(rack: int, place: int) -> str:
    """The address of a node by its rack and its place there, both from 1."""
    return f"10.77.{rack}.{place}"


def render(racks: Sequence[int], *, accounting: bool = False) -> dict[str, str]:
    """File name to text, for a tree of one leaf switch a rack under one spine."""
    names = node_names(racks)
    everyone = hostlist([name for members in names for name in members])
    nodes = (
        f"NodeName={everyone} CPUs={CPUS} Sockets=1 CoresPerSocket={CPUS} ThreadsPerCore=1"
        f" RealMemory={MEMORY_MIB} Gres=gpu:{GPUS} State=UNKNOWN\n"
        f"PartitionName=main Nodes={everyone} Default=YES DefaultTime=10 MaxTime=60 State=UP\n"
    )
    leaves = "".join(
        f"SwitchName=leaf{rack} Nodes={hostlist(members)}\n" for rack, members in enumerate(names, 1)
    )
    hosts = f"127.0.0.1 localhost\n{HEAD_ADDRESS} head\n{LOGIN_ADDRESS} login\n" + "".join(
        f"{node_address(rack, place)} {name}\n"
        for rack, members in enumerate(names, 1)
        for place, name in enumerate(members, 1)
    )
    return {
        "hosts": hosts,
        "slurm.conf": SLURM_CONF + (WITH_ACCOUNTING if accounting else WITHOUT_ACCOUNTING) + nodes,
        "slurmdbd.conf": SLURMDBD_CONF,
        "topology.conf": leaves + f"SwitchName=spine Switches=leaf[1-{len(racks)}]\n",
        "gres.conf": GRES_CONF,
        "cgroup.conf": CGROUP_CONF,
        "mpi.conf": MPI_CONF,
    }
