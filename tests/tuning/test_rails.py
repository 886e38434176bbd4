"""Rails of nodes: which adapter is which, and where nodes do not agree."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from hpcrun.specs.cluster import NetworkSpec
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.doctor_report import examine_host
from hpcrun.tuning.host.fleet import compare_nodes
from hpcrun.tuning.host.node_report import read_host_report
from hpcrun.tuning.host.rails import AdapterRail, read_rails
from tests.tuning.trees import lay_out

Reports = dict[str, dict[str, Any]]


@pytest.fixture
def railed(tmp_path: Path) -> Reports:
    """Four nodes with a network for each of two rails."""
    one = examine_host(
        HostCheckInput(read_host_report(lay_out("roce-healthy", tmp_path / "node")), NetworkSpec())
    ).as_json()
    reports = {}
    for number in range(1, 5):
        report = copy.deepcopy(one)
        report["node"] = f"n{number}"
        report["environ"]["NCCL_IB_HCA"] = "=mlx5_0,mlx5_1"
        for interface in report["interfaces"]:
            if interface["name"] in ("ens1", "ens2"):
                interface["networks"] = [f"10.{interface['name'][-1]}.0.{number}/16"]
        reports[f"n{number}"] = report
    return reports


def rails(reports: Reports) -> list[str]:
    return [str(one) for one in compare_nodes(reports) if one.check == "rail"]


def swap(report: dict[str, Any]) -> None:
    """Cable the two rails the other way round."""
    first, second = (one for one in report["interfaces"] if one["name"] in ("ens1", "ens2"))
    first["networks"], second["networks"] = second["networks"], first["networks"]


def test_the_map_of_a_node(railed: Reports) -> None:
    assert read_rails(railed["n1"]) == (
        AdapterRail("mlx5_0:1", "10.1.0.0/16"),
        AdapterRail("mlx5_1:1", "10.2.0.0/16"),
    )
    assert read_rails({}) == ()


def test_nodes_that_agree_say_nothing(railed: Reports) -> None:
    for report in railed.values():
        report["environ"]["NCCL_CROSS_NIC"] = "0"
    assert rails(railed) == []


def test_a_node_that_is_cabled_the_other_way_round_is_named_with_its_value(railed: Reports) -> None:
    swap(railed["n3"])
    (found,) = rails(railed)
    assert found.startswith(
        "n3: its rail 0 is mlx5_0:1 in 10.2.0.0/16, on the others rail 0 is in 10.1.0.0/16: rails cross;"
    )
    assert "NCCL_IB_HCA==mlx5_0:1:1,mlx5_1:1:0 there" in found


def test_racks_with_networks_of_their_own_are_fine(railed: Reports) -> None:
    for interface in railed["n3"]["interfaces"]:
        if interface["name"] in ("ens1", "ens2"):
            interface["networks"] = [f"10.{interface['name'][-1]}0.0.3/16"]
    assert rails(railed) == []


def test_one_network_for_all_adapters_has_no_rails_to_cross(railed: Reports) -> None:
    for number, report in enumerate(railed.values(), 1):
        for interface in report["interfaces"]:
            if interface["name"] in ("ens1", "ens2"):
                interface["networks"] = [f"10.1.{interface['name'][-1]}.{number}/16"]
    swap(railed["n3"])
    assert rails(railed) == []


def test_other_ports_matter_where_rails_are_not_to_cross(railed: Reports) -> None:
    for report in railed.values():
        report["environ"]["NCCL_IB_HCA"] = "=mlx5_0:1,mlx5_1:1"
    railed["n2"]["environ"]["NCCL_IB_HCA"] = "=mlx5_1:1"
    assert rails(railed) == []
    railed["n1"]["environ"]["NCCL_CROSS_NIC"] = "0"
    (found,) = rails(railed)
    assert found.startswith("n2: its rails are mlx5_1:1, on 3 others mlx5_0:1, mlx5_1:1")
