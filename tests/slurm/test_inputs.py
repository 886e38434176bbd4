"""What sbatch's input environment variables become: honoured, refused with both values, or named."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UsageError
from hpcrun.slurm.client import cluster_from_environment, run_slurm_client, slurm_client_environment
from hpcrun.slurm.inputs import (
    OPTION_OF_VARIABLE,
    REFUSED_VARIABLES,
    RESOURCE_KEY_OF_VARIABLE,
    SbatchInputs,
    read_sbatch_inputs,
)
from hpcrun.specs.cluster import ClusterSpec, parse_cluster
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import parse_job
from hpcrun.specs.resources import ResourcesSpec
from tests.slurm.fakes import calls, environment, stand_ins

PROFILE = parse_cluster(
    "name: here\naccount: proj\npartitions: {gpu: {default: true, gpus_per_node: 4, gpu_type: h100,"
    " qos: long}, dev: {qos: short}}\n",
    "here.yaml",
)
# Strings of sbatch 22.05.8, and of the manual pages up to 25.11.
MANUAL = """\
ACCOUNT ACCTG_FREQ ARRAY_INX BATCH BURST_BUFFER CLUSTERS CLUSTER_CONSTRAINT CONSOLIDATE_SEGMENTS CONSTRAINT
CONTAINER CONTAINER_ID CORE_SPEC CPUS_PER_GPU CPU_FREQ_REQ DEBUG DELAY_BOOT DISTRIBUTION ERROR EXCLUSIVE
EXPORT GET_USER_ENV GPUS GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GRES GRES_FLAGS HINT
IGNORE_PBS INPUT JOB_NAME MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NETWORK NO_KILL NO_REQUEUE OPEN_MODE
OUTPUT OVERCOMMIT PARTITION POWER PROFILE QOS REQUEUE REQ_SWITCH RESERVATION SEGMENT_SIZE SIGNAL SPREAD_JOB
SPREAD_SEGMENTS STEPMGR THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND TRES_PER_TASK USE_MIN_NODES WAIT
WAIT4SWITCH WAIT_ALL_NODES WCKEY
""".split()  # noqa: SIM905


def job(**resources: Any) -> JobSpec:
    return JobSpec.model_validate({"command": ["true"], "resources": resources})


def read(environ: dict[str, str], cluster: ClusterSpec | None = None, **resources: Any) -> SbatchInputs:
    return read_sbatch_inputs(job(**resources), cluster, environ)


@pytest.mark.parametrize("name", MANUAL)
def test_no_variable_of_sbatch_s_is_dropped_without_a_word(name: str) -> None:
    values = {"TIMELIMIT": "30", "MEM_PER_NODE": "4G", "WAIT4SWITCH": "60", "EXCLUSIVE": "", "GRES": "gpu:2"}
    found = read({f"SBATCH_{name}": values.get(name, "2")})
    assert not found.findings
    (note,) = found.notes
    assert f"SBATCH_{name}" in note
    assert REFUSED_VARIABLES.get(f"SBATCH_{name}", "") in note


def test_a_variable_that_nobody_knows_is_named_too() -> None:
    assert "SBATCH_NEW_THING is not used" in read({"SBATCH_NEW_THING": "1"}).notes[0]


@pytest.mark.parametrize(
    ("name", "value", "key", "taken"),
    [
        ("SBATCH_ACCOUNT", "other", "account", "other"),
        ("SBATCH_PARTITION", "a,b", "partition", "a,b"),
        ("SBATCH_QOS", "long", "qos", "long"),
        ("SBATCH_RESERVATION", "res_1", "reservation", "res_1"),
        ("SBATCH_CONSTRAINT", "a&b", "constraint", "a&b"),
        ("SBATCH_TIMELIMIT", "1-00:00:00", "time", "1-00:00:00"),
        ("SBATCH_MEM_PER_NODE", "64000", "mem", "64000"),
        ("SBATCH_EXCLUSIVE", "", "exclusive", True),
        ("SBATCH_REQ_SWITCH", "2", "switches", 2),
        ("SBATCH_WAIT4SWITCH", "0:30:00", "switches_wait", "0:30:00"),
        ("SBATCH_SEGMENT_SIZE", "2", "segment", 2),
        ("SBATCH_GPUS_PER_NODE", "4", "gpus_per_node", 4),
        ("SBATCH_GPUS", "8", "gpus_per_node", 4),
        ("SBATCH_GPUS_PER_TASK", "1", "gpus_per_node", 4),
        ("SBATCH_GRES", "gpu:4", "gpus_per_node", 4),
    ],
)
def test_what_the_job_leaves_open_is_filled(name: str, value: str, key: str, taken: object) -> None:
    found = read({name: value}, nodes=2, ranks_per_node=4)
    assert dict(found.resources) == {key: taken}
    assert (dict(found.sources), found.findings) == ({name: value}, ())
    # A spec.yaml with it is read again, by the node and by --resume.
    assert getattr(ResourcesSpec.model_validate(dict(found.resources)), key) == taken


@pytest.mark.parametrize(
    ("environ", "resources", "words"),
    [
        ({"SBATCH_ACCOUNT": "b"}, {"account": "a"}, ("is a", "SBATCH_ACCOUNT", "is b")),
        ({"SBATCH_QOS": "b"}, {"qos": "a"}, ("is a", "is b")),
        ({"SBATCH_TIMELIMIT": "60"}, {"time": "2h"}, ("is 2h", "is 60")),
        ({"SBATCH_MEM_PER_NODE": "4G"}, {"mem": "8G"}, ("is 8G", "is 4G")),
        ({"SBATCH_MEM_PER_CPU": "4G"}, {"mem": "8G"}, ("mem 8G", "SBATCH_MEM_PER_CPU", "is 4G")),
        ({"SBATCH_MEM_PER_CPU": "1G", "SBATCH_MEM_PER_NODE": "4G"}, {}, ("mem-per-cpu 1G", "is 4G")),
        ({"SBATCH_MEM_PER_CPU": "1G", "SBATCH_MEM_PER_GPU": "4G"}, {}, ("mem-per-cpu 1G", "is 4G")),
        ({"SBATCH_EXCLUSIVE": ""}, {"exclusive": False}, ("is False",)),
        ({"SBATCH_EXCLUSIVE": "user"}, {}, ("SBATCH_EXCLUSIVE is user",)),
        ({"SBATCH_GPUS": "8"}, {"gpus_per_node": 2, "nodes": 2}, ("is 2", "is 8")),
        ({"SBATCH_GPUS": "3"}, {"nodes": 2}, ("SBATCH_GPUS is 3", "evenly")),
        ({"SBATCH_GPUS_PER_NODE": "2", "SBATCH_GRES": "gpu:1"}, {}, ("SBATCH_GPUS_PER_NODE says 2", "gpu:1")),
        ({"SBATCH_GRES": "gpu:a100:4"}, {}, ("gpu:a100:4",)),
        ({"SBATCH_WCKEY": "b"}, {"sbatch": {"wckey": "a"}}, ("is a", "is b")),
        ({"SBATCH_WCKEY": "b"}, {"sbatch": {"wckey": None}}, ("left out", "is b")),
        ({"SBATCH_HINT": "compute_bound", "SLURM_HINT": "memory_bound"}, {}, ("compute_bound", "memory_b")),
        ({"SBATCH_TIMELIMIT": "soon"}, {}, ("SBATCH_TIMELIMIT is soon",)),
        ({"SBATCH_REQ_SWITCH": "few"}, {}, ("SBATCH_REQ_SWITCH is few",)),
    ],
)  # fmt: skip
def test_what_contradicts_the_job_is_refused_with_both_values(
    environ: dict[str, str], resources: dict[str, Any], words: tuple[str, ...]
) -> None:
    found = read(environ, **resources)
    (finding,) = found.findings
    assert finding.severity == "error"
    assert "unset SBATCH_" in finding.text or "unset SLURM_" in finding.text
    assert "\n" not in finding.text
    for word in words:
        assert word in finding.text, finding.text


@pytest.mark.parametrize(
    ("environ", "resources"),
    [
        ({"SBATCH_TIMELIMIT": "120"}, {"time": "2h"}),
        ({"SBATCH_MEM_PER_NODE": "8192"}, {"mem": "8G"}),
        ({"SBATCH_PARTITION": "b,a"}, {"partition": "a, b"}),
        ({"SBATCH_GPUS": "gpu:8"}, {"gpus_per_node": 4, "nodes": 2}),
        ({"SBATCH_EXCLUSIVE": "exclusive"}, {"exclusive": True}),
        ({"SBATCH_WCKEY": "a"}, {"sbatch": {"wckey": "a"}}),
        ({"SBATCH_ACCOUNT": " "}, {"account": "a"}),
        ({"SBATCH_REQ_SWITCH": "4"}, {"switches": 2, "nodes": 2}),
    ],
)
def test_what_says_the_same_in_other_words_is_no_contradiction(
    environ: dict[str, str], resources: dict[str, Any]
) -> None:
    assert read(environ, **resources).findings == ()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SBATCH_ACCOUNT": "mine"}, "the profile here says proj, but SBATCH_ACCOUNT"),
        ({"SBATCH_PARTITION": "dev"}, "the profile here says gpu"),
        ({"SBATCH_QOS": "short"}, "the profile here says long"),
        ({"SBATCH_GPUS_PER_NODE": "2"}, "the profile here says 4"),
    ],
)  # fmt: skip
def test_what_the_profile_says_counts_as_said(environ: dict[str, str], words: str) -> None:
    (finding,) = read(environ, PROFILE).findings
    assert words in finding.text
    assert f"give {finding.subject}=" in finding.text


def test_the_profile_of_the_partition_that_is_asked_for_counts() -> None:
    (finding,) = read({"SBATCH_QOS": "long"}, PROFILE, partition="dev").findings
    assert "the profile here says short" in finding.text
    assert read({"SBATCH_GRES": "gpu:h100:4"}, PROFILE).findings == ()


def test_options_without_a_key_go_where_raw_options_stand() -> None:
    found = read(
        {"SBATCH_WCKEY": "w", "SBATCH_USE_MIN_NODES": "", "SBATCH_GRES": "nvme:1"}, sbatch={"comment": "c"}
    )
    assert found.resources["sbatch"] == {
        "comment": "c",
        "gres": "nvme:1",
        "use-min-nodes": True,
        "wckey": "w",
    }
    options = {"sbatch": dict.fromkeys(OPTION_OF_VARIABLE.values(), "1")}
    assert ResourcesSpec.model_validate(options).sbatch == options["sbatch"], "each may be given raw"
    assert not {*RESOURCE_KEY_OF_VARIABLE} & {*OPTION_OF_VARIABLE}
    assert not {*RESOURCE_KEY_OF_VARIABLE, *OPTION_OF_VARIABLE} & {*REFUSED_VARIABLES}


def test_an_allocation_around_us_is_no_wish() -> None:
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_ACCOUNT": "x",
        "SLURM_TIMELIMIT": "9",
        "SLURM_HINT": "nomultithread",
    }
    inside |= {"SBATCH_MEM_BIND_TYPE": "local", "SBATCH_CPU_BIND": "quiet"}
    assert read(inside) == SbatchInputs()
    assert read(inside | {"SBATCH_ACCOUNT": "mine"}).resources == {"account": "mine"}, (
        "that is the user's own"
    )


def test_which_cluster_is_meant() -> None:
    assert read({"SLURM_CLUSTERS": "far"}).slurm_cluster == "far"
    assert cluster_from_environment({"SBATCH_CLUSTERS": "far", "SLURM_CLUSTERS": "far"}) == (
        "SBATCH_CLUSTERS",
        "far",
    )
    with pytest.raises(UsageError, match="SBATCH_CLUSTERS is far and SLURM_CLUSTERS is near"):
        cluster_from_environment({"SBATCH_CLUSTERS": "far", "SLURM_CLUSTERS": "near"})
    profile = PROFILE.model_copy(update={"slurm_cluster": "near"})
    (finding,) = read({"SLURM_CLUSTERS": "far"}, profile).findings
    assert "near" in finding.text
    assert "SLURM_CLUSTERS is far" in finding.text


def test_a_sweep_s_elements_get_it_all() -> None:
    text = "model: tiny\ndata: {text: python-stdlib}\nsweep: {grid: {train.seed: [0, 1]}}\n"
    asked = parse_job(text, "job.yaml").asking({"account": "mine"})
    specs = [asked.spec, *(one.spec for one in asked.elements)]
    assert {one.resources.account for one in specs} == {"mine"}
    again = parse_job(asked.render(), "spec.yaml")
    assert [one.spec.resources.account for one in again.elements] == ["mine", "mine"]


def test_commands_of_slurm_s_do_not_see_what_is_for_the_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = stand_ins(tmp_path, monkeypatch)("squeue", "")
    theirs: tuple[str, ...] = (
        "SQUEUE_FORMAT",
        "SQUEUE_STATES",
        "SINFO_FORMAT",
        "SACCT_FORMAT",
        "SCANCEL_INTERACTIVE",
    )
    theirs += ("SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_TOPO_LEN", "SCONTROL_LOCAL", "SLURM_JOB_ID")
    for name in (*theirs, "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"):
        monkeypatch.setenv(name, "x")
    run_slurm_client(["squeue"], timeout_s=20, extra={"SLURM_BITSTR_LEN": "0"})
    given = environment(log)
    assert not set(theirs) & set(given)
    assert {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_BITSTR_LEN"} <= set(given)
    assert calls(log) == [""]
    assert slurm_client_environment({"HOME": "/h", "SQUEUE_SORT": "i"}) == {"HOME": "/h"}


def test_nobody_runs_them_in_another_way() -> None:
    commands = {"squeue", "sinfo", "sacct", "scancel", "scontrol"}
    package = Path(__file__).parents[2] / "hpcrun"
    wrong = []
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        told = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in commands
        }
        lists = [
            node.elts[0] for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple) and node.elts
        ]
        begins = any(isinstance(one, ast.Constant) and one.value in commands for one in lists)
        if told and begins and "run_slurm_client" not in path.read_text():
            wrong.append(path.relative_to(package))
    # What is shown to an admin, and words that are no commands.
    allowed = {"health/drain_request.py", "slurm/inputs.py"}
    assert [str(one) for one in wrong if str(one) not in allowed] == []
