"""The lab as it should be: idle nodes, racks, MPI over their network, nodes that share no memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab.cluster import SCRATCH, Lab

WORLD = """
import socket
from mpi4py import MPI
names = MPI.COMM_WORLD.gather(socket.gethostname())
if names:
    print(MPI.COMM_WORLD.size, *names)
"""
SEND_4_MIB = """
from mpi4py import MPI
world, block = MPI.COMM_WORLD, bytearray(4 << 20)
world.Send(block, 1) if world.rank == 0 else world.Recv(block, 0)
"""


def test_all_nodes_are_idle_and_counted(lab: Lab) -> None:
    shown = lab.run(["sinfo", "--noheader", "--format=%D %T %c %m %G %P"]).require_success().stdout
    assert shown.split() == ["8", "idle", "8", "64000", "gpu:4", "main*"]


def test_slurm_tells_the_racks(lab: Lab) -> None:
    lines = lab.run(["scontrol", "show", "topology"]).require_success().stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["SwitchName=leaf1", "Level=0", "LinkSpeed=1", "Nodes=n[01-04]"],
        ["SwitchName=leaf2", "Level=0", "LinkSpeed=1", "Nodes=n[05-08]"],
        ["SwitchName=spine", "Level=1", "LinkSpeed=1", "Nodes=n[01-08]", "Switches=leaf[1-2]"],
    ]
    job = ["srun", "-w", "n05", "printenv", "SLURM_TOPOLOGY_ADDR"]
    assert lab.run(job).require_success().stdout.strip() == "spine.leaf2.n05"


def test_mpi_makes_one_world_over_nodes(lab: Lab) -> None:
    job = ["srun", "--mpi=pmi2", "-N4", "--ntasks-per-node=2", "python", "-c", WORLD]
    words = lab.run(job, env={"UCX_TLS": "tcp,self"}).require_success().stdout.split()
    assert words == ["8", *(name for name in ("n01", "n02", "n03", "n04") for _ in range(2))]


@pytest.mark.parametrize(
    ("nodes", "crosses"), [("n01,n02", False), ("n01,n05", True)], ids=["one rack", "two racks"]
)
def test_only_traffic_between_racks_takes_their_uplinks(lab: Lab, nodes: str, crosses: bool) -> None:
    before = [lab.uplink_bytes(rack) for rack in (1, 2)]
    lab.run(["srun", "--mpi=pmi2", "-w", nodes, "-N2", "-n2", "python", "-c", SEND_4_MIB]).require_success()
    gone = [lab.uplink_bytes(rack) - old for rack, old in zip((1, 2), before, strict=True)]
    assert all(size > 4 << 20 if crosses else size < 1 << 20 for size in gone)


def test_gpus_are_counted_and_numbered(lab: Lab) -> None:
    job = ["srun", "-w", "n03", "--gres=gpu:3", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert lab.run(job).require_success().stdout.strip() == "0,1,2"
    refused = lab.run(["srun", "-N1", "--gres=gpu:5", "true"])
    assert refused.exit_code == 1
    assert "Requested node configuration is not available" in refused.stderr


def test_memory_is_counted(lab: Lab) -> None:
    refused = lab.run(["srun", "-N1", "--mem=64001", "true"])
    assert refused.exit_code == 1
    assert "Memory specification can not be satisfied" in refused.stderr


def test_nodes_share_the_checkout_but_neither_shm_nor_scratch_nor_processes(lab: Lab, tmp_path: Path) -> None:
    script = f"""
        echo $SLURM_PROCID > {tmp_path}/from-$(hostname)
        echo $SLURM_PROCID > /dev/shm/mine; echo $SLURM_PROCID > {SCRATCH}/mine; sleep 0.3
        echo $(cat /dev/shm/mine {SCRATCH}/mine) $(readlink /proc/self/ns/pid /proc/self/ns/net)
    """
    shown = lab.run(["srun", "--label", "-N8", "sh", "-c", script]).require_success().stdout.splitlines()
    words = sorted(line.split() for line in shown)
    assert [line[:3] for line in words] == [[f"{rank}:", str(rank), str(rank)] for rank in range(8)]
    assert len({word for line in words for word in line[3:]}) == 16
    assert len(list(tmp_path.glob("from-n0?"))) == 8


def test_the_login_node_has_this_hpcrun(lab: Lab) -> None:
    shown = (
        lab.run(["python", "-c", "import hpcrun, sys; print(sys.executable, hpcrun.__file__)"])
        .require_success()
        .stdout
    )
    executable, package = shown.split()
    assert executable == sys.executable
    assert Path(package).parents[1] == Path(__file__).parents[2]
    assert lab.run(["hostname"]).stdout.strip() == "login"
