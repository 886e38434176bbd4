"""Where runs stand, by the records in their directories and by what a command in squeue's place prints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.errors import UsageError
from hpcrun.runs.describe import compute_run_ledger
from hpcrun.runs.follow import PollIntervals, follow_logs, wait_for_runs
from hpcrun.runs.run_state import (
    RUN_STATES,
    RunState,
    read_element_states,
    read_run_state,
    read_run_states,
    with_slurm_state,
    worst_exit_code,
)
from hpcrun.specs.metrics import Metric
from hpcrun.specs.provenance import Provenance, SubmissionRecord, read_provenance, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import all_runs, create_run, find_run, runs_root, runs_roots
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric, metric_line

SUBMITTED = 1000.0
AT_ONCE = PollIntervals(records=0.01, slurm=0.01, slurm_max=0.01, believe=0.0)

Squeue = Callable[..., None]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """Sets what squeue prints from now on: rows of its format, by default without any job; no sacct."""
    (tmp_path / "bin").mkdir()
    command, out = tmp_path / "bin" / "squeue", tmp_path / "squeue.out"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def prints(*rows: str, code: int = 0) -> None:
        # Renamed into place: the one that runs may be reading.
        out.with_suffix(".new").write_text("".join(f"{row}\n" for row in rows))
        out.with_suffix(".new").rename(out)
        command.write_text(
            f"#!/bin/sh\necho >> {tmp_path}/calls\n"
            f"while IFS= read -r line; do printf '%s\\n' \"$line\"; done < {out}\nexit {code}\n"
        )
        command.chmod(0o755)

    prints()
    return prints


def row(job: str, state: str, reason: str = "None", start: str = "N/A", nodes: str = "") -> str:
    return f"{job}|{state}|{reason}|{start}|{nodes}|main|0:00|5:00|train"


def calls(tmp_path: Path) -> int:
    path = tmp_path / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def submitted(name: str = "r", *submissions: SubmissionRecord, **more: Any) -> RunDir:
    run = create_run(name)
    run.spec.write_text("name: r\n")
    origin = Provenance(
        kind="train",
        name=name,
        ranks=1,
        steps=10,
        created=1.0,
        user="me",
        host="login",
        directory="/",
        argv=[],
        hpcrun="",
        python="",
    )
    record = replace(origin, submissions=list(submissions or [SubmissionRecord(SUBMITTED, job=7)]), **more)
    write_provenance(run, record)
    return run


def begun(run: RunDir, attempt: int = 1, *, started: float | None = SUBMITTED + 5, **more: Any) -> RunDir:
    made = run.attempt(attempt).create()
    record = {"host": "n01", "pid": 4, "start_ticks": 5, "started": started, "slurm_job": 7, "restarts": 0}
    write_json(made.supervisor, record | more)
    return run


def ended(run: RunDir, status: str = "done", attempt: int | None = 1, **more: Any) -> RunDir:
    record = {"status": status, "exit_code": 0 if status == "done" else 5, "message": "", "attempt": attempt}
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.exit, record | {"step": 4, "ended": SUBMITTED + 50} | more)
    return run


def sweep(elements: int, *submissions: SubmissionRecord) -> RunDir:
    run = submitted("s", *(submissions or [SubmissionRecord(SUBMITTED, job=9, array=f"0-{elements - 1}%2")]))
    write_json(run.sweep, [{"train.lr": 10.0**-number} for number in range(elements)])
    return run


def asked(run: RunDir) -> RunState:
    return read_run_states([run])[0]


def test_a_job_that_waits_says_why_and_until_when(squeue: Squeue) -> None:
    squeue(row("7", "PENDING", "Resources", "2026-11-29T15:16:47"))
    state = asked(submitted())
    assert (state.state, state.job, state.start) == ("queued", "7", "2026-11-29T15:16:47")
    assert state.message == "waits for nodes to become free; estimated start 2026-11-29T15:16:47"
    squeue(row("7", "PENDING", "PartitionTimeLimit"))
    assert asked(submitted()).message == "will never start: asks for more time than the partition allows"


def test_the_exit_record_wins_and_then_nobody_is_asked(squeue: Squeue, tmp_path: Path) -> None:
    squeue(row("7", "RUNNING"))
    assert asked(ended(begun(submitted()))).state == "done"
    assert calls(tmp_path) == 0


def test_an_exit_record_of_an_attempt_before_the_newest_does_not_count(squeue: Squeue) -> None:
    squeue(row("7", "RUNNING", nodes="n[01-02]"))
    state = asked(begun(ended(begun(submitted()), "failed"), 2))
    assert (state.state, state.attempt, state.exit_code, state.nodes) == ("running", 2, None, "n[01-02]")


def test_an_exit_record_of_before_the_newest_submission_does_not_count(squeue: Squeue) -> None:
    squeue(row("8", "PENDING", "Priority"))
    again = SubmissionRecord(SUBMITTED + 100, job=8, attempts={"": 1})
    run = ended(begun(submitted("r", SubmissionRecord(SUBMITTED, job=7), again)), "failed")
    state = asked(run)
    assert (state.state, state.job, state.attempt) == ("queued", "8", 1)
    assert state.message == "again, after attempt 1: jobs with a higher priority come first"


@pytest.mark.parametrize("ahead_s", [-7200.0, -1.0, 0.0, 7200.0])
def test_an_end_counts_whatever_the_clocks_of_the_login_node_and_the_compute_node_say(
    squeue: Squeue, ahead_s: float
) -> None:
    started = SUBMITTED + ahead_s
    run = ended(begun(submitted(), started=started), ended=started + 0.5)
    assert (asked(run).state, asked(run).exit_code) == ("done", 0)
    early = ended(submitted("early"), "failed", None, slurm_job=7, ended=started)
    assert asked(early).state == "failed", "before there was an attempt"
    again = [SubmissionRecord(SUBMITTED, job=7), SubmissionRecord(SUBMITTED + 100, job=8, attempts={"": 1})]
    squeue(row("8", "PENDING", "Priority"))
    for more in ({"attempt": 1}, {"attempt": 1, "slurm_job": 7}, {"attempt": None, "slurm_job": 7}):
        run = ended(begun(submitted("late", *again)), "failed", ended=SUBMITTED + 100 + ahead_s, **more)
        assert asked(run).state == "queued", "a supervisor of the job before was late to write"
    taken = ended(begun(submitted("taken", *again)), "cancelled", slurm_job=8, ended=started)
    assert asked(taken).state == "cancelled", "out of the queue, without an attempt of the new job's"
    second = begun(submitted("second", *again), 2, started=started, slurm_job=8)
    begun(second, 1)
    squeue(row("8", "RUNNING"))
    assert (asked(second).state, asked(second).message) == ("running", "")
    assert asked(ended(second, attempt=2, slurm_job=8, ended=started)).state == "done"


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_the_time_of_a_run_that_goes_on_is_counted_by_the_clock_of_its_nodes(
    squeue: Squeue, ahead_s: float
) -> None:
    squeue(row("7", "RUNNING"))
    run, now = begun(submitted()), time.time() + ahead_s
    events = [("launch", now - 10, 50.0), ("ranks_connected", now - 8, 52.0)]
    run.events.write_text(
        "".join(json.dumps(event_line(name, at, monotonic=clock)) + "\n" for name, at, clock in events)
    )
    os.utime(run.events, (time.time() - 8,) * 2)
    state = asked(run)
    assert state.state == "running"
    # A file system counts in ticks, which are coarser than the clock.
    assert 9 <= compute_run_ledger(state).wall_s < 60
    assert 1 <= compute_run_ledger(read_run_state(run)).wall_s < 60, "Slurm was not asked"


def test_a_requeued_job_is_queued_again_and_its_attempts_are_counted(squeue: Squeue) -> None:
    squeue(row("7", "PENDING", "BeginTime"))
    run = begun(begun(submitted()), 2)
    assert (asked(run).state, asked(run).attempt) == ("queued", 2)
    assert asked(run).message.startswith("again, after attempt 2: its start time has not come")
    squeue(row("7", "REQUEUED"))
    assert asked(run).state == "queued"


@pytest.mark.parametrize(
    ("printed", "state", "words"),
    [
        ("COMPLETING", "running", ""),
        ("CONFIGURING", "running", "its supervisor is not up yet"),
        ("CANCELLED by 0", "cancelled", "Slurm says CANCELLED by 0, and there is no record"),
        ("OUT_OF_MEMORY", "failed", "Slurm says OUT_OF_MEMORY, and there is no record"),
        ("NODE_FAIL", "failed", "Slurm says NODE_FAIL"),
        ("TIMEOUT", "failed", "Slurm says TIMEOUT"),
        ("COMPLETED", "failed", "Slurm says COMPLETED, and there is no record of an end"),
        ("RESV_DEL_HOLD", "queued", ""),
        ("WHO_KNOWS", "unknown", "a state that is not known here: unknown WHO_KNOWS"),
    ],
)
def test_slurm_s_states_in_our_words(squeue: Squeue, printed: str, state: str, words: str) -> None:
    squeue(row("7", printed))
    found = asked(submitted())
    assert found.state == state
    assert words in found.message
    assert found.state in RUN_STATES


def test_a_job_that_left_no_record_is_explained_by_the_last_line_of_its_batch_shell(squeue: Squeue) -> None:
    run = submitted()
    run.submitit.mkdir()
    (run.submitit / "7_0_log.out").write_text("hello\n")
    assert asked(run).state == "lost"
    assert asked(run).message.endswith("; the batch shell said last: hello")
    (run.submitit / "7_0_log.err").write_text("Lmod has detected: cuda/99 is unknown\n\n")
    squeue(row("7", "FAILED"))
    assert asked(run).message.endswith("; the batch shell said last: Lmod has detected: cuda/99 is unknown")


def test_a_job_that_slurm_forgot_is_lost_and_says_what_to_do(squeue: Squeue) -> None:
    state = asked(submitted())
    assert state.state == "lost"
    assert (
        "does not know job 7 any more, and it left no record of its end; hpcrun submit --resume"
        in state.message
    )
    assert (state.is_over, state.code) == (True, 5)


def test_a_job_of_the_same_number_that_is_another_run_s_is_not_this_one(squeue: Squeue) -> None:
    run, many = submitted(), sweep(2)
    for one, job, index in ((run, "7", "7"), (many, "9", "9_1")):
        mine = row(index, "RUNNING").replace("|train", f"|command=/r/{one.id}/submitit/a.sh|train")
        squeue(mine)
        assert asked(one).state == "running"
        squeue(mine.replace(one.id, "other-0101-000000-abcdef"))
        assert (asked(one).state, asked(one).job) == ("lost", job)
    squeue(row("7", "RUNNING").replace("|train", "|command=/home/me/allocation.sh|train"))
    write_provenance(run, replace(origin_of(run), submissions=[]))
    assert asked(begun(run)).state == "running", "training inside of an allocation"


def test_a_job_that_is_cleaned_up_before_it_runs_again_is_queued(squeue: Squeue) -> None:
    run = begun(submitted())
    squeue(row("7", "COMPLETING"))
    assert asked(run).state == "running"
    write_json(run.attempt(1).outcome, {"status": "saved", "requeued": "preemption"})
    assert (asked(run).state, asked(run).message) == (
        "queued",
        "again, after attempt 1: its nodes are cleaned up",
    )
    begun(run, 2)
    assert asked(run).state == "running"


def test_where_squeue_fails_the_state_is_unknown_and_says_why(squeue: Squeue) -> None:
    squeue("slurm is not here", code=1)
    state = asked(submitted())
    assert (state.state, state.is_over) == ("unknown", False)
    assert "squeue ended with exit code 1: slurm is not here" in state.message


def test_a_record_that_comes_while_slurm_is_asked_is_seen(squeue: Squeue, tmp_path: Path) -> None:
    run = begun(submitted())
    text = json.dumps({"status": "saved", "exit_code": 75, "message": "", "attempt": 1, "step": 3})
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho '{text}' > {run.exit}\n")
    state = asked(run)
    assert (state.state, state.exit_code, state.step) == ("saved", 75, 3)


def test_without_asking_a_job_is_unknown(squeue: Squeue, tmp_path: Path) -> None:
    state = read_run_state(submitted())
    assert (state.state, state.job) == ("unknown", "7")
    assert calls(tmp_path) == 0


def test_many_runs_are_one_question(squeue: Squeue, tmp_path: Path) -> None:
    runs = [submitted("r", SubmissionRecord(SUBMITTED, job=job)) for job in range(20)] + [sweep(5)]
    squeue(*(row(str(job), "RUNNING") for job in range(8)), row("9", "RUNNING"), row("9_[0-4]", "PENDING"))
    states = [one.state for one in read_run_states(runs)]
    assert states == ["running"] * 8 + ["lost", "running"] + ["lost"] * 10 + ["queued"]
    assert calls(tmp_path) == 1


def test_a_local_run_in_the_background_is_its_process(squeue: Squeue, tmp_path: Path) -> None:
    me = process.identify_process(os.getpid())
    assert me
    host = os.uname().nodename
    alive = SubmissionRecord(SUBMITTED, host=host, pid=me.pid, start_ticks=me.start_ticks)
    assert asked(submitted("r", alive)).state == "running"
    gone = asked(submitted("r", replace(alive, start_ticks=1)))
    assert gone.state == "dead"
    assert "hpcrun submit --resume r-" in gone.message
    away = asked(submitted("r", replace(alive, host="elsewhere")))
    assert (away.state, away.is_over) == ("unknown", False)
    assert calls(tmp_path) == 0


def test_a_run_that_was_continued_here_after_its_job_is_judged_by_its_process(squeue: Squeue) -> None:
    run = begun(submitted(), 2, host=os.uname().nodename, slurm_job=None)
    assert (asked(run).state, asked(run).job) == ("dead", None)
    me = process.identify_process(os.getpid())
    assert me
    run = begun(
        submitted(), 2, host=os.uname().nodename, slurm_job=None, pid=me.pid, start_ticks=me.start_ticks
    )
    assert asked(run).state == "running"


def test_training_inside_an_allocation_is_asked_for_by_its_job(squeue: Squeue) -> None:
    squeue(row("7", "RUNNING"))
    run = submitted()
    write_provenance(run, replace(origin_of(run), submissions=[]))
    assert asked(begun(run)).state == "running"
    squeue()
    assert asked(run).state == "lost"


def origin_of(run: RunDir) -> Provenance:
    found = read_provenance(run)
    assert found
    return found


def test_a_sweep_is_the_sum_of_its_elements(squeue: Squeue, tmp_path: Path) -> None:
    run = sweep(6)
    ended(begun(run.element(0)))
    ended(begun(run.element(1)), "failed")
    squeue(row("9_2", "RUNNING", nodes="n03"), row("9_[3-5%2]", "PENDING", "JobArrayTaskLimit"))
    begun(run.element(2)).metrics.write_text(json.dumps(metric_line("step", 3, loss=1.5)))
    states = read_element_states(run)
    assert [one.state for one in states] == ["done", "failed", "running", "queued", "queued", "queued"]
    assert [one.job for one in states] == [f"9_{index}" for index in range(6)]
    assert (states[2].step, states[2].loss, states[2].nodes) == (3, 1.5, "n03")
    assert calls(tmp_path) == 1
    whole = asked(run)
    assert (whole.state, whole.job, whole.exit_code) == ("running", "9", None)
    assert whole.elements == {"done": 1, "failed": 1, "queued": 3, "running": 1}
    assert whole.message.startswith(
        "1 done, 1 failed, 3 queued, 1 running; as many elements of the array run"
    )
    for number in range(2, 6):
        ended(run.element(number), attempt=None)
    assert (asked(run).state, asked(run).code) == ("failed", 5)


def test_elements_in_pieces_and_submitted_again_are_asked_for_by_their_own_job(squeue: Squeue) -> None:
    run = sweep(
        4,
        SubmissionRecord(SUBMITTED, job=9, array="0-1"),
        SubmissionRecord(SUBMITTED, job=10, array="0-1", offset=2),
        SubmissionRecord(SUBMITTED + 100, job=11, array="1%4", offset=2, attempts={"3": 1}),
    )
    ended(begun(run.element(3), slurm_job=10), "failed")
    squeue(row("9_[0-1]", "PENDING"), row("10_0", "RUNNING"), row("11_[1]", "PENDING"))
    states = read_element_states(run)
    assert [one.job for one in states] == ["9_0", "9_1", "10_0", "11_1"]
    assert [one.state for one in states] == ["queued", "queued", "running", "queued"]
    assert asked(run).job == "11", "the newest of its jobs"


def test_a_local_sweep_runs_one_element_after_another(squeue: Squeue) -> None:
    me = process.identify_process(os.getpid())
    assert me
    here: dict[str, Any] = {"host": os.uname().nodename, "pid": me.pid, "start_ticks": me.start_ticks}
    run = sweep(3, SubmissionRecord(SUBMITTED, **here))
    ended(begun(run.element(0), slurm_job=None, **here))
    begun(run.element(1), slurm_job=None, **here)
    states = read_element_states(run)
    assert [one.state for one in states] == ["done", "running", "queued"]
    assert states[2].message == "waits for its turn"


def test_a_damaged_record_is_the_trouble_of_one_run(squeue: Squeue) -> None:
    bad, good = submitted(), ended(begun(submitted()))
    bad.exit.write_text('{"status": 7}')
    torn = sweep(2)
    torn.sweep.write_text("[{")
    states = read_run_states([bad, good, torn])
    assert [one.state for one in states] == ["unknown", "done", "unknown"]
    assert "is damaged" in states[0].message
    assert "sweep.json: is damaged" in states[2].message


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("supervisor.json", '{"started": "x"}', 'supervisor.json: is damaged: started is "x", not a number'),
        ("supervisor.json", '{"started": 1e9, "host": 7}', "host is 7, not text"),
        ("exit.json", '{"exit_code": 0}', "exit.json: is damaged: status is null, not text"),
        ("supervisor.json", "[1]", "supervisor.json: is damaged: it holds no mapping; remove it"),
        ("exit.json", '{"status": "done", "exit_code": 0, "ended": "x"}', 'ended is "x", not a number'),
        (
            "exit.json",
            '{"status": "done", "exit_code": 0, "slurm_job": "x"}',
            'slurm_job is "x", not a number',
        ),
        ("exit.json", '{"status": "done", "exit_code": "0"}', 'exit_code is "0", not a number'),
        ("result.json", '{"status": []}', "no supervisor of ours has recorded itself here"),
        ("job.json", "", 'time is "x", not a number'),
    ],
)
def test_a_record_of_a_wrong_type_is_the_trouble_of_one_run(
    name: str, text: str, said: str, squeue: Squeue
) -> None:
    bad, good = submitted("r", SubmissionRecord(SUBMITTED, job=7)), ended(begun(submitted()))
    if name == "job.json":
        text = bad.job.read_text().replace(f'"time": {SUBMITTED}', '"time": "x"')
    elif name == "result.json":
        write_provenance(bad, replace(origin_of(bad), submissions=[]))
    files = {"exit.json": bad.exit, "job.json": bad.job}
    files.get(name, bad.attempt(1).create().path / name).write_text(text)
    states = read_run_states([bad, good])
    assert [one.state for one in states] == ["unknown", "done"]
    assert said in states[0].message


def test_what_a_record_leaves_out_is_no_damage(squeue: Squeue) -> None:
    run = begun(submitted(), started=None, host=None)
    squeue(row("7", "PENDING", "Priority"))
    assert asked(run).state == "queued"
    assert asked(ended(run, message=None, ended=None)).state == "done"


def test_figures_of_a_wrong_type_are_none(squeue: Squeue) -> None:
    run = begun(submitted())
    lines = [metric_line("step") | {"step": "x", "loss": []}, metric_line("eval", eval_loss={})]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (asked(run).step, asked(run).loss, asked(run).eval_loss) == (None, None, None)


def test_a_run_is_found_by_its_job(squeue: Squeue) -> None:
    one, many = submitted(), sweep(3, SubmissionRecord(SUBMITTED, job=9, array="0-1", offset=1))
    named = submitted("77", SubmissionRecord(SUBMITTED, job=5))
    assert find_run("7") == one
    assert find_run("9") == many
    many.element(2).path.mkdir(parents=True)
    assert find_run("9_1") == many.element(2)
    assert find_run("7+0") == one
    assert find_run(f"{many.id}/2") == many.element(2)
    assert find_run("77") == named
    for word, told in {
        "8": "no such run",
        f"{many.id}/3": "there are 0 to 2",
        f"{one.id}/0": "is not a sweep",
        "9_99": f"{many.id}/100: there is no such element; there are 0 to 2",
        "7_0": f"{one.id} is not a sweep, so it has no elements",
    }.items():
        with pytest.raises(UsageError, match=told):
            find_run(word)


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_word_names_no_run(word: str) -> None:
    run = submitted()
    assert find_run(run.id) == run
    with pytest.raises(UsageError, match="empty run name"):
        find_run(word)


def test_a_whole_name_comes_before_those_that_begin_like_it() -> None:
    run, _, _ = submitted("cont"), submitted("cont2"), submitted("cont-0102")
    assert find_run("cont") == run
    assert find_run("cont2") != run
    submitted("cont")
    with pytest.raises(UsageError, match="cont: names 2 runs"):
        find_run("cont")


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No HPCRUN_ROOT, and a place for profiles."""
    monkeypatch.delenv("HPCRUN_ROOT")
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    profiles = tmp_path / "site" / "profiles"
    profiles.mkdir(parents=True)
    return profiles


