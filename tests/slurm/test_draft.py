"""A profile drafted from what Slurm says, and the same profile after the cluster has changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from hpcrun.errors import SpecError
from hpcrun.slurm.cluster_state import parse_cluster_answers
from hpcrun.slurm.draft import draft_profile, find_profile_differences, find_unconfirmed_keys
from hpcrun.specs.cluster import ClusterSpec, parse_cluster

Captured = Callable[[str, str], str]
Change = Callable[[dict[str, str]], object]

CONFIG = """\
ClusterName             = lab
MpiDefault              = pmi2
SelectType              = select/cons_tres
SLURM_VERSION           = {version}
TopologyPlugin          = topology/tree
"""


@pytest.fixture
def answers(captured: Captured, version: str) -> dict[str, str]:
    names = {
        "version": "version",
        "partitions": "show-partition",
        "nodes": "show-nodes-oneline",
        "topology": "show-topology",
    }
    texts = {name: captured(version, file) for name, file in names.items()}
    return texts | {"config": CONFIG.format(version=version)}


def drafted(answers: Mapping[str, str]) -> ClusterSpec:
    """The draft's profile, read back from its text."""
    draft = draft_profile(parse_cluster_answers(answers))
    profile = parse_cluster(draft.text, "draft.yaml")
    assert profile == draft.cluster
    return profile


def test_a_draft_holds_what_slurm_says(answers: dict[str, str], version: str) -> None:
    profile = drafted(answers)
    main = profile.partitions["main"]
    assert (profile.name, profile.slurm_version) == ("lab", version.rpartition(".")[0])
    assert (main.default, main.max_time, main.max_nodes) == (True, "UNLIMITED", None)
    assert (main.gpus_per_node, main.cpus_per_node, main.mem_per_node) == (4, 8, "64000M")
    assert (profile.gpus.request, profile.mpi.pmi, profile.topology.source) == (
        "gpus-per-node",
        "pmi2",
        "slurm",
    )
    assert list(profile.partitions) == (["main", "blk"] if version == "25.11.7" else ["main"])
    assert profile.default_partition == "main"


def test_a_draft_matches_the_cluster_that_it_was_made_from(answers: dict[str, str]) -> None:
    live, profile = parse_cluster_answers(answers), drafted(answers)
    assert (find_profile_differences(profile, live), find_unconfirmed_keys(profile, live)) == ([], [])


def test_a_draft_says_what_was_measured_and_what_is_to_be_filled_in(answers: dict[str, str]) -> None:
    text = draft_profile(parse_cluster_answers(answers)).text
    assert "  # 8 nodes: n[01-08]\n" in text
    assert "#    gpu_type: h100              # the GPUs' name, which Slurm does not tell\n" in text
    assert "# TopologyPlugin=tree; switch: 3\n" in text
    # every key that is to be filled in can be: without its `#` it is part of a sound profile
    filled = parse_cluster(re.sub(r"^#(?! \S)", "", text, flags=re.MULTILINE), "filled.yaml")
    assert [level.name for level in filled.topology.levels] == ["leaf", "spine"]
    assert (filled.default, filled.gpus.request, filled.account) == (True, "gpus-per-node", "proj")
    assert filled.quota
    assert filled.file_systems["local"].shared is False


def test_a_draft_without_its_remarks_is_the_same(answers: dict[str, str]) -> None:
    bare = re.sub(r"^\s*#.*\n", "", draft_profile(parse_cluster_answers(answers)).text, flags=re.MULTILINE)
    assert parse_cluster(bare, "bare.yaml") == drafted(answers)


def replace(name: str, old: str, new: str) -> Change:
    def change(answers: dict[str, str]) -> None:
        assert old in answers[name]
        answers[name] = answers[name].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            replace("partitions", "PartitionName=main", "PartitionName=other"),
            "partitions.main: is gone; there are: other",
        ),
        (
            replace("partitions", "MaxTime=UNLIMITED", "MaxTime=2-00:00:00"),
            "partitions.main.max_time: the profile says UNLIMITED, the partition allows 2-00:00:00",
        ),
        (
            replace("partitions", "OverSubscribe=NO", "OverSubscribe=EXCLUSIVE"),
            "partitions.main.exclusive: the profile says false, the partition gives whole nodes only",
        ),
        (
            replace("nodes", "RealMemory=64000", "RealMemory=32768"),
            "partitions.main.mem_per_node: the profile says 64000M, the nodes have 32G (8 nodes)",
        ),
        (
            replace("nodes", "Gres=gpu:4", "Gres=gpu:2"),
            "partitions.main.gpus_per_node: the profile says 4, the nodes have 2 (8 nodes)",
        ),
        (
            replace("nodes", "CPUTot=8", "CPUTot=16"),
            "partitions.main.cpus_per_node: the profile says 8, the nodes have 16 (8 nodes)",
        ),
        (
            replace("config", "cons_tres", "cons_res"),
            "gpus.request: the profile says gpus-per-node, select/cons_res takes only gres",
        ),
    ],
)
def test_each_difference_is_a_line(answers: dict[str, str], version: str, change: Change, line: str) -> None:
    profile = drafted(answers)
    change(answers)
    found = find_profile_differences(profile, parse_cluster_answers(answers))
    # 25.11's capture has a second partition with the same nodes; what holds for both is said of both
    assert [each for each in found if ".blk" not in each] == [
        line.replace("other", "other, blk") if version == "25.11.7" else line
    ]


