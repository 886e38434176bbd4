"""Ranks over the nodes of a real allocation: every launcher, our training and programs of one's own."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.specs.records import read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story

DEMO = (
    "train.steps=3",
    "train.warmup=1",
    "train.eval.sequences=8",
    "data.pattern=a*.py",
    "train.gbs=16",
    "train.mbs=2",
)
FOUR_BY_TWO = ("resources.nodes=4", "resources.time=10m", "resources.mem=4G")
EIGHT = [f"n0{node}" for node in (1, 1, 2, 2, 3, 3, 4, 4)]
# What a rank of a program of one's own is told.
SAY = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK $(hostname) $MASTER_ADDR"'


def logs_of(run: RunDir) -> list[str]:
    return [path.read_text().strip() for path in sorted(run.path.glob("attempts/1/logs/rank-*.log"))]


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_json_lines(run.metrics) if line.get("kind") == "step"]


def test_the_demo_on_four_nodes_with_each_launcher_gives_the_same_losses(desk: Desk) -> None:
    from hpcrun.specs.shipped import shipped_file

    shutil.copy(shipped_file("jobs/demo.yaml"), desk.path)
    found = {}
    for launcher in ("hydra", "srun"):
        desk.profile(f"mpi: {{launcher: {launcher}, pmi: pmi2}}\n")
        run = desk.submit("demo.yaml", *DEMO, *FOUR_BY_TWO)
        assert desk.ended(run)["status"] == "done", story(run)
        placed = records(run, "attempts/1/ranks/rank-?.json")
        assert [record["node"] for record in placed] == EIGHT
        assert records(run, "attempts/1/placement.json")[0]["ranks"] == EIGHT
        found[launcher] = losses(run)
    assert len(found["hydra"]) == 3
    assert found["hydra"] == found["srun"]


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_a_program_of_ones_own_knows_its_rank_without_torchrun(desk: Desk, launcher: str) -> None:
    desk.profile(f"mpi: {{launcher: {launcher}}}\nnetwork: {{fabric_suffix: -ib}}\n")
    run = desk.submit("name=own", "resources.nodes=2", "resources.ranks_per_node=2", "--", "sh", "-c", SAY)
    assert desk.ended(run)["status"] == "done", story(run)
    assert logs_of(run) == [
        "0 4 0 2 0 n01 10.77.1.1",
        "1 4 1 2 0 n01 10.77.1.1",
        "2 4 0 2 1 n02 10.77.1.1",
        "3 4 1 2 1 n02 10.77.1.1",
    ]


TORCH = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), total.item())
dist.destroy_process_group()
"""


@contextlib.contextmanager
def own_names(desk: Desk, **lines: str) -> Iterator[None]:
    """Nodes whose files of hosts have another line for their own name."""
    script = (
        'sed "s/^[0-9.]* $1$/$2/" /etc/hosts >/run/scratch/hosts; mount --bind /run/scratch/hosts /etc/hosts'
    )
    for node, line in lines.items():
        desk.lab.node(node).run(["sh", "-euc", script, "sh", node, line]).require_success()
    try:
        yield
    finally:
        for node in lines:
            desk.lab.node(node).run(["umount", "/etc/hosts"]).require_success()


def test_training_and_programs_meet_where_a_node_s_own_name_means_loopback(desk: Desk) -> None:
    from hpcrun.specs.shipped import shipped_file

    shutil.copy(shipped_file("jobs/demo.yaml"), desk.path)
    (desk.path / "own.py").write_text(TORCH)
    with own_names(desk, n01="127.0.1.1 n01", n02="127.0.0.1 localhost n02"):
        run = desk.submit("demo.yaml", *DEMO, "resources.nodes=2", "resources.time=10m", "resources.mem=4G")
        own = desk.submit("name=torch", "resources.nodes=2", "--", "python", str(desk.path / "own.py"))
        assert desk.ended(run)["status"] == "done", story(run)
        assert desk.ended(own)["status"] == "done", story(own)
    assert len(losses(run)) == 3
    assert {one["node"] for one in records(run, "attempts/1/ranks/rank-?.json")} == {"n01", "n02"}
    assert [log.splitlines()[-1] for log in logs_of(own)] == ["0 2 3.0", "1 2 3.0"]


def test_a_foreign_torch_script_meets_over_nodes(desk: Desk) -> None:
    (desk.path / "own.py").write_text(TORCH)
    run = desk.submit("name=torch", "resources.nodes=3", "--", "python", str(desk.path / "own.py"))
    assert desk.ended(run)["status"] == "done", story(run)
    # torch may complain before about names that do not resolve.
    assert [log.splitlines()[-1] for log in logs_of(run)] == ["0 3 6.0", "1 3 6.0", "2 3 6.0"]


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_a_rank_that_is_killed_on_another_node_is_named_and_takes_all_with_it(
    desk: Desk, launcher: str
) -> None:
    desk.profile(f"mpi: {{launcher: {launcher}}}\n")
    body = 'if [ "$RANK" = 3 ]; then sleep 1; kill -9 "$PPID"; fi; sleep 300'
    run = desk.submit("name=k", "resources.nodes=2", "resources.ranks_per_node=2", "--", "sh", "-c", body)
    ended = desk.ended(run)
    record = records(run, "attempts/1/ranks/rank-3.json")[0]
    assert ended["message"].startswith(f"rank 3 on node n02 (pid {record['pid']}) "), story(run)
    assert ended["exit_code"] == 5
    desk.until(lambda: "sleep 300" not in everything(desk), run)


