"""Checks before a submission: fits that pass, limits that are told, jobs that could never start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import SpecError
from hpcrun.finding import Finding
from hpcrun.slurm.cluster_state import LiveCluster, parse_cluster_answers
from hpcrun.slurm.precheck import (
    check_gpus,
    check_partition_fit,
    check_run_root_visibility,
    exceeded_quota_lines,
    schedules_memory,
)
from hpcrun.specs.cluster import ClusterSpec, parse_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import parse_job

PARTITIONS = """\
PartitionName=main
   Default=YES QoS=N/A DefaultTime=00:30:00 MaxNodes=6 MaxTime=1-00:00:00 MaxMemPerNode=UNLIMITED
   Nodes=n[01-08] State=UP TotalCPUs=64 TotalNodes=8
PartitionName=small
   Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED MaxMemPerNode=8G
   Nodes=n[01-02] State=INACTIVE TotalCPUs=16 TotalNodes=2
"""
NODE = (
    "NodeName=n{0:02} CPUTot=8 AvailableFeatures={1} ActiveFeatures={1} Gres=gpu:4 RealMemory=64000"
    " State={2} Partitions=main{3}"
)
NODES = "\n".join(
    NODE.format(
        number,
        "fast,old" if number < 5 else "slow",
        "DOWN" if number > 6 else "IDLE",
        ",small" * (number < 3),
    )
    for number in range(1, 9)
)
PROFILE = """\
name: here
partitions:
  main: {default: true, max_time: 2h, max_nodes: 4, gpus_per_node: 4, cpus_per_node: 8, mem_per_node: 60G}
  debug: {max_time: 30m, qos: quick}
