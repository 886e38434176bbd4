"""Faults rehearsed on real local runs: who is struck, who is not, and what is left of it afterwards."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.chaos.disk_filler import DiskFiller
from hpcrun.chaos.faults import InjectedFault
from hpcrun.chaos.inject import Injection, TargetNotReadyError, find_target, inject_fault, require_running
from hpcrun.chaos.scenario import ScenarioRun, check_targets, load_scenario
from hpcrun.errors import SiteError, SpecError, UsageError
from hpcrun.mesh import ParallelDegrees
from hpcrun.runs.event_text import format_events
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.records import read_json, read_json_lines, write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from tests.launch.supervised import Recorder, Site
from tests.metric_lines import metric_line

ROOT = Path(__file__).parents[2]
NODE = os.uname().nodename
LOOP = "while :; do sleep 0.2; done"


@dataclass
class Live:
    """A program of two ranks that runs under a supervisor of its own process."""

    run: RunDir
    supervisor: subprocess.Popen[bytes]

    def record(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.run.attempt(1).rank_record(rank))
        return found

    def program(self, rank: int) -> int:
        """The pid of the shell below the script that starts the rank."""
        return process.descendants(self.record(rank)["pid"])[0].pid

    def struck(self) -> list[tuple[str, Any, str]]:
        return [(one["do"], one["rank"], one["text"]) for one in read_json_lines(self.run.chaos)]


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@contextmanager
def running(place: Path, crashes: int) -> Iterator[Live]:
    """A run of two ranks that is tried again after as many crashes."""
    words = [sys.executable, "-m", "hpcrun", "train", "name=own", "parallel.dp_replicate=2"]
    words += [f"retry={{crash: {crashes}}}", "--", "sh", "-c", LOOP]
    environ, root = os.environ | {"PYTHONPATH": str(ROOT)}, Path(os.environ["HPCRUN_ROOT"])
    with (place / "said").open("wb") as said:
        child = subprocess.Popen(words, cwd=place, env=environ, stdout=said, stderr=said)
    try:
        until(lambda: root.is_dir() and any(root.iterdir()))
        (path,) = root.iterdir()
        run = RunDir(path)
        until(lambda: all(run.attempt(1).rank_record(rank).exists() for rank in (0, 1)))
        yield Live(run, child)
    finally:
        child.terminate()
        child.wait()
        until(lambda: process.processes_with_env("HPCRUN_RUN_ID", RunDir(path).run_id) == [])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with running(tmp_path, 0) as found:
        yield found


def test_a_killed_rank_of_training_is_told_as_a_rehearsal(site: Site) -> None:
    def kill() -> None:
        run = site.only_run
        require_running(run)
        records = inject_fault(find_target(run, InjectedFault("kill-rank", rank=1)), lambda record: None)
        assert [(one["phase"], one["rank"], one["text"]) for one in records] == [
            ("injected", 1, "SIGKILL to rank 1")
        ]

    outcome = site.run("wait", ranks=3, observer=Recorder(on_ready=kill))
    pid = read_json(outcome.run.attempt(1).rank_record(1))["pid"]
    assert outcome.message.startswith(f"rank 1 on node {NODE} (pid {pid}) was killed by signal 9 (SIGKILL)")
    (record,) = read_json_lines(outcome.run.chaos)
    assert record["pids"] == [pid]
    ended = next(one for one in read_json_lines(outcome.run.events) if one["event"] == "rank_ended")
    assert 0 < record["monotonic"] < ended["monotonic"]
    told = [entry.text for entry in format_events(outcome.run)]
    at = told.index(f"chaos on {NODE}: SIGKILL to rank 1")
    fate = f"rank 1 on {NODE} was killed by signal 9 (SIGKILL) before the run was done"
    assert [text for text in told[at:] if text.startswith(fate)]


def test_of_a_command_the_program_is_killed_and_its_script_tells(live: Live) -> None:
    program, script = live.program(1), live.record(1)["pid"]
    (record,) = inject_fault(
        find_target(live.run, InjectedFault("kill-rank", rank=1, signal=signal.SIGSEGV)), lambda one: None
    )
    assert program in record["pids"]
    assert script not in record["pids"]
    until(live.run.exit.exists)
    ended = live.run.read_exit()
    assert ended is not None
    assert "rank 1 on node" in ended["message"]
    assert "the command was killed by signal 11" in ended["message"]


def test_a_stopped_rank_goes_on_when_it_is_told_to_or_its_time_is_over(live: Live) -> None:
    stopped, other = live.program(0), live.program(1)
    inject_fault(find_target(live.run, InjectedFault("stop-rank", rank=0)), lambda one: None)
    assert state_of(stopped) == "T"
    assert state_of(other) != "T"
    inject_fault(find_target(live.run, InjectedFault("resume-rank", rank=0)), lambda one: None)
    assert state_of(stopped) != "T"
    inject_fault(find_target(live.run, InjectedFault("stop-rank", rank=1, for_s=0.1)), lambda one: None)
    assert state_of(other) != "T"
    assert live.struck() == [
        ("stop-rank", 0, "SIGSTOP to rank 0"),
        ("resume-rank", 0, "SIGCONT to rank 0"),
        ("stop-rank", 1, "SIGSTOP to rank 1"),
        ("stop-rank", 1, "SIGCONT to rank 1"),
    ]


@pytest.mark.parametrize(
    "fault",
    [InjectedFault("stop-rank", rank=0, for_s=600), InjectedFault("slow", node=NODE, share=0.9, for_s=600)],
)
def test_what_lasts_is_undone_when_whoever_asked_is_gone(live: Live, fault: InjectedFault) -> None:
    """The pipe of the command's process ends with it, however it ends."""
    words = find_target(live.run, fault).command()
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["kind"] == "injected"
        until(lambda: state_of(live.program(0)) == "T")
        child.stdin.close()
        assert json.loads(child.stdout.readline())["kind"] == "removed"
    assert [state_of(live.program(rank)) != "T" for rank in (0, 1)] == [True, True]


