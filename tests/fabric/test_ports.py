"""RDMA ports, interfaces and PCI links, read from texts in the shape of sysfs and /proc/net."""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path

import pytest

from hpcrun.fabric.node_topology import read_node_topology
from hpcrun.fabric.ports import (
    Gid,
    natural_sort_key,
    parse_interface_addresses,
    read_network_interfaces,
    read_pci_links,
    read_rdma_ports,
)
from tests.tuning.trees import lay_out

MAPPED = str(IPv6Address("::ffff:10.1.0.7"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return lay_out("roce-healthy", tmp_path / "node")


def test_ports(root: Path) -> None:
    first, second = read_rdma_ports(root)
    assert (first.name, first.state, first.physical, first.rate_Gbps) == (
        "mlx5_0:1",
        "ACTIVE",
        "LinkUp",
        400.0,
    )
    assert (first.is_active, first.is_roce, first.interfaces) == (True, True, ("ens1",))
    assert first.gids == (
        Gid(0, "fe80::5aa2:e1ff:fe10:0", 1, "ens1"),
        Gid(1, "fe80::5aa2:e1ff:fe10:0", 2, "ens1"),
        Gid(2, MAPPED, 1, "ens1"),
        Gid(3, MAPPED, 2, "ens1"),
    )
    assert second.name == "mlx5_1:1"
    (root / "sys/class/infiniband/mlx5_0/tc/1").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0/tc/1/traffic_class").write_text("Global tclass=106\n")
    assert [one.traffic_class for one in read_rdma_ports(root)] == [106, None]


def test_interfaces(root: Path) -> None:
    found = {one.name: one for one in read_network_interfaces(root)}
    assert {name: (one.kind, one.networks) for name, one in found.items()} == {
        "ens1": ("physical", ("10.1.0.7/24",)),
        "ens2": ("physical", ("10.1.1.7/24",)),
        "eth0": ("physical", ("10.0.0.7/24",)),
        "lo": ("loopback", ()),
    }
    one = found["ens1"]
    assert (one.up, one.speed_Gbps, one.mtu, one.trust, one.ecn) == (True, 400.0, 9000, "dscp", None)
    for end in ("roce_np", "roce_rp"):
        enable = root / "sys/class/net/ens1/ecn" / end / "enable"
        enable.mkdir(parents=True)
        for priority in range(8):
            (enable / str(priority)).write_text(f"{int(priority == 3)}\n")
    assert {one.name: one.ecn for one in read_network_interfaces(root)}["ens1"] == (3,)


def test_links(root: Path) -> None:
    found = {one.name: one for one in read_pci_links(root, read_node_topology(root))}
    assert list(found) == ["GPU 0", "GPU 1", "mlx5_0", "mlx5_1", "eth0"]
    one = found["mlx5_0"]
    assert (one.speed_GTs, one.width, one.most_width, one.slot_speed_GTs, one.slot_width) == (
        32.0,
        16,
        16,
        32.0,
        16,
    )
    (root / "sys/bus/pci/devices/0000:18:00.0/max_link_width").write_text("255\n")
    assert {one.name: one.most_width for one in read_pci_links(root, read_node_topology(root))}[
        "mlx5_0"
    ] is None
    assert (found["GPU 0"].speed_GTs, found["eth0"].slot_width, one.iommu) == (2.5, None, "")


def test_addresses() -> None:
    route = "Iface\tDestination\tGateway\nib0\t0000010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    route += "eth9\t0000000A\t0100010A\t0003\t0\t0\t0\t000000FF\t0\t0\t0\n"  # by a gateway: not its own
    trie = "  |-- 10.1.0.9\n     /32 host LOCAL\n  |-- 10.2.0.9\n     /32 host LOCAL\n"
    trie += "  |-- 10.1.0.255\n     /32 link BROADCAST\n"
    six = (
        "fe80000000000000021132fffe445566 02 40 20 80 ib0\nfd020000000000000000000000000007 02 10 00 80 ib0\n"
    )
    assert parse_interface_addresses(route, trie, six) == {
        "ib0": ("10.1.0.9/24", "fe80::211:32ff:fe44:5566/64", "fd02::7/16")
    }


@pytest.mark.parametrize("text", ["", "garbage", "\0", "a b c d e f g h i", "|-- 999.1.1.1\n/32 host LOCAL"])
def test_odd_addresses(text: str) -> None:
    assert parse_interface_addresses(text, text, text) == {}


def test_an_empty_tree(tmp_path: Path) -> None:
    assert (
        read_rdma_ports(tmp_path),
        read_network_interfaces(tmp_path),
        read_pci_links(tmp_path, read_node_topology(tmp_path)),
    ) == ((), (), ())


def test_ten_comes_after_two() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "ib0"], key=natural_sort_key) == ["ib0", "mlx5_2", "mlx5_10"]
