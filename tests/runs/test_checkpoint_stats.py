"""Saves that go through tiers, as the records of a run tell of them, and as readers of these are told."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hpcrun.cli.display import LineDisplay
from hpcrun.runs.checkpoint_stats import CheckpointStats
from hpcrun.runs.describe import describe_run
from hpcrun.runs.event_text import format_events
from hpcrun.runs.timeline import build_timelines
from hpcrun.specs.metrics import MetricRecord, parse_metric
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.prometheus_metrics import RunMetrics, render_exposition
from hpcrun.telemetry.run_counters import RunCounters, RunCountersReader
from hpcrun.telemetry.trackers import ScalarReader, metric_scalars
from hpcrun.typed_json import parse_typed
from tests.metric_lines import metric, metric_record
from tests.runs.made_runs import Run

GB = 10**9


def tiered() -> Run:
    """A copy each 5 steps, which waits within a step; that of step 5 becomes durable, that of 10 does not."""
    run = Run()
    run.launch()
    run.steps(1, 5)
    run.passes("checkpoint", 0.25)
    run.steps(6, 6, seconds=1.5)
    run.line("save", 5, tier="memory", seconds=0.75, copy_s=1.2, fence_wait_s=0.5, size_bytes=8 * GB)
    run.steps(7, 7)
    run.line("stored", 5, tier="parity", seconds=1.0, size_bytes=2 * GB, lag_s=2.0, stored_bytes=GB)
    run.steps(8, 8)
    run.line("flush", 5, tiers=["durable"], size_bytes=8 * GB, seconds=2.5)
    run.line("stored", 5, tier="durable", seconds=2.0, size_bytes=2 * GB, lag_s=3.5)
    run.steps(9, 10)
    run.passes("checkpoint", 0.25)
    run.line("save", 10, tier="memory", seconds=0.25, copy_s=0.2, fence_wait_s=0.0, size_bytes=8 * GB)
    run.line("save_failed", 10, tier="durable", why="rank 0 on n01: no space left")
    run.steps(11, 12)
    return run


def written(run: Run, directory: RunDir) -> RunDir:
    directory.events.write_text("".join(f"{json.dumps(one)}\n" for one in run.events))
    directory.metrics.write_text("".join(f"{json.dumps(one)}\n" for one in run.metrics))
    return directory


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (metric_record("save", 5), 5),
        (metric_record("save", 5, tier="memory"), 0),
        (metric_record("stored", 5, tier="local"), 0),
        (metric_record("stored", 5), 5),
        (metric_record("save_failed", 5), 0),
    ],
)
def test_a_save_lasts_when_it_is_in_the_run_directory(line: MetricRecord, step: int) -> None:
    run = Run()
    run.launch()
    run.steps(1, 6)
    attempts = build_timelines(run.event_records, [*run.metric_records, line])
    assert attempts[0].saved_step == step


def test_what_the_tiers_have_come_to() -> None:
    run = tiered()
    found = CheckpointStats().take_all(run.metric_records)
    memory, parity, durable = (found.tiers[name] for name in ("memory", "parity", "durable"))
    assert (memory.saves, memory.stall_s, memory.size_bytes) == (2, 1.0, 16 * GB)
    assert (parity.saves, parity.flush_s, parity.lag_s, parity.ratio) == (1, 1.0, 2.0, 0.5)
    assert (durable.saves, durable.failures, durable.flush_s, durable.ratio) == (1, 1, 2.0, 1.0)
    stored = next(one for one in run.metrics if one.get("tier") == "durable")
    assert found.durable_since == stored["time"]
    assert found.lines() == [
        "memory: 2 saves, training waited 0.5 s each",
        "parity: 1 save, 1 s each in the background, 2 GB/s, the newest 2 s after the save, 0.50 of its"
        " bytes",
        "durable: 1 save, 2 s each in the background, 1 GB/s, the newest 3.5 s after the save, 1 failed",
    ]
    assert parse_typed(CheckpointStats, json.loads(json.dumps(found.as_json()))) == found


def test_a_tier_of_a_newer_version_changes_nothing() -> None:
    assert CheckpointStats().take_all([metric_record("stored", tier="attic")]).tiers == {}


def test_time_in_the_background_is_not_the_runs_and_a_wait_counts_once() -> None:
    run = tiered()
    ledger = run.account(now=run.now)
    assert ledger.buckets["productive"] == pytest.approx(12.5)
    assert ledger.buckets["checkpoint"] == pytest.approx(0.5)
    tally = RunCounters()
    tally.take(run.event_records, run.metric_records)
    assert tally.productive_s == pytest.approx(12.5)
    # What is told of only after the next step was other time by then.
    assert tally.badput_s["checkpoint"] + tally.badput_s["other"] == pytest.approx(0.5)


def test_only_what_is_durable_counts_as_saved(runs_root: Path) -> None:
    run = tiered()
    run.dies(then="shutdown")
    assert run.account().steps == 5, "copies in memory died with the allocation"
    directory = written(run, create_run("tiered"))
    tally = RunCountersReader(directory).read()
    assert tally.saved_step == 5
    again = RunCountersReader(directory, RunCountersReader(directory).as_json())
    assert again.read().as_json() == RunCounters().as_json() | again.tally.as_json()
    follower = RunCountersReader(directory)
    follower.read()
    state = json.loads(json.dumps(follower.as_json()))
    assert RunCountersReader(directory, state).tally.saves == tally.saves
    state["tally"]["saves"] = {"tiers": 3}
    assert RunCountersReader(directory, state).read().saves == tally.saves, "a damaged state is read anew"


def test_prometheus_gets_every_tier() -> None:
    run = tiered()
    tally = RunCounters()
    tally.take(run.event_records, run.metric_records)
    since = tally.saves.durable_since
    assert since is not None
    text = render_exposition([RunMetrics("r", tally, now=since + 40), RunMetrics("over", tally)])
    found = {
        (one.name, one.labels["run"], one.labels.get("tier")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name.startswith("hpcrun_checkpoint")
    }
    assert found["hpcrun_checkpoint_stall_seconds_total", "r", "memory"] == 1.0
    assert found["hpcrun_checkpoint_flush_seconds_total", "r", "durable"] == 2.0
    assert found["hpcrun_checkpoint_bytes_total", "r", "parity"] == 2 * GB
    assert found["hpcrun_checkpoint_failures_total", "r", "durable"] == 1
    assert found["hpcrun_checkpoint_lag_seconds", "r", "durable"] == 3.5
    assert found["hpcrun_checkpoint_bytes_ratio", "r", "parity"] == 0.5
    assert found["hpcrun_checkpoint_durable_age_seconds", "r", None] == 40.0
    assert ("hpcrun_checkpoint_durable_age_seconds", "over", None) not in found
    assert found["hpcrun_checkpoint_last_step", "r", None] == 5


def test_people_are_told_of_what_lasts_and_of_what_failed(runs_root: Path) -> None:
    directory = written(tiered(), create_run("tiered"))
    directory.spec.write_text("name: tiered\n")
    words = [
        entry.text for entry in format_events(directory) if entry.what in ("save", "stored", "save_failed")
    ]
    assert words == [
        "step 5: saved in the background after 3.5 s",
        "step 10: durable save failed: rank 0 on n01: no space left",
    ]
    stream = io.StringIO()
    display = LineDisplay(12, stream)
    for line in tiered().metrics:
        if line["kind"] not in ("step", "start"):
            display.step(parse_metric(line).metric)
    assert stream.getvalue().splitlines() == [
        "hpcrun: step 5: 7.451 GiB being written to durable after 2.5 s",
        "hpcrun: step 5: saved in the background after 3.5 s",
        "hpcrun: step 10: durable save failed: rank 0 on n01: no space left",
    ]
    told, _ = describe_run(directory)
    assert told["save_tiers"] == asdict(CheckpointStats().take_all(tiered().metric_records))


def test_sinks_get_drain_and_lag_of_each_tier(runs_root: Path) -> None:
    stored = metric("stored", 5, seconds=2.0, lag_s=3.5)
    assert metric_scalars(stored, 1) == {"checkpoint/durable_flush(s)": 2.0, "checkpoint/durable_lag(s)": 3.5}
    directory = written(tiered(), create_run("tiered"))
    points = ScalarReader(directory, 2, {})
    names = {name for _, _, figures in points.new() for name in figures if name.startswith("checkpoint/")}
    assert names == {
        f"checkpoint/{tier}_{what}(s)" for tier in ("parity", "durable") for what in ("flush", "lag")
    }
    again = ScalarReader(directory, 2, json.loads(json.dumps(points.state)))
    assert list(again.new()) == []
