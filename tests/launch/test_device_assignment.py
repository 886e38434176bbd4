"""What each rank uses of its node: decided by what captured trees say, kept to by real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpcrun.fabric import inventory
from hpcrun.fabric.inventory import (
    NodeInventory,
    gpus_visible_to_job,
    parse_node_inventory,
    read_node_inventory,
    try_read_node_inventory,
)
from hpcrun.fabric.node_topology import format_cpu_list, parse_cpu_list
from hpcrun.launch.device_assignment import BindingInputs, assign_devices, binding_inputs
from hpcrun.launch.node_environment import render_node_table
from hpcrun.launch.rank_command import rank_command
from hpcrun.specs.cluster import ClusterSpec
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Binding, BoundBy, Placement, read_placement, write_placement
from hpcrun.specs.records import read_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.settings import CommSettings
from tests.fabric.test_node_topology import Tree

HERE = os.uname().nodename
MINE = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(MINE) < 2, reason="needs two CPUs; give the tests another one")
UUIDS = [f"GPU-0000000{number}-aaaa-bbbb-cccc-000000000000" for number in range(4)]


def two_sockets(root: Path, *, gpus: int = 4, cpus: str = "0-15") -> NodeInventory:
    """Two NUMA nodes of eight CPUs, half of the GPUs on each, each with an adapter behind its switch."""
    tree = Tree(root)
    tree.numa(node0="0-7", node1="8-15")
    for number in range(gpus):
        numa = number * 2 // gpus
        switch = f"pci0000:{number}0/0000:{number}0:01.0/0000:{number}0:02.0"
        tree.gpu(f"{switch}/0000:{number}0:03.0", numa, f"{8 * numa}-{8 * numa + 7}", UUIDS[number])
        tree.hca(f"mlx5_{number}", f"{switch}/0000:{number}0:04.0", numa)
    return replace(read_node_inventory(root), cpus=frozenset(parse_cpu_list(cpus)))


def decided(
    node: NodeInventory, ranks: int, around: BindingInputs | None = None
) -> tuple[Placement, list[str]]:
    return assign_devices(Placement(("n1",) * ranks), {"n1": node}, around or BindingInputs())


def cpus(placed: Placement) -> list[str]:
    return [one.cpus if one else "?" for one in placed.bindings]


def test_each_rank_gets_a_gpu_and_what_is_near_to_it(tmp_path: Path) -> None:
    placed, notes = decided(two_sockets(tmp_path), 4)
    assert placed.bindings == (
        Binding(0, 0, UUIDS[0], "mlx5_0", "0-7"),
        Binding(1, 1, UUIDS[1], "mlx5_1", "0-7"),
        Binding(2, 2, UUIDS[2], "mlx5_2", "8-15"),
        Binding(3, 3, UUIDS[3], "mlx5_3", "8-15"),
    )
    assert (placed.bound_by, notes) == ("rank", [])


def test_an_inventory_travels(tmp_path: Path) -> None:
    node = two_sockets(tmp_path)
    there = parse_node_inventory(json.loads(json.dumps(node.as_json())))
    assert there is not None
    assert decided(there, 4) == decided(node, 4)
    assert [parse_node_inventory(said) for said in (None, {}, {"gpus": [{"index": 0}]}, "no")] == [None] * 4


def test_a_driver_that_is_stuck_costs_the_binding_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    here = try_read_node_inventory()
    assert here is not None
    assert here.cpus == frozenset(MINE)
    stuck = threading.Event()
    monkeypatch.setattr(inventory, "read_node_topology", lambda root: stuck.wait(30))
    assert try_read_node_inventory(0.01) is None
    stuck.set()


def test_a_placement_with_bindings_reads_back(tmp_path: Path) -> None:
    placed, _ = decided(two_sockets(tmp_path), 2)
    write_placement(tmp_path / "placement.json", placed, JobSpec(command=["x"]).degrees)
    read = read_placement(tmp_path / "placement.json")
    assert read is not None
    assert read[0] == placed
    old = read_json(tmp_path / "placement.json") or {}
    del old["bindings"], old["bound_by"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    before = read_placement(tmp_path / "old.json")
    assert before is not None
    assert (before[0].binding(0), before[0].bound_by) == (None, "either")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, ["0-15"]),
        (2, ["0-7", "8-15"]),
        (3, ["0-7", "0-7", "8-15"]),
        (4, ["0-7", "0-7", "8-15", "8-15"]),
    ],
)
def test_without_gpus_ranks_share_out_the_sockets(tmp_path: Path, ranks: int, expected: list[str]) -> None:
    placed, _ = decided(two_sockets(tmp_path, gpus=0), ranks)
    assert cpus(placed) == expected
    assert all(one and one.gpu is None for one in placed.bindings)


def test_only_what_the_job_has_is_used(tmp_path: Path) -> None:
    part = two_sockets(tmp_path, cpus="6-9")
    assert cpus(decided(part, 4)[0]) == ["6-7", "6-7", "8-9", "8-9"]
    placed, notes = decided(replace(part, cpus=frozenset(range(4))), 4)
    assert cpus(placed) == ["0-3"] * 4
    assert notes == [
        f"n1: GPU {gpu}: none of the job's CPUs is near it; ask for whole nodes" for gpu in (2, 3)
    ]


def test_one_numa_node_leaves_every_rank_what_the_job_has(tmp_path: Path) -> None:
    Tree(tmp_path).numa(node0="0-7")
    one = replace(read_node_inventory(tmp_path), cpus=frozenset(range(2, 6)))
    assert cpus(decided(one, 2)[0]) == ["2-5", "2-5"]
    nothing = replace(read_node_inventory(tmp_path / "no"), cpus=frozenset({1}))
    assert cpus(decided(nothing, 2)[0]) == ["1", "1"]


def test_several_ranks_of_a_gpu_stay_with_it(tmp_path: Path) -> None:
    placed, _ = decided(two_sockets(tmp_path, gpus=2), 4)
    assert [(one.gpu, one.cpus) for one in placed.bindings if one] == [
        (0, "0-7"),
        (0, "0-7"),
        (1, "8-15"),
        (1, "8-15"),
    ]


def test_a_node_that_says_nothing_leaves_its_ranks_unbound(tmp_path: Path) -> None:
    placed, notes = assign_devices(Placement(("n1", "n2")), {"n1": two_sockets(tmp_path)}, BindingInputs())
    assert placed.binding(0) is not None
    assert placed.binding(1) is None
    assert notes == ["n2: has not said what is inside it; its ranks are not bound"]


@pytest.mark.parametrize(
    ("visible", "in_slurm", "asked", "expected"),
    [
        (None, False, None, [0, 1, 2, 3]),
        (None, True, 4, [0, 1, 2, 3]),
        (None, True, 2, None),
        (None, True, None, None),
        ("NoDevFiles", True, 4, [0, 1, 2, 3]),
        ("", True, 4, []),
        ("-1", False, None, []),
        ("3,2,1,0", True, 4, [3, 2, 1, 0]),
        ("2,3", False, None, [2, 3]),
        ("0,1", True, 2, None),
        ("0,9", False, None, None),
        ("1,1", False, None, None),
        (f"{UUIDS[2]},{UUIDS[1]}", True, 2, [2, 1]),
        ("GPU-00000003", True, 1, [3]),
        ("GPU-0", True, 1, None),
        ("GPU-7", True, 1, None),
        ("MIG-00000003-aaaa", False, None, None),
        ("all", False, None, None),
    ],
)
def test_which_gpus_are_the_job_s(
    tmp_path: Path, visible: str | None, in_slurm: bool, asked: int | None, expected: list[int] | None
) -> None:
    there = two_sockets(tmp_path).inside.gpus
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_visible_to_job(there, environ, asked, in_slurm=in_slurm) == expected
    assert gpus_visible_to_job((), environ, asked, in_slurm=in_slurm) == []


def test_gpus_that_are_not_known_are_told_and_nothing_is_guessed(tmp_path: Path) -> None:
    around = BindingInputs(in_slurm=True, gpus_requested=2)
    placed, notes = decided(two_sockets(tmp_path), 2, around)
    assert placed.bindings == (Binding(0, cpus="0-7"), Binding(1, cpus="8-15"))
    assert notes == ["n1: which of its 4 GPUs the job has is not known; ranks keep to NUMA nodes"]


def job(**keys: object) -> JobSpec:
    return JobSpec.model_validate({"command": ["true"], **keys})


def test_who_binds() -> None:
    cluster = ClusterSpec.model_validate({"name": "c", "gpus": {"bind": "closest"}})
    own = binding_inputs(job(), cluster, "mpiexec", {}, in_slurm=True)
    assert (own.bound_by, own.may_assign_gpus, own.environ) == ("rank", True, {})
    dealt = ClusterSpec.model_validate({"name": "c", "gpus": {"request": "gpus-per-task"}})
    assert not binding_inputs(job(), dealt, "mpiexec", {}, in_slurm=True).may_assign_gpus
    srun = binding_inputs(job(), cluster, "srun", {}, in_slurm=True)
    assert (srun.bound_by, srun.may_assign_gpus, srun.environ) == ("either", False, None)
    asked = job(resources={"cpus_per_rank": 2})
    assert binding_inputs(asked, None, "srun", {}, in_slurm=True).bound_by == "launcher"
    assert binding_inputs(asked, None, "mpiexec", {}, in_slurm=True).bound_by == "rank"
    assert binding_inputs(job(), None, "mpirun", {}, in_slurm=True).bound_by == "either"
    wanted = job(env={"HYDRA_BINDING": "core"})
    assert binding_inputs(wanted, None, "mpiexec", {}, in_slurm=False).bound_by == "either"
    inside = {"HPCRUN_RANK_PREFIX": "apptainer exec it.sif"}
    assert binding_inputs(job(), None, "mpiexec", inside, in_slurm=True).bound_by == "either"


def test_what_the_launcher_binds_is_not_placed(tmp_path: Path) -> None:
    node = two_sockets(tmp_path)
    placed, _ = decided(node, 2, BindingInputs("launcher", may_assign_gpus=False))
    assert placed.bindings == (Binding(0), Binding(1))
    placed, notes = decided(node, 2, BindingInputs(uses_gpus=False))
    assert (cpus(placed), notes) == (["0-7", "8-15"], [])


# --- ranks that run


def in_a_child(binding: Binding | None, *before: str) -> dict[str, str]:
    """What a process that binds itself writes into its record."""
    said = "None" if binding is None else f"Binding(**{asdict(binding)!r})"
    program = (
        "import json; from hpcrun.launch.cpu_binding import bind_process;"
        " from hpcrun.specs.placement import Binding;"
        f"print(json.dumps(bind_process({said})))"
    )
    run = subprocess.run(
        [*before, sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, str] = json.loads(run.stdout)
    return found


@needs_two_cpus
@pytest.mark.process
def test_a_rank_binds_itself() -> None:
    every, last = format_cpu_list(MINE), str(MINE[-1])
    assert in_a_child(Binding(0, cpus=last)) == {"before": every, "cpus": last}
    assert in_a_child(None) == {"before": every, "cpus": every}
    if shutil.which("taskset"):
        first = str(MINE[0])
        bound = in_a_child(Binding(0, cpus=last), "taskset", "-c", first)
        assert bound == {"before": first, "cpus": first}


PROGRAM = ("sh", "-c", "sed -n 's/^Cpus_allowed_list:[[:space:]]*/on /p' /proc/self/status; env")


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.setenv("HPCRUN_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return create_run("bound").next_attempt()


def run_script(
    attempt: Attempt, binding: Binding, *before: str, path: str | None = None, bound_by: BoundBy = "rank"
) -> tuple[int, str]:
    """Start a rank of a program as the launcher would; its exit code and what it printed."""
    placed = replace(Placement((HERE,), bindings=(binding,)), bound_by=bound_by)
    attempt.node_table.write_text(render_node_table(CommSettings(), placed))
    attempt.hosts.write_text(f"{HERE}\n")
    words = rank_command(attempt, JobSpec(command=list(PROGRAM)), placed, {})
    environ = {"PATH": path or os.environ["PATH"], "PMI_RANK": "0"}
    done = subprocess.run([*before, *words], env=environ, timeout=60, check=False)
    return done.returncode, attempt.log(0).read_text()


needs_taskset = pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset, of util-linux")


@needs_two_cpus
@needs_taskset
@pytest.mark.process
def test_a_program_s_rank_is_bound_and_told_what_is_near(attempt: Attempt) -> None:
    last = str(MINE[-1])
    code, said = run_script(attempt, Binding(0, 1, UUIDS[1], "mlx5_1", last))
    assert code == 0
    assert f"on {last}\n" in said
    for line in (f"HPCRUN_CPUS={last}", "HPCRUN_NIC=mlx5_1", f"HPCRUN_GPU_UUID={UUIDS[1]}", "LOCAL_RANK=0"):
        assert f"{line}\n" in said
    record = read_json(attempt.rank_record(0)) or {}
    assert record["binding"] == {"before": format_cpu_list(MINE), "cpus": last}


@needs_two_cpus
@needs_taskset
@pytest.mark.process
def test_a_program_s_rank_that_somebody_has_bound_is_caught(attempt: Attempt) -> None:
    every, first = format_cpu_list(MINE), str(MINE[0])
    code, said = run_script(attempt, Binding(0, cpus=every), "taskset", "-c", first)
    told = f"is to run on CPUs {every}, and has been bound to {first} before it has started"
    assert (code, said) == (3, "")
    assert (read_json(attempt.error_record(0)) or {})["message"] == told
    code, said = run_script(attempt, Binding(0, cpus=every), "taskset", "-c", first, bound_by="either")
    assert code == 0
    assert said.startswith(f"hpcrun: rank 0 {told}; left so\non {first}\n")


@needs_two_cpus
@pytest.mark.process
def test_without_taskset_a_rank_says_so_and_runs(attempt: Attempt, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "sed", "uname", "env", "printenv", "date", "mv"):
        (tools / name).symlink_to(shutil.which(name) or "")
    code, said = run_script(attempt, Binding(0, cpus=str(MINE[-1])), path=str(tools))
    assert code == 0
    assert re.match(
        rf"hpcrun: there is no taskset on {HERE}: its ranks run on CPUs {format_cpu_list(MINE)}\n", said
    )


@pytest.mark.process
def test_nothing_is_bound_where_nothing_was_decided(attempt: Attempt) -> None:
    code, said = run_script(attempt, Binding(0))
    assert code == 0
    assert "HPCRUN_CPUS" not in said
    assert f"on {format_cpu_list(MINE)}\n" in said
