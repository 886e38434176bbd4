"""Settings on their way into the ranks: written with their reasons, given to all, and by node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcrun.launch.comm_settings import choose_comm_settings
from hpcrun.launch.node_environment import apply_node_environment, render_node_table
from hpcrun.launch.rank_command import rank_command
from hpcrun.specs.cluster import ClusterSpec, parse_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.specs.settings import CommSetting, CommSettings, read_comm_settings
from hpcrun.tuning.job_settings import advise_job, preview_job_settings

HERE = os.uname().nodename.partition(".")[0]
NODES = ("n1", "n2")
PORT = {
    "device": "mlx5_0", "number": 1, "state": "ACTIVE", "physical": "LinkUp", "rate_Gbps": 400.0,
    "layer": "InfiniBand", "gids": [], "interfaces": [], "traffic_class": None,
}  # fmt: skip


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDir(tmp_path / "run").attempt(1).create()


def cluster(network: str) -> ClusterSpec:
    return parse_cluster(f"name: c\nnetwork: {network}\n", "c.yaml")


def job(**env: str | None) -> JobSpec:
    return JobSpec(command=["true"], env=env)


def test_ranks_get_them_and_the_record_says_why(attempt: Attempt) -> None:
    given = choose_comm_settings(
        attempt, job(), cluster("{hcas: [mlx5_0], traffic_class: 106}"), Placement(NODES), {}
    )
    assert given == {"NCCL_IB_HCA": "=mlx5_0", "NCCL_IB_TC": "106"}
    record = read_comm_settings(attempt.settings)
    assert record is not None
    assert record.environment() == given
    assert {one.source for one in record.everywhere} == {
        "profile: network.hcas",
        "profile: network.traffic_class",
    }


def test_what_the_job_or_the_shell_has_set_stands(attempt: Attempt) -> None:
    network = cluster("{hcas: [mlx5_0], traffic_class: 106}")
    notes: list[str] = []
    given = choose_comm_settings(
        attempt, job(NCCL_IB_TC="96"), network, Placement(NODES), {"NCCL_IB_HCA": "=mlx5_0"}, notes.append
    )
    assert given == {}
    assert notes == ["NCCL_IB_TC=96 stands, as env of the job has it; it would be 106"]
    told = {(one["name"], one["value"], one["by"]) for one in read_json(attempt.settings)["overruled"]}
    assert told == {("NCCL_IB_TC", "96", "env of the job"), ("NCCL_IB_HCA", "=mlx5_0", "environment")}


def test_what_the_job_unsets_is_not_set_in_its_place(attempt: Attempt) -> None:
    network = cluster("{hcas: [mlx5_0], traffic_class: 106}")
    assert choose_comm_settings(attempt, job(NCCL_IB_TC=None), network, Placement(NODES), {}) == {
        "NCCL_IB_HCA": "=mlx5_0"
    }
    assert "NCCL_IB_TC" not in attempt.node_table.read_text()
    site = network.model_copy(update={"env": {"NCCL_IB_TC": None}})
    two = JobSpec.model_validate({"command": ["true"], "resources": {"nodes": 2}})
    assert preview_job_settings(two, site, {}).environment() == {"NCCL_IB_HCA": "=mlx5_0"}


def test_what_nccl_s_own_file_has_set_stands_too(attempt: Attempt, tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_IB_TC=41\n")
    environ = {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}
    given = choose_comm_settings(
        attempt, job(), cluster("{traffic_class: 106, service_level: 1}"), Placement((HERE, "n2")), environ
    )
    assert given == {"NCCL_IB_SL": "1"}
    assert read_json(attempt.settings)["overruled"][0]["by"] == "nccl.conf of this node"


def test_mpi_goes_along_with_a_class_that_somebody_has_set_for_nccl(attempt: Attempt) -> None:
    profile = parse_cluster(
        "name: c\nnetwork: {traffic_class: 106, service_level: 1}\n"
        "mpi: {library: openmpi, launcher: srun, pmi: pmix}\n",
        "c.yaml",
    )
    given = choose_comm_settings(
        attempt, job(NCCL_IB_TC="96"), profile, Placement(NODES), {"NCCL_IB_SL": "x"}
    )
    assert given == {"UCX_IB_TRAFFIC_CLASS": "96", "UCX_IB_SL": "1"}
    record = read_comm_settings(attempt.settings)
    assert record is not None
    assert str(record.everywhere[0]) == ("UCX_IB_TRAFFIC_CLASS=96  # as NCCL_IB_TC stands (env of the job)")
    two = JobSpec.model_validate({"command": ["true"], "resources": {"nodes": 2}})
    profile = profile.model_copy(update={"env": {"NCCL_IB_TC": "96"}})
    before = preview_job_settings(two, profile, {})
    assert before.environment()["UCX_IB_TRAFFIC_CLASS"] == "96"
    assert not any("two queues" in note for note in before.notes)


@pytest.mark.parametrize(
    ("network", "nodes", "note"),
    [
        ("{fabric: nonsense}", NODES, "no settings: profile c: network.fabric: nonsense: no such fabric"),
        ("{hcas: [mlx5_0]}", ("n1",), "one node: no traffic between nodes"),
        (
            "{interface: ib7}",
            (HERE, "n2"),
            "network.interface of the profile, ib7, is not on this node; left out",
        ),
    ],
)
def test_what_is_wrong_costs_the_settings_and_not_the_job(
    attempt: Attempt, network: str, nodes: tuple[str, ...], note: str
) -> None:
    assert choose_comm_settings(attempt, job(), cluster(network), Placement(nodes), {}) == {}
    assert any(text.startswith(note) for text in read_json(attempt.settings)["notes"])
    assert attempt.node_table.read_text() == ""


def test_an_interface_is_judged_only_where_this_is_one_of_the_nodes(attempt: Attempt) -> None:
    assert (
        choose_comm_settings(attempt, job(), cluster("{interface: ib7}"), Placement(NODES), {})[
            "GLOO_SOCKET_IFNAME"
        ]
        == "ib7"
    )


def test_values_by_node_come_from_the_doctor_s_reports(attempt: Attempt, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    nodes = [
        {"node": node, "ports": [PORT | {"state": state}]}
        for node, state in (("n1", "ACTIVE"), ("n2", "DOWN"))
    ]
    nodes += [{"node": "n2", "ports": [PORT, PORT | {"device": "mlx5_1", "state": "DOWN"}]}]
    write_json(path, {"nodes": [nodes[0] | {"ports": [PORT, PORT | {"device": "mlx5_1"}]}, nodes[2]]})
    profile = cluster(f"{{hcas: [mlx5_0, mlx5_1], reports: {path}}}")
    assert choose_comm_settings(attempt, job(), profile, Placement(NODES), {}) == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1"
    }
    assert attempt.node_table.read_text() == "n2\tNCCL_IB_HCA\t=mlx5_0\t=mlx5_0,mlx5_1\n"
    assert advise_job(job(), profile, ("n1", "n3")).by_node == {}
    assert list(advise_job(job(), profile, ("n1", "n2.some.domain")).by_node) == ["n2"]
    choose_comm_settings(attempt, job(NCCL_IB_HCA="mlx5"), profile, Placement(NODES), {})
    assert attempt.node_table.read_text() == ""


@pytest.mark.parametrize(
    ("text", "note"), [(None, "is not there (yet)"), ("{", "is damaged"), ("[]", "holds no report")]
)
def test_reports_that_cannot_be_read_are_told(text: str | None, note: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    if text is not None:
        path.write_text(text)
    assert note in advise_job(job(), cluster(f"{{reports: {path}}}"), NODES).notes[0]


def by_node(node: str, value: str = "=a b;$(touch x)") -> CommSettings:
    usual = CommSetting("NCCL_IB_HCA", "=mlx5_0", "why", "where")
    own = (
        CommSetting("NCCL_IB_HCA", value, "why", "where"),
        CommSetting("NCCL_IB_GID_INDEX", "3", "why", "where"),
    )
    return CommSettings((usual,), {node: own})


@pytest.mark.parametrize(
    ("node", "environ", "hca", "index"),
    [
        (HERE, {"NCCL_IB_HCA": "=mlx5_0"}, "=a b;$(touch x)", "3"),
        (HERE, {}, "=a b;$(touch x)", "3"),
        (HERE, {"NCCL_IB_HCA": "mine", "NCCL_IB_GID_INDEX": "1"}, "mine", "1"),
        ("elsewhere", {"NCCL_IB_HCA": "=mlx5_0"}, "=mlx5_0", ""),
    ],
)
@pytest.mark.process
def test_a_node_s_own_values_reach_programs_and_our_ranks(
    attempt: Attempt, node: str, environ: dict[str, str], hca: str, index: str
) -> None:
    attempt.node_table.write_text(render_node_table(by_node(f"{node}.some.domain")))
    attempt.hosts.write_text(f"{os.uname().nodename}\n")
    program = ["sh", "-c", 'printf "%s|%s" "$NCCL_IB_HCA" "$NCCL_IB_GID_INDEX"']
    words = rank_command(attempt, JobSpec(command=program), Placement((os.uname().nodename,)), {})
    subprocess.run(words, env={"PATH": os.environ["PATH"], **environ}, cwd=attempt.path, check=True)
    assert attempt.log(0).read_text() == f"{hca}|{index}"
    ours = dict(environ)
    done = apply_node_environment(attempt, ours, os.uname().nodename)
    assert (ours.get("NCCL_IB_HCA"), ours.get("NCCL_IB_GID_INDEX", "")) == (hca or None, index)
    assert bool(done) == (ours != environ)
    assert not (attempt.path / "x").exists()


def test_a_value_that_the_table_cannot_hold_is_left_out() -> None:
    assert render_node_table(by_node("n1", "a\tb")) == "n1\tNCCL_IB_GID_INDEX\t3\t\n"


def test_no_table_no_values(attempt: Attempt) -> None:
    assert apply_node_environment(attempt, {}) == {}


def test_the_measured_policy_reaches_the_attempt_with_its_figures(attempt: Attempt, tmp_path: Path) -> None:
    name = "NCCL_IB_QPS_PER_CONNECTION"
    times = (
        "with_us: [5.0, 5.1, 5.2, 5.0, 5.1, 5.2], without_us: [8.0, 8.1, 8.2, 8.0, 8.1, 8.2], checked: true"
    )
    (tmp_path / "policy.yaml").write_text(
        f'rows:\n  - set: {{{name}: "4"}}\n    nccl: "2.27"\n    nodes: [2, 2]\n    ranks_per_node: 1\n'
        f"    when: d\n    by: anna\n    measured: [{{collective: all_reduce, size_bytes: 8, {times}}}]\n"
    )
    profile = cluster(f"{{policy: {tmp_path / 'policy.yaml'}}}")
    found = advise_job(job(), profile, NODES, nccl=(2, 27, 5))
    assert found.environment() == {name: "4"}
    assert advise_job(job(), profile, NODES, nccl=(2, 28, 3)).environment() == {}
    stood = advise_job(job(**{name: "2"}), profile, NODES, nccl=(2, 27, 5))
    assert [(one.name, one.value, one.ours) for one in stood.overruled] == [(name, "2", "4")]
    choose_comm_settings(attempt, job(), profile, Placement(NODES), {})
    told = read_json(attempt.settings)
    assert name in [one["name"] for one in told["settings"]] or any(name in note for note in told["notes"])


def test_gloo_is_given_the_interface_that_others_reach(attempt: Attempt) -> None:
    def given(
        reached: dict[str, str], network: str = "{}", nodes: tuple[str, ...] = NODES, **env: str
    ) -> str:
        choose_comm_settings(attempt, job(**env), cluster(network), Placement(nodes), env, interfaces=reached)
        settings = read_comm_settings(attempt.settings)
        assert settings is not None
        shown = [f"{one.value}" for one in settings.everywhere if one.name == "GLOO_SOCKET_IFNAME"]
        shown += [f"{node}={one.value}" for node, of in settings.by_node.items() for one in of]
        return " ".join(shown)

    assert given({"n1": "eth0", "n2": "eth0"}) == "eth0"
    assert given({"n1": "eth0", "n2": "ens3"}) == "n1=eth0 n2=ens3"
    assert "n2\tGLOO_SOCKET_IFNAME\tens3\t\n" in attempt.node_table.read_text()
    # What the profile, the job or the shell names stands, and one node needs none.
    assert given({"n1": "eth0", "n2": "eth0"}, "{interface: ib7}") == "ib7"
    assert given({"n1": "eth0", "n2": "eth0"}, GLOO_SOCKET_IFNAME="eth5") == ""
    assert given({"n1": "eth0"}, nodes=("n1",)) == ""
    assert given({}) == ""
