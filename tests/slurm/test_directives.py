"""What a job asks for, as sbatch options: their order, the site's way to ask for GPUs, defaults, gates."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.slurm.directives import SbatchDirectives, build_directives, requested_gpus_per_node
from hpcrun.slurm.versions import SlurmVersion
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec

SITE = {
    "name": "blue",
    "account": "site",
    "partitions": {
        "gpu": {
            "default": True,
            "gpus_per_node": 4,
            "gpu_type": "h100",
            "mem_per_node": "512G",
            "exclusive": True,
            "qos": "normal",
        },
        "more": {"gpus_per_node": 4, "mem_per_node": "256G", "qos": "long"},
        "cpu": {},
    },
}


def job(**resources: Any) -> JobSpec:
    return JobSpec.model_validate({"command": ["x"], "resources": resources})


def site(**more: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(SITE | more)


def options(spec: JobSpec, cluster: ClusterSpec | None = None, version: SlurmVersion | None = None) -> Any:
    return build_directives(spec, cluster, version).options


def test_a_bare_job_says_only_how_large_it_is() -> None:
    assert options(job()) == {"nodes": 1, "ntasks-per-node": 1}


def test_everything_in_the_order_in_which_it_is_read() -> None:
    asked = job(
        sbatch={"contiguous": True, "hold": True, "spread-job": True},
        switches=2,
        segment=2,
        exclusive=True,
        exclude="n[01-03]",
        reservation="maintenance",
        constraint="ib&v100",
        time="1d12h",
        mem="1.5G",
        gpus_per_node=8,
        cpus_per_rank=7,
        ranks_per_node=8,
        nodes=4,
        qos="high",
        account="me",
        partition="gpu",
    )
    assert list(options(asked, None).items()) == [
        ("partition", "gpu"),
        ("account", "me"),
        ("qos", "high"),
        ("nodes", 4),
        ("ntasks-per-node", 8),
        ("cpus-per-task", 7),
        ("gpus-per-node", 8),
        ("mem", "1536M"),
        ("time", 2160),
        ("constraint", "ib&v100"),
        ("reservation", "maintenance"),
        ("exclude", "n[01-03]"),
        ("exclusive", True),
        ("switches", "2@00:10:00"),
        ("segment", 2),
        ("contiguous", True),
        ("hold", True),
        ("spread-job", True),
    ]


def test_the_profile_gives_what_the_job_does_not_name() -> None:
    assert options(job(), site()) == {
        "partition": "gpu",
        "account": "site",
        "qos": "normal",
        "nodes": 1,
        "ntasks-per-node": 1,
        "gpus-per-node": 4,
        "exclusive": True,
    }
    own = job(partition="cpu", account="me", qos="high", gpus_per_node=1, exclusive=False)
    assert options(own, site()) == {
        "partition": "cpu",
        "account": "me",
        "qos": "high",
        "nodes": 1,
        "ntasks-per-node": 1,
        "gpus-per-node": 1,
    }
    assert "exclusive" not in options(job(exclusive=False), site())
    assert "gpus-per-node" not in options(job(gpus_per_node=0), site())


def test_of_several_partitions_only_what_they_share_counts() -> None:
    found = options(job(partition="gpu,more"), site())
    assert (found["partition"], found["gpus-per-node"]) == ("gpu,more", 4)
    assert not {"qos", "exclusive"} & set(found)


@pytest.mark.parametrize(
    ("request_", "typed", "option"),
    [
        ("gpus-per-node", False, {"gpus-per-node": 4}),
        ("gpus-per-node", True, {"gpus-per-node": "h100:4"}),
        ("gres", False, {"gres": "gpu:4"}),
        ("gres", True, {"gres": "gpu:h100:4"}),
        ("gpus", False, {"gpus": 4}),
        ("gpus", True, {"gpus": "h100:4"}),
        ("gpus-per-task", False, {"gpus-per-task": 2}),
        ("gpus-per-task", True, {"gpus-per-task": "h100:2"}),
        ("none", True, {}),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(request_: str, typed: bool, option: dict[str, Any]) -> None:
    cluster = site(gpus={"request": request_, "typed": typed})
    found = options(job(ranks_per_node=2), cluster)
    assert {name: value for name, value in found.items() if name.startswith("g")} == option


def test_gpus_of_all_nodes_together_count_the_spares() -> None:
    found = options(job(nodes=3, spares=1), site(gpus={"request": "gpus"}))
    assert found["gpus"] == 16
    with pytest.raises(UsageError, match=r"Slurm 18\.08\.0 does not have sbatch --gpus"):
        build_directives(job(), site(gpus={"request": "gpus"}), SlurmVersion(18, 8))
    assert (
        build_directives(job(), site(gpus={"request": "gres"}), SlurmVersion(18, 8)).options["gres"]
        == "gpu:4"
    )


def test_gpus_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(UsageError, match=r"resources.gpus_per_node: 4 .* multiple of 3"):
        options(job(ranks_per_node=3), site(gpus={"request": "gpus-per-task"}))


def test_other_resources_do_not_displace_the_gpus() -> None:
    cluster = site(gpus={"request": "gres"})
    assert options(job(sbatch={"gres": "nvme:1"}), cluster)["gres"] == "gpu:4,nvme:1"
    assert options(job(sbatch={"gres": "gpu:a100:2"}), cluster)["gres"] == "gpu:a100:2"
    assert "gres" not in options(job(sbatch={"gres": None}), cluster)


def test_raw_options_are_left_out_by_null() -> None:
    assert options(job(sbatch={"spread-job": None})) == {"nodes": 1, "ntasks-per-node": 1}


@pytest.mark.parametrize(("text", "option"), [("64G", "64G"), ("1.5G", "1536M"), ("1B", "1M"), ("0", "0")])
def test_memory_is_a_whole_number_with_a_unit(text: str, option: str) -> None:
    assert options(job(mem=text))["mem"] == option


def test_memory_is_left_out_where_it_is_not_counted_and_that_is_said() -> None:
    found = build_directives(job(partition="cpu", mem="8G"), site(), None)
    assert "mem" not in found.options
    assert "resources.mem" in found.notes[0]
    assert "cpu" in found.notes[0]
    assert options(job(partition="gpu", mem="8G"), site())["mem"] == "8G"
    assert options(job(partition="elsewhere", mem="8G"), site())["mem"] == "8G"


@pytest.mark.parametrize(
    ("text", "option"),
    [("90m", 90), ("90", 90), ("1:30:00", 90), ("1-0", 1440), ("61s", 2), ("UNLIMITED", "UNLIMITED")],
)
def test_time_is_in_whole_minutes(text: str, option: int | str) -> None:
    assert build_directives(job(time=text), None, None) == SbatchDirectives(
        {"nodes": 1, "ntasks-per-node": 1, "time": option}
    )


def test_a_time_that_looks_like_hours_is_told() -> None:
    found = build_directives(job(time="4:00"), None, None)
    assert found.options["time"] == 4
    assert "4 minutes" in found.notes[0]


@pytest.mark.parametrize(
    ("key", "asked", "option", "version", "since"),
    [
        ("segment", {"segment": 2}, ("segment", 2), SlurmVersion(23, 11), "24.05"),
        ("topo_exclusive", {"topo_exclusive": True}, ("exclusive", "topo"), SlurmVersion(23, 11, 4), "24.05"),
        (
            "nodelist",
            {"placement": "pin", "nodelist": "n[01-03]"},
            ("nodelist", "n[01-03]"),
            SlurmVersion(22, 5, 8),
            "23.02",
        ),
        *(
            (f"sbatch.{name}", {"sbatch": {name: True}}, (name, True), SlurmVersion(25, 5), "25.11")
            for name in ("spread-segments", "consolidate-segments")
        ),
    ],
)
def test_an_option_that_the_release_does_not_have_is_refused(
    key: str, asked: dict[str, Any], option: tuple[str, Any], version: SlurmVersion, since: str
) -> None:
    spec = job(nodes=2, **asked)
    with pytest.raises(UsageError, match=rf"resources\.{key}: Slurm {version} .*from {since} on"):
        options(spec, None, version)
    year, month = since.split(".")
    for good in (None, SlurmVersion(int(year), int(month))):
        assert options(spec, None, good)[option[0]] == option[1]


def steering(found: SbatchDirectives) -> dict[str, Any]:
    """The options that tell Slurm which nodes to give."""
    names = ("nodelist", "exclude", "switches", "segment", "exclusive")
    return {name: found.options[name] for name in names if name in found.options}


def about(found: SbatchDirectives, words: str) -> str:
    """The one note that begins with these words."""
    (note,) = (note for note in found.notes if note.startswith(words))
    return note


def test_a_job_is_packed_where_the_leaves_are_known() -> None:
    found = build_directives(job(nodes=6), None, SlurmVersion(22, 5, 8), leaves=2)
    assert steering(found) == {"switches": "2@00:10:00"}
    assert "6 nodes find room under 2 leaf switches" in about(found, "--switches=2@00:10:00: ")
    assert "00:10:00" in found.notes[0].partition(": ")[2]
    quick = build_directives(job(nodes=6, switches_wait="90s"), None, None, leaves=1)
    assert steering(quick) == {"switches": "1@00:01:30"}


@pytest.mark.parametrize(
    ("resources", "leaves"),
    [
        ({"nodes": 6}, None),
        ({"nodes": 1}, 1),
        ({"nodes": 6, "placement": "none"}, 2),
        ({"nodes": 6, "placement": "spread"}, 2),
    ],
)
def test_slurm_is_asked_for_nothing_where_that_would_not_help(
    resources: dict[str, Any], leaves: int | None
) -> None:
    found = build_directives(job(**resources), None, SlurmVersion(25, 11), leaves=leaves)
    assert (steering(found), found.notes) == ({}, ())


def test_a_number_of_switches_that_the_job_names_wins_and_one_that_cannot_do_is_told() -> None:
    asked = job(nodes=6, switches=1, switches_wait="1h")
    assert steering(build_directives(asked, None, None)) == {"switches": "1@01:00:00"}
    assert [note[:10] for note in build_directives(asked, None, None, leaves=1).notes] == ["--switches"]
    found = build_directives(asked, None, None, leaves=2)
    assert steering(found) == {"switches": "1@01:00:00"}
    assert "1 cannot hold 6 nodes" in about(found, "resources.switches: ")
    assert found.notes[1].endswith("use 2")


def test_segments_stand_for_themselves() -> None:
    found = build_directives(job(nodes=6, segment=3), None, SlurmVersion(24, 5), leaves=2)
    assert steering(found) == {"segment": 3}
    assert "every 3 of the 6 nodes in one block" in about(found, "--segment=3: ")
    assert "not known" not in found.notes[0]
    assert "not known" in build_directives(job(nodes=6, segment=3), None, None).notes[0]


def test_pinned_nodes_are_named_and_only_they() -> None:
    asked = job(nodes=2, placement="pin", nodelist="n02,n01", exclude="n07")
    found = build_directives(asked, None, SlurmVersion(22, 5, 8), leaves=1)
    assert steering(found) == {"nodelist": "n[01-02]", "exclude": "n07"}
    assert "may never start" in about(found, "--nodelist=n[01-02]: ")


@pytest.mark.parametrize(("exclude", "left"), [("n01,n07", {"exclude": "n07"}), ("n01", {})])
def test_a_pinned_node_is_not_excluded_and_that_is_said(exclude: str, left: dict[str, str]) -> None:
    asked = job(nodes=2, placement="pin", nodelist="n[01-02]", exclude=exclude)
    found = build_directives(asked, None, None)
    assert steering(found) == {"nodelist": "n[01-02]"} | left
    assert "resources.nodelist" in about(found, "exclude: n01: ")


def test_a_part_of_the_network_for_oneself() -> None:
    found = build_directives(job(nodes=2, exclusive=True, topo_exclusive=True), None, SlurmVersion(24, 5))
    assert steering(found) == {"exclusive": "topo"}
    assert "no other job" in about(found, "--exclusive=topo: ")


def test_the_gpus_of_a_node() -> None:
    assert (
        requested_gpus_per_node(job(), site()),
        requested_gpus_per_node(job(partition="cpu"), site()),
        requested_gpus_per_node(job(), None),
    ) == (4, 0, 0)


def test_a_job_that_goes_on_without_a_node_outlives_it() -> None:
    def keeps(**sections: Any) -> bool:
        asked = JobSpec.model_validate({"parallel": {"dp_shard": 2}, "resources": {"nodes": 2}} | sections)
        return build_directives(asked, None, None).options.get("no-kill") is True

    assert not keeps()
    assert keeps(elastic={})
    assert keeps(resources={"nodes": 2, "spares": 1})
