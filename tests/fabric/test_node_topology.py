"""The inside of a node, read from small trees in the shape of sysfs, and from nvidia-smi's table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.fabric.node_topology import Nic, NodeTopology, format_cpu_list, parse_cpu_list, read_node_topology
from hpcrun.specs.placement import Binding

NVIDIA, AMD, ASPEED, MELLANOX = "0x10de", "0x1002", "0x1a03", "0x15b3"


class Tree:
    """A captured tree under construction."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))

    def numa(self, **cpus: str) -> None:
        for node, text in cpus.items():
            self.write(f"sys/devices/system/node/{node}/cpulist", text)

    def device(self, way: str, *, vendor: str, kind: str, numa: int, cpus: str = "") -> str:
        """A PCI device at the end of a way such as pci0000:16/0000:16:01.0/0000:17:00.0."""
        folder, address = f"sys/devices/{way}", way.rpartition("/")[2]
        entries = {"vendor": vendor, "class": kind, "numa_node": numa, "local_cpulist": cpus}
        for name, value in entries.items():
            self.write(f"{folder}/{name}", str(value))
        self.link(f"sys/bus/pci/devices/{address}", folder)
        return folder

    def gpu(self, way: str, numa: int, cpus: str = "", uuid: str = "", vendor: str = NVIDIA) -> None:
        kind = "0x120000" if vendor == AMD else "0x030200"
        self.device(way, vendor=vendor, kind=kind, numa=numa, cpus=cpus)
        if uuid:
            address = way.rpartition("/")[2]
            text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Location: \t {address}"
            self.write(f"proc/driver/nvidia/gpus/{address}/information", text)

    def hca(
        self, name: str, way: str, numa: int, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)"
    ) -> None:
        folder = self.device(way, vendor=MELLANOX, kind="0x020700", numa=numa)
        self.link(f"sys/class/infiniband/{name}/device", folder)
        self.write(f"sys/class/infiniband/{name}/ports/1/state", state)
        self.write(f"sys/class/infiniband/{name}/ports/1/rate", rate)
        self.write(f"{folder}/net/ib{name[-1]}/operstate", "up")
        self.link(f"sys/class/net/ib{name[-1]}", f"{folder}/net/ib{name[-1]}")
        self.link(f"{folder}/net/ib{name[-1]}/device", folder)

    def ethernet(self, name: str, way: str, numa: int, state: str = "up", speed: str = "25000") -> None:
        folder = self.device(way, vendor="0x8086", kind="0x020000", numa=numa)
        self.write(f"{folder}/net/{name}/operstate", state)
        self.write(f"{folder}/net/{name}/speed", speed)
        self.link(f"sys/class/net/{name}", f"{folder}/net/{name}")
        self.link(f"{folder}/net/{name}/device", folder)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "node")


@pytest.fixture
def two_sockets(tree: Tree) -> NodeTopology:
    """Four GPUs: two behind a switch each with an adapter, two below a host bridge with one down, one far."""
    tree.numa(node0="0-7,16-23", node1="8-15,24-31")
    for bus, number in (("17", 0), ("3a", 1)):
        switch = f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:02.0"
        tree.gpu(f"{switch}/0000:{bus}:03.0/0000:{bus}:10.0", 0, "0-7,16-23", f"GPU-aaaa-{number}")
        tree.hca(f"mlx5_{number}", f"{switch}/0000:{bus}:03.1/0000:{bus}:11.0", 0)
    tree.gpu("pci0000:98/0000:98:01.0/0000:9a:00.0", 1, "8-15,24-31")
    tree.gpu("pci0000:98/0000:98:02.0/0000:9b:00.0", 1, "8-15,24-31")
    tree.hca("mlx5_2", "pci0000:98/0000:98:03.0/0000:9c:00.0", 1, state="1: DOWN")
    tree.hca("mlx5_3", "pci0000:b0/0000:b0:02.0/0000:b2:00.0", 1)
    tree.hca("mlx5_4", "pci0000:b0/0000:b0:03.0/0000:b3:00.0", 1)
    tree.hca("mlx5_5", "pci0000:b0/0000:b0:01.0/0000:b1:00.0", 1, rate="100 Gb/sec (4X EDR)")
    tree.ethernet("eno1", "pci0000:00/0000:00:1c.0/0000:02:00.0", 0)
    tree.device("pci0000:00/0000:00:1d.0/0000:03:00.0", vendor=ASPEED, kind="0x030000", numa=0)
    tree.write("sys/class/net/lo/operstate", "unknown")
    return read_node_topology(tree.root)


def test_gpus_in_the_order_of_the_bus(two_sockets: NodeTopology) -> None:
    assert [(gpu.index, gpu.address, gpu.numa, gpu.uuid) for gpu in two_sockets.gpus] == [
        (0, "0000:17:10.0", 0, "GPU-aaaa-0"),
        (1, "0000:3a:10.0", 0, "GPU-aaaa-1"),
        (2, "0000:9a:00.0", 1, None),
        (3, "0000:9b:00.0", 1, None),
    ]
    assert two_sockets.numa == {0: "0-7,16-23", 1: "8-15,24-31"}


