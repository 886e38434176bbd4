"""Advice: the few settings that follow from profile, fabric and nodes; nothing that is only habit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.specs.cluster import ClusterSpec, NetworkSpec, parse_cluster
from hpcrun.specs.settings import CommSetting, CommSettings
from hpcrun.tuning.advice import AdviceContext, advise_settings
from hpcrun.tuning.fabrics import load_fabric_kinds
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.doctor_report import examine_host
from hpcrun.tuning.host.node_report import read_host_report
from hpcrun.tuning.lint.environment import layer_from_environment
from hpcrun.tuning.lint.lint import lint_layers
from hpcrun.tuning.registry.registry import parse_version
from tests.tuning.trees import lay_out

FULL = "{interface: ib0, hcas: [mlx5_0, mlx5_1], fabric: roce-spectrum, address_range: 10.1.0.0/16}"


def cluster(network: str = FULL, more: str = "") -> ClusterSpec:
    return parse_cluster(f"name: c\nnetwork: {network}\n{more}\n", "c.yaml")


def reports(tmp_path: Path, **cases: str) -> dict[str, dict[str, Any]]:
    return {
        node: examine_host(
            HostCheckInput(read_host_report(lay_out(case.replace("_", "-"), tmp_path / node)), NetworkSpec())
        ).as_json()
        for node, case in cases.items()
    }


def values(settings: CommSettings) -> dict[str, str]:
    return settings.environment()


def test_a_profile_s_facts_become_settings() -> None:
    found = advise_settings(AdviceContext(cluster()))
    assert values(found) == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "NCCL_IB_TC": "106",
        "NCCL_IB_ADDR_RANGE": "10.1.0.0/16",
    }
    assert all(one.reason and one.source for one in found.everywhere)
    assert {one.name: one.needs for one in found.everywhere if one.needs} == {
        "NCCL_IB_ADDR_RANGE": "NCCL 2.21"
    }


def test_the_profile_wins_over_the_fabric() -> None:
    found = advise_settings(
        AdviceContext(cluster("{fabric: roce-spectrum, traffic_class: 96, service_level: 3}"))
    )
    assert values(found) == {"NCCL_IB_TC": "96", "NCCL_IB_SL": "3"}
    assert {one.source for one in found.everywhere} == {
        "profile: network.traffic_class",
        "profile: network.service_level",
    }


def test_open_mpi_gets_the_same_facts() -> None:
    mpi = "mpi: {library: openmpi, launcher: srun, pmi: pmix}"
    found = values(
        advise_settings(AdviceContext(cluster("{interface: ib0, hcas: [mlx5_0], traffic_class: 106}", mpi)))
    )
    assert found["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert found["UCX_IB_TRAFFIC_CLASS"] == found["NCCL_IB_TC"] == "106"
    assert found["OMPI_MCA_btl_tcp_if_include"] == "ib0"


def test_libraries_that_the_profile_s_own_env_parts_are_told() -> None:
    more = "mpi: {library: openmpi, launcher: srun, pmi: pmix}\nenv: {UCX_IB_TRAFFIC_CLASS: '0'}"
    notes = advise_settings(AdviceContext(cluster("{traffic_class: 106}", more))).notes
    assert notes[0].startswith(
        "profile c: NCCL sends in TC 106 = DSCP 26, ECT(0), priority 3, MPI over UCX in TC 0"
    )


@pytest.mark.parametrize(
    ("situation", "note"),
    [
        (AdviceContext(None), "there is no profile of the cluster, so nothing is known to be set"),
        (AdviceContext(cluster(), nodes=1), "one node: no traffic between nodes, so nothing is set for it"),
        (
            AdviceContext(cluster("{}")),
            "nothing to set: the profile names no interface, devices or traffic class",
        ),
    ],
)
def test_nothing_to_say_is_said(situation: AdviceContext, note: str) -> None:
    assert advise_settings(situation) == CommSettings(notes=(note,))


@pytest.mark.parametrize("kind", load_fabric_kinds())
def test_published_tuning_is_told_and_never_set(kind: str) -> None:
    found = advise_settings(AdviceContext(cluster(f"{{fabric: {kind}}}")))
    published = {one.name for one in load_fabric_kinds()[kind].published}
    assert not published & set(values(found))
    for name in published:
        assert any(note.startswith(f"{name} is not set: ") for note in found.notes)


_NETWORK = (
    "{fabric: KIND, interface: bond0.209, hcas: [mlx5_1, mlx5_10], traffic_class: 104, service_level: 3,"
    " address_family: ipv6, address_range: 'fd02::/16', nccl_topology: /opt/site/topology.xml}"
)
_OPEN_MPI = "mpi: {library: openmpi, launcher: srun, pmi: pmix}"


@pytest.mark.parametrize("version", ["2.18.5", "2.20.5", "2.27.5", "2.31.1", None])
@pytest.mark.parametrize("mpi", ["", _OPEN_MPI])
@pytest.mark.parametrize("network", ["{fabric: KIND, interface: ib0, hcas: [mlx5_0]}", _NETWORK])
@pytest.mark.parametrize("kind", load_fabric_kinds())
def test_lint_has_nothing_against_the_advice(
    kind: str, network: str, mpi: str, version: str | None, tmp_path: Path
) -> None:
    nccl = parse_version(version) if version else None
    told = reports(tmp_path, n1="roce_healthy", n2="ipv6_only", n3="link_down")
    found = advise_settings(
        AdviceContext(cluster(network.replace("KIND", kind), mpi), reports=told, nccl=nccl)
    )
    for node in ("elsewhere", *found.by_node):
        layer = layer_from_environment(values(found) | found.of_node(node), "advice")
        complaints = [str(one) for one in lint_layers([layer], nccl).findings if one.severity != "note"]
        # An old NCCL has no other way, and the index was looked up at this very node.
        allowed = "NCCL_IB_GID_INDEX" in found.of_node(node)
        assert [one for one in complaints if not (allowed and "NCCL_IB_GID_INDEX" in one)] == []


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("infiniband", {"NCCL_IB_HCA", "NCCL_IB_SL", "NCCL_TOPO_FILE", "UCX_NET_DEVICES", "UCX_IB_SL"}),
        ("aws-efa", {"NCCL_TOPO_FILE"}),
        ("tcp", {"NCCL_TOPO_FILE"}),
    ],
)
def test_what_nothing_reads_on_a_fabric_is_told_and_not_set(
    kind: str, left: set[str], tmp_path: Path
) -> None:
    told = reports(tmp_path, n1="link_down")
    network = _NETWORK.replace("KIND", kind).replace("[mlx5_1, mlx5_10]", "[mlx5_0, mlx5_1]")
    found = advise_settings(AdviceContext(cluster(network, _OPEN_MPI), reports=told))
    sockets = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"}
    assert set(values(found)) == sockets | left
    idle = [note.partition(" is left out: on ")[0] for note in found.notes if "nothing reads it" in note]
    assert "NCCL_IB_TC" in idle
    assert not set(idle) & left
    assert bool(found.by_node) == (kind == "infiniband")


def measured(name: str, value: str, needs: str = "", reason: str = "+12 % at 64 MiB") -> CommSetting:
    return CommSetting(name, value, reason, "sweep of 2026-09-01" if reason else "", needs)


def test_what_is_measured_is_set_with_its_figures() -> None:
    one = measured("NCCL_IB_QPS_PER_CONNECTION", "4")
    found = advise_settings(AdviceContext(cluster("{fabric: oci}"), measured=(one,)))
    assert found.everywhere[-1] == one
    assert not any(note.startswith(one.name) for note in found.notes)
    assert advise_settings(AdviceContext(cluster(), nodes=1, measured=(one,))).everywhere == (one,)


@pytest.mark.parametrize(
    ("one", "fabric", "why"),
    [
        (measured("NCCL_IB_TC", "96"), "oci", "it is a fact of the system here"),
        (measured("NCCL_BUFFSIZE", "4M"), "oci", "units are not read"),
        (measured("NCCL_IB_QPS_PER_CONNECTION", "4", reason=""), "oci", "it names no sweep"),
        (measured("NCCL_IB_QPS_PER_CONNECTION", "4"), "gcp", "the script of Google Cloud"),
    ],
)
def test_no_measured_setting_is_lost_in_silence(one: CommSetting, fabric: str, why: str) -> None:
    found = advise_settings(AdviceContext(cluster(f"{{fabric: {fabric}}}"), measured=(one,)))
    assert one not in found.everywhere
    told = [note for note in found.notes if note.startswith(f"{one.name}={one.value}, measured, is left out")]
    assert why in "".join(told)


def test_what_was_measured_together_is_set_together_or_not_at_all() -> None:
    pair = (measured("NCCL_IB_QPS_PER_CONNECTION", "4"), measured("NCCL_IB_TC", "96"))
    found = advise_settings(AdviceContext(cluster("{fabric: oci}"), measured=pair))
    assert "NCCL_IB_QPS_PER_CONNECTION" not in values(found)
    why = "measured, is left out: it was measured together with NCCL_IB_TC"
    assert f"NCCL_IB_QPS_PER_CONNECTION=4, {why}" in found.notes


def test_a_measured_setting_that_is_too_new_is_told() -> None:
    one = measured("NCCL_MIN_CTAS", "16", "NCCL 2.17")
    found = advise_settings(AdviceContext(cluster(), nccl=(2, 16, 5), measured=(one,)))
    assert "NCCL_MIN_CTAS is left out: it needs NCCL 2.17, this is 2.16.5" in found.notes


def test_clouds() -> None:
    azure = advise_settings(AdviceContext(cluster("{fabric: azure-nd, nccl_topology: /opt/ndv5.xml}")))
    assert values(azure) == {
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "NCCL_TOPO_FILE": "/opt/ndv5.xml",
    }
    assert values(advise_settings(AdviceContext(cluster("{fabric: aws-efa}")))) == {}
    assert values(advise_settings(AdviceContext(cluster("{fabric: oci}")))) == {
        "NCCL_IB_TC": "41",
        "NCCL_IB_SL": "0",
    }
    assert values(advise_settings(AdviceContext(cluster("{fabric: gcp, interface: eth0}")))) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def test_a_release_that_does_not_read_it_is_not_given_it() -> None:
    old = advise_settings(
        AdviceContext(cluster("{address_family: ipv6, traffic_class: 106}"), nccl=(2, 19, 3))
    )
    assert values(old) == {"NCCL_IB_TC": "106"}
    assert "NCCL_IB_ADDR_FAMILY is left out: it needs NCCL 2.21, this is 2.19.3" in old.notes
    assert values(advise_settings(AdviceContext(cluster("{address_family: ipv6}"), nccl=(2, 21))))[
        "NCCL_IB_ADDR_FAMILY"
    ]


def test_an_interface_that_is_not_here_is_not_named() -> None:
    found = advise_settings(AdviceContext(cluster("{interface: ib0}"), interfaces=("lo", "eth0")))
    assert values(found) == {}
    assert any("ib0, is not on this node; left out" in note for note in found.notes)
    assert values(advise_settings(AdviceContext(cluster("{interface: ib0}"), interfaces=("lo", "ib0"))))


def test_a_node_without_one_of_the_devices_gets_its_own_list(tmp_path: Path) -> None:
    told = reports(tmp_path, n1="roce_healthy", n2="link_down")
    found = advise_settings(AdviceContext(cluster("{hcas: [mlx5_0, mlx5_1]}"), reports=told))
    assert found.of_node("n2.some.domain") == {"NCCL_IB_HCA": "=mlx5_0"}
    assert found.by_node["n2"][0].source == "doctor's report of the node, unknown date"
    told["n2"]["time"] = 1_790_000_000.0
    dated = advise_settings(AdviceContext(cluster("{hcas: [mlx5_0, mlx5_1]}"), reports=told))
    assert dated.by_node["n2"][0].source.startswith("doctor's report of the node, 2026-09-2")
    assert (found.of_node("n1"), values(found)) == ({}, {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"})
    assert "n2: mlx5_1 is missing or down" in found.notes
    none = advise_settings(AdviceContext(cluster("{hcas: [mlx5_8]}"), reports=told))
    assert none.by_node == {}
    assert "n1: mlx5_8 is missing or down; none of the devices is left" in none.notes


def test_an_old_nccl_is_told_the_index_where_it_is_certain(tmp_path: Path) -> None:
    told = reports(tmp_path, n1="roce_healthy", n2="ipv6_only")
    old = advise_settings(AdviceContext(cluster("{hcas: [mlx5_0, mlx5_1]}"), reports=told, nccl=(2, 20, 5)))
    assert old.of_node("n1") == {"NCCL_IB_GID_INDEX": "3"}
    assert old.of_node("n2") == {}
    assert "n2: which GID index is right is not certain; NCCL 2.21 finds it by itself" in old.notes
    apart = reports(tmp_path / "apart", n1="roce_healthy", n2="infiniband_healthy")
    for gid in apart["n1"]["ports"][0]["gids"][2:]:
        gid["index"] += 4
    uneven = advise_settings(
        AdviceContext(cluster("{hcas: [mlx5_0, mlx5_1]}"), reports=apart, nccl=(2, 20, 5))
    )
    assert uneven.by_node == {}
    new = advise_settings(AdviceContext(cluster("{hcas: [mlx5_0, mlx5_1]}"), reports=told, nccl=(2, 27, 7)))
    assert (
        new.by_node == advise_settings(AdviceContext(cluster("{hcas: [mlx5_0]}"), reports=told)).by_node == {}
    )


def test_adapters_with_ipv6_alone_are_seen(tmp_path: Path) -> None:
    both = reports(tmp_path, n1="ipv6_only", n2="ipv6_only")
    assert values(advise_settings(AdviceContext(cluster("{}"), reports=both))) == {
        "NCCL_IB_ADDR_FAMILY": "AF_INET6"
    }
    mixed = reports(tmp_path / "mixed", n1="ipv6_only", n2="roce_healthy")
    assert values(advise_settings(AdviceContext(cluster("{}"), reports=mixed))) == {}


def test_damaged_reports_change_nothing() -> None:
    odd: dict[str, dict[str, Any]] = {"n1": {}, "n2": {"ports": [{}, 3]}, "n3": {"ports": None}}
    found = advise_settings(AdviceContext(cluster("{hcas: [mlx5_0]}"), reports=odd))
    assert (values(found), found.by_node, found.notes) == ({"NCCL_IB_HCA": "=mlx5_0"}, {}, ())


def test_a_fabric_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"profile c: network\.fabric: infinband: no such fabric"):
        advise_settings(AdviceContext(cluster("{fabric: infinband}")))
