"""Nodes and rank order in a real Slurm of two racks: what was planned takes effect, or is caught."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from hpcrun.fabric.node_topology import format_cpu_list
from hpcrun.specs.rundir import RunDir
from tests.lab.desk import Desk, records, story

# In this table the racks alternate in Slurm's order of the nodes.
TABLE = "topology: {source: file, file: FILE}\n"
TREE = """\
SwitchName=a Nodes=n[01,03,05,07]
SwitchName=b Nodes=n[02,04,06,08]
SwitchName=top Switches=a,b
"""
OUR_ORDER = ["n01", "n03", "n02", "n04"]
SAY = ("--", "sh", "-c", "hostname")


def hosts(run: RunDir) -> list[str]:
    """Where the ranks really were, by their own word."""
    return [path.read_text().strip() for path in sorted(run.path.glob("attempts/1/logs/rank-*.log"))]


def alternating(desk: Desk, more: str = "") -> None:
    """A profile that says so."""
    (desk.path / "tree.conf").write_text(TREE)
    desk.profile(TABLE.replace("FILE", str(desk.path / "tree.conf")) + more)


@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_ranks_stand_in_our_order_and_not_in_slurm_s(desk: Desk, launcher: str) -> None:
    alternating(desk, f"mpi: {{launcher: {launcher}}}\n")
    pin = ("resources.placement=pin", "resources.nodelist=n[01-04]", "resources.nodes=4")
    run = desk.submit("name=order", *pin, *SAY)
    assert desk.ended(run)["status"] == "done", story(run)
    placement = records(run, "attempts/1/placement.json")[0]
    assert placement["ranks"] == hosts(run) == OUR_ORDER
    assert placement["method"] == "exact"
    assert "crosses the spine" in " ".join(placement["why"])


def test_placement_none_keeps_slurm_s_order(desk: Desk) -> None:
    alternating(desk)
    words = ("resources.placement=none", "resources.exclude=n[05-08]", "resources.nodes=4")
    run = desk.submit("name=none", *words, *SAY)
    assert desk.ended(run)["status"] == "done", story(run)
    assert hosts(run) == ["n01", "n02", "n03", "n04"]


# Stands in for a launcher that does as it likes.
WILFUL = """#!/bin/bash
words=()
for word; do [[ $word == --distribution=* ]] || words+=("$word"); done
unset SLURM_HOSTFILE
exec /usr/bin/srun "${words[@]}"
"""


def with_srun(desk: Desk, script: str) -> str:
    """Lines of a profile that have jobs use this script for srun."""
    tool = desk.path / "bin" / "srun"
    tool.parent.mkdir()
    tool.write_text(script)
    tool.chmod(0o755)
    return f'setup: ["export PATH={tool.parent}:$PATH"]\n'


@pytest.mark.parametrize("kind", ["command", "train"])
def test_a_rank_on_the_wrong_node_is_caught(desk: Desk, kind: str) -> None:
    alternating(desk, f"mpi: {{launcher: srun}}\n{with_srun(desk, WILFUL)}")
    pin = ("resources.placement=pin", "resources.nodelist=n[01-04]", "resources.nodes=4", "name=wrong")
    if kind == "command":
        run = desk.submit(*pin, *SAY)
        told = "rank [12] on node n0[23]: is to stand on n0[32], and the launcher has put it on n0[23]"
    else:
        data = ("data.text=python-stdlib", "data.pattern=a*.py", "data.seq_len=32")
        (desk.path / "job.yaml").write_text("model: tiny\n")
        run = desk.submit("job.yaml", "parallel.dp_shard=2", "parallel.pp=2", *pin, *data, "train.steps=2")
        told = "rank 1: node should be n03, is n02"
    ended = desk.ended(run)
    assert ended["exit_code"] == 3, story(run)
    assert re.search(told, ended["message"])


# Gives the agent of one node, and with it the job's share there, one CPU alone.
CONFINING = """#!/bin/bash
words=()
for word; do
    [[ $word == */python* && "$*" == *--nodelist=n02\\ *" _agent "* ]] && words+=(taskset -c LAST)
    words+=("$word")
