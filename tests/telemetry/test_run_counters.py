"""Counters of runs that were made up second by second: as the ledger has them, and never going back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpcrun.specs.records import JsonLineReader
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.prometheus_metrics import RunMetrics, metric_samples
from hpcrun.telemetry.run_counters import BADPUT_BUCKETS, RunCounters, RunCountersReader
from tests.runs.test_ledger import RUNS, Record, Run


def three_attempts() -> Run:
    """Loses steps to a crash, is queued again for a lost node, and is done in its third attempt."""
    run = Run()
    run.launch()
    run.steps(1, 5)
    run.saves(5)
    run.steps(6, 8, "lost")
    run.dies()
    run.event("fault", cause="crash", nodes=[], message="killed")
    run.event("relaunch", excluded=["n02"], spares_left=0)
    run.passes("recovery", 1)
    run.launch(5)
    run.steps(6, 9)
    run.dies(then="shutdown")
    run.event("fault", cause="node", nodes=["n03"], message="lost")
    run.event("requeue", cause="node")
    run.passes("queued", 60)
    run.boot = 77.0
    run.launch(5)
    run.steps(6, 12)
    run.saves(12)
    run.ends()
    return run


def folded(run: Run) -> RunCounters:
    tally = RunCounters()
    tally.take(run.events, run.metrics)
    return tally


def in_order(run: Run) -> list[tuple[Record, bool]]:
    both = [(one, False) for one in run.events] + [(one, True) for one in run.metrics]
    return sorted(both, key=lambda one: (one[0]["attempt"], one[0]["time"]))


def counters(tally: RunCounters) -> dict[tuple[str, str], float]:
    ends = ("_total", "_count", "_sum", "_bucket")
    found = metric_samples([RunMetrics("r", tally)])
    return {(name, json.dumps(labels)): value for name, labels, value in found if name.endswith(ends)}


@pytest.mark.parametrize("name", RUNS)
def test_time_is_counted_as_the_ledger_counts_it(name: str) -> None:
    run = RUNS[name]()
    tally, ledger = folded(run), run.account()
    assert tally.productive_s == pytest.approx(ledger.buckets["productive"], abs=1e-4)
    expected = {("recompute" if key == "lost" else key): s for key, s in ledger.buckets.items()}
    assert tally.badput_s == pytest.approx({key: expected[key] for key in BADPUT_BUCKETS}, abs=1e-4)


def test_all_seconds_of_three_attempts_are_counted_once() -> None:
    run = three_attempts()
    tally = folded(run)
    assert tally.productive_s == pytest.approx(12, abs=1e-4)
    assert tally.badput_s["recompute"] == pytest.approx(3 + 4, abs=1e-4)
    assert tally.badput_s["queued"] == pytest.approx(60, abs=1e-4)
    assert tally.productive_s + sum(tally.badput_s.values()) == pytest.approx(run.now, abs=1e-3)
    assert (tally.faults, tally.restarts) == (
        {"crash": 1, "node": 1},
        {"crash/allocation": 1, "node/requeue": 1},
    )
    assert tally.detections == 2
    assert tally.detection_s == pytest.approx(6, abs=1e-4)
    assert (tally.state, tally.attempt, tally.step, tally.saved_step) == ("done", 3, 12, 12)


def test_counters_never_go_back() -> None:
    tally, before = RunCounters(), counters(RunCounters())
    for record, is_line in in_order(three_attempts()):
        tally.take([] if is_line else [record], [record] if is_line else [])
        after = counters(tally)
        assert all(after.get(key, 0) >= value for key, value in before.items())
        before = after
    assert tally == folded(three_attempts())


def write(run: RunDir, made: Run, count: int | None = None) -> None:
    for record, is_line in in_order(made)[:count]:
        with (run.metrics if is_line else run.events).open("a") as file:
            file.write(json.dumps(record) + "\n")


def test_one_that_goes_on_where_another_stood_counts_the_same(runs_root: Path) -> None:
    made = three_attempts()
    whole = folded(made)
    for count in (0, 7, 15, 25, 33):
        run = create_run("r")
        write(run, made, count)
        first = RunCountersReader(run)
        first.read()
        state = json.loads(json.dumps(first.as_json()))
        for path in (run.events, run.metrics):
            path.unlink(missing_ok=True)
        write(run, made)
        second = RunCountersReader(run, state)
        assert second.read() == whole
        assert second.read() == whole


def test_a_long_run_is_read_in_pieces(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = create_run("r"), three_attempts()
    write(run, made)
    monkeypatch.setattr("hpcrun.telemetry.run_counters._PIECE_BYTES", 300)
    assert RunCountersReader(run).read() == folded(made)


def test_a_line_longer_than_a_piece_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"long": "' + "x" * 500 + '"}\n{"a": 1}\n{"b"')
    reader, found = JsonLineReader(path), []
    before = -1
    while before != reader.offset:
        before = reader.offset
        found += reader.read(100)
    assert found == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert reader.read(100) == [{"b": 2}]


@pytest.mark.parametrize(
    "state",
    [
        None,
        7,
        {"tally": {}},
        {"tally": {**RunCounters().as_json(), "attempt": "1"}, "events": 5, "metrics": 5},
        {"tally": {**RunCounters().as_json(), "step_counts": [1]}, "events": 5, "metrics": 5},
        {"tally": {**RunCounters().as_json(), "badput_s": {"x": 1.0}}, "events": 5, "metrics": 5},
    ],
)
def test_a_damaged_state_is_counted_anew(runs_root: Path, state: Any) -> None:
    run = create_run("r")
    write(run, three_attempts())
    assert RunCountersReader(run, state).read() == folded(three_attempts())


def test_whatever_a_file_holds_counters_grow_and_nothing_breaks() -> None:
    dice = random.Random(3)
    values: list[Any] = [None, True, -1, 0, 3, 1e300, float("nan"), "x", [], {"a": 1}, 1_800_000_000.0]
    keys = ("time", "attempt", "event", "kind", "step", "step_time_s", "seconds", "tokens_per_s", "status")
    names = [
        "launch",
        "ranks_connected",
        "rank_ended",
        "fault",
        "relaunch",
        "requeue",
        "exit",
        "result",
        "step",
    ]
    tally, before = RunCounters(), counters(RunCounters())
    for _ in range(2000):
        record = {key: dice.choice(values) for key in keys if dice.random() < 0.7}
        if dice.random() < 0.8:
            record |= {"time": 1_800_000_000.0 + dice.randint(-50, 500), "attempt": dice.randint(0, 3)}
            record |= {"event": dice.choice(names), "kind": dice.choice(["step", "save", "start"])}
            record |= {"step": dice.randint(0, 9)}
        tally.take([record] if dice.random() < 0.5 else [], [record] if dice.random() < 0.5 else [])
        after = counters(tally)
        assert all(after.get(key, 0) >= value for key, value in before.items())
        before = after


def test_a_supervisor_that_went_without_a_word_is_a_fault() -> None:
    run = Run()
    run.launch()
    run.steps(1, 3)
    run.passes("queued", 100)
    run.boot = 5.0
    run.launch(0)
    tally = folded(run)
    assert tally.faults == {"supervisor lost": 1}
    assert tally.badput_s["queued"] == pytest.approx(100, abs=1e-3)


def test_a_record_that_comes_late_counts_no_second_twice() -> None:
    tally = RunCounters()
    tally.take([{"time": 100.0, "attempt": 1, "event": "launch"}], ())
    for moment, step in ((110.0, 2), (105.0, 1), (112.0, 3)):
        tally.take((), [{"time": moment, "attempt": 1, "kind": "step", "step": step, "step_time_s": 5.0}])
    assert tally.productive_s + sum(tally.badput_s.values()) == pytest.approx(12.0)
