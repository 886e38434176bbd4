"""Which adapters of a node have to work before an attempt: those that the job's ranks there will use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.health.preflight import PreflightRequest, run_probes
from hpcrun.launch.admission import build_preflight_request, rank_adapters
from hpcrun.specs.cluster import ClusterSpec, parse_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import load_job
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir

NODES = ("n1", "n2.some.domain")


def job(*words: str) -> JobSpec:
    return load_job(None, ["resources.nodes=2", *words], command=["true"]).spec


def port(device: str, state: str) -> dict[str, Any]:
    return {
        "device": device, "number": 1, "state": state, "physical": "", "rate_Gbps": None,
        "layer": "InfiniBand", "gids": [], "interfaces": [], "traffic_class": None,
    }  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterSpec:
    """A profile of two adapters, and the doctor's report that one of them is down on n2."""
    path = tmp_path / "hosts.json"
    reports = [
        {"node": "n1", "ports": [port("mlx5_0", "ACTIVE"), port("mlx5_1", "ACTIVE")]},
        {"node": "n2", "ports": [port("mlx5_0", "ACTIVE"), port("mlx5_1", "DOWN")]},
    ]
    write_json(path, {"nodes": reports})
    return parse_cluster(f"name: c\nnetwork: {{hcas: [mlx5_0, mlx5_1], reports: {path}}}\n", "c.yaml")


def node_with(folder: Path, **states: str) -> Path:
    for device, state in states.items():
        place = folder / f"sys/class/infiniband/{device}/ports/1"
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
    return folder


def verdicts(ask: PreflightRequest, node: str, root: Path) -> list[str]:
    one = ask.of(node)
    return [f"{found.severity} {found.subject}" for found in run_probes(one.place(RunDir(root), root), one)]


def asked(cluster: ClusterSpec) -> PreflightRequest:
    spec = job("preflight=[limits, space, write, clock, interface, leftovers, shm, sums, gpu, site]")
    ask = build_preflight_request(spec, cluster, 1, NODES, is_alone=False)
    assert ask is not None
    return ask


def test_an_adapter_that_the_settings_leave_out_on_a_node_evicts_it_not(
    cluster: ClusterSpec, tmp_path: Path
) -> None:
    down = node_with(tmp_path / "down", mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    assert verdicts(asked(cluster), "n2", down) == []
    assert verdicts(asked(cluster), "n2.some.domain", down) == []


def test_one_that_the_job_will_use_does(cluster: ClusterSpec, tmp_path: Path) -> None:
    down = node_with(tmp_path / "down", mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    assert verdicts(asked(cluster), "n1", down) == ["error mlx5_1"]
    other = node_with(tmp_path / "other", mlx5_0="1: DOWN", mlx5_1="4: ACTIVE")
    assert verdicts(asked(cluster), "n2", other) == ["error mlx5_0"]


def test_a_node_of_which_nothing_is_left_has_to_have_all(cluster: ClusterSpec, tmp_path: Path) -> None:
    assert cluster.network.reports is not None
    ports = [port("mlx5_0", "DOWN"), port("mlx5_1", "DOWN")]
    write_json(Path(cluster.network.reports), {"nodes": [{"node": "n2", "ports": ports}]})
    down = node_with(tmp_path / "down", mlx5_0="1: DOWN", mlx5_1="1: DOWN")
    assert verdicts(asked(cluster), "n2", down) == ["error mlx5_0", "error mlx5_1"]


@pytest.mark.parametrize(
    ("value", "used"),
    [
        ("=mlx5_0", ("mlx5_0",)),
        ("mlx5", ("mlx5_0", "mlx5_1")),
        ("^mlx5_0", ("mlx5_1",)),
        ("=mlx5_7:1", ("mlx5_7",)),
    ],
)
def test_what_the_job_or_the_shell_sets_says_which(
    cluster: ClusterSpec, value: str, used: tuple[str, ...]
) -> None:
    by_job = rank_adapters(job(f"env.NCCL_IB_HCA={value}"), cluster, NODES, {})
    by_shell = rank_adapters(job(), cluster, NODES, {"NCCL_IB_HCA": value})
    assert by_job == by_shell == {"n1": used, "n2": used}


def test_a_profile_that_is_wrong_elsewhere_leaves_the_profile_s_adapters() -> None:
    wrong = parse_cluster("name: c\nnetwork: {hcas: [mlx5_0], fabric: velvet}\n", "c.yaml")
    assert rank_adapters(job(), wrong, NODES, {}) == {}
    assert asked(wrong).of("n1").hcas == ["mlx5_0"]
