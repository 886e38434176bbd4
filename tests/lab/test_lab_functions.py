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
from hpcrun.slurm.executor import TemplateJob

def say(**values):
    print(json.dumps(values, default=str))

def look(names):
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
    inside |= {"SBATCH_GRES": "gpu:none:9", "SLURM_MEM_PER_NODE": "999999999", "PMIX_RANK": "5"}
    inside |= {"BASH_FUNC_module%%": "() { exit 9; }", "SLURM_CPUS_PER_TASK": "99"}
    found = program(
        """
os.environ.pop("LC_ALL")  # which is how the lab runs commands
names = ["FromProfile", "MiXed", "FROM_SITE", "SLURM_ARRAY_JOB_ID", "PMIX_RANK", "LC_ALL", "mine"]
spec = {"name": "look", "env": {"MiXed": "a 'b'"}, "resources": {"time": "5m", "mem": "100M"}}
job = hpcrun.submit(look, names, spec=spec)
say(result=job.result(), script=job.paths.submission_file.read_text(), state=job.state)
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
names = ["SLURM_PROCID", "SLURMD_NODENAME", "SLURM_LOCALID"]
job = hpcrun.submit(look, names, spec={"resources": {"nodes": 2, "ranks_per_node": 2}})
results = job.results()
say(results=results, one=job.task(3).result(), logs=[job.task(k).stdout() is not None for k in range(4)])
"""
    )
    assert [(rank, local) for rank, _, local in found["results"]] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    nodes = [node for _, node, _ in found["results"]]
    assert (nodes[0], nodes[2]) == (nodes[1], nodes[3])
    assert nodes[0] != nodes[2]
    assert (found["one"], found["logs"]) == (found["results"][3], [True] * 4)


def test_an_array_keeps_the_site_s_template(program: Program) -> None:
    found = program(
        """
def both(a, b):
    return [a * b, *look(["FROM_SITE", "SLURM_ARRAY_TASK_ID"])]
jobs = hpcrun.submit_array(both, [2, 3, 4], [10, 20, 30])
results = [job.result() for job in jobs]
say(results=results, ids=[job.job_id for job in jobs], log=jobs[2].stdout() is not None)
"""
    )
    assert found["results"] == [[20, "yes", "0"], [60, "yes", "1"], [120, "yes", "2"]]
    number = found["ids"][0].partition("_")[0]
    assert found["ids"] == [f"{number}_{k}" for k in range(3)]
    assert found["log"] is True


def test_a_job_can_be_cancelled(program: Program) -> None:
    found = program(
        """
TemplateJob._wait_for_result_s = 0
job = hpcrun.submit(time.sleep, 600)
while job.get_info()["State"] != "RUNNING":
    time.sleep(0.1)
job.cancel()
job.cancel()
say(error=str(job.exception()), state=job.state)
"""
    )
    assert found["state"] == "CANCELLED"
    assert "has not produced any output (state: CANCELLED)" in found["error"]


def test_a_job_that_is_killed_is_not_waited_for(program: Program) -> None:
    found = program(
        """
TemplateJob._wait_for_result_s = 0
job = hpcrun.submit(os._exit, 9)
say(error=str(job.exception()), state=job.state)
"""
    )
    assert found["state"] == "FAILED"
    assert "state: FAILED" in found["error"]


def test_a_job_that_slurm_forgot_is_not_waited_for(program: Program) -> None:
    found = program(
        """
TemplateJob._wait_for_result_s = 0
folder = Path(os.environ["HPCRUN_ROOT"])
folder.mkdir()
say(error=str(TemplateJob(folder, "99999").exception()))
"""
    )
    assert "(state: VANISHED)" in found["error"]


def test_a_function_that_can_save_itself_goes_on_after_a_time_limit(program: Program) -> None:
    found = program(
        """
class Counter:
    def __call__(self, start, go):
        if start:
            return [start, os.environ["SLURM_RESTART_COUNT"]]
        Path(go).touch()
        time.sleep(600)

    def checkpoint(self, start, go):
        from submitit.core.utils import DelayedSubmission
        return DelayedSubmission(self, start + 7, go)

go = Path(os.environ["HPCRUN_ROOT"]) / "go"
job = hpcrun.submit(Counter(), 0, str(go))
while not go.exists():
    time.sleep(0.1)
job._interrupt(timeout=True)
say(result=job.result(), script=job.paths.submission_file.read_text())
"""
    )
    assert found["result"] == [7, "1"]
    assert "#SBATCH --requeue\n" in found["script"]


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
    assert "SpecError: spec resources.partition: nowhere is no partition of this cluster" in ahead
    assert "SiteError: sbatch did not take the job: sbatch: error: " in refused
    assert "Requested reservation is invalid" in refused
    assert found["left"] == []


def test_nodes_that_are_gone_do_not_stop_a_job(program: Program) -> None:
    found = program(
        """
job = hpcrun.submit(dict, spec={"resources": {"exclude": "n[01-02],gone7"}})
job.result()
say(script=job.paths.submission_file.read_text(), nodes=job.get_info()["NodeList"])
"""
    )
    assert "#SBATCH --exclude=n[01-02]\n" in found["script"].replace("\\", "")
    assert found["nodes"] not in ("n01", "n02")
