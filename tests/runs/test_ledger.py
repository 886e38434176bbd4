"""The goodput ledger on runs that were made up second by second, and on whatever else a file may hold."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from hpcrun.runs.ledger import LEDGER_BUCKETS, GoodputLedger, compute_ledger, read_ledger, sum_ledgers
from hpcrun.specs.records import write_json
from hpcrun.specs.run_lookup import create_run
from hpcrun.telemetry.run_counters import RunCounters
from tests.runs.made_runs import RUNS, WALL, Record, Run, ledger_of, relaunched, requeued, undisturbed


@pytest.mark.parametrize("ahead_s", [-7200.0, -30.0, 30.0, 7200.0])
def test_the_clock_of_rank_0_s_host_may_be_another_than_the_supervisor_s(ahead_s: float) -> None:
    run = Run()
    run.launch()
    run.steps(1, 10)
    run.dies()
    run.passes("recovery", 5.0)
    run.launch(5)
    run.steps(6, 20)
    run.ends()
    straight = run.account()
    for line in run.metrics:
        line["time"] += ahead_s
    skewed = run.account()
    assert skewed.wall_s == pytest.approx(straight.wall_s)
    assert (skewed.steps, skewed.steps_lost) == (straight.steps, straight.steps_lost)
    for name in ("productive", "lost", "start", "recovery"):
        assert skewed.buckets[name] == pytest.approx(straight.buckets[name]), name
    # Where between two events a line stood nobody can tell: at most the restore and the end are mixed up.
    for name, seconds in straight.buckets.items():
        assert skewed.buckets[name] == pytest.approx(seconds, abs=6.0), name
    del run.events[-4:]
    going = run.account(now=run.now)
    assert going.wall_s == pytest.approx(straight.wall_s), "it goes on, and that is not a time of the future"


def close(found: GoodputLedger, truth: dict[str, float]) -> None:
    assert {name: round(value, 5) for name, value in found.buckets.items()} == {
        name: round(value, 5) for name, value in truth.items()
    }
    assert found.wall_s == pytest.approx(sum(truth.values()), abs=1e-5)


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_every_second_is_in_the_bucket_that_it_was_spent_in(make: Callable[[], Run]) -> None:
    run = make()
    found = run.account()
    close(found, run.truth)
    assert found.goodput == pytest.approx(run.truth["productive"] / run.now)
    assert found.steps == 10


def test_a_fault_is_counted_with_its_cause_and_cost() -> None:
    found = relaunched().account()
    (fault,) = found.faults
    assert (fault.attempt, fault.cause, fault.node, fault.rank) == (1, "crash", "n02", 1)
    assert fault.message == "rank 1 was killed"
    assert (found.steps_lost, fault.steps_lost, found.spares_left) == (3, 3, 1)
    assert found.mttd_s == pytest.approx(3.0)
    # cleaned up, launched, met, restored, and steps 6 to 9, which is the first beyond the old ones
    assert found.mttr_s == pytest.approx(1 + 0.75 + 2 + 2 + 4)
    assert found.causes == {"crash": 1}
    assert [(name, round(seconds, 5)) for name, seconds in found.losses(2)] == [("start", 6), ("restore", 4)]


def test_a_fault_that_the_supervisor_did_not_name_is_named_after_what_was_seen() -> None:
    run = Run()
    run.launch()
    run.passes("detection", 2)
    run.event("node_lost", node="n03", why="no answer for 5 s")
    run.event("exit", status="failed", exit_code=5, message="node n03 is lost")
    (fault,) = run.account().faults
    assert (fault.cause, fault.node, fault.message) == ("node lost", "n03", "no answer for 5 s")
    run.event("fault", cause="partition", nodes=["n03", "n04"], message="cut off")
    assert [(one.cause, one.node) for one in run.account().faults] == [("partition", "n03,n04")]
    for event, exit_code, cause in ((None, 5, "hang"), ("rank_failed", 4, "not a number")):
        run = Run()
        run.launch()
        if event:
            run.event(event, rank=0)
        run.event("exit", status="failed", exit_code=exit_code, message="")
        assert run.account().causes == {cause: 1}
    run = Run(attempt=1)
    run.event("launch", ranks=2)
    run.passes("start", 600)
    run.event("processes_ended", stuck=[])
    run.event("exit", status="failed", exit_code=5, message="")
    assert run.account().causes == {"not started": 1}
    close(run.account(), run.truth)


def test_a_run_that_failed_for_good_has_lost_what_it_had_not_saved() -> None:
    run = Run()
    run.launch()
    run.steps(1, 5)
    run.saves(5)
    run.steps(6, 8, "lost")
    run.dies(then="shutdown")
    close(run.account(), run.truth)
    # Asked while somebody may still go on with it, it is what recovery costs.
    going_on = run.account(now=run.now + 2)
    assert going_on.buckets["recovery"] == pytest.approx(1 + 2)
    assert going_on.faults[0].recovery_s is None


def test_a_run_that_goes_on_has_lost_nothing_yet() -> None:
    run = Run()
    run.launch()
    run.steps(1, 8)
    run.passes("other", 0.5)
    found = run.account(now=run.now)
    close(found, run.truth)
    assert (found.steps, found.steps_lost, found.faults) == (8, 0, ())


def test_a_supervisor_that_vanished_is_a_fault_and_its_host_s_absence_is_waiting() -> None:
    run = Run()
    run.launch()
    run.steps(1, 5)
    run.saves(5)
    run.steps(6, 8, "lost")
    run.passes("queued", 300)
    run.boot = 17.0
    run.launch(5)
    run.steps(6, 8)
    run.ends()
    found = run.account()
    close(found, run.truth)
    assert found.causes == {"supervisor lost": 1}


@pytest.mark.parametrize(
    ("before", "after", "bucket"),
    [(7, 7, "queued"), (7, 8, "stopped"), (None, None, "stopped"), (None, 7, "stopped")],
)
@pytest.mark.parametrize("has_told", [False, True], ids=["without a word", "with an end"])
def test_where_no_event_says_so_only_the_same_job_was_in_the_queue(
    before: int | None, after: int | None, bucket: str, *, has_told: bool
) -> None:
    run = Run()
    for job, first in ((before, 1), (after, 4)):
        run.launch(first - 1)
        run.events[-2]["job"] = job
        run.steps(first, 3)
        if first == 1:
            if has_told:
                run.event("exit", status="interrupted", exit_code=130, message="")
            run.passes(bucket, 300)
    run.steps(4, 6)
    run.ends()
    found = run.account()
    close(found, run.truth)
    tally = RunCounters()
    tally.take(run.event_records, run.metric_records)
    assert tally.badput_s[bucket] == pytest.approx(300)


def test_a_run_that_somebody_resumed_the_next_day_has_not_wasted_the_night() -> None:
    run = undisturbed()
    night = 40_000
    run.passes("stopped", night)
    run.job = 8
    run.launch(10)
    run.steps(11, 20)
    run.ends()
    found = run.account()
    close(found, run.truth)
    assert found.goodput == pytest.approx(run.truth["productive"] / (run.now - night))
    assert "stopped" not in dict(found.losses(9))


def test_an_interruption_by_a_person_is_no_fault() -> None:
    run = Run()
    run.launch()
    run.steps(1, 3, "lost")
    run.event("signal", signal="SIGINT")
    run.event("rank_ended", rank=0, node="n01", pid=6, wait_status=9)
    run.passes("shutdown", 1)
    run.event("exit", status="interrupted", exit_code=130, message="")
    assert run.account().faults == ()
    close(run.account(), run.truth)


def test_a_command_whose_steps_nobody_counts_has_no_goodput() -> None:
    run = Run(attempt=1)
    run.event("launch", ranks=2)
    run.passes("start", 1)
    run.event("ranks_connected")
    run.passes("other", 60)
    run.event("result", status="done")
    run.event("exit", status="done", exit_code=0)
    close(run.account(), run.truth)
    assert run.account().goodput is None


def test_nothing_recorded_is_an_empty_ledger() -> None:
    found = compute_ledger([], [])
    assert (found.wall_s, found.goodput, found.mttd_s, found.mttr_s) == (0, None, None, None)
    assert list(found.buckets) == list(LEDGER_BUCKETS)


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_a_wall_clock_that_is_set_while_an_attempt_runs_changes_nothing(
    make: Callable[[], Run], jump: float
) -> None:
    run = make()
    truth, events = run.truth, run.events
    for place in range(1, len(events)):
        if events[place]["attempt"] != events[place - 1]["attempt"]:
            continue
        # Set right after this event: whatever is written later shows the new time.
        since = events[place - 1]["time"]
        moved = [{**one, "time": one["time"] + jump * (index >= place)} for index, one in enumerate(events)]
        lines = [{**one, "time": one["time"] + jump * (one["time"] > since)} for one in run.metrics]
        found = ledger_of(moved, lines)
        assert found.wall_s == pytest.approx(run.now, abs=1e-5)
        exact = [name for name in LEDGER_BUCKETS if name not in ("restore", "detection", "shutdown", "other")]
        assert [found.buckets[name] for name in exact] == pytest.approx([truth[name] for name in exact])
        close(found, truth)


def test_another_host_that_takes_an_attempt_over_has_another_monotonic_clock() -> None:
    run = undisturbed()
    moved = [
        {**one, "host": "n01"} if index < 2 else {**one, "host": "n02", "monotonic": one["monotonic"] + 9e4}
        for index, one in enumerate(run.events)
    ]
    close(ledger_of(moved, run.metrics), run.truth)


def test_a_rank_that_leaves_in_order_is_no_fault_of_a_run_that_goes_on() -> None:
    run = Run()
    run.launch()
    run.steps(1, 4)
    run.event("rank_ended", rank=0, node="n01", pid=6, wait_status=0)
    run.passes("other", 0.5)
    close(run.account(now=run.now), run.truth)
    assert run.account(now=run.now).faults == ()


def test_steps_before_an_older_save_that_had_to_do_are_lost_as_well() -> None:
    run = Run()
    run.launch()
    run.steps(1, 5)
    run.saves(5)
    run.steps(6, 10, "lost")
    run.saves(10)
    run.dies()
    run.event("relaunch")
    run.launch(10)
    run.steps(11, 12, "lost")
    run.dies()
    run.event("relaunch")
    run.launch(5)
    run.steps(6, 12)
    run.ends()
    close(run.account(), run.truth)
    assert [one.steps_lost for one in run.account().faults] == [5, 2]


def test_lines_that_claim_more_time_than_there_was_get_no_more() -> None:
    run = undisturbed()
    lines = [{**one, "step_time_s": 1000.0} if one["kind"] == "step" else one for one in run.metrics]
    found = ledger_of(run.events, lines)
    assert found.wall_s == pytest.approx(run.now)
    close(found, run.truth)


def test_the_sum_over_runs_is_the_sum_of_everything() -> None:
    parts = [make().account() for make in RUNS.values()]
    whole = sum_ledgers(parts)
    assert whole.wall_s == pytest.approx(sum(one.wall_s for one in parts))
    assert (whole.steps, whole.steps_lost, whole.attempts) == (30, 3, 5)
    assert whole.goodput == pytest.approx(whole.buckets["productive"] / whole.wall_s)
    assert whole.mttd_s == pytest.approx(3.0)
    assert sum_ledgers([]).goodput is None


def test_the_outcome_of_an_attempt_says_that_it_was_queued_again() -> None:
    run, made = create_run("r"), requeued()
    # A run without a batch job: where no record says so, somebody went on with it.
    events = [one | {"job": None} for one in made.events if one["event"] != "requeue"]
    run.events.write_text("".join(json.dumps(one) + "\n" for one in events) + '{"torn')
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in made.metrics))
    assert read_ledger(run).buckets["stopped"] == pytest.approx(120)
    ended = next(one["time"] for one in events if one["event"] == "exit")
    write_json(run.attempt(1).create().outcome, {"status": "saved", "requeued": "time_limit", "ended": ended})
    close(read_ledger(run), made.truth)


# What a file may hold in place of what belongs there.
_ODD: list[Any] = [None, "x", -1, 0, 1e300, math.nan, math.inf, True, [], {}, 2**70, -5.5]


def anything(rng: random.Random) -> tuple[list[Record], list[Record]]:
    """Records of a run with lines missing, doubled, swapped and damaged."""
    run = rng.choice(list(RUNS.values()))()
    files = []
    for records in (run.events, run.metrics):
        kept = [dict(one) for one in records if rng.random() > 0.2]
        for one in kept:
            while rng.random() < 0.15:
                one[rng.choice(list(one))] = rng.choice(_ODD)
            if rng.random() < 0.05:
                one["time"] = WALL + rng.uniform(-1e4, 1e4)
            if rng.random() < 0.05:
                one.pop("monotonic", None)
            if rng.random() < 0.1:
                one["attempt"] = rng.choice([1, 2, 3, 9])
            if rng.random() < 0.05:
                one["step_time_s"] = one["seconds"] = rng.uniform(0, 1e4)
            if rng.random() < 0.03:
                one["host"] = "n07"
        kept += rng.sample(kept, rng.randrange(len(kept) // 3 + 1))
        if rng.random() < 0.3:
            rng.shuffle(kept)
        files.append(kept)
    return files[0], files[1]


def test_whatever_the_files_hold_no_bucket_is_negative_and_they_add_up() -> None:
    rng = random.Random(5)
    for _ in range(4000):
        events, metrics = anything(rng)
        now = rng.choice([None, WALL + rng.uniform(-100, 1000)])
        found = ledger_of(events, metrics, now)
        assert all(value >= 0 and math.isfinite(value) for value in found.buckets.values()), (events, metrics)
        assert found.wall_s == pytest.approx(math.fsum(found.buckets.values()), abs=1e-6)
        assert found.goodput is None or 0 <= found.goodput <= 1
        assert all(one.detection_s >= 0 and (one.recovery_s or 0) >= 0 for one in found.faults)
        json.dumps(found.as_json(), allow_nan=False)


def test_with_lines_missing_the_buckets_add_up_to_the_time_between_the_first_and_the_last() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        run = rng.choice(list(RUNS.values()))()
        events = [one for one in run.events if one["event"] in ("launch", "exit") or rng.random() < 0.6]
        metrics = [one for one in run.metrics if rng.random() < 0.6]
        for one in metrics:
            if rng.random() < 0.1:
                one["step_time_s"] = one["seconds"] = rng.uniform(0, 1e4)
        assert ledger_of(events, metrics).wall_s == pytest.approx(run.now, abs=1e-5)
        later = run.now + rng.uniform(0, 500)
        going_on = ledger_of(events[:-1], metrics, WALL + later)
        assert going_on.wall_s == pytest.approx(later, abs=1e-5)