def test_the_root_is_that_of_the_profile(
    no_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert runs_root() == tmp_path / "runs"
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (no_root / "a.yaml").write_text("name: a\nroot: $WORK/runs\n")
    assert runs_roots() == [tmp_path / "work" / "runs"]
    (no_root / "b.yaml").write_text("name: b\ndefault: true\nroot: ~/runs\n")
    assert runs_roots() == [tmp_path / "home" / "runs", tmp_path / "work" / "runs"]
    run = create_run("r", runs_roots()[1])
    run.spec.write_text("name: r\n")
    assert list(all_runs()) == [run]
    assert find_run("r-") == run
    monkeypatch.setenv("HPCRUN_ROOT", "mine")
    assert runs_roots() == [tmp_path / "mine"]


def test_a_root_that_names_an_unset_variable_is_told_with_file_and_line(no_root: Path) -> None:
    (no_root / "a.yaml").write_text("name: a\nroot: $NO_SUCH_PLACE/runs\n")
    with pytest.raises(
        UsageError, match=r"a\.yaml:2 root: '\$NO_SUCH_PLACE/runs' is not an absolute path here"
    ):
        runs_root()


def test_where_slurm_calls_the_end_of_a_run_otherwise_both_are_shown(squeue: Squeue, tmp_path: Path) -> None:
    squeue(row("7", "CANCELLED"))
    lost = ended(begun(submitted("host")), slurm_state="CANCELLED")
    assert (asked(lost).state, asked(lost).shown) == ("done", "done (Slurm says CANCELLED)")
    assert calls(tmp_path) == 0, "the leader that ended the job has written it down"
    run = ended(begun(submitted("r")))
    assert (asked(run).shown, with_slurm_state(asked(run)).shown) == ("done", "done (Slurm says CANCELLED)")
    assert calls(tmp_path) == 1
    for status, name, shown in (
        ("done", "COMPLETED", "done"),
        ("done", "NODE_FAIL", "done (Slurm says NODE_FAIL)"),
        ("failed", "COMPLETED", "failed (Slurm says COMPLETED)"),
        ("failed", "FAILED", "failed"),
        ("saved", "CANCELLED", "saved"),
        ("done", "RUNNING", "done"),
    ):
        squeue(row("7", name))
        assert with_slurm_state(asked(ended(begun(run), status))).shown == shown
    squeue(code=1)
    assert with_slurm_state(asked(run)).shown == "done"
    assert asked(ended(begun(run), "failed", slurm_state="CANCELLED")).shown == "failed"


def test_the_worst_of_several_exit_codes() -> None:
    assert worst_exit_code([]) == 0
    assert worst_exit_code([0, 75]) == 75
    assert worst_exit_code([75, 1, 0]) == 1
    assert worst_exit_code([5, 130, 3]) == 130


def test_waiting_ends_with_the_exit_record(squeue: Squeue) -> None:
    run, notes = begun(submitted()), list[str]()
    squeue(row("7", "RUNNING"))

    def note(text: str) -> None:
        notes.append(text)
        if text.endswith("is running"):
            ended(run, "failed", message="rank 1 died")

    (state,) = wait_for_runs([run], note, pace=AT_ONCE)
    assert (state.state, state.code) == ("failed", 5)
    assert notes == [f"{run.id} is running", f"{run.id} is failed: rank 1 died"]


def test_waiting_ends_for_a_lost_job_and_at_the_time_out(squeue: Squeue) -> None:
    (lost,) = wait_for_runs([submitted()], lambda _: None, pace=AT_ONCE)
    assert lost.state == "lost"
    squeue(row("7", "PENDING"))
    (queued,) = wait_for_runs([submitted()], lambda _: None, timeout_s=0.05, pace=AT_ONCE)
    assert queued.state == "queued"
    never = submitted()
    write_provenance(never, replace(origin_of(never), submissions=[]))
    with pytest.raises(UsageError, match="nothing to wait for"):
        wait_for_runs([never], lambda _: None, pace=AT_ONCE)
    write_json(never.sweep, [{}, {}])
    with pytest.raises(UsageError, match="nothing to wait for"):
        wait_for_runs([never], lambda _: None, pace=AT_ONCE)


def test_an_end_that_only_slurm_tells_of_is_not_believed_at_once(squeue: Squeue) -> None:
    run, looked = begun(submitted()), list[str]()

    def note(text: str) -> None:
        looked.append(text)
        ended(run)

    (state,) = wait_for_runs([run], note, pace=replace(AT_ONCE, believe=60))
    assert state.state == "done"
    assert "unknown" in looked[0]


def test_waiting_asks_slurm_seldom_and_the_records_often(squeue: Squeue, tmp_path: Path) -> None:
    squeue(row("7", "PENDING"))
    run = submitted()
    wait_for_runs(
        [run, submitted()], lambda _: None, timeout_s=0.3, pace=replace(AT_ONCE, slurm=60, slurm_max=60)
    )
    assert calls(tmp_path) == 1


def test_following_waits_for_the_job_and_goes_on_over_a_requeue(squeue: Squeue) -> None:
    run, written, notes = submitted(), list[str](), list[str]()
    squeue(row("7", "PENDING", "Priority"))

    def start(number: int, text: str) -> None:
        begun(run, number)
        run.attempt(number).log(0).write_text(text)
        squeue(row("7", "RUNNING"))

    def note(text: str) -> None:
        notes.append(text)
        if text.endswith("queued: jobs with a higher priority come first"):
            start(1, "one ")
        elif "again, after attempt 1" in text:
            with run.attempt(1).log(0).open("a") as file:
                file.write("last of one ")
            start(2, "two ")

    def write(text: str) -> None:
        written.append(text)
        if text == "one ":
            squeue(row("7", "PENDING", "BeginTime"))
        elif text == "two ":
            ended(run, attempt=2)

    assert follow_logs(run, write, note, pace=AT_ONCE) == 0
    assert "".join(written) == "one last of one two "
    assert [text for text in notes if "begins" in text] == [f"attempt 2 of {run.id} begins"]
    assert notes[-1] == f"{run.id} is done"


def test_following_a_rank_shows_the_launcher_until_the_rank_prints(squeue: Squeue) -> None:
    run, written = begun(submitted()), list[str]()
    squeue(row("7", "RUNNING"))
    run.attempt(1).launcher_log.write_text("starting\n")

    def write(text: str) -> None:
        written.append(text)
        if text == "starting\n":
            run.attempt(1).log(0).write_text("up\n")
        else:
            ended(run)

    assert follow_logs(run, write, lambda _: None, pace=AT_ONCE) == 0
    assert written == ["starting\n", "up\n"]


@pytest.mark.parametrize(("attempt", "shown"), [(None, "three "), (2, "two three ")])
def test_following_begins_with_the_newest_attempt_or_the_one_that_is_named(
    squeue: Squeue, attempt: int | None, shown: str
) -> None:
    run, written = submitted(), list[str]()
    for number, text in enumerate(("one ", "two ", "three "), 1):
        begun(run, number)
        run.attempt(number).log(0).write_text(text)
    ended(run, attempt=3)
    assert follow_logs(run, written.append, lambda _: None, attempt=attempt, pace=AT_ONCE) == 0
    assert "".join(written) == shown


def test_following_tells_of_the_steps_that_come(squeue: Squeue) -> None:
    run, steps = begun(submitted()), list[Metric]()
    run.metrics.write_text(json.dumps(metric_line("step", 1)) + "\n")
    run.attempt(1).log(0).write_text("up")
    squeue(row("7", "RUNNING"))

    def write(_: str) -> None:
        with run.metrics.open("a") as file:
            file.write(json.dumps(metric_line("step", 2)) + '\n{"step": 3')
        ended(run)

    assert follow_logs(run, write, lambda _: None, step=steps.append, pace=AT_ONCE) == 0
    assert steps == [metric("step", 2)]


def test_following_the_batch_shell(squeue: Squeue) -> None:
    run, written = submitted(), list[str]()
    run.submitit.mkdir()
    (run.submitit / "7_0_log.out").write_text("module: no such module\n")
    squeue(row("7", "FAILED"))
    assert follow_logs(run, written.append, lambda _: None, batch=True, pace=AT_ONCE) == 5
    assert written == ["module: no such module\n"]
