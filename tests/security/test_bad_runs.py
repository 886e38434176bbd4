"""Whatever lies in a run directory, it costs its own run one line, and no verb more than a moment."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hpcrun.cli.main import main
from hpcrun.runs.history import count_run_failures, find_similar_runs, measure_runs
from hpcrun.specs.job import JobSpec
from hpcrun.specs.provenance import Provenance, SubmissionRecord, write_provenance
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import all_runs, create_run
from hpcrun.specs.rundir import RunDir
from tests.event_lines import event_line
from tests.metric_lines import metric_line

T0 = 1_700_000_000.0
MOMENT_S = 20
"""A verb that takes longer hangs; one that does not takes some milliseconds."""


def make_run(name: str) -> RunDir:
    run = create_run(name)
    run.spec.write_text("name: t\ncommand: [sleep, '60']\n")
    origin = Provenance("command", name, 1, 10, T0, "me", "login", "/", ["hpcrun"], "0.1", "3.11")
    write_provenance(
        run, origin.submitted(SubmissionRecord(T0, pid=1, start_ticks=1, host=os.uname().nodename))
    )
    attempt = run.attempt(1).create()
    attempt.log(0).write_text("hello\n")
    attempt.launcher_log.write_text("launched\n")
    supervisor = {"pid": 1, "start_ticks": 0, "host": os.uname().nodename, "started": T0 + 1}
    write_json(attempt.supervisor, supervisor)
    write_json(attempt.plan, {"dp_replicate": 1, "dp_shard": 1, "whole_dp": 2})
    write_json(attempt.outcome, {"status": "done", "message": "", "step": 1, "ended": T0 + 9})
    write_json(attempt.result, {"status": "done", "step": 1})
    write_json(attempt.settings, {})
    events = [
        event_line("launch", T0 + 1, ranks=1),
        event_line("ranks_connected", T0 + 2),
        event_line("exit", T0 + 9, status="done"),
    ]
    run.events.write_text("".join(json.dumps(one) + "\n" for one in events))
    run.chaos.write_text(json.dumps(event_line("chaos", T0 + 3, text="x", node="n")) + "\n")
    steps = [metric_line("step", step, time=T0 + step) for step in (1, 2)]
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in steps))
    (run.submitit).mkdir()
    (run.submitit / "1_0_log.out").write_text("batch\n")
    return run


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 107 characters at most
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _directory(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _text(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text * (1 if path.suffix != ".jsonl" else 2))

    write.__name__ = f"_{text[:12]!r}"
    return write


WRONG: list[Any] = ["\ud800", [], {}, None, -1, 10**30, float("nan")]
DEEP = "[" * 100_000
KINDS = [
    _fifo,
    _socket,
    _directory,
    _dangling,
    _loop,
    _device,
    _sparse,
    *map(
        _text,
        ["", "\0", DEEP, '{"a":' * 50_000, "[]", "7", '"x"', "null", "{", "- a\n", "&a [*a]", "1" * 9000],
    ),
]
FILES = [
    "spec.yaml",
    "job.json",
    "exit.json",
    "sweep.json",
    "cluster.yaml",
    "events.jsonl",
    "metrics.jsonl",
    "chaos.jsonl",
    "submitit/1_0_log.out",
    "attempts",
    "attempts/1",
    "attempts/1/supervisor.json",
    "attempts/1/plan.json",
    "attempts/1/placement.json",
    "attempts/1/settings.json",
    "attempts/1/outcome.json",
    "attempts/1/result.json",
    "attempts/1/logs/rank-0.log",
    "checkpoints",
    "checkpoints/step-00000001",
    "checkpoints/step-00000001/checkpoint.json",
    "elements",
    "elements/0",
]
EVERY_VERB = [
    ("status", "--json"),
    ("describe",),
    ("events",),
    ("logs",),
    ("logs", "--batch"),
    ("metrics",),
    ("cancel",),
    ("save",),
    ("wait", "--timeout", "0s"),
    ("ckpt", "ls"),
    ("ckpt", "gc", "--dry-run"),
]
QUICK_VERBS = [("describe",), ("events",)]


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What a verb prints; it ends in a moment, with no exception that is not ours."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"hangs: {words}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOMENT_S)
    try:
        with pytest.raises(SystemExit):
            main(words)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capsys.readouterr()
    return out, err


def replace_by(path: Path, make: Callable[[Path], None]) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        path.rename(path.with_name("aside"))
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_stops_a_verb(
    name: str, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for make in KINDS:
        bad = make_run("bad")
        replace_by(bad.path / name, make)
        for verb in EVERY_VERB if make in (_fifo, _directory, _sparse) else QUICK_VERBS:
            assert "Traceback" not in say(capsys, *verb, bad.id)[1], (make, verb)
    sound = make_run("sound")
    out, err = say(capsys, "list")
    lines = out.splitlines()
    assert [line for line in lines if line.startswith(sound.id)]
    assert len([line for line in lines if line.startswith("bad-")]) == len(KINDS)
    assert err == ""
    runs = list(all_runs())
    assert count_run_failures(runs, None).runs <= len(runs)
    measure_runs(find_similar_runs(JobSpec(name="bad", command=["true"]), runs))


@pytest.mark.parametrize(
    "name",
    [
        "job.json",
        "exit.json",
        "attempts/1/supervisor.json",
        "attempts/1/plan.json",
        "attempts/1/outcome.json",
    ],
)
def test_no_value_of_a_record_stops_a_verb(
    name: str, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = make_run("bad")
    write_json(
        sound.exit,
        {"status": "done", "exit_code": 0, "message": "", "attempt": 1, "step": 1, "ended": T0 + 9},
    )
    path = sound.path / name
    record = json.loads(path.read_text())
    for key in record:
        for value in WRONG:
            path.write_text(json.dumps(record | {key: value}))
            for verb in (("describe",), ("cancel",), ("list",)):
                say(capsys, *verb, *([] if verb == ("list",) else [sound.id]))


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "chaos.jsonl"])
def test_no_value_of_a_line_stops_a_verb(
    name: str, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("bad")
    path = run.path / name
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        for key in record:
            for value in WRONG:
                changed = [*lines[:number], json.dumps(record | {key: value}), *lines[number + 1 :]]
                path.write_text("\n".join(changed) + "\n")
                for verb in ("describe", "events", "metrics"):
                    say(capsys, verb, run.id)


def test_a_closed_run_is_one_line(runs_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["²", "1" * 5000, "-1", "01", "x"]
    run = make_run("odd")
    for name in names[:1] + names[2:]:
        (run.path / "attempts" / name).mkdir()
    assert [one.number for one in run.attempts()] == [1]
    assert run.id in say(capsys, "list")[0]