def test_a_told_end_undoes_what_lasts(live: Live) -> None:
    strike = Injection(find_target(live.run, InjectedFault("slow", node=NODE, share=0.9, for_s=600)))
    until(lambda: state_of(live.program(1)) == "T")
    os.kill(strike._child.pid, signal.SIGTERM)
    until(lambda: strike.news(0.1) == [] and strike.is_over)
    assert [state_of(live.program(rank)) != "T" for rank in (0, 1)] == [True, True]
    strike.close()


def test_nothing_but_the_run_is_touched(live: Live) -> None:
    """A record whose pid belongs to another process, or to a process of another start, strikes nobody."""
    path = live.run.attempt(1).rank_record(1)
    record = read_json(path)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        found = process.identify_process(stranger.pid)
        assert found is not None
        write_json(path, record | {"pid": found.pid, "start_ticks": found.start_ticks})
        with pytest.raises(UsageError, match="does not carry the run's mark"):
            Injection(find_target(live.run, InjectedFault("kill-rank", rank=1)))
        write_json(path, record | {"start_ticks": record["start_ticks"] + 1})
        with pytest.raises(UsageError, match="has ended already"):
            Injection(find_target(live.run, InjectedFault("kill-rank", rank=1)))
        assert stranger.poll() is None
        stranger.kill()
    assert live.supervisor.poll() is None
    assert list(read_json_lines(live.run.chaos)) == []


@pytest.mark.parametrize(
    "fault", [InjectedFault("kill-supervisor"), InjectedFault("vanish", node=NODE, force=True)]
)
def test_the_supervisor_goes_and_nothing_stays(live: Live, fault: InjectedFault) -> None:
    (record,) = inject_fault(find_target(live.run, fault), lambda one: None)
    assert live.supervisor.pid in record["pids"]
    assert live.supervisor.wait(30) == -signal.SIGKILL
    if fault.do == "vanish":
        assert live.record(0)["pid"] in record["pids"]
    until(lambda: process.processes_with_env("HPCRUN_RUN_ID", live.run.run_id) == [])
    with pytest.raises(UsageError, match=r"is dead .*there is nothing to inject it into"):
        require_running(live.run)