def test_another_release(answers: dict[str, str]) -> None:
    profile = drafted(answers)
    answers["version"] = "slurm 26.05.1\n"
    assert find_profile_differences(profile, parse_cluster_answers(answers)) == [
        f"slurm_version: the profile says {profile.slurm_version}, Slurm is 26.05.1"
    ]
    exact = profile.model_copy(update={"slurm_version": "26.05.1"})
    assert find_profile_differences(exact, parse_cluster_answers(answers)) == []
    assert (
        "the commands here are 26.05.1, the controller is "
        in draft_profile(parse_cluster_answers(answers)).text
    )


def test_another_topology(answers: dict[str, str]) -> None:
    profile = drafted(answers)
    flat = answers | {
        "topology": "\nNo topology information available\n",
        "config": answers["config"].replace("tree", "default"),
    }
    assert find_profile_differences(profile, parse_cluster_answers(flat)) == [
        "topology.source: the profile says slurm, TopologyPlugin is default, which knows no switches"
    ]
    assert drafted(flat).topology.source == "none"
    assert find_profile_differences(drafted(flat), parse_cluster_answers(answers)) == [
        "topology.source: the profile says none, TopologyPlugin is tree and lists units: switch"
    ]
    values = profile.model_dump(mode="json")
    values["topology"]["levels"] = [{"name": "leaf", "bandwidth_GBps": 50.0}]
    assert find_profile_differences(ClusterSpec.model_validate(values), parse_cluster_answers(answers)) == [
        "topology.levels: the profile says 1, Slurm knows 2 levels of switches"
    ]


def test_a_limit_on_nodes(answers: dict[str, str]) -> None:
    open_profile = drafted(answers)
    answers["partitions"] = answers["partitions"].replace("MaxNodes=UNLIMITED", "MaxNodes=4", 1)
    limited = drafted(answers)
    assert limited.partitions["main"].max_nodes == 4
    assert find_profile_differences(open_profile, parse_cluster_answers(answers)) == [], (
        "what is left unsaid does not differ"
    )
    answers["partitions"] = answers["partitions"].replace("MaxNodes=4", "MaxNodes=UNLIMITED")
    assert find_profile_differences(limited, parse_cluster_answers(answers)) == [
        "partitions.main.max_nodes: the profile says 4, the partition allows UNLIMITED"
    ]


def test_a_profile_may_keep_memory_back_and_write_times_as_it_likes(answers: dict[str, str]) -> None:
    answers["partitions"] = answers["partitions"].replace("MaxTime=UNLIMITED", "MaxTime=2-00:00:00")

    def found(mem: str, time: str) -> list[str]:
        text = f"name: a\npartitions: {{main: {{mem_per_node: {mem}, max_time: {time}}}}}\n"
        return find_profile_differences(parse_cluster(text, "a.yaml"), parse_cluster_answers(answers))

    assert found("60G", "48h") == []
    assert [len(found(mem, "2d")) for mem in ("64001M", "30G")] == [1, 1], "too much, and half of it"


def test_nodes_that_differ_are_left_to_the_admin(answers: dict[str, str]) -> None:
    answers["nodes"] = answers["nodes"].replace("Gres=gpu:4", "Gres=gpu:h100:8", 1)
    profile = drafted(answers)
    assert (profile.partitions["main"].gpus_per_node, profile.partitions["main"].gpu_type) == (None, None)
    text = draft_profile(parse_cluster_answers(answers)).text
    assert "# gpus_per_node: the nodes differ in their GPUs: 4 (7 nodes), 8 (1 node); write what jobs" in text

    def found(**keys: object) -> list[str]:
        mine = ClusterSpec.model_validate({"name": "a", "partitions": {"main": keys}})
        return find_profile_differences(mine, parse_cluster_answers(answers))

    assert found(gpus_per_node=8, gpu_type="H100") == found(gpus_per_node=4) == [], "either is there"
    assert found(gpus_per_node=2, gpu_type="a100") == [
        "partitions.main.gpus_per_node: the profile says 2, the nodes have 4 (7 nodes), 8 (1 node)",
        "partitions.main.gpu_type: the profile says a100, the nodes have h100 (1 node)",
    ]


