"""Programs that are called when a run changes: what they are told, and those that misbehave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun import process
from hpcrun.specs.events.log import EventRecord, parse_event
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.hooks import Hooks, StateChanges
from tests.event_lines import event_line
from tests.runs.made_runs import Run

APPEND = ["sh", "-c", 'cat >> "$0"; echo "$HPCRUN_HOOK_STATE $HPCRUN_HOOK_ATTEMPT $PWD" >> "$0.env"']
Make = Callable[..., Hooks]


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    run = create_run("r")
    run.telemetry.mkdir()
    return run


@pytest.fixture
def make(run: RunDir, tmp_path: Path) -> Make:
    def new(*commands: list[str], on: tuple[str, ...] = ()) -> Hooks:
        about = {"run": run.id, "name": "r", "slurm_job": "17", "host": "n01", "ranks": 2}
        hooks = [{"command": command, "on": list(on), "whose": "job"} for command in commands]
        return Hooks(run, about, {"hooks": hooks, "directory": str(tmp_path)})

    return new


def tell(run: RunDir, *events: dict[str, Any]) -> None:
    with run.events.open("a") as file:
        for event in events:
            file.write(json.dumps(event_line(**{"time": 1.0, **event})) + "\n")


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until_told(hooks: Hooks) -> None:
    end = time.monotonic() + 20
    while hooks._pending and time.monotonic() < end:
        hooks.turn()
        time.sleep(0.02)
    assert not hooks._pending


def faulty() -> list[EventRecord]:
    run = Run()
    for _ in range(2):
        run.launch()
        run.dies()
        run.event("fault", cause="crash", nodes=["n02"], message="killed")
        run.event("relaunch", excluded=[], spares_left=1)
    run.launch()
    return [parse_event(event_line(**event)) for event in run.events]


def test_every_fault_is_an_alert_of_its_own_and_resolved_by_the_recovery() -> None:
    told = list(StateChanges().of(faulty()))
    assert [(one["state"], one["alert"], one["resolved"]) for one in told] == [
        ("starting", None, []),
        ("running", None, []),
        ("fault", "attempt-1", []),
        ("relaunched", None, []),
        ("starting", None, []),
        ("running", None, ["attempt-1"]),
        ("fault", "attempt-2", []),
        ("relaunched", None, []),
        ("starting", None, []),
        ("running", None, ["attempt-2"]),
    ]
    assert [one["id"] for one in told] == list(range(1, 11))
    assert (told[2]["cause"], told[2]["nodes"], told[2]["message"]) == ("crash", ("n02",), "killed")


def test_the_end_is_told_by_its_record_or_by_its_lack() -> None:
    changes = StateChanges()
    list(changes.of(faulty()))
    (end,) = changes.end({"status": "done", "exit_code": 0, "step": 9, "message": "done", "ended": 2.0})
    assert (end["state"], end["exit_code"], end["step"], end["previous"]) == ("done", 0, 9, "running")
    (lost,) = StateChanges(state="running", attempt=2).end(None)
    assert (lost["state"], lost["alert"]) == ("lost", "attempt-2")
    assert list(StateChanges(state="requeued").end(None)) == []
    assert list(StateChanges().end(None)) == []


def test_a_hook_reads_a_document_and_a_few_variables(run: RunDir, make: Make, tmp_path: Path) -> None:
    path = tmp_path / "told"
    hooks = make([*APPEND, str(path)])
    tell(run, {"event": "launch"}, {"event": "rank_started"}, {"event": "ranks_connected"})
    hooks.turn()
    write_json(run.exit, {"status": "failed", "exit_code": 5, "message": "rank 1 \u2026", "ended": 3.0})
    hooks.close()
    told = documents(path)
    assert [one["state"] for one in told] == ["starting", "running", "failed"]
    assert told[2] | {"step": None} == {
        "schema_version": 1,
        **{"run": run.id, "name": "r", "slurm_job": "17", "host": "n01", "path": str(run.path)},
        **{"id": 3, "state": "failed", "previous": "running", "time": 3.0, "attempt": 1, "step": None},
        **{"message": "rank 1 \u2026", "exit_code": 5, "alert": "attempt-1", "resolved": []},
    }
    assert (tmp_path / "told.env").read_text().splitlines()[0] == f"starting 1 {tmp_path}"


def test_a_hook_is_not_told_the_secrets_that_a_message_holds(
    run: RunDir, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "of-the-environment")
    path = tmp_path / "told"
    hooks = make([*APPEND, str(path)])
    write_json(run.next_attempt().peers, {"secret": "of-the-attempt"})
    fault = {"cause": "crash", "message": "s3://me:of-the-url@host and of-the-environment: no"}
    tell(run, {"event": "launch"}, {"event": "fault", **fault})
    hooks.turn()
    write_json(run.exit, {"status": "failed", "exit_code": 5, "message": "HF_TOKEN=of-a-name of-the-attempt"})
    hooks.close()
    text = path.read_text()
    assert not [
        word
        for word in ("url", "environment", "attempt", "a-name")
        if f"of-{word}" in text.replace("of-the-", "of-")
    ]
    assert [one["message"] for one in documents(path)][1].endswith("(masked): no")
    assert documents(path)[1]["cause"] == "crash"


def test_a_hook_hears_of_what_it_asked_for(run: RunDir, make: Make, tmp_path: Path) -> None:
    hooks = make([*APPEND, str(tmp_path / "told")], on=("fault", "lost"))
    tell(run, {"event": "launch"}, {"event": "fault"}, {"event": "relaunch"}, {"event": "launch"})
    hooks.turn()
    hooks.close()
    assert [one["state"] for one in documents(tmp_path / "told")] == ["fault", "lost"]


def test_a_failure_is_told_once_until_it_has_worked_again(
    run: RunDir, make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    works = tmp_path / "works"
    hooks = make(["sh", "-c", 'echo "no room" >&2; test -e "$0"', str(works)], ["no-such-program"])
    for works_now in (False, False, True, False):
        works.touch() if works_now else works.unlink(missing_ok=True)
        tell(run, {"event": "fault"})
        hooks.turn()
        until_told(hooks)
    hooks.close()
    out, err = capfd.readouterr()
    told = [line for line in err.splitlines() if "hook" in line]
    assert len([line for line in told if "ended with exit code 1: no room; the run continues" in line]) == 2
    assert len([line for line in told if "no-such-program: cannot be run" in line]) == 1
    assert out.count("ended with exit code 1") == 4


def test_hooks_that_hang_crash_or_flood_keep_nobody_else_waiting(
    run: RunDir,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hpcrun.telemetry.hooks.TIME_LIMIT_S", 1.0)
    crash = [sys.executable, "-c", "import os; os.abort()"]
    hang = ["sh", "-c", "sleep 60 & setsid sleep 60 & sleep 60"]
    hooks = make(hang, ["yes"], crash, [*APPEND, str(tmp_path / "told")])
    tell(run, {"event": "launch"})
    hooks.turn()
    hooks.close()
    assert [one["state"] for one in documents(tmp_path / "told")] == ["starting", "lost"]
    out, err = capfd.readouterr()
    assert "hook of the job failed at starting: `sh` did not end in 1 s and was ended" in err
    assert "hook of the job failed at starting: `yes` did not end in 1 s and was ended" in err
    assert "ended with exit code -6" in err
    assert len(out) < 20_000
    assert process.descendants(os.getpid()) == []


def test_a_hook_that_is_too_slow_loses_the_oldest_calls(
    run: RunDir, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrun.telemetry.hooks._MAX_QUEUED_CALLS", 3)
    go = tmp_path / "go"
    wait = [
        "sh",
        "-c",
        'while ! test -e "$1"; do sleep 0.02; done; cat >> "$0"',
        str(tmp_path / "told"),
        str(go),
    ]
    hooks = make(wait)
    tell(run, *({"event": "fault", "attempt": number} for number in range(1, 8)))
    hooks.turn()
    go.touch()
    until_told(hooks)
    hooks.close()
    assert [one["attempt"] for one in documents(tmp_path / "told")] == [1, 6, 7, 7]


def test_what_was_not_told_is_told_where_the_run_goes_on(run: RunDir, make: Make, tmp_path: Path) -> None:
    path = tmp_path / "told"
    hooks = make([*APPEND, str(path)])
    tell(run, {"event": "launch"}, {"event": "fault"})
    hooks.turn()
    until_told(hooks)
    # The next one is seen, and its hook has not ended when all is over.
    tell(run, {"event": "requeue", "cause": "node"})
    hooks._call(hooks._changes.of(hooks._reader.read()))
    for hook in hooks._hooks:
        hook.close()
    again = make([*APPEND, str(path)])
    tell(run, {"event": "launch", "attempt": 2}, {"event": "ranks_connected", "attempt": 2})
    again.turn()
    until_told(again)
    told = [(one["id"], one["state"]) for one in documents(path)]
    both = [(3, "requeued"), (3, "requeued")]
    assert told == [(1, "starting"), (2, "fault"), *both, (4, "starting"), (5, "running")]
    assert documents(path)[-1]["resolved"] == ["attempt-1"]
    again.close()


@pytest.mark.parametrize("state", ["{", "[]", '{"changes": 3}', '{"changes": {"number": "x"}, "events": -4}'])
def test_a_damaged_memory_is_no_hindrance(run: RunDir, make: Make, tmp_path: Path, state: str) -> None:
    (run.telemetry / "hooks.json").write_text(state)
    run.events.write_text('{"event": "launch"}\nnonsense\n{"event": "launch", "attempt": "x"}\n[]\n')
    hooks = make([*APPEND, str(tmp_path / "told")])
    tell(run, {"event": "launch"})
    hooks.turn()
    until_told(hooks)
    assert [one["state"] for one in documents(tmp_path / "told")] == ["starting"]
    hooks.close()
