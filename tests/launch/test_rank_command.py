"""The script around a program of one's own, as launchers run it: what a rank is told, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hpcrun.errors import UsageError
from hpcrun.launch.rank_command import rank_command
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
PLACED = Placement(("n1", "n1", "n1", "n1", "n2", "n2", "n2", "n2"))
SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
HYDRA = {"PMI_RANK": "5", "MPI_LOCALRANKID": "2"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
HOSTILE = ["$(touch x)", "`touch x`", "a b", "'\"'", "é\n", "", "-n", "%s\\n"]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDir(tmp_path / 'it\'s a "run" $(touch x)').attempt(1).create()


def write_hosts(attempt: Attempt, node: str) -> None:
    attempt.hosts.write_text(f"{node}\n" * 8)


def start(attempt: Attempt, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    words = rank_command(attempt, JobSpec(command=list(command)), PLACED, {})
    environ = {"PATH": os.environ["PATH"], **(env or SLURM)}
    if not attempt.hosts.exists():
        write_hosts(attempt, f"{os.uname().nodename}.some.domain")
    return subprocess.Popen(words, env=environ, cwd=attempt.path)


def left(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (SLURM, ["1", "8", "1", "4", "0"]),
        (SLURM | HYDRA, ["5", "8", "2", "4", "1"]),
        (SLURM | OPENMPI, ["6", "8", "3", "4", "1"]),
    ],
)
def test_a_rank_is_told_what_torchrun_would_tell_it(
    attempt: Attempt, env: dict[str, str], told: list[str]
) -> None:
    assert start(attempt, "sh", "-c", f"echo {' '.join(f'${name}' for name in NAMES)}", env=env).wait() == 0
    rank = int(told[0])
    assert attempt.log(rank).read_text().split() == told
    assert left(attempt.exit_record(rank)) == {"rank": rank, "exit_code": 0}
    record = left(attempt.rank_record(rank))
    assert (record["rank"], record["node"], record["shm"]) == (rank, os.uname().nodename, [])


def test_a_rank_is_told_of_its_own_node_where_all_were_told_the_same(attempt: Attempt) -> None:
    told = {"HPCRUN_WORKER_SOCKET": "/dev/shm/a run/{node}/worker.sock"}
    assert start(attempt, "sh", "-c", 'echo "$HPCRUN_WORKER_SOCKET"', env=SLURM | told).wait() == 0
    node = f"{os.uname().nodename}.some.domain"
    assert attempt.log(1).read_text() == f"/dev/shm/a run/{node}/worker.sock\n"


def test_words_arrive_as_they_are_and_nothing_is_executed(attempt: Attempt) -> None:
    assert start(attempt, "printf", "%s\\0", *HOSTILE).wait() == 0
    assert attempt.log(1).read_text().split("\0")[:-1] == HOSTILE
    assert not list(attempt.run.path.parent.rglob("x"))


@pytest.mark.parametrize(
    ("body", "code", "exit_code", "message"),
    [
        ("exit 7", 7, 5, "the command ended with exit code 7"),
        ("exit 93", 93, 93, "the command ended with exit code 93"),
        ("kill -9 $$", 137, 5, "the command was killed by signal 9"),
    ],
)
def test_a_failure_is_recorded_with_its_cause(
    attempt: Attempt, body: str, code: int, exit_code: int, message: str
) -> None:
    assert start(attempt, "sh", "-c", body).wait() == code
    error = left(attempt.error_record(1))
    assert (error["exit_code"], error["message"]) == (exit_code, f"{message}; log: {attempt.log(1)}")
    assert left(attempt.exit_record(1))["exit_code"] == code


@pytest.mark.parametrize("name", ["USR1", "USR2", "TERM"])
def test_signals_reach_the_program_and_its_own_end_counts(attempt: Attempt, name: str) -> None:
    body = f'trap "echo got {name}; exit 75" {name}; echo up; while :; do sleep 0.05; done'
    rank = start(attempt, "sh", "-c", body)
    while not attempt.log(1).exists() or "up" not in attempt.log(1).read_text():
        time.sleep(0.02)
    rank.send_signal(signal.Signals[f"SIG{name}"])
    assert rank.wait() == 75
    assert f"got {name}" in attempt.log(1).read_text()
    assert not attempt.error_record(1).exists()


def test_a_storm_of_signals_to_every_process_does_not_lose_how_it_ended(attempt: Attempt) -> None:
    # So does Slurm: to the script, to the program, and to the commands with which the script records.
    body = "trap 'exit 75' TERM; echo up; while :; do sleep 0.005; done"
    words = rank_command(attempt, JobSpec(command=["sh", "-c", body]), PLACED, {})
    write_hosts(attempt, os.uname().nodename)
    for _ in range(10):
        attempt.exit_record(1).unlink(missing_ok=True)
        attempt.log(1).unlink(missing_ok=True)
        environ = {"PATH": os.environ["PATH"], **SLURM}
        with subprocess.Popen(words, env=environ, cwd=attempt.path, start_new_session=True) as running:
            while not (attempt.log(1).exists() and attempt.rank_record(1).exists()):
                time.sleep(0.005)
            while "up" not in attempt.log(1).read_text():
                time.sleep(0.005)
            while running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)
                time.sleep(0.001)
        assert running.returncode == 75
        assert left(attempt.exit_record(1)) == {"rank": 1, "exit_code": 75}


def test_the_words_of_a_template_come_before_the_command(attempt: Attempt) -> None:
    spec = JobSpec(command=["python", "own.py"])
    words = rank_command(attempt, spec, PLACED, {"HPCRUN_RANK_PREFIX": "apptainer exec 'my image.sif'"})
    assert words[2:] == ("apptainer", "exec", "my image.sif", "python", "own.py")
    with pytest.raises(UsageError, match="HPCRUN_RANK_PREFIX: cannot be split into words"):
        rank_command(attempt, spec, PLACED, {"HPCRUN_RANK_PREFIX": "it's"})


def test_a_rank_on_another_node_than_it_was_to_stand_on_is_caught(attempt: Attempt) -> None:
    write_hosts(attempt, "elsewhere")
    assert start(attempt, "sh", "-c", "touch started").wait() == 3
    here = os.uname().nodename
    assert left(attempt.error_record(1))["message"] == (
        f"is to stand on elsewhere, and the launcher has put it on {here}"
    )
    assert not (attempt.path / "started").exists()