"""


@pytest.fixture
def live() -> LiveCluster:
    return parse_cluster_answers({"partitions": PARTITIONS, "nodes": NODES})


@pytest.fixture
def profile() -> ClusterSpec:
    return parse_cluster(PROFILE, "profile.yaml")


def job(*overrides: str, ranks: int | None = None) -> JobSpec:
    text = "command: [echo]\n" + (f"resources: {{ranks_per_node: {ranks}}}\n" if ranks else "")
    return parse_job(text, "job.yaml", overrides).spec


def is_refusal(finding: Finding) -> bool:
    return finding.severity == "error"


def told(found: list[Finding]) -> list[tuple[str, str, bool]]:
    return [(one.subject, one.text, is_refusal(one)) for one in found]


@pytest.mark.parametrize(
    "overrides",
    [
        ["resources.time=1h"],
        ["resources.time=1-00:00:00", "resources.nodes=6"],
        ["resources.time=1h", "resources.mem=64000M", "resources.gpus_per_node=4"],
        ["resources.time=1h", "resources.constraint=fast&old", "resources.nodes=4"],
        ["resources.time=1h", "resources.constraint=fast|nothing", "resources.nodes=4"],
        ["resources.time=1h", "resources.exclude=n[01-02],gone[1-9]", "resources.nodes=4"],
    ],
)
def test_what_fits_is_not_spoken_of(overrides: list[str], live: LiveCluster) -> None:
    assert check_partition_fit(job(*overrides), None, live) == []
    assert check_partition_fit(job(*overrides), None, None) == []


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["partition=other"],
            "partition",
            "other is not a partition of this cluster; there are: main, small",
        ),
        (["time=25h"], "time", "25h is more than partition main allows (1-00:00:00); ask for less"),
        (["time=UNLIMITED"], "time", "UNLIMITED is more than partition main allows (1-00:00:00)"),
        (["nodes=7"], "nodes", "7 is more than partition main allows (6); ask for fewer"),
        (["nodes=9"], "nodes", "9 can never start: partition main has 8; ask for fewer"),
        (["partition=small", "nodes=3"], "nodes", "3 can never start: partition small has 2"),
        (["partition=small", "mem=9G"], "mem", "9G is more than partition small allows a node (8G)"),
        (["mem=65G"], "mem", "65G can never start: the nodes of partition main have 64000M"),
        (
            ["gpus_per_node=5"],
            "gpus_per_node",
            "5 GPUs a node can never start: the nodes of partition main have 4",
        ),
        (
            ["ranks_per_node=4", "cpus_per_rank=3"],
            "cpus_per_rank",
            "12 CPUs a node can never start: the nodes of partition main have 8",
        ),
        (
            ["constraint=h100"],
            "constraint",
            "h100 can never start: the nodes of partition main have fast,old, slow",
        ),
        (
            ["constraint=fast", "nodes=5"],
            "constraint",
            "fast can never start: 4 nodes of partition main have that, not 5",
        ),
        (
            ["exclude=n[01-04]", "nodes=5"],
            "exclude",
            "leaves 4 nodes of partition main, the job asks for 5; exclude fewer",
        ),
        (
            ["placement=pin", "nodelist='n[08-10]'", "nodes=3"],
            "nodelist",
            "n[09-10]: no such node here",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], key: str, said: str, live: LiveCluster) -> None:
    found = check_partition_fit(
        job("resources.time=1h", *(f"resources.{one}" for one in overrides)), None, live
    )
    refused = [one for one in found if is_refusal(one)]
    assert [one.subject for one in refused] == [f"resources.{key}"]
    assert refused[0].text.startswith(said)


def test_several_partitions_need_one_that_takes_the_job(live: LiveCluster) -> None:
    asked = job("resources.time=25h", "resources.partition=main,small")
    assert [is_refusal(one) for one in check_partition_fit(asked, None, live)] == [False], (
        "small is inactive, no more"
    )
    found = check_partition_fit(
        job("resources.time=25h", "resources.nodes=3", "resources.partition=main,small"), None, live
    )
    assert [(one.subject, is_refusal(one)) for one in found] == [("resources.time", True)]
    absent = check_partition_fit(job("resources.time=1h", "resources.partition=main,gone"), None, live)
    assert [(one.subject, is_refusal(one)) for one in absent] == [("resources.partition", True)]


def test_a_qos_may_lift_limits_but_makes_no_nodes(live: LiveCluster) -> None:
    asked = ["resources.time=25h", "resources.qos=long"]
    assert [is_refusal(one) for one in check_partition_fit(job(*asked, "resources.nodes=7"), None, live)] == [
        False
    ] * 3
    assert [
        one.subject
        for one in check_partition_fit(job(*asked, "resources.nodes=9"), None, live)
        if is_refusal(one)
    ] == ["resources.nodes"]


def test_what_a_person_should_know_is_told_and_not_refused(live: LiveCluster) -> None:
    assert told(check_partition_fit(job(), None, live)) == [
        ("resources.time", "is not given, so partition main gives 00:30:00", False)
    ]
    assert told(check_partition_fit(job("resources.partition=small"), None, live)) == [
        (
            "resources.partition",
            "partition small is INACTIVE now: the job waits until an administrator changes that",
            False,
        )
    ]
    waits = check_partition_fit(
        job("resources.time=1h", "resources.constraint=slow", "resources.nodes=3"), None, live
    )
    assert told(waits) == [
        (
            "resources.nodes",
            "3 must wait: of the 4 nodes that could take the job in partition main only 2 are up",
            False,
        )
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"time": "3h"}, "time"),
        ({"nodes": 5}, "nodes"),
        ({"gpus_per_node": 5}, "gpus_per_node"),
        ({"mem": "61G"}, "mem"),
        ({"cpus_per_rank": 9, "gpus_per_node": 0}, "cpus_per_rank"),
    ],
)
def test_without_slurm_the_profile_is_asked(
    overrides: dict[str, Any], key: str, profile: ClusterSpec
) -> None:
    asked = [f"resources.{name}={value}" for name, value in ({"time": "1h"} | overrides).items()]
    assert [(one.subject, is_refusal(one)) for one in check_partition_fit(job(*asked), profile, None)] == [
        (f"resources.{key}", True)
    ]


def test_a_profile_need_not_know_every_partition(profile: ClusterSpec) -> None:
    found = check_partition_fit(job("resources.partition=other"), profile, None)
    assert told(found) == [
        ("resources.partition", "other is not a partition of the profile here; there are: main, debug", False)
    ]
    quick = check_partition_fit(job("resources.partition=debug", "resources.time=1h"), profile, None)
    assert [is_refusal(one) for one in quick] == [False], "its QOS may allow it"


def test_the_profile_knows_how_many_gpus_a_job_gets(live: LiveCluster) -> None:
    greedy = parse_cluster("name: a\npartitions: {main: {default: true, gpus_per_node: 8}}", "p.yaml")
    found = check_partition_fit(job("resources.time=1h"), greedy, live)
    assert [(one.subject, is_refusal(one)) for one in found] == [("resources.gpus_per_node", True)]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("retry: {grace: 10m}", "retry.grace"),
        ("retry: {grace: 2h}", "retry.grace"),
        ("watch: {floor: 10m}", "watch.floor"),
        ("watch: {floor: 2h}", "watch.floor"),
        ("watch: {slow: 1h}", "watch.slow"),
        ("checkpoint: {max_durable_age: 1h, memory: 1}", "checkpoint.max_durable_age"),
        ("watch: {floor: 2h, hangs: false}", ""),
        ("watch: {floor: 9m, slow: 10m}", ""),
        ("retry: {grace: 9m}", ""),
        ("retry: {crash: 1}", ""),
    ],
)
def test_what_waits_longer_than_the_job_is_a_mistake_wherever_the_limit_comes_from(
    text: str, key: str, live: LiveCluster
) -> None:
    shared = "command: [echo]\n"
    if not key:
        assert parse_job(f"{shared}{text}\nresources: {{time: 10m}}\n", "job.yaml")
    else:
        with pytest.raises(SpecError) as refused:
            parse_job(f"{shared}{text}\nresources: {{time: 10m}}\n", "job.yaml")
        (problem,) = refused.value.problems
        assert problem.key == key
        assert "is no less than resources.time 10m, so " in problem.text
    # Without a limit of its own the job gets its partition's, half an hour.
    spec = parse_job(f"{shared}{text}\n", "job.yaml").spec
    late = {one.subject: one.text for one in check_partition_fit(spec, None, live) if is_refusal(one)}
    expected = {key} if "1h" in text or "2h" in text else set()
    assert set(late) == (expected if key else set())
    assert all("no less than the 00:30:00 of partition main, so " in one for one in late.values())


def test_where_no_memory_is_counted_none_is_asked_for(live: LiveCluster) -> None:
    asked = job("resources.time=1h", "resources.mem=8G")
    assert schedules_memory(asked, None, live)
    assert schedules_memory(asked, None, None)
    bare = parse_cluster_answers(
        {
            "partitions": PARTITIONS.replace("TotalNodes=8", "TotalNodes=8 TRES=cpu=64,mem=8M,node=8"),
            "nodes": NODES.replace("RealMemory=64000", "RealMemory=1"),
        }
    )
    assert not schedules_memory(asked, None, bare)
    assert check_partition_fit(asked, None, bare) == []


@pytest.mark.parametrize(
    ("place", "file_system"),
    [("/tmp/runs", "ext4"), ("/dev/shm", "tmpfs"), ("/run/me", "tmpfs"), ("/home/me/ram disk", "ramfs")],
)
def test_places_that_nodes_seldom_share_are_told(place: str, file_system: str) -> None:
    found = check_run_root_visibility(Path(place), None, file_system)
    assert [one.severity for one in found] == ["warning"]
    assert "which compute nodes rarely share" in found[0].text


def test_a_profile_says_which_places_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")
    text = "name: a\nfile_systems: {local: {path: /scratch/local, shared: false}, all: {path: /scratch}}\n"
    systems = parse_cluster(text, "p.yaml")
    assert check_run_root_visibility(Path("/home/me/runs"), None, "nfs4") == []
    assert check_run_root_visibility(Path("/scratch/runs"), systems, "") == []
    assert (
        check_run_root_visibility(
            Path("/tmp/runs"), parse_cluster("name: a\nfile_systems: {t: {path: /tmp}}", "p"), ""
        )
        == []
    )
    refused = check_run_root_visibility(Path("/scratch/local/runs"), systems, "")
    assert refused[0].severity == "error"
    assert "is on /scratch/local, which every node has for itself" in refused[0].text


def test_log_roots_are_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")
    rooted = parse_cluster("name: a\nlog_roots: [/work/$USER]\n", "p.yaml")
    assert check_run_root_visibility(Path("/work/me/runs"), rooted, "nfs4") == []
    refused = check_run_root_visibility(Path("/work/you/runs"), rooted, "nfs4")
    assert (
        refused[0].severity == "error",
        "allows run directories under /work/me only" in refused[0].text,
    ) == (
        True,
        True,
    )


def test_links_lead_to_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    rooted = parse_cluster(f"name: a\nlog_roots: ['{tmp_path}/home']\n", "p.yaml")
    assert check_run_root_visibility(tmp_path / "real" / "runs", rooted, "") == []
    assert check_run_root_visibility(tmp_path / "other", rooted, "")[0].severity == "error"


def test_a_star_marks_a_limit_that_is_passed() -> None:
    printed = """Disk quotas for usr me (uid 1000):
     Filesystem    used   quota   limit   grace   files   quota   limit   grace
       /scratch  1.205T*     1T      2T  6d23h     214*    200    300       -
          /home    1.2G     10G     20G      -     214    2000   3000       -
