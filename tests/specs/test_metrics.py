"""Lines of metrics.jsonl: every kind comes back as it was written, and what is wrong costs its line alone."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from hpcrun.specs.metrics import (
    METRIC_CLASSES,
    MetricReader,
    StepMetric,
    UnknownMetric,
    newest_steps,
    parse_metric,
    read_metrics,
)
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import WrongValue
from tests.metric_lines import metric, metric_line, metric_record


@pytest.mark.parametrize("kind", METRIC_CLASSES)
def test_a_record_of_each_kind_comes_back_as_it_was_written(kind: str) -> None:
    line = metric_line(kind, 7, attempt=2, time=1e9 + 0.5)
    record = parse_metric(line)
    assert type(record.metric) is METRIC_CLASSES[kind]
    assert (record.attempt, record.time, record.kind, record.metric.step) == (2, 1e9 + 0.5, kind, 7)
    written = json.loads(json.dumps(record.as_json()))
    assert written.items() >= line.items()
    assert parse_metric(written) == record


@pytest.mark.parametrize("kind", METRIC_CLASSES)
def test_a_missing_or_wrong_field_of_each_kind_is_named(kind: str) -> None:
    line = metric_line(kind)
    for entry in dataclasses.fields(METRIC_CLASSES[kind]):
        with pytest.raises(WrongValue, match=f"^{entry.name}: "):
            parse_metric(line | {entry.name: object()})
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            with pytest.raises(WrongValue, match=f"^{entry.name}: is missing"):
                parse_metric({name: value for name, value in line.items() if name != entry.name})
    for name in ("attempt", "time", "kind"):
        with pytest.raises(WrongValue, match=f"^{name}: "):
            parse_metric({key: value for key, value in line.items() if key != name})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"step": -1}, "step: expected a number from 0"),
        ({"step": True}, "step: expected an integer, not True"),
        ({"time": 1e12}, "time: expected a number from 0 to 1e[+]11"),
        ({"attempt": "1"}, "attempt: expected an integer, not '1'"),
        ({"step_time_s": -0.5}, "step_time_s: expected a number from 0"),
        ({"loss": float("nan")}, "loss: expected a number, not nan"),
        ({"time_s": {"data": "x"}}, "time_s: expected a number, not 'x'"),
        ({"kind": 7}, "kind: expected a text, not 7"),
    ],
)
def test_values_out_of_range_are_wrong(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(WrongValue, match=f"^{problem}"):
        parse_metric(metric_line("step") | fields)


def test_a_line_that_is_no_object_is_wrong() -> None:
    with pytest.raises(WrongValue, match=r"^kind: expected a text"):
        parse_metric([1])


def test_what_a_newer_writer_adds_is_kept_and_shown() -> None:
    line = metric_line("eval", 3, eval_loss=1.5, newer={"a": 1})
    record = parse_metric(line)
    assert record.extra == {"newer": {"a": 1}}
    assert record.as_json() == line
    assert str(record) == "step 3: eval loss 1.5000 (newer={'a': 1})"
    unknown = metric_line("sync", 3, place="n01", seconds=2)
    record = parse_metric(unknown)
    assert record.metric == UnknownMetric(3, "sync", {"step": 3, "place": "n01", "seconds": 2})
    assert record.as_json() == unknown
    assert str(record) == "sync step=3 place=n01 seconds=2"
    assert parse_metric({"attempt": 1, "time": 1, "kind": "x", "step": "odd"}).metric.step == 0


def test_a_wrong_line_is_one_note_and_the_rest_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    lines = [
        metric_line("step", 1),
        metric_line("step", 2, loss="low"),
        metric_line("new"),
        metric_line("step", 4),
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "step", "st')
    assert [record.metric.step for record in read_metrics(run)] == [1, 1, 4]
    note = f"hpcrun: {run.metrics}:2 loss: expected a number, not 'low'; the line is passed over\n"
    assert capsys.readouterr().err == note
    list(read_metrics(run))
    assert capsys.readouterr().err == "", "said once"
    assert MetricReader(run, from_now=True).read() == []


def test_the_newest_attempt_s_steps_stand_and_evaluations_are_no_steps() -> None:
    steps = newest_steps(
        [
            metric_record("step", 1, loss=9),
            metric_record("step", 2, loss=8),
            metric_record("step", 2, attempt=2, loss=7),
            metric_record("eval", 2, attempt=2, eval_loss=6),
            metric_record("step", 2, loss=8.5),
            metric_record("step", 3, loss=5),
        ]
    )
    assert [(step.step, step.loss) for step in steps] == [(1, 9), (2, 7), (3, 5)]


@pytest.mark.parametrize(
    ("kind", "fields", "text", "is_durable"),
    [
        ("start", {}, "resumes after step 7", False),
        ("step", {}, "", False),
        ("eval", {"eval_loss": 1.5}, "step 7: eval loss 1.5000", False),
        ("eval", {"eval_loss": None}, "step 7: eval loss not a number", False),
        ("restore", {}, "", False),
        ("restore", {"passed_over": ["a", "b"]}, "falls back to step 7: a; b", False),
        (
            "weights",
            {"notes": ["tied"]},
            "starts from the weights in /weights (3 float32 tensors, kept in float32; hashes checked); tied",
            False,
        ),
        (
            "weights",
            {"is_hashed": False},
            "starts from the weights in /weights (3 float32 tensors, kept in float32; no SHA256SUMS found)",
            False,
        ),
        ("save", {"seconds": 1.25}, "step 7: saved in 1.2 s", True),
        ("save", {"seconds": 0.01, "tier": "memory"}, "", False),
        ("stored", {"lag_s": 2.04}, "step 7: saved in the background after 2.0 s", True),
        ("stored", {"tier": "local", "lag_s": 2.0}, "", False),
        (
            "stored",
            {"tier": "object", "lag_s": 9.0},
            "step 7: saved (object) in the background after 9.0 s",
            False,
        ),
        ("save_failed", {"why": "disk full"}, "step 7: durable save failed: disk full", False),
        ("save_stalled", {"why": "slow"}, "step 7: save stalled (durable): slow", False),
        (
            "save_skipped",
            {"why": "busy"},
            "step 7: save skipped, the previous save is still being stored (busy)",
            False,
        ),
        ("save_unchanged", {"why": "same"}, "step 7: warning: same", False),
        ("save_interval", {"every_s": 600, "why": "w"}, "save interval is now 10 min: w", False),
        (
            "flush",
            {"size_bytes": 4 * 10**9, "done_bytes": 10**9, "seconds": 3.0},
            "step 7: 953.7 MiB of 3.725 GiB written to durable (25%) after 3.0 s",
            False,
        ),
        (
            "flush",
            {"tiers": ["object"], "size_bytes": 4 * 10**9},
            "step 7: 3.725 GiB being written to object after 2.0 s",
            False,
        ),
        (
            "flush",
            {"tiers": ["local", "object"], "size_bytes": 0},
            "step 7: being written to local, object after 2.0 s",
            False,
        ),
    ],
)
def test_people_read_what_is_safe_what_failed_and_how_far_it_is(
    kind: str, fields: dict[str, Any], text: str, is_durable: bool
) -> None:
    line = metric(kind, 7, **fields)
    assert str(line) == text
    assert line.is_durable_save is is_durable


def test_the_time_that_lines_account_for() -> None:
    assert metric("step", step_time_s=2.0).busy_s == 2.0
    assert metric("save", seconds=2.0, fence_wait_s=0.5).busy_s == 1.5, "the wait is in the step's time"
    assert metric("stored", seconds=2.0).busy_s == 0.0, "training goes on meanwhile"
    assert typing.cast(StepMetric, metric("step")).mfu is None