def test_adapters(two_sockets: NodeTopology) -> None:
    found = {nic.name: nic for nic in two_sockets.nics}
    assert list(found) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_5", "mlx5_3", "mlx5_4", "eno1"]
    assert (found["mlx5_2"].up, found["mlx5_3"].up) == (False, True)
    assert (found["mlx5_0"].rate_Gbps, found["mlx5_5"].rate_Gbps, found["eno1"].rate_Gbps) == (400, 100, 25)
    assert found["mlx5_0"].interfaces == ("ib0",)
    assert (found["eno1"].rdma, found["eno1"].address) == (False, "0000:02:00.0")


def test_how_near_a_gpu_and_an_adapter_are(two_sockets: NodeTopology) -> None:
    near = two_sockets.near
    assert (near[0, "mlx5_0"], near[1, "mlx5_1"]) == ("PIX", "PIX")
    assert (near[0, "mlx5_1"], near[0, "mlx5_3"]) == ("NODE", "SYS")
    assert (near[2, "mlx5_2"], near[2, "mlx5_3"]) == ("PHB", "NODE")


def test_several_switches_are_farther_than_one(tree: Tree) -> None:
    root = "pci0000:16/0000:16:01.0/0000:17:00.0"
    tree.gpu(f"{root}/0000:18:00.0/0000:19:00.0/0000:1a:00.0/0000:1b:00.0", 0)
    tree.hca("mlx5_0", f"{root}/0000:18:01.0/0000:1c:00.0", 0)
    assert read_node_topology(tree.root).near[0, "mlx5_0"] == "PXB"


def names(nics: list[Nic | None]) -> list[str | None]:
    return [nic.name if nic else None for nic in nics]


def test_the_nearest_adapter_is_up_and_fast_and_shared_out(two_sockets: NodeTopology) -> None:
    assert names([two_sockets.nearest_nic(gpu) for gpu in range(4)]) == [
        "mlx5_0",
        "mlx5_1",
        "mlx5_3",
        "mlx5_4",
    ]
    assert names([two_sockets.nearest_nic(0, ["mlx5_3"])]) == ["mlx5_3"]
    assert names([two_sockets.nearest_nic(0, ["mlx5_2"])]) == [None]
    with pytest.raises(UsageError, match="gpu 7: this node has no such GPU; there are: 0, 1, 2, 3"):
        two_sockets.nearest_nic(7)


def test_cpus_of_a_gpu_are_those_that_the_job_has(two_sockets: NodeTopology) -> None:
    assert two_sockets.cpus_of(3) == "8-15,24-31"
    assert two_sockets.cpus_of(3, range(12)) == "8-11"
    assert two_sockets.cpus_of(3, range(4)) == "0-3"
    assert two_sockets.gpus_far_from_cpus(range(4)) == (2, 3)
    assert two_sockets.gpus_far_from_cpus(range(12)) == ()
    assert two_sockets.gpus_far_from_cpus(()) == ()


def test_what_each_local_rank_should_use(two_sockets: NodeTopology) -> None:
    assert two_sockets.bind(4)[0] == Binding(0, 0, "GPU-aaaa-0", "mlx5_0", "0-7,16-23")
    assert [(one.gpu, one.nic) for one in two_sockets.bind(2, gpus=[3, 1])] == [(3, "mlx5_4"), (1, "mlx5_1")]
    assert [one.gpu for one in two_sockets.bind(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert two_sockets.bind(1, gpus=[2], allowed=range(10), hcas=["mlx5_5"])[0] == Binding(
        0, 2, None, "mlx5_5", "8-9"
    )


def test_ranks_without_gpus_are_spread_over_the_numa_nodes(tree: Tree) -> None:
    tree.numa(node0="0-3", node1="4-7", node2="")
    tree.ethernet("eth0", "pci0000:00/0000:00:03.0", 0, speed="-1")
    host = read_node_topology(tree.root)
    assert [one.cpus for one in host.bind(4)] == ["0-3", "0-3", "4-7", "4-7"]
    assert [one.cpus for one in host.bind(2, allowed=[5, 6])] == ["5-6", "5-6"]
    assert host.bind(1)[0] == Binding(0, nic="eth0", cpus="0-7")
    assert host.nics[0].rate_Gbps is None


def test_a_machine_that_tells_nothing(tree: Tree) -> None:
    tree.root.mkdir()
    host = read_node_topology(tree.root)
    assert host == NodeTopology()
    assert host.bind(2, allowed=[0, 1]) == (Binding(0, cpus="0-1"), Binding(1, cpus="0-1"))


def test_other_vendors_and_an_unknown_numa_node(tree: Tree) -> None:
    tree.gpu("pci0000:c0/0000:c1:00.0", -1, vendor=AMD)
    host = read_node_topology(tree.root)
    assert [(gpu.index, gpu.numa) for gpu in host.gpus] == [(0, None)]
    assert host.notes == ("GPU 0: the NUMA node is unknown",)
    assert host.bind(1) == (Binding(0, 0),)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("", ()), ("N/A", ()), ("3-1", ()), (" 5 ", (5,))]
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus
