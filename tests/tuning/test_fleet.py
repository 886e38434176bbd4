"""Nodes compared: the odd one is named, small differences are none, damaged reports are unknown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.specs.cluster import NetworkSpec
from hpcrun.tuning.checks import Question
from hpcrun.tuning.finding import Finding
from hpcrun.tuning.fleet import compare
from hpcrun.tuning.host import look
from hpcrun.tuning.report import examine, read_reports
from tests.tuning.trees import lay_out

Reports = dict[str, dict[str, Any]]


def report_of(name: str, root: Path) -> dict[str, Any]:
    return examine(Question(look(lay_out(name, root)), NetworkSpec())).as_json()


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
    return [f"{one.level} {one.subject}: {one.text}" for one in findings]


def test_alike(healthy: Reports) -> None:
    healthy["n2"]["memory_bytes"] += healthy["n2"]["memory_bytes"] // 100
    healthy["n3"]["shm"]["free_bytes"] = 17
    healthy["n4"]["links"][0]["speed_GTs"] = 32.0  # a GPU that is awake
    assert compare(healthy) == compare(healthy, "eth0") == ()


ODD = {
    "downtrained": [
        "fault n3: mlx5_1: PCIe width is 8, on 3 other nodes 16",
        "fault n3: mlx5_0: PCIe speed in GT/s is 16, on 3 other nodes 32",
    ],
    "slow-port": ["fault n3: mlx5_1:1: rate in Gb/s is 100, on 3 other nodes 400"],
    "link-down": ["fault n3: mlx5_1:1: state is DOWN, on 3 other nodes ACTIVE"],
    "small-mtu": ["fault n3: ens1: MTU is 1500, on 3 other nodes 9000"],
    "trust-pcp": ["warning n3: ens1: trust is pcp, on 3 other nodes dscp"],
    "pfc-off": [
        "fault n3: ens1: PFC priorities is none, on 3 other nodes 3",
        "fault n3: ens2: PFC priorities is none, on 3 other nodes 3",
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
    assert told(compare(healthy)) == ODD[case]


def test_limits_and_a_missing_adapter(healthy: Reports) -> None:
    healthy["n2"]["limits"]["memlock"] = 65536
    del healthy["n2"]["ports"][1]
    assert told(compare(healthy)) == [
        "fault n2: mlx5_1:1: state is missing, on 3 other nodes ACTIVE",
        "warning n2: memlock: limit is 65536, on 3 other nodes unlimited",
    ]


def test_without_a_majority_the_groups_are_told(healthy: Reports) -> None:
    for node in ("n3", "n4"):
        healthy[node]["kernel"] = "6.8.0"
    assert told(compare(healthy)) == [
        "note node: kernel differs: 5.14.0-427.13.1.el9_4.x86_64 on n[1-2], 6.8.0 on n[3-4]"
    ]


def test_docker0_has_the_same_address_everywhere(tmp_path: Path) -> None:
    one = report_of("docker0", tmp_path / "one")
    (fault,) = [found for found in compare({"n1": one, "n2": one}) if found.level == "fault"]
    assert str(fault) == (
        "docker0: 172.17.0.1 is on 2 nodes, and NCCL takes this interface for its sockets;"
        " set network.interface in the profile"
    )


def test_a_bridge_that_nothing_uses_is_only_noted(healthy: Reports) -> None:
    bridge = {"name": "docker0", "kind": "bridge", "mtu": 1500, "trust": "", "networks": ["172.17.0.1/16"]}
    for report in healthy.values():
        report["interfaces"].append(bridge)
    assert told(compare(healthy)) == ["note docker0: 172.17.0.1 is on 4 nodes; nothing is to use it"]


def test_half_the_memory_is_no_small_difference(healthy: Reports) -> None:
    healthy["n2"]["memory_bytes"] //= 2
    assert told(compare(healthy)) == ["warning n2: memory: size is 503.7 GiB, on 3 other nodes 1007 GiB"]


def test_one_network_for_all(healthy: Reports) -> None:
    healthy["n4"]["interfaces"][2]["networks"] = ["10.9.0.4/24"]
    assert told(compare(healthy, "eth0")) == ["warning n4: stands in 10.9.0.0/24, 3 others in 10.0.0.0/24"]
    healthy["n4"]["interfaces"][2]["networks"] = []
    assert told(compare(healthy, "eth0")) == ["fault n4: eth0 has no address here, or is missing"]


@pytest.mark.parametrize(
    "damage", [{}, {"ports": 3, "interfaces": [{}], "limits": None}, {"interfaces": [{"networks": ["x"]}]}]
)
def test_a_damaged_report_is_unknown(damage: dict[str, Any], healthy: Reports) -> None:
    healthy["n1"] = {"node": "n1", **damage}
    levels = {one.level for one in compare(healthy) if one.check not in ("state", "setting")}
    assert levels == {"unknown"}


def test_one_is_no_fleet(healthy: Reports) -> None:
    with pytest.raises(UsageError, match=r"1 report\(s\): it takes two nodes"):
        compare({"n1": healthy["n1"]})


_ODD: tuple[Any, ...] = (
    None, 3, -1.5, True, "x", "", [], [3], [None], ["x"], [{}], [[1]], {}, {"x": 1}, {"x": [1]},
    {"size_bytes": 0}, [{"device": 1, "number": "y"}],
    [{"name": "eth0", "networks": "10.0.0.1/8", "kind": "physical", "mtu": "a"}],
)  # fmt: skip


def test_reports_of_any_shape_are_compared(healthy: Reports) -> None:
    for key in healthy["n1"]:
        for odd in _ODD if key != "node" else ():
            damaged = read_reports(healthy["n1"] | {key: odd}, "n1.json")
            compare({"n1": damaged["n1"], "n2": healthy["n2"]})


def test_a_sound_report_is_taken_as_it_is(healthy: Reports) -> None:
    assert read_reports(healthy["n1"], "n1.json") == {"n1": healthy["n1"]}
    assert read_reports({"nodes": [{"node": "n1", "ports": 3, "kernel": 1}]}, "f") == {"n1": {"node": "n1"}}
