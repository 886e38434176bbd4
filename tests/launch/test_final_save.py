"""The last save before the end of an allocation: asked for as early as saves of the run take long."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from hpcrun.checkpoint.tier import TierName
from hpcrun.launch import final_save as last
from hpcrun.launch.attempt_monitor import AttemptLimits, AttemptOutcome
from hpcrun.launch.final_save import (
    FinalSaveTimer,
    SaveDurations,
    deepest_reachable_tier,
    effective_grace_s,
    final_save_deadline,
    watch_time_limit,
)
from hpcrun.launch.outcome import OutcomeRecorder
from hpcrun.launch.recovery import restart_cause
from hpcrun.launch.run_context import RunContext
from hpcrun.slurm.allocation import Allocation, JobDisposition
from hpcrun.specs.load import load_job
from hpcrun.specs.metrics import MetricRecord
from hpcrun.specs.records import read_json
from hpcrun.specs.run_lookup import create_run
from tests.metric_lines import metric_line, metric_record


def pace_of(*records: MetricRecord) -> SaveDurations:
    pace = SaveDurations()
    pace.take(records)
    return pace


def test_how_long_a_save_takes_is_until_it_is_durable() -> None:
    step = metric_record("step", step_time_s=2.0)
    assert pace_of(step).lead_s == 0.0, "nothing was saved yet"
    waited = pace_of(step, metric_record("save", seconds=100.0), metric_record("save", seconds=80.0))
    assert waited.lead_s == 1.5 * 100 + 2
    behind = pace_of(
        step,
        metric_record("save", tier="memory", seconds=0.5),
        metric_record("stored", tier="parity", seconds=3.0, lag_s=4.0),
        metric_record("stored", tier="durable", seconds=200.0, lag_s=220.0),
        metric_record("stored", tier="attic", lag_s=1e5),
    )
    assert behind.save_times_s() == {"memory": 2.75, "parity": 8.0, "durable": 332.0}
    assert behind.lead_s == 332.0


def test_what_a_worker_rested_does_not_count() -> None:
    assert pace_of(metric_record("stored", lag_s=100.0, rested_s=80.0)).lead_s == 30.0
    assert pace_of(metric_record("stored", lag_s=100.0, rested_s=101.0)).lead_s == 0.0
    assert pace_of(metric_record("stored", lag_s=100.0)).lead_s == 150.0


def test_only_the_newest_saves_count() -> None:
    slow = metric_record("save", seconds=500.0)
    assert pace_of(slow, *([metric_record("save", seconds=10.0)] * 8)).lead_s == 15.0


def test_the_deepest_tier_that_fits() -> None:
    takes: dict[TierName, float] = {"memory": 1.0, "durable": 100.0, "object": 900.0}
    assert [deepest_reachable_tier(left, takes) for left in (0.5, 1.0, 99.0, 100.0, 1e4)] == [
        *(None, "memory", "memory", "durable", "object")
    ]
    assert final_save_deadline(1000.0, 330.0) == 670.0


def test_it_is_called_when_the_signal_would_come_too_late() -> None:
    now, left, asked = 0.0, 1000.0, 0

    def seconds_left() -> float:
        nonlocal asked
        asked += 1
        return left - now

    call = FinalSaveTimer(120.0, seconds_left, lambda: now)
    call.pace.take([metric_record("save", seconds=60.0)])
    assert call.why_due() is None
    assert asked == 0, "for a save that fits into the grace nobody asks Slurm"
    call.pace.take([metric_record("save", seconds=200.0)])
    while now < 700:
        assert call.why_due() is None
        now += 5
    assert asked == 3, "once in five minutes"
    assert call.why_due() == (
        "300 s are left, and saves take up to 200 s, more than retry.grace (120 s) leaves room for: the last"
        " save begins now; it is to be durable"
    )


def test_a_limit_that_is_not_known_or_is_raised() -> None:
    lefts = iter([None, 1000.0, 100_000.0])
    now = 0.0
    call = FinalSaveTimer(60.0, lambda: next(lefts), lambda: now)
    call.pace.take([metric_record("save", seconds=100.0)])
    assert call.why_due() is None
    now = 300.0
    assert call.why_due() is None
    now = 1150.0
    assert call.why_due() is None, "somebody has raised the limit meanwhile"


@dataclass(frozen=True)
class _Ending(Allocation):
    left_s: float = 0.0

    def seconds_left(self) -> float | None:
        return self.left_s

    def disposition(self) -> JobDisposition:
        return "running"

    def requeue(self) -> None:
        pass


@pytest.mark.parametrize("takes", [10.0, 500.0])
def test_the_supervisor_gets_the_signal_by_itself(
    takes: float, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, spec = create_run("late"), load_job(None, command=["true"], overrides=["retry.grace=2m"]).spec
    run.metrics.write_text(json.dumps(metric_line("save", 1, seconds=takes)) + "\n")
    heard, notes, looked = threading.Event(), list[str](), threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        heard.set()

    true = FinalSaveTimer.why_due

    def due(call: FinalSaveTimer) -> str | None:
        looked.set()
        return true(call)

    monkeypatch.setattr(FinalSaveTimer, "why_due", due)
    monkeypatch.setattr(last, "_POLL_S", 0.01)
    before = signal.signal(signal.SIGUSR2, hear)
    try:
        with watch_time_limit(_Ending(1, ("n01",), "1", True, left_s=600.0), run, spec, notes.append):
            assert looked.wait(20)
            assert heard.wait(20 if takes > 100 else 0.1) is (takes > 100)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [note[:15] for note in notes] == (["600 s are left,"] if takes > 100 else [])
    assert effective_grace_s(run, spec) == max(120.0, takes * 1.5)


def test_an_early_save_is_still_one_for_the_time_limit(runs_root: Path) -> None:
    outcome = AttemptOutcome(create_run("early"), 1, "saved", 75, "saved", 5, stop=signal.SIGUSR2)
    assert restart_cause(outcome, 120.0, 700.0) == "preemption"
    assert restart_cause(outcome, 750.0, 700.0) == "time_limit"


def test_a_job_that_saved_early_is_queued_again_for_its_time_limit(runs_root: Path) -> None:
    run, spec = create_run("early"), load_job(None, command=["true"], overrides=["retry.grace=2m"]).spec
    run.metrics.write_text(json.dumps(metric_line("save", 5, seconds=500.0)) + "\n")
    outcome = AttemptOutcome(run, run.next_attempt().number, "saved", 75, "saved", 5, stop=signal.SIGUSR2)
    site = RunContext(_Ending(1, ("n01",), "1", is_batch=True, left_s=600.0))
    OutcomeRecorder(spec, site, lambda text: None, lambda: None).close(outcome, 5)
    assert read_json(run.attempt(1).outcome)["requeued"] == "time_limit"


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [([], 120), (["retry.grace=30s"], 120), (["retry.grace=2m"], 120), (["retry.grace=10m"], 600)],
)
def test_ranks_may_take_as_long_to_stop_as_the_job_asks_for(overrides: list[str], seconds: int) -> None:
    assert AttemptLimits.of(load_job(None, command=["true"], overrides=overrides).spec).stop_s == seconds
