"""Counters of runs that were made up second by second: as the ledger has them, and never going back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpcrun.runs.time_account import BUCKETS
from hpcrun.specs.events.log import parse_event
from hpcrun.specs.metrics import parse_metric
from hpcrun.specs.records import JsonLineReader
from hpcrun.specs.run_lookup import create_run
from hpcrun.telemetry.prometheus_metrics import RunMetrics, metric_samples
from hpcrun.telemetry.run_counters import RunCounters, RunCountersReader
from tests.event_lines import event_line
from tests.metric_lines import metric_line
from tests.runs.made_runs import RUNS, Record, Run, in_order, parse_lines, three_attempts, write


def folded(run: Run) -> RunCounters:
    tally = RunCounters()
    tally.take(run.event_records, run.metric_records)
    return tally


def take(tally: RunCounters, events: list[Record], metrics: list[Record]) -> None:
    tally.take(parse_lines(events, parse_event), parse_lines(metrics, parse_metric))


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
    assert tally.buckets == pytest.approx({key: expected[key] for key in BUCKETS}, abs=1e-4)


def test_all_seconds_of_three_attempts_are_counted_once() -> None:
    run = three_attempts()
    tally = folded(run)
    assert tally.productive_s == pytest.approx(12, abs=1e-4)
    assert tally.badput_s["recompute"] == pytest.approx(3 + 4, abs=1e-4)
    assert tally.badput_s["queued"] == pytest.approx(60, abs=1e-4)
    assert tally.productive_s + sum(tally.badput_s.values()) == pytest.approx(run.now, abs=1e-3)
    assert (tally.fault_counts, tally.restarts) == (
        {"crash": 1, "node": 1},
        {"crash/allocation": 1, "node/requeue": 1},
    )
    assert len(tally.faults) == 2
    assert tally.detection_s == pytest.approx(6, abs=1e-4)
    assert (tally.state, tally.attempt, tally.step, tally.saved_step) == ("done", 3, 12, 12)


def test_counters_never_go_back() -> None:
    tally, before = RunCounters(), counters(RunCounters())
    for record, is_line in in_order(three_attempts()):
        take(tally, [] if is_line else [record], [record] if is_line else [])
        after = counters(tally)
        assert all(after.get(key, 0) >= value for key, value in before.items())
        before = after
    assert tally == folded(three_attempts())


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
        {"tally": {**RunCounters().as_json(), "buckets": {"x": 1.0}}, "events": 5, "metrics": 5},
    ],
)
def test_a_damaged_state_is_counted_anew(runs_root: Path, state: Any) -> None:
    run = create_run("r")
    write(run, three_attempts())
    assert RunCountersReader(run, state).read() == folded(three_attempts())


def test_whatever_a_file_holds_counters_grow_and_nothing_breaks() -> None:
    dice = random.Random(3)
    values: list[Any] = [None, True, -1, 0, 3, 1e300, float("nan"), "x", [], {"a": 1}, 1_800_000_000.0]
    names = [
        "launch",
        "ranks_connected",
        "rank_ended",
        "fault",
        "relaunch",
        "requeue",
        "exit",
        "result",
        "odd",
    ]
    tally, before = RunCounters(), counters(RunCounters())
    for _ in range(2000):
        now, attempt = 1_800_000_000.0 + dice.randint(-50, 500), dice.randint(0, 3)
        event = event_line(dice.choice(names), now, attempt)
        kind = dice.choice(["step", "save", "start", "odd"])
        line = metric_line(kind, dice.randint(0, 9), time=now, attempt=attempt)
        for record in (event, line):
            while dice.random() < 0.15:
                record[dice.choice(list(record))] = dice.choice(values)
        take(tally, [event] if dice.random() < 0.5 else [], [line] if dice.random() < 0.5 else [])
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
    assert tally.fault_counts == {"supervisor lost": 1}
    assert tally.badput_s["queued"] == pytest.approx(100, abs=1e-3)


def test_a_record_that_comes_late_counts_no_second_twice() -> None:
    tally = RunCounters()
    take(tally, [event_line("launch", 100.0)], [])
    for moment, step in ((110.0, 2), (105.0, 1), (112.0, 3)):
        take(tally, [], [metric_line("step", step, time=moment, step_time_s=5.0)])
    assert tally.productive_s + sum(tally.badput_s.values()) == pytest.approx(12.0)


@pytest.mark.parametrize("name", ["straggler", "checkpoint_stored", "rank_stopped", "preflight", "odd"])
def test_an_event_that_says_nothing_about_time_cuts_no_step(name: str) -> None:
    run = Run()
    run.launch()
    run.steps(1, 2)
    run.event(name)
    run.events[-1]["time"] += 0.5
    run.steps(3, 4)
    run.ends()
    tally = folded(run)
    assert tally.productive_s == pytest.approx(4, abs=1e-4)
    assert tally.badput_s["other"] == pytest.approx(0, abs=1e-4)


def test_a_preflight_before_the_next_attempt_is_part_of_the_recovery() -> None:
    run = Run()
    run.launch()
    run.steps(1, 2)
    run.dies()
    run.event("fault", cause="crash", message="killed")
    run.event("relaunch", spares_left=1)
    run.passes("recovery", 2.0)
    run.event("preflight", nodes=2)
    run.events[-1]["attempt"] = 2
    run.passes("recovery", 3.0)
    run.launch(2)
    run.steps(3, 4)
    run.ends()
    tally = folded(run)
    assert tally.badput_s["recovery"] == pytest.approx(run.truth["recovery"], abs=1e-4)
    assert run.account().buckets["recovery"] == pytest.approx(run.truth["recovery"], abs=1e-4)
