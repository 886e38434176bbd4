"""Runs that were made up second by second, with their own account of where the time went."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpcrun.runs.ledger import LEDGER_BUCKETS, GoodputLedger, compute_ledger
from hpcrun.specs.events.log import EventRecord, parse_event
from hpcrun.specs.metrics import MetricRecord, parse_metric
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import WrongValue
from tests.event_lines import event_line
from tests.metric_lines import metric_line

T = TypeVar("T")
Record = dict[str, Any]
WALL, BOOT = 1_800_000_000.0, 5_000.0


@dataclass
class Run:
    """Writes the lines of a run as time passes, and keeps its own account of where the time went."""

    now: float = 0.0
    events: list[Record] = field(default_factory=list)
    metrics: list[Record] = field(default_factory=list)
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEDGER_BUCKETS, 0.0))
    attempt: int = 0
    boot: float = BOOT
    wall: float = WALL
    job: int | None = 7

    def passes(self, bucket: str, seconds: float) -> None:
        self.now += seconds
        self.truth[bucket] += seconds

    def event(self, name: str, **more: Any) -> None:
        line = event_line(name, self.wall + self.now, self.attempt, **more)
        self.events.append(line | {"monotonic": self.boot + self.now})

    def line(self, kind: str, step: int, **more: Any) -> None:
        stamp: dict[str, Any] = {"time": self.wall + self.now, "attempt": self.attempt}
        self.metrics.append(metric_line(kind, step, **stamp, **more))

    def launch(self, after: int = 0, *, start: float = 4.0, restore: float = 2.0) -> None:
        self.attempt += 1
        self.event("launch", ranks=2, job=self.job)
        self.passes("start", start)
        self.event("ranks_connected", seconds=start)
        self.passes("restore", restore / 2)
        self.line("start", after)
        self.passes("restore", restore / 2)

    def steps(self, first: int, last: int, bucket: str = "productive", seconds: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.passes(bucket, seconds)
            self.line("step", step, step_time_s=seconds, loss=1.0)

    def saves(self, step: int, seconds: float = 0.5) -> None:
        self.passes("checkpoint", seconds)
        self.line("save", step, seconds=seconds)

    def evaluates(self, step: int, seconds: float = 0.25) -> None:
        self.passes("eval", seconds)
        self.line("eval", step, seconds=seconds, eval_loss=1.0)

    def dies(self, *, detection: float = 3.0, clean: float = 1.0, then: str = "recovery") -> None:
        self.passes("detection", detection)
        self.event("rank_ended", rank=1, node="n02", pid=7, wait_status=9)
        self.passes(then, clean)
        self.event("processes_ended", stuck=[])
        message = "rank 1 on node n02 was killed by signal 9 (SIGKILL)"
        self.event("exit", status="failed", exit_code=5, message=message)

    def ends(self, status: str = "done", seconds: float = 1.5) -> None:
        self.passes("shutdown", seconds / 3)
        self.event("result", status=status)
        self.passes("shutdown", seconds / 3)
        self.event("rank_ended", rank=0, node="n01", pid=6, wait_status=0)
        self.event("processes_ended", stuck=[])
        self.passes("shutdown", seconds / 3)
        self.event("exit", status=status, exit_code=0, message="done")

    def account(self, *, now: float | None = None) -> GoodputLedger:
        return ledger_of(self.events, self.metrics, None if now is None else self.wall + now)

    @property
    def event_records(self) -> list[EventRecord]:
        return parse_lines(self.events, parse_event)

    @property
    def metric_records(self) -> list[MetricRecord]:
        return parse_lines(self.metrics, parse_metric)


def parse_lines(lines: Iterable[Record], parse: Callable[[Record], T]) -> list[T]:
    """The records of lines; wrong ones are left out, as readers of files leave them out."""
    records = []
    for line in lines:
        with suppress(WrongValue):
            records.append(parse(line))
    return records


def ledger_of(events: Iterable[Record], metrics: Iterable[Record], now: float | None = None) -> GoodputLedger:
    return compute_ledger(parse_lines(events, parse_event), parse_lines(metrics, parse_metric), now=now)


def undisturbed() -> Run:
    run = Run()
    run.launch()
    run.evaluates(0)
    run.steps(1, 5)
    run.saves(5)
    run.steps(6, 10)
    run.passes("other", 0.125)
    run.saves(10)
    run.evaluates(10)
    run.ends()
    return run


def relaunched() -> Run:
    """Dies at step 8 with a save of step 5, and goes on in the same allocation."""
    run = Run()
    run.launch()
    run.steps(1, 5)
    run.saves(5)
    run.steps(6, 8, "lost")
    run.dies()
    run.event("fault", cause="crash", nodes=[], message="rank 1 was killed")
    run.event("relaunch", excluded=["n02"], spares_left=1)
    run.passes("recovery", 0.75)
    run.launch(5, start=2.0)
    run.steps(6, 10)
    run.ends()
    return run


def requeued() -> Run:
    """Saves at its time limit and is queued again for two minutes; another node, another boot."""
    run = Run()
    run.launch()
    run.steps(1, 4)
    run.event("signal", signal="SIGUSR2")
    run.steps(5, 5)
    run.saves(5)
    run.ends("saved")
    run.event("requeue", cause="time_limit")
    run.passes("queued", 120)
    run.boot = 90.0
    run.launch(5)
    run.steps(6, 10)
    run.ends()
    return run


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


def in_order(run: Run) -> list[tuple[Record, bool]]:
    both = [(one, False) for one in run.events] + [(one, True) for one in run.metrics]
    return sorted(both, key=lambda one: (one[0]["attempt"], one[0]["time"], not one[1]))


def write(run: RunDir, made: Run, count: int | None = None) -> None:
    for record, is_line in in_order(made)[:count]:
        with (run.metrics if is_line else run.events).open("a") as file:
            file.write(json.dumps(record) + "\n")


RUNS: dict[str, Callable[[], Run]] = {"ok": undisturbed, "relaunch": relaunched, "requeue": requeued}
