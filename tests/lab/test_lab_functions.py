"""Python functions as real Slurm jobs: results, tracebacks, tasks on several nodes, arrays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cluster import Lab

HEAD = """
import json, os, sys, time
from pathlib import Path
import hpcrun

def say(**values):
    print(json.dumps(values, default=str))

def look(names):
    if "RANK" in names:
        print("rank", os.environ["RANK"])
        return [os.uname().nodename, *(os.environ[name] for name in names)]
    return [os.environ.get(name) for name in names]
"""
SETUP = """{% extends "shipped/function.sbatch.j2" %}
{% block setup %}
{{ super() }}
export FROM_SITE=yes
{% endblock %}
"""
PROFILE = """\
name: lab
partitions: {main: {default: true, max_time: 1-00:00:00, mem_per_node: 64000M}}
env: {FromProfile: "1"}
"""

Program = Callable[..., dict[str, Any]]


@pytest.fixture
def program(lab: Lab, tmp_path: Path, runs_root: Path) -> Program:
    """Run lines of a user's program on the login node, and get what it says at its end."""
    site = tmp_path / "site"
    (site / "profiles").mkdir(parents=True)
    (site / "profiles" / "lab.yaml").write_text(PROFILE, encoding="utf-8")
    (site / "function.sbatch.j2").write_text(SETUP, encoding="utf-8")
    environ = {"HPCRUN_ROOT": str(runs_root), "HPCRUN_SITE": str(site), "XDG_CONFIG_HOME": str(tmp_path)}

    def run(lines: str, **env: str) -> dict[str, Any]:
        script = tmp_path / "program.py"
        script.write_text(HEAD + lines, encoding="utf-8")
        done = lab.run([sys.executable, str(script)], env=environ | env, timeout_s=120)
        assert done.exit_code == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def test_a_result_comes_back(program: Program) -> None:
    # As from inside of a job: none of it may reach the new one.
    inside = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}
    inside |= {"SLURM_MEM_PER_NODE": "999999999", "PMIX_RANK": "5"}
    inside |= {"BASH_FUNC_module%%": "() { exit 9; }", "SLURM_CPUS_PER_TASK": "99"}
    found = program(
        """
os.environ.pop("LC_ALL")  # which is how the lab runs commands
names = ["FromProfile", "MiXed", "FROM_SITE", "SLURM_ARRAY_JOB_ID", "PMIX_RANK", "LC_ALL", "mine"]
spec = {"name": "look", "env": {"MiXed": "a 'b'"}, "resources": {"time": "5m", "mem": "100M"}}
job = hpcrun.submit(look, names, spec=spec)
say(result=job.result(), script=job.files.script.read_text(), state=job.state)
""",
        mine="kept",
        **inside,
    )
    assert found["result"] == ["1", "a 'b'", "yes", None, None, None, "kept"]
    for line in ("job-name=look", "partition=main", "time=5", "mem=100M", "no-requeue"):
        assert f"#SBATCH --{line}\n" in found["script"]


def test_a_traceback_comes_back(program: Program) -> None:
    found = program(
        """
def deep():
    raise ValueError("no such luck")
job = hpcrun.submit(deep)
say(error=str(job.exception()))
"""
    )
    assert "ValueError: no such luck" in found["error"]
    assert "in deep" in found["error"]


def test_every_task_on_every_node_has_a_result(program: Program) -> None:
    found = program(
        """
names = ["RANK", "LOCAL_RANK"]
job = hpcrun.submit(look, names, spec={"resources": {"nodes": 2, "ranks_per_node": 2}})
results = job.results()
say(results=results, logs=[job.stdout(k) for k in range(4)])
"""
    )
    assert [(rank, local) for _, rank, local in found["results"]] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    nodes = [node for node, _, _ in found["results"]]
    assert (nodes[0], nodes[2]) == (nodes[1], nodes[3])
    assert nodes[0] != nodes[2]
    assert found["logs"] == [f"rank {k}\n" for k in range(4)]


def test_an_array_keeps_the_site_s_template(program: Program) -> None:
    found = program(
        """
def both(a, b):
    return [a * b, *look(["FROM_SITE", "SLURM_ARRAY_TASK_ID"])]
jobs = hpcrun.submit_array(both, [2, 3, 4], [10, 20, 30])
results = [job.result() for job in jobs]
say(results=results, ids=[job.job_id for job in jobs], runs=[job.files.id for job in jobs])
"""
    )
    assert found["results"] == [[20, "yes", "0"], [60, "yes", "1"], [120, "yes", "2"]]
    number = found["ids"][0].partition("_")[0]
    assert found["ids"] == [f"{number}_{k}" for k in range(3)]
    assert [one.partition("/")[2] for one in found["runs"]] == ["0", "1", "2"]