done
exec /usr/bin/srun "${words[@]}"
"""
MINE = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(MINE) < 2 or not shutil.which("taskset"), reason="needs two CPUs, and taskset")
@pytest.mark.parametrize("launcher", ["hydra", "srun"])
def test_ranks_are_bound_as_the_placement_says(desk: Desk, launcher: str) -> None:
    path = with_srun(desk, CONFINING.replace("LAST", str(MINE[-1])))
    alternating(desk, f"mpi: {{launcher: {launcher}}}\n{path}")
    pin = ("resources.placement=pin", "resources.nodelist=n[01-02]", "resources.nodes=2")
    see = "sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status; echo $HPCRUN_CPUS"
    run = desk.submit("name=bound", *pin, "resources.ranks_per_node=2", "--", "sh", "-c", see)
    assert desk.ended(run)["status"] == "done", story(run)
    placement = records(run, "attempts/1/placement.json")[0]
    share = {"n01": format_cpu_list(MINE), "n02": str(MINE[-1])}
    for rank, (node, binding) in enumerate(zip(placement["ranks"], placement["bindings"], strict=True)):
        assert binding["cpus"] == share[node]
        said = run.attempt(1).log(rank).read_text().splitlines()
        assert said == [share[node], share[node]], story(run)


def test_few_switches_are_asked_for_and_given(desk: Desk) -> None:
    desk.lab.run(
        ["sbatch", "-N1", "-w", "n01", "--exclusive", "-o/dev/null", "--wrap=sleep 60"]
    ).require_success()
    run = desk.submit("name=near", "resources.nodes=4", *SAY)
    assert "#SBATCH --switches=1@10:00\n" in run.script.read_text().replace("00:10:00", "10:00")
    assert desk.ended(run)["status"] == "done", story(run)
    assert sorted(hosts(run)) == ["n05", "n06", "n07", "n08"]


def test_a_bad_node_and_a_drained_one_are_avoided(desk: Desk) -> None:
    desk.hpcrun("fabric", "avoid", "n02", "--reason", "throws ECC errors")
    drain = ["scontrol", "update", "nodename=n03", "state=drain", "reason=test"]
    desk.lab.run(drain).require_success()
    try:
        shown = json.loads(desk.hpcrun("fabric", "show", "--json").stdout)
        assert (shown["states"]["n02"], shown["states"]["n03"]) == ("bad", "out of service")
        done = desk.hpcrun("submit", "name=bad", "resources.nodes=4", *SAY)
        assert "bad nodes: n02: throws ECC errors" in done.stderr
        run = RunDir(desk.runs / done.stdout.strip())
        assert "#SBATCH --exclude=n02\n" in run.script.read_text()
        assert desk.ended(run)["status"] == "done", story(run)
        assert not {"n02", "n03"} & set(hosts(run))
    finally:
        desk.lab.run(["scontrol", "update", "nodename=n03", "state=resume"]).require_success()


def test_the_network_is_shown_and_a_job_is_placed_in_it(desk: Desk) -> None:
    tree = desk.hpcrun("fabric", "show").stdout
    assert "leaf1" in tree
    assert "n[01-04]" in tree
    assert desk.hpcrun("fabric", "free").stdout.splitlines() == [
        "leaf1  4 free: n[01-04]",
        "leaf2  4 free: n[05-08]",
    ]
    words = ("resources.nodes=4", "parallel.dp_shard=2", "parallel.pp=2", "--", "true")
    placed = json.loads(desk.hpcrun("fabric", "place", "name=x", "--json", *words).stdout)
    assert (placed["leaves"], len(placed["placement"]["nodes"])) == (1, 4)
    text = desk.hpcrun("fabric", "place", "name=x", *words).stdout
    assert "from 1 leaf" in text


def test_a_captured_topology_can_be_replayed_anywhere(desk: Desk, tmp_path: Path) -> None:
    captured = tmp_path / "topology.txt"
    captured.write_text(desk.lab.run(["scontrol", "show", "topology"]).stdout)
    tree = desk.hpcrun("fabric", "show", "--topology", str(captured)).stdout
    assert "leaf2" in tree