def make(*, ranks: tuple[str, ...] = ("n1", "n1", "n2"), job: int | None = 7, up: bool = True) -> RunDir:
    """A run of several nodes as its directory shows it, whose supervisor (on n1) is this very process."""
    run = create_run("r")
    run.spec.write_text("name: r\ncommand: [a]\n")
    attempt = run.attempt(1).create()
    found = process.identify_process(os.getpid())
    assert found
    who = {"host": "n1.cluster", "pid": found.pid, "start_ticks": found.start_ticks, "slurm_job": job}
    write_json(attempt.supervisor, who | {"started": 1.0, "restarts": 0})
    write_placement(attempt.placement, Placement(ranks, spares=("n3",)), ParallelDegrees())
    for rank, node in enumerate(ranks if up else ()):
        write_json(attempt.rank_record(rank), {"rank": rank, "node": node, "pid": 1, "start_ticks": 1})
    return run


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (InjectedFault("kill-rank", rank=3), "rank 3: r-.* has no such rank; there are: 0 to 2"),
        (InjectedFault("vanish", node="n9"), "node n9: .*ranks are on n.1-2., and as spares n3"),
        (InjectedFault("slow", node="n3", for_s=1.0), "node n3: is not a node of"),
        (
            InjectedFault("vanish", node="n1"),
            "has the supervisor of r-.*name another .n.2-3.., or use --force",
        ),
    ],
)
def test_who_does_not_exist_is_told_with_who_does(fault: InjectedFault, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_target(make(), fault)


def test_a_node_without_agents_has_none_to_kill() -> None:
    with pytest.raises(UsageError, match="has no agents"):
        find_target(make(job=None), InjectedFault("kill-agent", node="n1"))


def test_a_rank_that_has_not_come_up_is_not_there_yet() -> None:
    with pytest.raises(TargetNotReadyError, match=r"rank 1 of attempt 1 of r-.* has not come up yet"):
        find_target(make(up=False), InjectedFault("kill-rank", rank=1))
    with pytest.raises(TargetNotReadyError, match="is about to start"):
        find_target(create_run("empty"), InjectedFault("kill-rank", rank=1))


def test_a_seed_takes_the_same_victim_again() -> None:
    run = make()
    chosen = [find_target(run, InjectedFault("kill-rank", seed=seed)).fault.rank for seed in range(30)]
    assert chosen == [
        find_target(run, InjectedFault("kill-rank", seed=seed)).fault.rank for seed in range(30)
    ]
    assert set(chosen) == {0, 1, 2}
    # The node of the supervisor is not taken by chance.
    assert {find_target(run, InjectedFault("vanish", seed=seed)).node for seed in range(30)} == {"n2", "n3"}
    drawn = find_target(run, InjectedFault("kill-agent")).fault
    assert drawn.seed is not None
    assert find_target(run, InjectedFault("kill-agent", seed=drawn.seed)).fault == drawn


def test_another_node_is_reached_as_a_step_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "srun: error: Unable to confirm allocation for job 7" >&2\nexit 1\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    aimed = find_target(make(), InjectedFault("kill-rank", rank=2))
    words = aimed.command()
    wanted = {"--jobid=7", "--overlap", "--no-kill", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--mpi=none"}
    assert wanted <= set(words[: words.index("-P")])
    with pytest.raises(SiteError, match=r"n2 could not be reached: .*Unable to confirm allocation for job 7"):
        Injection(aimed)


def test_runs_of_others_and_runs_that_are_over_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    monkeypatch.setattr("os.getuid", lambda: 4242)
    with pytest.raises(UsageError, match=r"belongs to .*; faults are injected into your own runs only"):
        require_running(run)
    monkeypatch.undo()
    write_json(run.exit, {"status": "done", "exit_code": 0, "message": "done at step 4", "attempt": 1})
    with pytest.raises(UsageError, match=r"is done \(done at step 4\); there is nothing to inject it into"):
        require_running(run)
    write_json(run.sweep, [{}])
    with pytest.raises(UsageError, match="is a sweep"):
        require_running(run)


def test_a_filler_takes_room_under_no_name_and_gives_it_back(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is where temporary files are; set TMPDIR to another file system")
    before = set(shm.iterdir())
    with DiskFiller(shm, tmp_path, force=False) as filler:
        room = os.statvfs(shm)
        taken = filler.fill(room.f_bavail * room.f_frsize - 2**20, lambda: False)
        held = os.fstat(filler._file.fileno())
        assert 0 < taken <= 2**24
        assert (held.st_nlink, held.st_blocks * 512) == (0, taken)
    assert "tmpfs" in filler.description
    assert not {name for name in set(shm.iterdir()) - before if name.name.startswith("tmp")}


def test_a_filler_takes_what_a_quota_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota, taken_by = 5 * 2**20 + 8192, []

    def fallocate(file: int, offset: int, size: int) -> None:
        if offset + size > quota:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        taken_by.append(size)

    monkeypatch.setattr("os.posix_fallocate", fallocate)
    with DiskFiller(tmp_path, tmp_path, force=True) as filler:
        assert filler.fill(0, lambda: False) == sum(taken_by)
    assert quota - 8192 < sum(taken_by) <= quota


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (".", "is on the file system that holds the run"),
        ("/proc", "is a file system of type proc, which other nodes may share"),
        ("/nowhere", f"/nowhere: is not a directory on {NODE}"),
    ],
)
def test_a_shared_file_system_is_not_filled(tmp_path: Path, where: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DiskFiller(tmp_path / where, tmp_path, force=False)


SCENARIO = """\
- {at: 0, do: stop-rank, rank: 0}
- {at: 1s, do: resume-rank, rank: 0}
- at: 1s
  do: slow
  node: NODE
  share: 0.2
  for: 1s
- {step: 3, do: kill-rank, random: true, seed: 1}
- {step: 4, do: kill-rank, rank: 0}
"""


def test_a_scenario_is_played_in_order_until_the_run_is_over(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("NODE", NODE))
    scenes = load_scenario(path)
    assert [str(one).partition(" ")[0] for one in check_targets(live.run, scenes)] == [
        "stop",
        "let",
        "take",
        "send",
        "send",
    ]
    notes: list[str] = []
    records: list[dict[str, Any]] = []

    def write(record: dict[str, Any]) -> None:
        records.append(record)
        if record["text"].startswith("leaves"):
            # The step is one that a run of ours would have written.
            live.run.metrics.write_text(json.dumps(metric_line("step", 3)) + "\n")

    assert not ScenarioRun(live.run, notes.append, write).run_all(scenes)
    assert [(one["do"], one["phase"]) for one in records] == [
        ("stop-rank", "injected"),
        ("resume-rank", "injected"),
        ("slow", "injected"),
        ("slow", "removed"),
        ("kill-rank", "injected"),
    ]
    assert json.loads(json.dumps(records)) == list(read_json_lines(live.run.chaos))
    assert notes == [f"the run was over before step 4 (kill-rank, {path}:9)"]


def test_a_victim_that_is_gone_is_waited_for(tmp_path: Path) -> None:
    """Between two attempts there is nobody to strike."""
    path = tmp_path / "scenario.yaml"
    path.write_text("- {at: 0, do: kill-rank, rank: 0}\n- {at: 0, do: kill-rank, rank: 0, signal: SEGV}\n")
    with running(tmp_path, 1) as live:
        records: list[dict[str, Any]] = []
        notes: list[str] = []
        assert ScenarioRun(live.run, notes.append, records.append).run_all(load_scenario(path))
        assert notes == []
        assert [(one["attempt"], one["text"]) for one in records] == [
            (1, "SIGKILL to rank 0"),
            (2, "SIGSEGV to rank 0"),
        ]
        until(live.run.exit.exists)
        ended = live.run.read_exit()
        assert ended is not None
        assert "was killed by signal 11" in ended["message"]


WRONG = """\
- {at: 5, do: kill-rank, rank: 0}
- {at: 9s, do: kill-rnak}
- {at: 8s, step: 2, do: slow, node: n1}
- {at: 9s, do: kill-rank, rank: -1, where: /tmp}
- {at: 9s, do: vanish}
- {at: 9s, do: vanish, node: n1, random: true}
- {at: 9s, do: kill-rank, rank: 0}
- {at: 3s, do: kill-rank, rank: 0}
- {at: 9s, do: fill-disk, node: n1, where: scratch, for: 3x}
"""


def test_all_that_is_wrong_with_a_scenario_is_told_before_anything_is_done(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(WRONG)
    with pytest.raises(SpecError) as refused:
        load_scenario(path)
    lines = [line.removeprefix(f"{path}:") for line in str(refused.value).splitlines()]
    starts = [line.partition(": ")[0] for line in lines]
    assert starts == [
        "1 at",
        "2 do",
        "3 for",
        "3 at",
        "4 where",
        "4 rank",
        "5 node",
        "6 node",
        "8 at",
        "9 where",
        "9 for",
    ]
    assert "has no unit; write 30s or 5m" in lines[0]
    assert "'kill-rnak' is not a fault; there are: kill-rank, stop-rank" in lines[1]
    assert lines[8] == "8 at: 3 s is after a later one; put them in order"
    path.write_text("do: kill-rank\n")
    with pytest.raises(SpecError, match="is not a list"):
        load_scenario(path)
    path.write_text("- {at: 1s, do: kill-rank, rank: 8}\n- kill-rank\n")
    with pytest.raises(SpecError, match=r"s.yaml:2: must be a mapping of keys to values"):
        load_scenario(path)
    path.write_text("- {at: 1s, do: kill-rank, rank: 8}\n- {at: 2s, do: kill-rank, rank: 1}\n")
    with pytest.raises(SpecError, match=r"s.yaml:1: rank 8: r-.* has no such rank; there are: 0 to 2"):
        check_targets(make(), load_scenario(path))