def test_unknown_stays_unknown_and_is_said(answers: dict[str, str]) -> None:
    profile = drafted(answers)
    silent = {
        "version": "scontrol: what?\n",
        "partitions": "PartitionName=main\n",
        "config": "",
        "nodes": "",
        "topology": "slurm_load_topo: refused\n",
    }
    live = parse_cluster_answers(silent)
    assert (live.version, live.is_flat, live.plugin, live.nodes) == (None, None, "unknown", ())
    bare = drafted(silent)
    assert (bare.name, bare.slurm_version, bare.partitions["main"].max_time) == ("unnamed", None, None)
    text = draft_profile(live).text
    for line in (
        "# name: unknown, Slurm does not report it; write it here\n",
        "# slurm_version: unknown: `scontrol --version` said: scontrol: what?\n",
        "# the configuration: unknown: `scontrol show config` said: nothing\n",
        "  # max_time: unknown\n",
        "# gpus.request: unknown, no node says whether it has GPUs\n",
        "# topology: unknown: `scontrol show topology` said: slurm_load_topo: refused\n",
    ):
        assert line in text
    main = profile.model_copy(update={"partitions": {"main": profile.partitions["main"]}})
    assert find_profile_differences(main, live) == []
    assert [line.partition(":")[0] for line in find_unconfirmed_keys(main, live)] == [
        "slurm_version",
        "partitions.main.max_time",
        "partitions.main.gpus_per_node",
        "partitions.main.cpus_per_node",
        "partitions.main.mem_per_node",
        "gpus.request",
        "topology",
    ]


def test_memory_that_slurm_does_not_count(answers: dict[str, str]) -> None:
    answers["nodes"] = answers["nodes"].replace("RealMemory=64000", "RealMemory=1")
    assert drafted(answers).partitions["main"].mem_per_node is None
    assert (
        "# mem_per_node: unknown, Slurm does not report it"
        in draft_profile(parse_cluster_answers(answers)).text
    )


def test_sinfo_names_the_nodes_where_scontrol_does_not(
    answers: dict[str, str], captured: Captured, version: str
) -> None:
    expected = drafted(answers)
    asked = answers | {"nodes": "", "sinfo": captured(version, "sinfo-N")}
    assert drafted(asked) == expected


@pytest.mark.parametrize(
    ("plugin", "select", "mpi", "expected"),
    [
        ("cons_tres", "gpus-per-node", "pmix_v5", "pmix_v5"),
        ("cons_res", "gres", "none", "pmi2"),
        ("linear", "gres", "pmix_v2", "pmi2"),
    ],
)
def test_how_gpus_are_asked_for_and_ranks_are_started(
    answers: dict[str, str], plugin: str, select: str, mpi: str, expected: str
) -> None:
    answers["config"] = answers["config"].replace("cons_tres", plugin).replace("= pmi2", f"= {mpi}")
    profile = drafted(answers)
    assert (profile.gpus.request, profile.mpi.pmi) == (select, expected)
    assert ("# mpi.pmi: unknown, MpiDefault is" in draft_profile(parse_cluster_answers(answers)).text) == (
        mpi != expected
    )


def test_a_cluster_without_gpus(answers: dict[str, str]) -> None:
    answers["nodes"] = answers["nodes"].replace("Gres=gpu:4", "Gres=(null)")
    profile = drafted(answers)
    assert (profile.gpus.request, profile.partitions["main"].gpus_per_node) == ("none", 0)
    assert "gpu_type" not in draft_profile(parse_cluster_answers(answers)).text


def test_names_that_a_profile_cannot_hold(answers: dict[str, str]) -> None:
    answers["partitions"] = answers["partitions"].replace("PartitionName=main", "PartitionName=_m@in")
    assert "main" not in drafted(answers).partitions
    assert "# '_m@in' is left out: a profile cannot hold this name\n" in (
        draft_profile(parse_cluster_answers(answers)).text
    )
    with pytest.raises(SpecError):
        parse_cluster("name: a\npartitions: {_m@in: {}}\n", "a.yaml")
