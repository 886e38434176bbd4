"""`hpcrun submit` on a real Slurm: commands, sweeps, dependencies, a site's template, what cannot be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrun.process import CompletedCommand
from hpcrun.specs.rundir import RunDir
from tests.lab.cluster import Lab

Hpcrun = Callable[..., CompletedCommand]
"""The command on the lab's login node, with a site, a root and a working directory of this test."""


@pytest.fixture
def hpcrun(lab: Lab, tmp_path: Path) -> Hpcrun:
    site = {
        "HPCRUN_ROOT": str(tmp_path / "runs"),
        "HPCRUN_SITE": str(tmp_path / "site"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }

    def call(*words: str, timeout_s: float = 120, env: Mapping[str, str] = {}) -> CompletedCommand:
        own = {**site, **env}
        return lab.run(["python", "-m", "hpcrun", *words], env=own, cwd=tmp_path, timeout_s=timeout_s)

    return call


def submitted(done: CompletedCommand, tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / done.require_success().stdout.splitlines()[0])


def ended(runs: list[RunDir], within_s: float = 240) -> list[dict[str, Any]]:
    """The exit records of runs, once all are there."""
    deadline = time.monotonic() + within_s
    while True:
        records = [run.read_exit() for run in runs]
        if all(record is not None for record in records):
            return [record for record in records if record is not None]
        assert time.monotonic() < deadline, [run.id for run in runs if run.read_exit() is None]
        time.sleep(0.2)


def test_a_command_over_two_nodes_is_followed_to_its_end(hpcrun: Hpcrun, tmp_path: Path) -> None:
    words = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK on $(hostname), of $MASTER_ADDR; test $RANK != 3"
    asked = ["resources.nodes=2", "resources.ranks_per_node=2", "resources.time=5m"]
    done = hpcrun("submit", *asked, "--follow", "--", "sh", "-c", words)
    assert done.exit_code == 5, done.stderr
    run = RunDir(tmp_path / "runs" / done.stdout.splitlines()[0])
    assert "rank 0 of 4, 0 on n01, of 10.77.1.1\n" in done.stdout
    logs = [run.attempt(1).log(rank).read_text() for rank in range(4)]
    assert [text.splitlines()[0] for text in logs] == [
        "rank 0 of 4, 0 on n01, of 10.77.1.1",
        "rank 1 of 4, 1 on n01, of 10.77.1.1",
        "rank 2 of 4, 0 on n02, of 10.77.1.1",
        "rank 3 of 4, 1 on n02, of 10.77.1.1",
    ]


def test_a_script_by_hand_and_what_a_job_does_not_inherit(hpcrun: Hpcrun, tmp_path: Path, lab: Lab) -> None:
    environ = {"TRITON_CACHE_DIR": "/home", "XDG_CACHE_HOME": "/home", "PLAIN": "mine"}
    (tmp_path / "job.yaml").write_text(
        "name: by-hand\nresources: {time: 5m}\nenv_deny: [TRITON_*]\nenv: {XDG_CACHE_HOME: null}\n"
        "command: [env]\n"
    )
    done = hpcrun("submit", "job.yaml", "--follow", env=environ).require_success()
    run = RunDir(tmp_path / "runs" / done.stdout.splitlines()[0])
    given = run.attempt(1).log(0).read_text().splitlines()
    assert "PLAIN=mine" in given
    assert not [line for line in given if line.startswith(("TRITON_CACHE_DIR=", "XDG_CACHE_HOME="))]
    before = run.read_exit()
    job = lab.run(["sbatch", "--parsable", str(run.script)]).require_success().stdout.strip()
    log = run.submitit / f"{job}_0_log.err"

    def is_over() -> bool:
        return "JobState=FAILED Reason=NonZeroExitCode" in lab.run(["scontrol", "show", "job", job]).stdout

    lab.wait_until(is_over, 60, lambda: lab.run(["scontrol", "show", "job", job]).stdout)
    (line,) = log.read_text().splitlines()
    assert f"job {job} was not submitted by hpcrun" in line
    assert "ExitCode=2:0" in lab.run(["scontrol", "show", "job", job]).stdout
    assert run.read_exit() == before
    assert len(run.attempts()) == 1


def test_forty_elements_and_the_three_that_failed_again(hpcrun: Hpcrun, tmp_path: Path, lab: Lab) -> None:
    # Three elements find what they need only the second time.
    text = f'if [ "$N" -gt 36 ] && ! [ -e {tmp_path}/mended ]; then exit 7; fi; echo element $N'
    job = {
        "name": "forty",
        "command": ["sh", "-c", text],
        "resources": {"time": "5m", "mem": "200M"},
        "sweep": {"grid": {"env.N": [str(number) for number in range(40)]}, "throttle": 8},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run = submitted(hpcrun("submit", "job.yaml"), tmp_path)
    elements = [run.element(number) for number in range(40)]
    assert [one["status"] for one in ended(elements)] == ["done"] * 37 + ["failed"] * 3
    assert elements[12].attempt(1).log(0).read_text() == "element 12\n"
    (tmp_path / "mended").touch()
    again = hpcrun("submit", "--resume", run.id, "--only-failed")
    assert again.stderr.splitlines()[-1].endswith("[37-39%8]"), again.stderr
    assert submitted(again, tmp_path) == run
    assert [one["status"] for one in ended(elements)] == ["done"] * 40
    assert [len(one.attempts()) for one in (elements[0], elements[36], elements[37])] == [1, 1, 2]


def test_a_run_waits_for_another(hpcrun: Hpcrun, tmp_path: Path, lab: Lab) -> None:
    sleeps = ["resources.time=5m", "--", "sh", "-c", f"while ! [ -e {tmp_path}/go ]; do sleep 0.1; done"]
    first = submitted(hpcrun("submit", "name=first", *sleeps), tmp_path)
    second = submitted(hpcrun("submit", "name=second", "--after", first.id, *sleeps), tmp_path)
    shown = lab.run(["squeue", "-h", "-n", "second", "-o", "%T %r"]).require_success().stdout
    assert shown == "PENDING Dependency\n"
    (tmp_path / "go").touch()
    ends = [record["ended"] for record in ended([first, second])]
    assert ends[0] < ends[1]


def test_a_site_changes_one_block_of_every_job(hpcrun: Hpcrun, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    template = site / "base.sbatch.j2"
    block = "{% block setup %}\n{{ super() }}\nexport SITE_SAYS=hello\n{% endblock %}\n"
    template.write_text('{% extends "shipped/base.sbatch.j2" %}\n' + block)
    done = hpcrun(
        "submit", "resources.time=5m", "--follow", "--", "sh", "-c", "echo the site says $SITE_SAYS"
    )
    assert "the site says hello\n" in done.require_success().stdout
    template.write_text(template.read_text().replace("hello", "{{ helo }}"))
    broken = hpcrun("submit", "resources.time=5m", "--", "true")
    assert broken.exit_code == 2
    assert f"{template}:4: 'helo' is undefined" in broken.stderr


def test_what_can_never_start_is_told(hpcrun: Hpcrun, tmp_path: Path, lab: Lab) -> None:
    asked = ["resources.time=5m", "--", "false"]
    for override, words in {
        "resources.nodes=9": "resources.nodes: 9 can never start: partition main has 8",
        "resources.mem=65G": "resources.mem: 65G can never start: the nodes of partition main have 64000M",
        "resources.gpus_per_node=5": "5 GPUs a node can never start: the nodes of partition main have 4",
        "resources.partition=gone": "gone is not a partition of this cluster; there are: main",
        "resources.constraint=h100": "h100 can never start",
    }.items():
        done = hpcrun("submit", override, *asked)
        assert (done.exit_code, done.stdout) == (2, ""), override
        assert words in done.stderr
    refused = hpcrun("submit", "resources.reservation=gone", *asked)
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "Requested reservation is invalid" in refused.stderr
    assert not list((tmp_path / "runs").iterdir())
    failing = submitted(hpcrun("submit", "name=failing", "resources.nodes=8", *asked), tmp_path)
    waiting = hpcrun("submit", "--after", failing.id, *asked)
    ended([failing])
    assert waiting.exit_code in (0, 2), "it may have failed before it was waited for"
    late = hpcrun("submit", "--after", failing.id, *asked)
    assert late.exit_code == 2
    assert "it is failed, so this would never start" in late.stderr
    lab.run(["scancel", "--user=root"])


WRAPPER = """#!/bin/bash
/usr/bin/sbatch "$@"
kill -INT $PPID
exec sleep 60
"""


def test_an_interrupt_before_the_answer_leaves_no_job(lab: Lab, tmp_path: Path) -> None:
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    env = {
        "HPCRUN_ROOT": str(tmp_path / "runs"),
        "HPCRUN_SITE": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    words = ["submit", "name=orphan", "resources.time=5m", "--", "sleep", "300"]
    command = f'PATH={wrapper.parent}:$PATH exec python -m hpcrun "$@"'
    done = lab.run(["sh", "-c", command, "sh", *words], env=env, cwd=tmp_path)
    assert done.exit_code == 130, done.stderr
    assert "was cancelled" in done.stderr
    assert lab.run(["squeue", "-h", "-n", "orphan", "-t", "pending,running"]).require_success().stdout == ""
    assert list((tmp_path / "runs").iterdir()) == []


ASK = """
import sys
from hpcrun.slurm.queue import JobQuery, query_jobs
asked = [JobQuery(int(sys.argv[1]), run=run) for run in sys.argv[2:]]
answers = query_jobs(asked)
print(*(answers[one].record is not None for one in asked))
"""


def test_a_job_is_known_by_its_run_and_not_by_its_number(hpcrun: Hpcrun, lab: Lab, tmp_path: Path) -> None:
    run = submitted(hpcrun("submit", "resources.time=5m", "--", "sleep", "60"), tmp_path)
    job = json.loads(run.job.read_text())["submissions"][0]["job"]
    shown = lab.run(["python", "-c", ASK, str(job), run.id, "other-run"]).require_success().stdout
    assert shown == "True False\n"
    lab.run(["scancel", str(job)]).require_success()


@pytest.mark.parametrize("kind", ["train", "command", "sweep"])
def test_slurm_accepts_what_a_dry_run_prints(kind: str, hpcrun: Hpcrun, tmp_path: Path, lab: Lab) -> None:
    job: dict[str, Any] = {
        "resources": {"time": "10m", "nodes": 2, "mem": "1G", "gpus_per_node": 2, "exclusive": True}
    }
    job |= {
        "env": {"ODD": 'it\'s "$HOME" \n'},
        "resources": job["resources"] | {"sbatch": {"comment": "a'b' $c"}},
    }
    if kind == "command":
        job |= {"command": ["true"]}
    else:
        job |= {"model": "tiny", "data": {"text": "python-stdlib"}, "parallel": {"dp_shard": 2}}
    if kind == "sweep":
        job |= {"sweep": {"grid": {"train.seed": [1, 2, 3]}, "throttle": 2}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    script = tmp_path / "script.sh"
    script.write_text(hpcrun("submit", "job.yaml", "--dry-run").require_success().stdout)
    said = lab.run(["sbatch", "--test-only", str(script)])
    assert said.exit_code == 0, said.stderr
    assert "to start at" in said.stderr
    assert not (tmp_path / "runs").exists()
