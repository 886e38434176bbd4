"""A submitted job whose supervisor is killed alone goes on in the same job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun import process
from hpcrun.chaos.faults import InjectedFault
from hpcrun.chaos.inject import find_target, inject_fault
from hpcrun.runs.event_text import format_events
from hpcrun.runs.lease import read_leader
from hpcrun.runs.run_lock import read_supervisor_record
from hpcrun.specs.records import read_json, read_json_lines
from tests.launch.batch import HOST, LOOP, ROOT, Job, over, pretended_nodes, spec_of, submitted


@pytest.fixture
def job(tmp_path: Path, runs_root: Path) -> Iterator[Job]:
    """A program that runs until it is told to end."""
    with over(submitted(tmp_path, spec_of(["sh", "-c", LOOP.format(tmp_path)]))) as found:
        yield found


def test_another_supervisor_goes_on_with_the_run_of_one_that_was_killed(job: Job) -> None:
    first = job.supervisor
    assert first != job.command.pid
    (struck,) = inject_fault(find_target(job.run, InjectedFault("kill-supervisor")), lambda one: None)
    assert struck["pids"] == (first,)
    job.until(lambda: job.is_up(2))
    assert job.supervisor not in (first, job.command.pid)
    assert job.end() == 0
    ended = job.run.read_exit()
    assert ended is not None
    assert (ended["status"], ended["attempt"]) == ("done", 2)
    assert job.relaunches() == ["supervisor lost", None]
    told = [entry.text for entry in format_events(job.run)]
    assert f"the supervisor on {HOST} was killed by SIGKILL" in told
    (fault,) = [one for one in read_json_lines(job.run.events) if one["event"] == "fault"]
    assert (fault["cause"], fault["nodes"], fault["kind"]) == ("supervisor lost", [], "infrastructure")
    assert "Traceback" not in (job.place / "said").read_text()


def test_signals_reach_the_supervisor_that_came_back_and_the_exit_code_is_the_runs(job: Job) -> None:
    job.kill()
    job.until(lambda: job.is_up(2))
    job.command.send_signal(signal.SIGTERM)
    assert job.command.wait(60) == 130
    ended = job.run.read_exit()
    assert ended is not None
    assert ended["message"].startswith("stopped by SIGTERM, as asked")
    assert [one["signal"] for one in read_json_lines(job.run.events) if one["event"] == "signal"] == [
        "SIGTERM"
    ]


def test_the_batch_shell_sees_at_once_that_its_command_listens(job: Job) -> None:
    """As templates/base.sbatch.j2 looks: until then it keeps signals back."""
    job.until(lambda: process.state(job.command.pid) == "S")
    listens = int("4a00", 16)  # USR1, USR2, TERM
    masks = dict(
        line.split(":\t") for line in Path(f"/proc/{job.command.pid}/status").read_text().splitlines()
    )
    assert (int(masks["SigBlk"], 16) | int(masks["SigCgt"], 16)) & listens == listens


def test_what_the_killed_one_was_told_the_next_one_hears(job: Job) -> None:
    os.kill(job.supervisor, signal.SIGSTOP)
    # One of its threads that stands still only later might take the next signal yet.
    job.until(lambda: states_of_threads(job.supervisor) == {"T"})
    job.command.send_signal(signal.SIGTERM)
    job.until(lambda: "0000000000004000" in pending(job.supervisor))
    job.kill()
    assert job.command.wait(60) == 5
    ended = job.run.read_exit()
    assert ended is not None
    assert ended["message"] == f"the supervisor on {HOST} was killed by SIGKILL"
    assert not job.is_up(2)


def states_of_threads(pid: int) -> set[str]:
    """Of all of them."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {one.rpartition(")")[2].split()[0] for one in stats}


def pending(pid: int) -> str:
    """The signals that wait for a process."""
    return Path(f"/proc/{pid}/status").read_text().partition("ShdPnd:")[2].split("\n")[0]


def test_a_supervisor_that_is_killed_again_and_again_is_given_up_with_a_record(job: Job) -> None:
    for attempt in (1, 2, 3, 4):
        job.until(lambda number=attempt: job.is_up(number))  # type: ignore[misc]
        job.kill()
    assert job.command.wait(60) == 5
    ended = job.run.read_exit()
    assert ended is not None
    assert ended["exit_code"] == 5
    assert f"4 supervisors in a row were killed on {HOST}" in ended["message"]
    assert process.processes_with_env("HPCRUN_RUN_ID", job.run.run_id) == []


def test_one_that_is_killed_before_it_has_begun_is_as_if_it_had_not_been(
    tmp_path: Path, runs_root: Path
) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(EARLY)
    path = {"PYTHONPATH": f"{tmp_path / 'early'}:{ROOT}"}
    found = submitted(tmp_path, spec_of(["true"]), path | {"KILL_ONCE": str(tmp_path / "once")})
    assert found.command.wait(60) == 0
    assert "was killed by SIGKILL" in (tmp_path / "said").read_text()
    assert [read_json(one.outcome)["status"] for one in found.run.attempts()] == ["done"]


EARLY = """\
import os, signal, sys
class Killer:
    def find_spec(self, name, path=None, target=None):
        if name == "hpcrun.launch.batch_task" and not os.path.exists(os.environ["KILL_ONCE"]):
            open(os.environ["KILL_ONCE"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
if "_task" in sys.orig_argv:
    sys.meta_path.insert(0, Killer())
"""


@pytest.fixture
def spread(tmp_path: Path, runs_root: Path) -> Iterator[Job]:
    """The same on two nodes."""
    env = pretended_nodes(tmp_path, "n[1-2]")
    spec = spec_of(["sh", "-c", LOOP.format(tmp_path)], resources={"nodes": 2, "ranks_per_node": 1})
    with over(submitted(tmp_path, spec, env)) as found:
        yield found


def test_agents_come_to_the_supervisor_that_comes_back_and_no_node_is_lost(spread: Job) -> None:
    leader = read_leader(spread.run)
    spread.kill()
    spread.until(lambda: spread.is_up(2))
    after = read_leader(spread.run)
    assert leader is not None
    assert after is not None
    assert (leader.epoch, after.epoch) == (1, 2)
    assert spread.end() == 0
    assert spread.relaunches() == ["supervisor lost", None]
    assert [one for one in read_json_lines(spread.run.events) if one["event"] == "node_lost"] == []
    record = read_supervisor_record(spread.run)
    assert record["taken_over"] is None


def test_a_node_that_vanishes_takes_what_would_come_back_with_it(job: Job) -> None:
    first = job.supervisor
    (struck,) = inject_fault(
        find_target(job.run, InjectedFault("vanish", node=HOST, force=True)), lambda one: None
    )
    assert {first, job.command.pid} <= {*struck["pids"]}
    assert job.command.wait(60) == -signal.SIGKILL
    assert not job.run.exit.exists()


def test_without_a_retry_block_the_run_ends_with_its_supervisor(tmp_path: Path, runs_root: Path) -> None:
    found = submitted(tmp_path, spec_of(["sh", "-c", LOOP.format(tmp_path)], retry=None))
    found.until(lambda: found.is_up(1))
    found.kill()
    assert found.command.wait(60) == 5
    ended = found.run.read_exit()
    assert ended is not None
    assert f"the supervisor on {HOST} was killed by SIGKILL" in json.dumps(ended)
    assert process.processes_with_env("HPCRUN_RUN_ID", found.run.run_id) == []
