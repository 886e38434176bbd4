"""One attempt, from launch to exit record, with real MPI ranks: success, failures, requests to stop."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.errors import SiteError, UsageError
from hpcrun.launch import admission, supervisor
from hpcrun.launch.attempt_monitor import AttemptLimits
from hpcrun.specs.metrics import Metric, SaveMetric
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.specs.rundir import RunDir
from tests.launch.supervised import LIMITS, PROGRAM, Recorder, Site, send
from tests.metric_lines import metric_line

NODE = os.uname().nodename


def log_of(run: RunDir, rank: int, attempt: int = 1) -> str:
    return run.attempt(attempt).log(rank).read_text()


def ranks_of(run: RunDir, attempt: int = 1) -> dict[int, dict[str, Any]]:
    records = run.attempt(attempt).path.glob("ranks/rank-?.json")
    return {record["rank"]: record for record in map(read_json, records)}


def test_a_run_that_goes_well(site: Site) -> None:
    observer = Recorder()
    outcome = site.run("done", ranks=3, observer=observer)
    assert (outcome.status, outcome.exit_code, outcome.step, outcome.attempt) == ("done", 0, 3, 1)
    run = outcome.run
    exit_record = run.read_exit()
    assert exit_record is not None
    assert (exit_record["status"], exit_record["exit_code"], exit_record["step"]) == ("done", 0, 3)
    who = read_json(run.attempt(1).supervisor)
    assert (who["pid"], who["host"], who["slurm_job"]) == (os.getpid(), NODE, None)
    assert (read_json(run.job)["steps"], read_json(run.attempt(1).placement)["ranks"]) == (3, [NODE] * 3)
    assert read_json(run.attempt(1).outcome)["status"] == "done"
    assert read_json(run.attempt(1).plan)["dp_replicate"] == 3
    assert "dp_replicate: 3" in run.spec.read_text()
    assert observer.ready == 3
    assert [metric.step for metric in observer.steps] == [1, 2, 3]
    assert observer.outcome == outcome
    for rank, record in ranks_of(run).items():
        assert record["node"] == NODE
        assert f"hello from rank {rank}" in log_of(run, rank)
    events = [record["event"] for record in read_json_lines(run.events)]
    assert events[:2] == ["preflight", "launch"]
    assert events[-1] == "exit"
    assert events.count("rank_started") == 3


def test_ranks_get_a_clean_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURM_NODELIST", "n[01-02]")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("HYDRA_HOST_FILE", "/nowhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = site.run("environment").run
    environ = read_json(run.attempt(1).path / "environ-1.json")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert environ == {
        "OMP_NUM_THREADS": str(threads),
        "SLURM_PROCID": None,
        "HYDRA_HOST_FILE": None,
        "HPCRUN_RUN_ID": run.run_id,
        "FROM_JOB": "yes",
    }


def test_a_killed_rank_is_named_and_takes_everything_with_it(site: Site) -> None:
    killed: list[int] = []

    def kill() -> None:
        run = site.only_run
        killed.append(ranks_of(run)[2]["pid"])
        os.kill(killed[0], signal.SIGKILL)

    outcome = site.run("wait", ranks=3, observer=Recorder(on_ready=kill))
    log = outcome.run.attempt(1).log(2)
    assert outcome.message == (
        f"rank 2 on node {NODE} (pid {killed[0]}) was killed by signal 9 (SIGKILL); log: {log}"
    )
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert process.processes_with_env("HPCRUN_RUN_ID", outcome.run.run_id) == []


def test_a_rank_killed_before_it_could_say_who_it_is(site: Site) -> None:
    outcome = site.run("killed-before-shim")
    assert outcome.exit_code == 5
    assert "was killed by signal 9 (SIGKILL)" in outcome.message


@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        ("error", 4, f"rank 1 on node {NODE}: step 7: loss is nan"),
        ("crash", 5, f"rank 1 on node {NODE}: ValueError: no such layer; log: "),
        ("segfault", 5, "was killed by signal 11 (SIGSEGV): Segmentation fault; log: "),
        ("leave", 5, "ended with exit code 0 before the run was done; log: "),
    ],
)
def test_a_rank_that_gives_up_is_the_cause(site: Site, mode: str, code: int, text: str) -> None:
    outcome = site.run(mode)
    assert outcome.exit_code == code
    assert outcome.message.startswith(f"rank 1 on node {NODE}")
    assert text in outcome.message
    exit_record = outcome.run.read_exit()
    assert exit_record is not None
    assert exit_record["message"] == outcome.message


def test_success_is_a_record_and_never_an_exit_code(site: Site) -> None:
    quiet = site.run("quiet")
    assert (quiet.status, quiet.exit_code) == ("failed", 5)
    assert "exit code 0 before the run was done" in quiet.message
    crashed = site.run("crash-after-result")
    assert (crashed.status, crashed.exit_code) == ("done", 0)


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (signal.SIGTERM, 75, "saved"),
        (signal.SIGUSR2, 75, "saved"),
        (signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_request_to_stop_reaches_the_ranks(site: Site, number: int, code: int, status: str) -> None:
    outcome = site.run("wait", observer=Recorder(on_ready=send(number)))
    assert (outcome.exit_code, outcome.status, outcome.step) == (code, status, 2)
    for rank in (0, 1):
        assert "was asked to stop, interrupted: False\n" in log_of(outcome.run, rank)
        assert "was asked to save" not in log_of(outcome.run, rank)


def test_usr1_saves_and_goes_on(site: Site) -> None:
    observer = Recorder()

    def ask(text: str) -> None:
        # The first note is the answer to USR1: stop only then, as the order of two signals is not kept.
        if "to save" in text and "stop" not in text:
            send(signal.SIGTERM)()

    observer.on_ready, observer.on_note = send(signal.SIGUSR1), ask
    outcome = site.run("wait", observer=observer)
    assert outcome.status == "saved"
    for rank in (0, 1):
        assert "was asked to save" in log_of(outcome.run, rank)


def test_a_child_that_a_rank_forks_is_no_rank(site: Site) -> None:
    outcome = site.run("fork", ranks=1)
    assert outcome.status == "done"
    assert f"child ended with wait status {signal.SIGTERM:d}\n" in log_of(outcome.run, 0)


@pytest.mark.parametrize("phase", ["before", "preflight", "placement"])
def test_a_stop_before_there_are_ranks_ends_the_run_at_once(
    site: Site, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"preflight": (admission, "run_preflight"), "placement": (supervisor, "write_placement")}.get(
        phase
    )
    if place is not None:

        def stopped_there(*_: object) -> None:
            send(signal.SIGTERM)()
            time.sleep(60)

        monkeypatch.setattr(*place, stopped_there)
    outcome = site.run("wait", before=send(signal.SIGTERM) if phase == "before" else lambda: None)
    assert (outcome.status, outcome.exit_code) == ("saved", 75)
    assert "SIGTERM: stopped before the ranks were started; continue with: hpcrun train" in outcome.message
    ended = outcome.run.read_exit()
    assert ended is not None
    assert (ended["status"], ended["exit_code"]) == ("saved", 75)
    events = outcome.run.events
    assert "launch" not in [one["event"] for one in (read_json_lines(events) if events.exists() else ())]


def test_a_request_while_ranks_start_waits_for_them(site: Site) -> None:
    outcome = site.run("slow-to-come-up", at_launch=send(signal.SIGUSR2))
    assert (outcome.status, outcome.exit_code) == ("saved", 75)


def test_an_interrupt_before_the_start_ends_us_at_once(site: Site) -> None:
    with pytest.raises(KeyboardInterrupt):
        site.run("wait", before=send(signal.SIGINT))
    assert not (site.path / "runs").exists()


def test_a_second_interrupt_does_not_wait(site: Site) -> None:
    observer = Recorder(on_ready=send(signal.SIGINT))
    observer.on_note = lambda text: send(signal.SIGINT)() if "SIGINT" in text else None
    outcome = site.run("stubborn", observer=observer)
    assert (outcome.status, outcome.exit_code) == ("interrupted", 130)
    assert "without a save" in outcome.message


def test_ranks_that_do_not_stop_are_ended_and_that_is_said(site: Site) -> None:
    limits = AttemptLimits(start_s=30, stop_s=0.2, settle_s=0.3)
    outcome = site.run("stubborn", observer=Recorder(on_ready=send(signal.SIGTERM)), limits=limits)
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert "did not stop within 0.2 s of SIGTERM and were ended" in outcome.message


def test_ranks_get_as_long_to_stop_as_their_saves_took(site: Site) -> None:
    def save() -> None:
        line = metric_line("save", 1, time=time.time(), seconds=0.8)
        with site.only_run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    observer = Recorder(on_ready=save)
    observer_step = observer.step

    def step(metric: Metric) -> None:
        observer_step(metric)
        if isinstance(metric, SaveMetric):
            send(signal.SIGTERM)()

    observer.step = step  # type: ignore[method-assign]
    limits = AttemptLimits(start_s=30, stop_s=0.2, settle_s=0.3)
    outcome = site.run("stubborn", observer=observer, limits=limits)
    assert "did not stop within 1.2 s of SIGTERM and were ended" in outcome.message


def test_ranks_that_never_meet_are_given_up(site: Site) -> None:
    outcome = site.run("never-meets", "retry.crash=5", limits=AttemptLimits(start_s=8))
    # Once more on the same nodes, for a fraction of the time; then it has failed twice in the same way.
    assert (outcome.exit_code, outcome.attempt) == (93, 2)
    first = read_json(outcome.run.attempt(1).outcome) or {}
    for number, seconds in ((1, "8"), (2, "1.6")):
        attempt = outcome.run.attempt(number)
        told = first["message"] if number == 1 else outcome.message
        assert f" within {seconds} s; " in told
        if "did not meet" in told:
            assert "ranks 0, 1: main (rank_program.py) <" in told
            assert f"stacks: {attempt.stacks}" in told
            assert "in main" in attempt.stack(1).read_text()
    assert "all ranks started, but they did not meet within 8 s; ranks 0, 1: main" in first["message"]
    events = [
        one
        for one in read_json_lines(outcome.run.events)
        if one["event"] in ("ranks_not_connected", "stacks")
    ]
    assert [one["event"] for one in events] == ["ranks_not_connected", "stacks"] * 2
    assert events[0]["message"] == "all ranks started, but they did not meet within 8 s"


def test_a_killed_launcher_is_not_blamed_on_a_rank(site: Site) -> None:
    sessions: list[int] = []

    def kill() -> None:
        (mpiexec,) = (one for one in process.descendants(os.getpid()) if parent_of(one.pid) == os.getpid())
        sessions.append(os.getsid(mpiexec.pid))
        os.kill(mpiexec.pid, signal.SIGKILL)

    outcome = site.run("wait", observer=Recorder(on_ready=kill))
    assert outcome.exit_code == 5
    assert outcome.message.startswith("mpiexec was killed by signal 9 (SIGKILL)")
    assert os.getsid(0) not in sessions, "an interrupt at the terminal is for us alone"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_resume_is_the_next_attempt_in_the_same_place(site: Site) -> None:
    first = site.run("wait", observer=Recorder(on_ready=send(signal.SIGTERM)))
    second = site.run("done", "train.steps=5", resume=first.run)
    assert (second.run, second.attempt, second.status) == (first.run, 2, "done")
    assert "steps: 5" in first.run.spec.read_text()
    assert "hello from rank 1" in log_of(first.run, 1, attempt=2)
    assert {record["attempt"] for record in read_json_lines(first.run.events)} == {1, 2}
    with pytest.raises(UsageError, match=r"is done \(3 of 3 steps\); to go on, .* train.steps=6"):
        site.run("done", "train.steps=3", resume=first.run)


def test_a_run_has_one_supervisor_at_a_time(site: Site) -> None:
    refused: list[str] = []

    def resume_meanwhile() -> None:
        with pytest.raises(UsageError) as error:
            site.run("done", resume=site.only_run)
        refused.append(str(error.value))
        send(signal.SIGTERM)()

    outcome = site.run("wait", observer=Recorder(on_ready=resume_meanwhile))
    assert outcome.status == "saved", "the first one is not disturbed"
    assert f"is being run by hpcrun on {NODE} (pid {os.getpid()})" in refused[0]
    assert len(outcome.run.attempts()) == 1


SUPERVISE = """\
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.launch.supervised import Recorder, Site
Site(Path(sys.argv[1])).run("wait", observer=Recorder(on_ready=lambda: print("ready", flush=True)))
"""


@pytest.mark.parametrize("proxy_first", [False, True])
def test_ranks_die_with_a_killed_supervisor_and_its_leftovers_are_swept(
    site: Site, proxy_first: bool
) -> None:
    code = SUPERVISE.format(tests=str(PROGRAM.parents[2]))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(site.path)], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        run = site.only_run
        assert len(process.processes_with_env("HPCRUN_RUN_ID", run.run_id)) >= 2
        if proxy_first:
            # What would end the ranks for Hydra is gone, and the supervisor has no time to do it.
            supervisor.send_signal(signal.SIGSTOP)
            os.kill(parent_of(ranks_of(run)[0]["pid"]), signal.SIGKILL)
        supervisor.kill()
    deadline = time.monotonic() + 10
    while process.processes_with_env("HPCRUN_RUN_ID", run.run_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.processes_with_env("HPCRUN_RUN_ID", run.run_id) == []
    segments = [Path(path) for path in ranks_of(run)[0]["shm"]]
    assert any(path.exists() for path in segments), "nobody is left who could have removed it"
    stranger = Path("/dev/shm/mpich_shm_of_somebody_else")
    stranger.write_bytes(b"x")
    try:
        assert site.run("done", resume=run).status == "done"
        assert stranger.exists()
    finally:
        stranger.unlink()
    assert not any(path.exists() for path in segments)


def test_without_mpiexec_the_remedy_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(site.path / "bin" / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(site.path / "bin"))
    with pytest.raises(SiteError, match=r"mpiexec does not exist.*pip install 'hpcrun-slurm\[train\]'"):
        site.run("done")
    (site.path / "bin").mkdir()
    (site.path / "bin" / "mpiexec").touch(mode=0o755)
    with pytest.raises(SiteError, match=r"mpiexec is not MPICH's.*pip install"):
        site.run("done")
    assert not (site.path / "runs").exists()


def test_a_place_that_cannot_be_written_is_a_mistake_of_usage(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.path / "file").touch()
    monkeypatch.setenv("HPCRUN_ROOT", str(site.path / "file" / "runs"))
    with pytest.raises(UsageError, match="no run directory can be made here"):
        site.run("done")


def test_segments_of_others_are_left_alone(site: Site) -> None:
    data = Path("/dev/shm/mpich_shm_of_another_run")
    data.write_bytes(b"x")
    try:
        site.run("killed-before-shim")
        assert data.exists()
    finally:
        data.unlink()


def test_events_are_whole_lines_of_json(site: Site) -> None:
    run = site.run("done", limits=LIMITS).run
    for line in run.events.read_text().splitlines():
        assert {"time", "monotonic", "attempt", "event"} <= json.loads(line).keys()
