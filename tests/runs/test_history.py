"""What earlier runs tell: failures by kind over node time, and what steps and saves took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.policy.failure_rates import FailureHistory
from hpcrun.runs.history import (
    count_attempt_failures,
    count_run_failures,
    find_similar_runs,
    measure_metric_records,
    measure_runs,
)
from hpcrun.specs.load import load_job, render_job
from hpcrun.specs.metrics import MetricRecord
from hpcrun.specs.placement import Placement, write_placement
from hpcrun.specs.run_lookup import create_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.shipped import shipped_file
from tests.metric_lines import metric_record
from tests.runs.made_runs import Run, relaunched, requeued, undisturbed


def seen_by(run: Run, nodes: int = 4) -> FailureHistory:
    return count_attempt_failures(run.event_records, dict.fromkeys(range(9), nodes))


def failing(**fault: Any) -> Run:
    run = Run()
    run.launch()
    run.steps(1, 8, "lost")
    run.dies()
    run.event("fault", **fault)
    return run


def test_node_time_is_that_of_the_attempts() -> None:
    run = undisturbed()
    found = seen_by(run)
    assert found.node_s == pytest.approx(4 * run.now)
    assert (found.counts, found.runs) == ({}, 1)
    waited = requeued()
    assert seen_by(waited).node_s == pytest.approx(4 * (waited.now - 120)), "the queue is no node's time"


@pytest.mark.parametrize(
    ("fault", "counts", "left_out"),
    [
        ({"cause": "crash", "kind": "infrastructure", "nodes": []}, {"process": 1}, 0),
        ({"cause": "hang", "kind": "unknown", "nodes": ["n02"]}, {"process": 1}, 0),
        ({"cause": "node", "kind": "infrastructure", "nodes": ["n02"]}, {"node": 1}, 0),
        ({"cause": "node", "kind": "infrastructure", "nodes": ["n02", "n03"]}, {"site": 1}, 0),
        ({"cause": "crash", "kind": "deterministic", "nodes": []}, {}, 1),
        ({"cause": "crash", "kind": "data", "nodes": []}, {}, 1),
        ({"cause": "straggler", "kind": "infrastructure", "nodes": ["n02"]}, {}, 1),
    ],
)
def test_faults_are_told_apart_by_what_is_lost(
    fault: dict[str, Any], counts: dict[str, int], left_out: int
) -> None:
    found = seen_by(failing(**fault))
    assert (found.counts, found.left_out) == (counts, left_out)


def test_an_attempt_that_ended_without_a_word_took_its_allocation_along() -> None:
    run = Run()
    run.launch()
    run.steps(1, 4, "lost")
    assert seen_by(run).counts == {}, "it may still go on"
    run.passes("queued", 60)
    run.launch()
    run.steps(1, 4)
    run.ends()
    assert seen_by(run).counts == {"site": 1}


def write(run: RunDir, lines: Run, job: str = "demo.yaml", nodes: int = 2) -> RunDir:
    run.spec.write_text(render_job(load_job(shipped_file(f"jobs/{job}")).spec), encoding="utf-8")
    run.events.write_text("".join(f"{json.dumps(one)}\n" for one in lines.events))
    run.metrics.write_text("".join(f"{json.dumps(one)}\n" for one in lines.metrics))
    attempt = run.attempt(1).create()
    spec = load_job(shipped_file(f"jobs/{job}")).spec
    ranks = tuple(f"n{rank * nodes // spec.ranks}" for rank in range(spec.ranks))
    write_placement(attempt.placement, Placement(ranks), spec.degrees)
    return run


def test_the_runs_of_one_cluster_add_up_and_rehearsals_do_not_count(runs_root: Path) -> None:
    first = write(create_run("demo"), relaunched())
    rehearsed = write(create_run("demo"), relaunched())
    rehearsed.chaos.write_text("{}\n")
    other = write(create_run("demo"), relaunched())
    other.cluster.write_text("name: elsewhere\n")
    broken = create_run("demo")
    broken.spec.write_text("name: demo\n")
    attempt = broken.attempt(1).create()
    attempt.placement.write_text("{}")
    found = count_run_failures([first, rehearsed, other, broken], None)
    assert (found.runs, found.counts) == (1, {"process": 1})
    assert count_run_failures([first, other], "elsewhere").runs == 1
    assert found.node_s > 2 * 10


def test_only_runs_of_the_same_job_and_layout_are_alike(runs_root: Path) -> None:
    same = write(create_run("demo"), undisturbed())
    write(create_run("demo-2"), undisturbed())
    spec = load_job(shipped_file("jobs/demo.yaml")).spec
    assert [one.id for one in find_similar_runs(spec, [same])] == [same.id]
    wider = load_job(shipped_file("jobs/demo.yaml"), ["model={preset: demo, layers: 8}"]).spec
    assert find_similar_runs(wider, [same]) == []
    found = measure_runs(find_similar_runs(spec, [same]))
    assert (found.step_s, found.tiers["durable"].stall_s, found.restart_s) == (1.0, 0.5, None)
    assert found.runs == (same.id,)
    assert measure_runs([write(create_run("demo"), relaunched())]).restart_s == pytest.approx(
        3 + 1 + 0.75 + 5 + 3
    )


def test_what_a_tier_takes_in_the_background_is_seen_in_the_steps_beside_it() -> None:
    records: list[MetricRecord] = []
    now = 1000.0
    for step in range(1, 41):
        seconds = 1.5 if step in (11, 12) else 1.0
        now += seconds
        records.append(metric_record("step", step, time=now, step_time_s=seconds))
        if step == 10:
            records.append(metric_record("save", 10, time=now, tier="memory", seconds=0.25))
        if step == 12:
            records.append(metric_record("stored", 10, time=now, seconds=3.0, lag_s=3.5))
    found = measure_metric_records([*records, metric_record("odd")])
    assert found.step_s == 1.0
    assert found.tiers["memory"].stall_s == 0.25
    durable = found.tiers["durable"]
    assert (durable.flush_s, durable.lag_s, durable.saves) == (3.0, 3.5, 1)
    assert durable.stall_s == pytest.approx(1.0), "two steps of half a second more"
