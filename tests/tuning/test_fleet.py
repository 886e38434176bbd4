"""Nodes compared: the odd one is named, small differences are none, damaged reports are unknown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.finding import Finding
from hpcrun.specs.cluster import NetworkSpec
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.doctor_report import examine_host, parse_doctor_reports
from hpcrun.tuning.host.fleet import compare_nodes
from hpcrun.tuning.host.node_report import read_host_report
from hpcrun.tuning.host.routes import parse_ip_route
from tests.tuning.trees import lay_out

Reports = dict[str, dict[str, Any]]


def report_of(name: str, root: Path) -> dict[str, Any]:
    return examine_host(HostCheckInput(read_host_report(lay_out(name, root)), NetworkSpec())).as_json()


@pytest.fixture
def healthy(tmp_path: Path) -> Reports:
    """Four healthy nodes, each with addresses of its own."""
    one = report_of("roce-healthy", tmp_path / "healthy")
    reports = {}
    for number in range(1, 5):
        report = copy.deepcopy(one)
        report["node"] = f"n{number}"
        for interface in report["interfaces"]:
            interface["networks"] = [text.replace(".7/", f".{number}/") for text in interface["networks"]]
        reports[f"n{number}"] = report
    return reports


def told(findings: tuple[Finding, ...]) -> list[str]:
    return [f"{one.severity} {one.subject}: {one.text}" for one in findings]


def test_alike(healthy: Reports) -> None:
    healthy["n2"]["memory_bytes"] += healthy["n2"]["memory_bytes"] // 100
    healthy["n3"]["shm"]["free_bytes"] = 17
    healthy["n4"]["links"][0]["speed_GTs"] = 32.0  # a GPU that is awake
    assert compare_nodes(healthy) == compare_nodes(healthy, "eth0") == ()


ODD = {
    "downtrained": [
        "error n3: mlx5_1: PCIe width is 8, on 3 other nodes 16",
        "error n3: mlx5_0: PCIe speed in GT/s is 16, on 3 other nodes 32",
    ],
    "slow-port": ["error n3: mlx5_1:1: rate in Gb/s is 100, on 3 other nodes 400"],
    "link-down": ["error n3: mlx5_1:1: state is DOWN, on 3 other nodes ACTIVE"],
    "small-mtu": ["error n3: ens1: MTU is 1500, on 3 other nodes 9000"],
    "trust-pcp": ["warning n3: ens1: trust is pcp, on 3 other nodes dscp"],
    "pfc-off": [
        "error n3: ens1: PFC priorities is none, on 3 other nodes 3",
        "error n3: ens2: PFC priorities is none, on 3 other nodes 3",
    ],
    "no-peermem": ["warning n3: nvidia_peermem: peer memory is False, on 3 other nodes True"],
    "ipv6-only": [
        "warning n3: mlx5_0:1: GID that NCCL takes is 0, on 3 other nodes 3",
        "warning n3: mlx5_1:1: GID that NCCL takes is 0, on 3 other nodes 3",
    ],
}


@pytest.mark.parametrize("case", ODD)
def test_the_odd_one_is_named(case: str, healthy: Reports, tmp_path: Path) -> None:
    odd = report_of(case, tmp_path / "odd")
    odd["interfaces"] = [
        {**one, "networks": healthy["n3"]["interfaces"][at]["networks"]}
        for at, one in enumerate(odd["interfaces"])
    ]
    healthy["n3"] = odd
    assert told(compare_nodes(healthy)) == ODD[case]


def test_limits_and_a_missing_adapter(healthy: Reports) -> None:
    healthy["n2"]["limits"]["memlock"] = 65536
    del healthy["n2"]["ports"][1]
    assert told(compare_nodes(healthy)) == [
        "error n2: mlx5_1:1: state is missing, on 3 other nodes ACTIVE",
        "warning n2: memlock: limit is 65536, on 3 other nodes unlimited",
    ]


def test_without_a_majority_the_groups_are_told(healthy: Reports) -> None:
    for node in ("n3", "n4"):
        healthy[node]["kernel"] = "6.8.0"
    assert told(compare_nodes(healthy)) == [
        "note node: kernel differs: 5.14.0-427.13.1.el9_4.x86_64 on n[1-2], 6.8.0 on n[3-4]"
    ]


def test_docker0_has_the_same_address_everywhere(tmp_path: Path) -> None:
    one = report_of("docker0", tmp_path / "one")
    (fault,) = [found for found in compare_nodes({"n1": one, "n2": one}) if found.severity == "error"]
    assert str(fault) == (
        "docker0: 172.17.0.1 is on 2 nodes, and NCCL takes this interface for its sockets;"
        " set network.interface in the profile"
    )


def test_a_bridge_that_nothing_uses_is_only_noted(healthy: Reports) -> None:
    bridge = {"name": "docker0", "kind": "bridge", "mtu": 1500, "trust": "", "networks": ["172.17.0.1/16"]}
    for report in healthy.values():
        report["interfaces"].append(bridge)
    assert told(compare_nodes(healthy)) == ["note docker0: 172.17.0.1 is on 4 nodes; nothing is to use it"]


def test_half_the_memory_is_no_small_difference(healthy: Reports) -> None:
    healthy["n2"]["memory_bytes"] //= 2
    assert told(compare_nodes(healthy)) == [
        "warning n2: memory: size is 503.7 GiB, on 3 other nodes 1007 GiB"
    ]


def test_one_network_for_all(healthy: Reports) -> None:
    healthy["n4"]["interfaces"][2]["networks"] = ["10.9.0.4/24"]
    assert told(compare_nodes(healthy, "eth0")) == [
        "warning n4: stands in 10.9.0.0/24, 3 others in 10.0.0.0/24"
    ]
    healthy["n4"]["interfaces"][2]["networks"] = []
    assert told(compare_nodes(healthy, "eth0")) == ["error n4: eth0 has no address here, or is missing"]


@pytest.mark.parametrize(
    "damage", [{}, {"ports": 3, "interfaces": [{}], "limits": None}, {"interfaces": [{"networks": ["x"]}]}]
)
def test_a_damaged_report_is_unknown(damage: dict[str, Any], healthy: Reports) -> None:
    healthy["n1"] = {"node": "n1", **damage}
    levels = {one.severity for one in compare_nodes(healthy) if one.check not in ("state", "setting")}
    assert levels == {"unknown"}


def routed(report: dict[str, Any], text: str) -> None:
    report["routes"] = [vars(one) for one in parse_ip_route(text)]


TWO_IN_ONE = """default via 10.1.0.1 dev eth0 proto dhcp metric 50
10.1.0.0/16 dev ens1 proto kernel scope link src 10.1.0.1 metric 100
10.1.0.0/16 dev ens2 proto kernel scope link src 10.1.1.1 metric 101
local 10.1.0.1 dev ens1 table local proto kernel scope host
10.1.0.0/16 dev ens1 table 101 scope link
fe80::/64 dev ens1 proto kernel metric 256 pref medium
"""


@pytest.mark.parametrize(
    ("found", "put", "said"),
    [
        ("metric 101", "metric 99", "warning n3: sends to 10.1.0.0/16 by ens2, on 3 other nodes by ens1: "),
        (
            "metric 101",
            "metric 102",
            "note n3: has other routes to 10.1.0.0/16 than 3 other nodes; all send by",
        ),
        (
            " metric 50\n",
            "\ndefault via 10.9.0.1 dev ens2 metric 50\n",
            "note n3: has other routes to default ",
        ),
        (
            "dev eth0 proto dhcp metric 50\n",
            "dev ens1 metric 40\ndefault via 10.1.0.1 dev eth0 metric 50\n",
            "warning n3: sends to default by ens1, on 3 other nodes by eth0: `ip route` here says",
        ),
        (
            "10.1.0.0/16 dev ens1 table 101 scope link",
            "10.1.0.0/16 dev ens2 table 101\n10.1.0.0/16 dev ens1 table 101",
            "warning n3: sends to 10.1.0.0/16 of table 101 by ens2, on 3 other nodes by ens1",
        ),
        (
            "default via 10.1.0.1 dev eth0 proto dhcp metric 50",
            "default proto static metric 50\n\tnexthop via 10.1.0.1 dev ens1 weight 1\n"
            "\tnexthop via 10.1.0.1 dev eth0 weight 1\ndefault via 10.1.0.1 dev eth0 metric 60",
            "warning n3: sends to default by ens1+eth0, on 3 other nodes by eth0",
        ),
    ],
)
def test_interfaces_in_one_network_by_which_nodes_send(
    found: str, put: str, said: str, healthy: Reports
) -> None:
    for report in healthy.values():
        routed(report, TWO_IN_ONE)
    assert compare_nodes(healthy) == ()
    routed(healthy["n3"], TWO_IN_ONE.replace(found, put))
    (line,) = told(compare_nodes(healthy))
    assert line.startswith(said)
    assert "`ip route` here says '" in line
    assert "; on n1 '" in line


def test_routes_in_another_order_are_read_from_proc_as_well(healthy: Reports, tmp_path: Path) -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    rows = [f"{name}\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\n" for name in ("ens1", "ens2")]
    for number, order in enumerate((rows, rows[::-1])):
        root = lay_out("roce-healthy", tmp_path / str(number))
        (root / "proc/net/route").write_text(head + "".join(order))
        healthy[f"n{number + 1}"]["routes"] = read_host_report(root).as_json()["routes"]
    lines = told(compare_nodes({"n1": healthy["n1"], "n2": healthy["n2"]}))
    assert lines == [
        "warning n2: sends to 10.1.0.0/16 by ens2, on 1 other node by ens1: `ip route` here says"
        " '10.1.0.0/16 dev ens2', then '10.1.0.0/16 dev ens1'; on n1 '10.1.0.0/16 dev ens1', then"
        " '10.1.0.0/16 dev ens2'"
    ]


def test_routes_that_differ_without_a_choice_are_nobodys_matter(healthy: Reports) -> None:
    routed(healthy["n1"], "10.1.0.0/16 dev ens1 proto kernel metric 100\n10.2.0.0/16 dev ens2\n")
    routed(healthy["n2"], "10.1.0.0/16 dev ens1 proto static metric 7\n10.3.0.0/16 dev ens2\nnonsense\n\n")
    assert compare_nodes(healthy) == ()


def test_adapters_that_are_not_as_near_to_their_gpus_are_named(healthy: Reports) -> None:
    assert healthy["n1"]["near"]["GPU 0"]["mlx5_0"] == "PHB"
    healthy["n3"]["near"] = {"GPU 0": {"mlx5_0": "SYS", "mlx5_1": "PHB"}, "GPU 1": {"mlx5_0": "SYS"}}
    (one,) = compare_nodes(healthy)
    assert str(one).startswith(
        "n3: GPUs and adapters are not as near as elsewhere: GPU 0 to mlx5_0 SYS (others PHB), GPU 0 to"
        " mlx5_1 PHB (others SYS); compare `nvidia-smi topo -m`"
    )
    del healthy["n3"]["near"]
    assert compare_nodes(healthy) == ()


def test_one_is_no_fleet(healthy: Reports) -> None:
    with pytest.raises(UsageError, match=r"1 report\(s\): it takes two nodes"):
        compare_nodes({"n1": healthy["n1"]})


_ODD: tuple[Any, ...] = (
    None, 3, -1.5, True, "x", "", [], [3], [None], ["x"], [{}], [[1]], {}, {"x": 1}, {"x": [1]},
    {"size_bytes": 0}, [{"device": 1, "number": "y"}],
    [{"name": "eth0", "networks": "10.0.0.1/8", "kind": "physical", "mtu": "a"}],
)  # fmt: skip


def test_reports_of_any_shape_are_compared(healthy: Reports) -> None:
    for key in healthy["n1"]:
        for odd in _ODD if key != "node" else ():
            damaged = parse_doctor_reports(healthy["n1"] | {key: odd}, "n1.json")
            compare_nodes({"n1": damaged["n1"], "n2": healthy["n2"]})


def test_a_sound_report_is_taken_as_it_is(healthy: Reports) -> None:
    assert parse_doctor_reports(healthy["n1"], "n1.json") == {"n1": healthy["n1"]}
    assert parse_doctor_reports({"nodes": [{"node": "n1", "ports": 3, "kernel": 1}]}, "f") == {
        "n1": {"node": "n1"}
    }