def everything(desk: Desk) -> str:
    """The command lines of all processes of the first two nodes."""
    return "".join(desk.lab.node(name).run(["ps", "-e", "-o", "args"]).stdout for name in ("n01", "n02"))


def test_a_program_that_fails_is_told_with_its_code_and_its_log(desk: Desk) -> None:
    run = desk.submit("name=f", "resources.nodes=2", "--", "sh", "-c", 'sleep 0.2; exit "$((RANK * 7))"')
    ended = desk.ended(run)
    log = run.attempt(1).log(1)
    assert ended["message"] == f"rank 1 on node n02: the command ended with exit code 7; log: {log}"
    status = json.loads(desk.hpcrun("status", run.id, "--json", code=None).stdout)
    assert (status["state"], status["exit_code"]) == ("failed", 5)


def test_training_inside_an_allocation_spreads_over_its_nodes(desk: Desk) -> None:
    before = ("salloc", "-N3", "--ntasks-per-node=2", "--mem=2G")
    done = desk.hpcrun("train", "parallel.tp=6", "name=here", "--", "sh", "-c", SAY, before=before)
    (run,) = (RunDir(path) for path in desk.runs.iterdir())
    assert "ended done" in done.stdout
    assert [line.split()[5] for line in logs_of(run)] == ["n01", "n01", "n02", "n02", "n03", "n03"]


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_ranks_on_other_nodes_do_not_inherit_what_is_unset_or_denied(desk: Desk, launcher: str) -> None:
    desk.profile(f"mpi: {{launcher: {launcher}}}\nenv_deny: [TRITON_CACHE_DIR]\n")
    set_here = ("env", "TRITON_CACHE_DIR=/home", "CUDA_CACHE_PATH=/home", "XDG_CACHE_HOME=/home", "PLAIN=1")
    words = ("env.XDG_CACHE_HOME=null", "env_deny=[CUDA_*]", "resources.nodes=2", "name=clean", "--", "env")
    desk.hpcrun("train", *words, before=(*set_here, "salloc", "-N2"))
    (run,) = (RunDir(path) for path in desk.runs.iterdir())
    for rank in (0, 1):
        given = {line.partition("=")[0] for line in run.attempt(1).log(rank).read_text().splitlines()}
        assert "PLAIN" in given
        assert not {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"} & given


def test_a_job_that_wants_more_nodes_than_there_are_is_told_so(desk: Desk) -> None:
    words = ("resources.nodes=3", "name=much", "--", "true")
    done = desk.hpcrun("train", *words, before=("salloc", "-N2"), code=2)
    assert "3 ranks with 1 on each node need 3 nodes, but there are 2: n01,n02" in done.stderr
    alone = desk.hpcrun("train", *words, code=2)
    assert "3 nodes are asked for, but this is one machine; use hpcrun submit" in alone.stderr


def test_ranks_that_do_not_meet_through_pmi_are_caught(desk: Desk) -> None:
    desk.profile("mpi: {launcher: srun, pmi: none}\n")
    (desk.path / "job.yaml").write_text("model: tiny\ndata: {text: python-stdlib, pattern: 'a*.py'}\n")
    run = desk.submit("job.yaml", "parallel.dp_shard=2", "resources.nodes=2", "data.seq_len=32")
    ended = desk.ended(run)
    assert ended["exit_code"] == 3, story(run)
    assert "the launcher started 2 ranks, but MPI sees a world of 1" in ended["message"]


APPTAINER = """#!/bin/bash
# Stands in for the container runtime: takes its options off and runs the rest.
shift
while [[ $1 == -* ]]; do
    case $1 in --nv) shift ;; *) shift 2 ;; esac
done
image=$1
shift
export IN_IMAGE=$image
exec "$@"
"""


def test_ranks_run_in_the_container_and_the_supervisor_does_not(desk: Desk) -> None:
    tool = desk.path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(APPTAINER)
    tool.chmod(0o755)
    desk.profile(f'container: {{runtime: apptainer}}\nsetup: ["export PATH={tool.parent}:$PATH"]\n')
    words = ("name=c", "resources.nodes=2", "container.image=/images/x.sif", "--", "sh", "-c")
    run = desk.submit(*words, 'echo "$RANK $IN_IMAGE"')
    assert desk.ended(run)["status"] == "done", story(run)
    assert logs_of(run) == ["0 /images/x.sif", "1 /images/x.sif"]


def test_a_secret_reaches_the_ranks_and_nothing_else(desk: Desk) -> None:
    secret = desk.path / "token"
    secret.write_text("swordfish-4711\n")
    secret.chmod(0o600)
    body = 'printf %s "$TOKEN" | cksum; sleep 1'
    run = desk.submit("name=s", "resources.nodes=2", f"secrets.TOKEN={secret}", "--", "sh", "-c", body)
    shown = desk.lab.run(["scontrol", "show", "job", "-dd"]).stdout + everything(desk)
    assert desk.ended(run)["status"] == "done", story(run)
    assert len(set(logs_of(run))) == 1
    assert not logs_of(run)[0].startswith("4294967295 0")
    written = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(b"swordfish" in content for content in [*written, shown.encode()])


def test_a_python_that_lacks_us_is_said_to(desk: Desk, tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text('#!/bin/sh\nexec /usr/bin/env -u PYTHONPATH python3 -S -E "$@"\n')
    bare.chmod(0o755)
    run = desk.submit("name=p", f"python={bare}", "--", "true")
    desk.hpcrun("wait", run.id, "--timeout", "60", code=None)
    told = desk.hpcrun("status", run.id, code=None).stdout
    assert "hpcrun" in told
    assert "No module named" in told