"""
    assert exceeded_quota_lines(printed) == ["/scratch 1.205T* 1T 2T 6d23h 214* 200 300 -"]


@pytest.mark.parametrize(
    ("style", "select", "asked", "words", "refuse"),
    [
        (
            "gpus-per-node",
            "cons_res",
            {},
            "--gpus-per-node, and this Slurm (select/cons_res) takes --gres",
            True,
        ),
        ("gpus", "linear", {}, "asks with --gpus, and this Slurm (select/linear) takes --gres", True),
        ("gpus", "cons_tres", {"nodes": 2}, "Slurm may share the 8 out unevenly among 2 nodes", False),
        ("gpus, bind: single:1", "cons_tres", {"exclusive": True, "nodes": 2}, "", False),
        ("gpus-per-task, bind: null", "cons_tres", {"ranks_per_node": 4}, "do not see the GPUs", False),
        ("gpus-per-node, typed: true", "cons_tres", {}, "of type h100, Slurm knows a100", True),
        ("gpus-per-task", "cons_tres", {"ranks_per_node": 4}, "", False),
        ("gres", "cons_res", {}, "", False),
        ("gpus-per-node", "cons_tres", {}, "", False),
        ("none", "linear", {}, "", False),
    ],
)
def test_how_gpus_are_asked_for_is_looked_at(
    style: str, select: str, asked: dict[str, Any], words: str, refuse: bool
) -> None:
    text = "name: here\npartitions: {main: {default: true, gpus_per_node: 4, gpu_type: h100}}\n"
    text += f"gpus: {{request: {style}}}\n"
    nodes = NODES.replace("Gres=gpu:4", "Gres=gpu:a100:4")
    answers = {"partitions": PARTITIONS, "nodes": nodes, "config": f"SelectType = select/{select}\n"}
    job = JobSpec.model_validate({"command": ["true"], "resources": asked})
    found = list(check_gpus(job, parse_cluster(text, "here.yaml"), parse_cluster_answers(answers)))
    assert [(words in one.text, is_refusal(one)) for one in found] == ([(True, refuse)] if words else [])
