"""A doctor's findings on captured hosts, one case a tree: what must be found, and what must not alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.specs.cluster import ClusterSpec, NetworkSpec
from hpcrun.tuning.advice import AdviceContext, advise_settings
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.checks import check_clock_skew, check_host
from hpcrun.tuning.host.doctor_report import DoctorReport, examine_host
from hpcrun.tuning.host.node_report import read_host_report, read_nccl_conf_files
from tests.tuning.trees import HOSTS, lay_out


def report(
    name: str, tmp_path: Path, *, uses_ucx: bool = False, nccl: str = "", **network: object
) -> DoctorReport:
    version = tuple(map(int, nccl.split("."))) if nccl else None
    host = read_host_report(lay_out(name, tmp_path / "node"))
    mpi = {"library": "openmpi", "launcher": "srun", "pmi": "pmix"} if uses_ucx else {}
    profile = ClusterSpec.model_validate({"name": "c", "network": network, "mpi": mpi})
    advised = advise_settings(AdviceContext(profile, 0, nccl=version)).environment()
    return examine_host(HostCheckInput(host, profile.network, version, uses_ucx, advised))


def found(one: DoctorReport) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.check, finding.subject) for finding in one.findings]


CASES = {
    "pfc-off": [("warning", "pfc", "ens1"), ("warning", "pfc", "ens2")],
    "wrong-class": [("warning", "traffic class", "ens1"), ("warning", "traffic class", "ens2")],
    "trust-pcp": [("error", "trust", "ens1")],
    "wrong-gid": [("error", "gid", "mlx5_0:1"), ("error", "gid", "mlx5_1:1")],
    "ipv6-only": [("error", "gid", "mlx5_0:1"), ("error", "gid", "mlx5_1:1")],
    "docker0": [("error", "interface", "docker0")],
    "downtrained": [("error", "pci", "mlx5_0"), ("error", "pci", "mlx5_1")],
    "small-limits": [
        ("error", "limits", "gpu-01"),
        ("error", "shm", "/dev/shm"),
        ("warning", "shm", "/dev/shm"),
        ("note", "limits", "gpu-01"),
    ],
    "slow-port": [("warning", "port", "mlx5_1:1")],
    "small-mtu": [("warning", "mtu", "ens1")],
    "no-peermem": [("warning", "peermem", "gpu-01")],
    "iommu": [("warning", "pci", "mlx5_0")],
    "pinned": [("warning", "affinity", "gpu-01"), ("warning", "affinity", "GPU 1")],
    "prefix-trap": [("warning", "port", "mlx5_1"), ("warning", "port", "mlx5_0:1")],
    "one-of-two": [("warning", "port", "mlx5_1:1")],
    "two-ports": [("warning", "rail", "mlx5_0")],
    "bonded": [("warning", "port", "mlx5_bond_0:1")],
    "virtual-machine": [("warning", "topology", "gpu-01"), ("unknown", "affinity", "GPU 0")],
    "wrong-interface": [("error", "interface", "gpu-01")],
    "loopback": [("error", "interface", "lo")],
    "odd-texts": [
        ("unknown", "port", "mlx5_0:1"),
        ("unknown", "limits", "gpu-09"),
        ("unknown", "shm", "/dev/shm"),
    ],
    # What must not alarm: an idle GPU's sleeping link, a storage port that is down, docker0 beside a good
    # interface, large counters since boot, links of virtual functions.
    "roce-healthy": [],
    "infiniband-healthy": [("note", "port", "mlx5_2:1")],
    "link-down": [("note", "port", "mlx5_1:1")],
    "virtual-functions": [("unknown", "affinity", "GPU 0")],
    "counters-before": [],
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, tmp_path: Path) -> None:
    assert found(report(name, tmp_path)) == CASES[name]


def test_every_captured_host_is_a_case() -> None:
    names = {path.stem for path in HOSTS.glob("*.txt")}
    assert names == set(CASES) | {name for name in names if name.startswith("counters-")}


def test_a_port_that_jobs_use_must_be_up_and_there(tmp_path: Path) -> None:
    one = report("link-down", tmp_path, hcas=["mlx5_0", "mlx5_1", "mlx5_7"])
    assert found(one) == [("error", "port", "mlx5_7"), ("error", "port", "mlx5_1:1")]
    assert str(one.findings[1]) == (
        "mlx5_1:1: is DOWN, Disabled, and jobs are to use it; look at cable and switch port; until then leave"
        " the device out"
    )


def test_the_address_that_nccl_takes(tmp_path: Path) -> None:
    assert report("roce-healthy", tmp_path).gid_index == {"mlx5_0:1": 3, "mlx5_1:1": 3}
    old = report("roce-healthy", tmp_path / "old", nccl="2.19.3")
    assert old.gid_index == {"mlx5_0:1": 0, "mlx5_1:1": 0}
    assert old.findings[0].remedy == "set NCCL_IB_GID_INDEX=3, or use NCCL 2.21"
    assert report("infiniband-healthy", tmp_path / "ib").gid_index == {}


def test_a_profile_that_says_ipv6_mends_adapters_without_ipv4(tmp_path: Path) -> None:
    remedy = report("ipv6-only", tmp_path).findings[0].remedy
    assert remedy == "it has IPv6 addresses only: set network.address_family: ipv6 in the profile"
    mended = report("ipv6-only", tmp_path / "mended", address_family="ipv6")
    assert (found(mended), mended.gid_index) == ([], {"mlx5_0:1": 3, "mlx5_1:1": 3})


def test_a_profile_s_class_mends_the_class(tmp_path: Path) -> None:
    assert found(report("wrong-class", tmp_path, traffic_class=106, uses_ucx=True)) == []
    # The class of the fabric's kind is what jobs get.
    assert found(report("wrong-class", tmp_path / "kind", fabric="roce-spectrum")) == []
    apart = report("wrong-class", tmp_path / "apart", uses_ucx=True)
    assert [one.text for one in apart.findings if one.subject == "mlx5_0:1"] == [
        "NCCL sends in TC 0 = DSCP 0, not-ECT, priority 0, MPI over UCX in TC 106 = DSCP 26, ECT(0), priority"
        " 3: two queues of the fabric"
    ]


def test_an_unlimited_stack_is_told_for_releases_that_it_crashed(tmp_path: Path) -> None:
    assert "the stack is unlimited" in str(report("small-limits", tmp_path, nccl="2.27.5").findings)
    assert "the stack" not in str(report("small-limits", tmp_path / "new", nccl="2.30.4").findings)


def test_what_the_profile_says_of_adapters_goes_first(tmp_path: Path) -> None:
    assert found(report("one-of-two", tmp_path, hcas=["mlx5_0"])) == []
    told = report("virtual-machine", tmp_path / "vm", nccl_topology="/opt/size.xml")
    assert found(told) == [("unknown", "affinity", "GPU 0")]
    root = lay_out("virtual-machine", tmp_path / "own")
    (root / "var/run/nvidia-topologyd").mkdir(parents=True)
    (root / "var/run/nvidia-topologyd/virtualTopology.xml").write_text("<system/>")
    assert found(examine_host(HostCheckInput(read_host_report(root), NetworkSpec()))) == [
        ("unknown", "affinity", "GPU 0")
    ]


def test_two_queue_pairs_use_both_links_of_a_bond(tmp_path: Path) -> None:
    root = lay_out("bonded", tmp_path / "node")
    (root / "proc/self/environ").write_text("NCCL_IB_TC=106\nNCCL_IB_QPS_PER_CONNECTION=2\n")
    assert found(examine_host(HostCheckInput(read_host_report(root), NetworkSpec()))) == []


def test_what_sockets_take(tmp_path: Path) -> None:
    assert report("docker0", tmp_path).socket_interface == "docker0"
    assert report("infiniband-healthy", tmp_path / "a").socket_interface == "ens1"
    assert report("roce-healthy", tmp_path / "b", interface="eth0").socket_interface == "eth0"
    missing = report("roce-healthy", tmp_path / "c", interface="ib0")
    assert found(missing) == [("error", "interface", "gpu-01")]
    assert "network.interface is =ib0" in missing.findings[0].text


def test_shared_memory_of_others_and_of_the_living_is_let_be(tmp_path: Path) -> None:
    host = read_host_report(lay_out("small-limits", tmp_path / "node"))
    assert host.shm.stale == ("nccl-4aF2cQ", "nccl-Zr81Lm")
    assert (host.shm.size_bytes, host.limits["memlock"], host.limits["stack"]) == (2**26, 65536, None)


def test_nothing_is_known_of_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    findings = check_host(HostCheckInput(read_host_report(tmp_path / "node"), NetworkSpec()))
    assert {one.severity for one in findings} == {"unknown"}
    assert [one.check for one in findings] == ["interface", "limits", "shm"]


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (105.0, None),
        (99.5, None),
        (120.0, "its clock is 10.0 s or more ahead"),
        (40.0, "its clock is 60.0 s or more behind"),
    ],
)
def test_clocks(told: float, text: str | None) -> None:
    found = check_clock_skew("n1", told, 100.0, 110.0)
    assert [one.text for one in found] == ([text] if text else [])


def test_files_of_nccl_s_own_count_too_and_the_environment_wins(tmp_path: Path) -> None:
    root = lay_out("wrong-interface", tmp_path / "node")
    (root / "etc").mkdir()
    (root / "etc" / "nccl.conf").write_text(
        "# of the image\nNCCL_SOCKET_IFNAME=eth0\nNCCL_IB_SL=1\nNCCL_IB_TIMEOUT = 22\nPATH=/x\n"
    )
    assert read_host_report(root).environ == {
        "NCCL_SOCKET_IFNAME": "bond0",
        "NCCL_IB_SL": "1",
        "NCCL_IB_TC": "106",
    }
    mine = tmp_path / "mine.conf"
    mine.write_text("NCCL_IB_SL=3\n")
    assert read_nccl_conf_files(root, {"NCCL_CONF_FILE": str(mine)})["NCCL_IB_SL"] == "3"
    assert read_nccl_conf_files(root, {}) == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_SL": "1"}


def test_a_slot_that_has_no_more_is_no_fault(tmp_path: Path) -> None:
    root = lay_out("downtrained", tmp_path / "node")
    for slot, name, text in (("98", "max_link_width", "8"), ("16", "max_link_speed", "16.0 GT/s PCIe")):
        (root / f"sys/bus/pci/devices/0000:{slot}:02.0" / name).write_text(f"{text}\n")
    (one,) = examine_host(HostCheckInput(read_host_report(root), NetworkSpec())).findings
    assert str(one) == "mlx5_1: its PCIe link runs at x8 of x16: the slot has no more"
    assert one.severity == "note"


def test_adaptive_routing_on_a_level_that_nccl_does_not_use_is_told(tmp_path: Path) -> None:
    def routing(root: str, levels: list[int], level: int | None = None) -> list[str]:
        one = report(
            "infiniband-healthy",
            tmp_path / root,
            hcas=["mlx5_0", "mlx5_1"],
            adaptive_routing_levels=levels,
            service_level=level,
        )
        return [str(finding) for finding in one.findings if finding.check == "routing"]

    (found,) = routing("a", [1, 2])
    assert found == (
        "mlx5_0:1, mlx5_1:1: NCCL sends on service level 0, and adaptive routing is on 1, 2: it does not get"
        " it; network.service_level: 1, if jobs may use it"
    )
    assert routing("b", [1, 2], 2) == []
    assert routing("c", []) == []


def test_few_cores_tell_of_the_one_thread_that_sends_for_all_gpus(tmp_path: Path) -> None:
    remedies = [one.remedy for one in report("pinned", tmp_path).findings if "proxy threads" in one.text]
    assert remedies == [
        "ask for whole nodes, or bind looser; all-to-all suffers most, as one of them sends for all GPUs of a"
        " rail (PXN)"
    ]
