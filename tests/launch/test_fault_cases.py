"""Faults that clusters are known for, each with what must come of it."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.launch import recovery
from hpcrun.launch.agents import agent_pool as crews
from hpcrun.launch.agents.agent_pool import AgentPool
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.runs.lease import Leadership
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import parse_job
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.submission.prepare import prepare_job
from tests.launch.supervised import LIMITS, Recorder, Site


def failed(run: RunDir, attempt: int, message: str) -> AttemptOutcome:
    return AttemptOutcome(run, attempt, "failed", 5, message, None)


def retrying(**budget: int) -> JobSpec:
    retry = ", ".join(f"{cause}: {number}" for cause, number in budget.items())
    return parse_job(f"name: r\ncommand: [a]\nretry: {{{retry}}}\n", "job.yaml").spec


def ended(run: RunDir, number: int, message: str, **after: str) -> None:
    """What a supervisor leaves of an attempt: the next one may be another process, of another job."""
    attempt = run.attempt(number).create()
    write_json(attempt.supervisor, {"host": f"n{number}", "pid": number, "start_ticks": 1, "started": 1.0})
    write_json(attempt.outcome, {"status": "failed", "exit_code": 5, "message": message, **after})


def test_a_budget_is_the_run_s_and_no_new_supervisor_begins_it_anew() -> None:
    run, spec = create_run("r"), retrying(crash=3, node=1)
    ended(run, 1, "rank 0 on node n1 was killed", relaunched="crash")
    ended(run, 2, "rank 1 on node n1 ended with exit code 1", requeued="crash")
    assert recovery.why_no_retry(run, spec, "crash", failed(run, 3, "x"), None, in_place=True) is None
    ended(run, 3, "node n2: its agent ended", relaunched="node")
    ended(run, 4, "rank 1 on node n3 ended with exit code 2", relaunched="crash")
    fifth = failed(run, 5, "y")
    refused = recovery.why_no_retry(run, spec, "crash", fifth, None, in_place=True)
    assert refused == "retry.crash allows 3, and 3 have been used"
    # What was used for one cause is not used for another.
    assert recovery.why_no_retry(run, retrying(node=2), "node", fifth, None, in_place=True) is None
    assert recovery.why_no_retry(run, spec, "node", fifth, None, in_place=True) is not None


def test_the_same_failure_on_another_node_and_pid_is_the_same() -> None:
    run, spec = create_run("r"), retrying(crash=9)
    ended(run, 1, "rank 3 on node n7 (pid 81): ValueError: no such layer; log: /a/attempts/1/logs/rank-3.log")
    words = "rank 0 on node n2 (pid 9): ValueError: no such layer; log: /a/attempts/2/logs/rank-0.log"
    refused = recovery.why_no_retry(run, spec, "crash", failed(run, 2, words), None, in_place=True)
    assert refused == recovery.REPEATED_FAILURE
    other = failed(run, 2, words.replace("no such layer", "no such file"))
    assert recovery.why_no_retry(run, spec, "crash", other, None, in_place=True) is None
    # With progress in between it may be a new cause.
    assert recovery.why_no_retry(run, spec, "crash", failed(run, 2, words), 5, in_place=True) is None


# Workers in sessions of their own, deaf to TERM or without our environment, which outlive their parent.
LEAVES_CHILDREN = (
    "setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' &"
    " env -i setsid sleep 1000 & exec sleep 1000"
)


def test_what_a_killed_program_has_started_goes_with_it(site: Site) -> None:
    tree: list[process.ProcessId] = []

    def kill() -> None:
        record = read_json(site.only_run.attempt(1).rank_record(1))
        end = time.monotonic() + 20
        # The program itself, a loop with its sleep, and a sleep.
        while len(process.descendants(record["pid"])) < 4:
            assert time.monotonic() < end
            time.sleep(0.02)
        tree.extend(process.descendants(record["pid"]))
        os.kill(tree[0].pid, signal.SIGKILL)

    words = ["parallel.dp_replicate=2", "retry={crash: 0}", "name=t"]
    prepared = prepare_job(None, words, command=["sh", "-c", LEAVES_CHILDREN])
    with SignalQueue() as inbox:
        outcome = Supervisor(prepared, inbox, Recorder(on_ready=kill), limits=LIMITS).run()
    assert "rank 1 on node" in outcome.message
    assert "the command was killed by signal 9" in outcome.message
    assert [one.pid for one in tree if process.is_alive(one)] == []


def start_agents(*programs: str) -> None:
    """Agents whose command is this text of Python's, on n1, n2, …"""
    run = create_run("r")
    names = [f"n{at}" for at in range(1, len(programs) + 1)]
    crew = AgentPool(run, Leadership(run), "127.0.0.1", names)
    steps: dict[tuple[str, ...], list[str]] = {
        (node,): [sys.executable, "-c", text] for node, text in zip(names, programs, strict=True)
    }
    try:
        crew.start(steps, os.environ)
    finally:
        crew.close()


SILENT = "import sys; sys.stdin.read()"


def test_an_agent_that_does_not_start_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "_HELLO_TIMEOUT_S", 1.0)
    monkeypatch.setattr(crews, "_SHUTDOWN_S", 0.2)
    broken = "raise SystemExit('srun: error: n2: task 0: cannot create step')"
    with pytest.raises(SiteError) as refused:
        start_agents(SILENT, broken)
    assert str(refused.value).startswith(
        "the agent of node n2 did not start; last output: srun: error: n2: task 0: cannot create step; log: "
    )


def test_agents_that_stay_silent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "_HELLO_TIMEOUT_S", 1.0)
    monkeypatch.setattr(crews, "_SHUTDOWN_S", 0.2)
    with pytest.raises(SiteError, match=r"^no agent answered on n1, n2 within 1 s$"):
        start_agents(SILENT, SILENT)