def test_a_function_that_is_asked_to_stop_ends_in_order(program: Program) -> None:
    found = program(
        """
def work(place):
    try:
        Path(place, "up").touch()
        time.sleep(600)
    finally:
        Path(place, "closed").touch()
place = Path(os.environ["HPCRUN_ROOT"])
job = hpcrun.submit(work, str(place))
while not (place / "up").exists():
    time.sleep(0.1)
state = job.state
job.cancel()
say(error=str(job.exception()), states=[state, job.state], closed=(place / "closed").exists())
job.cancel()
"""
    )
    assert found["states"] == ["running", "interrupted"]
    assert "stopped by SIGTERM, as asked, without a save" in found["error"]
    assert found["closed"]


def test_one_call_that_fails_fails_alone_and_only_it_is_made_again(program: Program, lab: Lab) -> None:
    found = program(
        """
def work(number, place):
    if number == 1 and not Path(place, "mended").exists():
        os._exit(9)
    return number
place = Path(os.environ["HPCRUN_ROOT"])
jobs = hpcrun.submit_array(work, [0, 1, 2], [str(place)] * 3)
errors = [str(job.exception()) for job in jobs]
Path(place, "mended").touch()
import subprocess
words = [sys.executable, "-m", "hpcrun", "submit", "--only-failed", "--resume"]
again = subprocess.run([*words, jobs[0].files.sweep_of_element.id], capture_output=True, text=True)
say(errors=errors, again=again.stderr + again.stdout, results=[job.result() for job in jobs])
"""
    )
    assert (found["errors"][0], found["errors"][2]) == ("None", "None")
    assert "is failed: rank 0 on node" in found["errors"][1]
    assert "ended with exit code 9" in found["errors"][1]
    assert found["results"] == [0, 1, 2], found["again"]


def test_a_function_that_can_save_goes_on_as_often_as_its_budget_says(program: Program) -> None:
    found = program(
        """
import subprocess
class Counter:
    def __call__(self, start, place):
        Path(place, f"up-{start}").touch()
        time.sleep(600)

    def checkpoint(self, start, place):
        from submitit.helpers import DelayedSubmission
        return DelayedSubmission(self, start + 7, place)

place = Path(os.environ["HPCRUN_ROOT"])
spec = {"resources": {"time": "2m"}, "retry": {"time_limit": 1, "grace": "30s"}}
job = hpcrun.submit(Counter(), 0, str(place), spec=spec)
for start in (0, 7):
    while not (place / f"up-{start}").exists():
        time.sleep(0.1)
    # As Slurm does before the limit.
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], check=True)
say(error=str(job.exception()), script=job.files.script.read_text(), attempts=len(job.files.attempts()))
"""
    )
    assert "#SBATCH --requeue\n" in found["script"]
    assert found["attempts"] == 2
    assert " is saved: saved; continue with: hpcrun submit --resume function-" in found["error"]
    assert "not tried again: retry.time_limit allows 1, and 1 have been used" in found["error"]


def test_a_refusal_is_told_in_sbatch_s_own_words_and_nothing_is_left(program: Program) -> None:
    found = program(
        """
from hpcrun.errors import HpcrunError
errors = []
for resources in ({"partition": "nowhere"}, {"reservation": "gone"}):
    try:
        hpcrun.submit(dict, spec={"resources": resources})
    except HpcrunError as error:
        errors.append(f"{type(error).__name__}: {error}")
say(errors=errors, left=os.listdir(os.environ["HPCRUN_ROOT"]))
"""
    )
    ahead, refused = found["errors"]
    assert "SpecError: spec resources.partition: nowhere is not a partition of this cluster" in ahead
    assert "SiteError: sbatch did not take the job: sbatch: error: " in refused
    assert "Requested reservation is invalid" in refused
    assert found["left"] == []


def test_nodes_that_are_gone_do_not_stop_a_job(program: Program) -> None:
    found = program(
        """
job = hpcrun.submit(dict, spec={"resources": {"exclude": "n[01-02],gone7"}})
job.result()
say(script=job.files.script.read_text(), nodes=job.files.attempt(1).hosts.read_text().split())
"""
    )
    assert "#SBATCH --exclude=n[01-02]\n" in found["script"].replace("\\", "")
    assert not {"n01", "n02"} & set(found["nodes"])
