"""Of everything that was seen when an attempt failed, which is the cause."""

import signal
from pathlib import Path
from typing import Any

import pytest

from hpcrun.health.connection_test import describe_unreachable, why_unreachable
from hpcrun.launch.attempt_events import LauncherEnded, RankEnded
from hpcrun.launch.failure_cause import explain_failure
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import Attempt, RunDir

EXITED_1 = 1 << 8


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDir(tmp_path).attempt(1).create()


def reported(attempt: Attempt, rank: int, message: str, time: float, **more: Any) -> None:
    record = {"rank": rank, "node": f"n{rank}", "kind": "RuntimeError", "expected": False, "exit_code": 5}
    write_json(attempt.error_record(rank), record | {"message": message, "time": time} | more)


def ended(rank: int, status: int | None, time: float) -> RankEnded:
    return RankEnded(rank, f"n{rank}", 100 + rank, status, time)


def test_the_first_report_wins(attempt: Attempt) -> None:
    reported(attempt, 2, "out of memory", 11.0)
    reported(attempt, 1, "no such file", 10.0, kind="UsageError", expected=True, exit_code=2)
    failure = explain_failure(attempt, 3, [ended(2, EXITED_1, 12.0), ended(1, EXITED_1, 12.0)], None)
    assert (failure.rank, failure.exit_code, failure.message) == (1, 2, "rank 1 on node n1: no such file")


def test_a_lost_connection_is_not_the_cause_of_its_loss(attempt: Attempt) -> None:
    reported(attempt, 0, "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:30222", 10.0)
    reported(attempt, 1, "index 7 is out of bounds", 10.2)
    assert explain_failure(attempt, 2, [ended(0, EXITED_1, 10.3)], None).rank == 1
    killed = explain_failure(attempt, 3, [ended(2, signal.SIGKILL, 10.1)], None)
    assert killed.rank == 2
    assert "killed by signal 9 (SIGKILL)" in killed.message


def test_a_lost_connection_is_told_when_there_is_nothing_better(attempt: Attempt) -> None:
    reported(attempt, 1, "Connection reset by peer\nmore of it", 10.0)
    failure = explain_failure(attempt, 2, [], None)
    log = attempt.log(1)
    assert failure.message == f"rank 1 on node n1: RuntimeError: Connection reset by peer; log: {log}"


def test_a_rank_that_reported_before_another_was_killed(attempt: Attempt) -> None:
    reported(attempt, 0, "bad batch", 10.0)
    assert explain_failure(attempt, 2, [ended(1, signal.SIGKILL, 10.5)], None).rank == 0


@pytest.mark.parametrize("ahead_s", [-7200.0, -5.0, 5.0, 7200.0])
def test_the_first_is_the_first_whatever_the_clock_of_its_node_says(attempt: Attempt, ahead_s: float) -> None:
    killed = ended(1, signal.SIGKILL, 1000.5)
    later = ended(0, EXITED_1, 1001.0 + ahead_s).to_supervisor_clock(1001.0)
    reported(attempt, 0, "bad batch", 1000.0 + ahead_s)
    assert explain_failure(attempt, 2, [killed, later], None).rank == 0
    reported(attempt, 0, "bad batch", 1000.7 + ahead_s)
    assert explain_failure(attempt, 2, [killed, later], None).rank == 1
    reported(attempt, 2, "no such file", 1000.3)
    assert explain_failure(attempt, 3, [later], None).rank == 2
    assert ended(1, EXITED_1, 1000.0).to_supervisor_clock(1001.0) == ended(1, EXITED_1, 1000.0), (
        "it came late"
    )


def test_where_the_kernel_does_not_tell_hydra_does(attempt: Attempt) -> None:
    attempt.launcher_log.write_text("[mpiexec@n0] Exit codes: [n0] 9,11,9\n")
    failure = explain_failure(attempt, 3, [ended(1, None, 10.0)], None)
    assert "rank 1 on node n1 (pid 101) was killed by signal 11 (SIGSEGV)" in failure.message


def test_what_the_interpreter_said_of_a_crash_is_told(attempt: Attempt) -> None:
    attempt.log(1).write_text("step 1\nFatal Python error: Bus error\n\nCurrent thread 0x1:\n")
    failure = explain_failure(attempt, 2, [ended(1, None, 10.0)], None)
    assert failure.message == f"rank 1 on node n1 (pid 101) ended: Bus error; log: {attempt.log(1)}"


def test_ranks_that_were_never_seen(attempt: Attempt) -> None:
    attempt.launcher_log.write_text("python: no module named hpcrun\n[mpiexec@n0] Exit codes: [n0] 9,256\n")
    failure = explain_failure(attempt, 2, [], LauncherEnded(9 << 8, 10.0))
    assert failure.message.startswith("rank 1 ended with exit code 1 before it had started; log: ")


def test_a_launcher_that_ends_by_itself(attempt: Attempt) -> None:
    attempt.launcher_log.write_text("[proxy] unable to bind\n\n")
    failure = explain_failure(attempt, 2, [], LauncherEnded(255 << 8, 10.0))
    assert failure.message == (
        "mpiexec ended with exit code 255 before the run was done; last output: [proxy] unable to bind;"
        f" log: {attempt.launcher_log}"
    )
    assert failure.exit_code == 5
    killed = explain_failure(
        attempt, 2, [ended(0, signal.SIGKILL, 9.99)], LauncherEnded(signal.SIGKILL, 10.0)
    )
    assert killed.message.startswith("mpiexec was killed by signal 9 (SIGKILL)")
    rank_first = explain_failure(
        attempt, 2, [ended(0, signal.SIGKILL, 9.0)], LauncherEnded(signal.SIGKILL, 10.0)
    )
    assert rank_first.rank == 0


def test_nodes_that_do_not_reach_each_other_are_a_cause_of_their_own(attempt: Attempt) -> None:
    failed = {"n0": {"n1": "refused (10.0.0.1:77)"}, "n1": {}}
    words = f"the nodes do not reach each other: {describe_unreachable(failed, ['n0', 'n1'])[0]}"
    reported(attempt, 0, words, 10.0, kind="RanksDiedError", expected=True)
    assert why_unreachable("127.0.0.1", "127.0.0.1", 1) == "refused (127.0.0.1:1)"
    failure = explain_failure(attempt, 2, [ended(1, signal.SIGKILL, 10.1)], None)
    assert failure.message == f"rank 0 on node n0: {words}"
