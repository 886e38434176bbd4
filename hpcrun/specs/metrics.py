"""metrics.jsonl: one class per kind of line, its text, and how lines are written and read.

A line has a stamp (attempt, time), its kind, and the fields of its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrun.specs.records import TypedLineReader, file_size
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import Count, Seconds, WrongValue, dump_typed, parse_typed
from hpcrun.units import format_bytes, format_duration

Texts = tuple[str, ...]

_QUIET_TIERS = ("memory", "local", "parity")
"""Reached many times an hour: only failures are shown."""


@dataclass(frozen=True)
class Metric:
    """One line without its stamp."""

    step: Count

    @property
    def busy_s(self) -> float:
        """Training time in seconds that only this line accounts for."""
        return 0.0

    @property
    def is_durable_save(self) -> bool:
        """Whether this line says that the step is saved in the run directory."""
        return False

    def __str__(self) -> str:
        """One line for people; empty for lines that they need not see."""
        return ""


@dataclass(frozen=True)
class UnknownMetric(Metric):
    """A line of a newer version."""

    kind: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        """Every field as it is."""
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.values.items())])


@dataclass(frozen=True)
class StartMetric(Metric):
    """The ranks are ready and continue after this step."""

    device: str
    device_name: str
    reason: str
    """Why the ranks compute on this device."""

    def __str__(self) -> str:
        """Where training begins."""
        return f"resumes after step {self.step}" if self.step else "starts at step 1"


@dataclass(frozen=True)
class StepMetric(Metric):
    """One step of all ranks."""

    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_time_s: Seconds
    time_s: Mapping[str, float]
    """By part of the step: data, forward_backward, reduce, fence, optimizer, agree."""
    mfu: float | None
    peak_memory_bytes: Count | None

    @property
    def busy_s(self) -> float:
        """All of the step."""
        return self.step_time_s


@dataclass(frozen=True)
class EvalMetric(Metric):
    """An evaluation after this step."""

    eval_loss: float | None
    """Mean over the sequences; None where it is not a finite number."""
    sequences: Count
    seconds: Seconds

    @property
    def busy_s(self) -> float:
        """All of it."""
        return self.seconds

    def __str__(self) -> str:
        """The loss."""
        loss = "not a number" if self.eval_loss is None else f"{self.eval_loss:.4f}"
        return f"step {self.step}: eval loss {loss}"


@dataclass(frozen=True)
class RestoreMetric(Metric):
    """The state of this step was loaded."""

    seconds: Seconds
    passed_over: Texts
    """What was wrong with newer saves."""
    lost_steps: Count
    """How many steps newer the newest of those is."""

    @property
    def busy_s(self) -> float:
        """All of it."""
        return self.seconds

    def __str__(self) -> str:
        """Empty unless newer saves could not be used."""
        return f"falls back to step {self.step}: {'; '.join(self.passed_over)}" if self.passed_over else ""


@dataclass(frozen=True)
class WeightsMetric(Metric):
    """The initial weights were read from files."""

    source: str
    dtypes: Mapping[str, Count]
    """Number of tensors by type."""
    kept: str
    """The type in which training keeps them."""
    is_hashed: bool
    """Whether hashes beside the files were checked."""
    carried: Texts
    """Other files of the model that exports will have."""
    absent: Texts
    left: Texts
    notes: Texts
    """What config.json and tensors disagree about."""

    def __str__(self) -> str:
        """Their source, types and notes."""
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
        hashes = "hashes checked" if self.is_hashed else "no SHA256SUMS found"
        text = f"starts from the weights in {self.source} ({dtypes} tensors, kept in {self.kept}; {hashes})"
        return "; ".join([text, *self.notes])


@dataclass(frozen=True)
class SaveMetric(Metric):
    """Training waited for a save: into the run directory, or for a copy in memory."""

    seconds: Seconds
    tier: str = "durable"
    copy_s: Seconds | None = None
    """Of a copy in memory: how long copying took, most of it during the next step."""
    fence_wait_s: Seconds = 0.0
    """The part of `seconds` that a step waited for the copy."""
    size_bytes: Count | None = None

    @property
    def busy_s(self) -> float:
        """Without what a step waited for: that is in the step's own time."""
        return max(0.0, self.seconds - self.fence_wait_s)

    @property
    def is_durable_save(self) -> bool:
        """A copy in memory is not."""
        return self.tier == "durable"

    def __str__(self) -> str:
        """Empty for a copy in memory."""
        return f"step {self.step}: saved in {self.seconds:.1f} s" if self.is_durable_save else ""


@dataclass(frozen=True)
class StoredMetric(Metric):
    """A save reached a tier in the background."""

    tier: str
    seconds: Seconds
    """How long the tier took."""
    size_bytes: Count
    """Of the save, as the node of rank 0 has it."""
    lag_s: Seconds
    """From the save until the tier had it."""
    stored_bytes: Count | None = None
    """Size at the tier, if it differs."""
    rested_s: Seconds = 0.0
    """The part of `lag_s` in which the worker rested, so as not to disturb training."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further details from the tier."""

    @property
    def is_durable_save(self) -> bool:
        """Whether this tier is the run directory."""
        return self.tier == "durable"

    def __str__(self) -> str:
        """Empty for the tiers in memory and on node-local disks."""
        if self.tier in _QUIET_TIERS:
            return ""
        tier = "" if self.is_durable_save else f" ({self.tier})"
        return f"step {self.step}: saved{tier} in the background after {self.lag_s:.1f} s"


@dataclass(frozen=True)
class SaveFailedMetric(Metric):
    """A save failed at a tier."""

    tier: str
    why: str

    def __str__(self) -> str:
        """Which tier, and why."""
        return f"step {self.step}: {self.tier} save failed: {self.why}"


@dataclass(frozen=True)
class SaveStalledMetric(Metric):
    """A save has been waiting for `seconds`."""

    tier: str
    seconds: Seconds
    why: str

    def __str__(self) -> str:
        """Which tier, and for what."""
        return f"step {self.step}: save stalled ({self.tier}): {self.why}"


@dataclass(frozen=True)
class SaveSkippedMetric(Metric):
    """A save was skipped."""

    why: str

    def __str__(self) -> str:
        """Why."""
        return f"step {self.step}: save skipped, the previous save is still being stored ({self.why})"


@dataclass(frozen=True)
class SaveUnchangedMetric(Metric):
    """A save holds the same bytes as the one before it."""

    why: str

    def __str__(self) -> str:
        """A warning."""
        return f"step {self.step}: warning: {self.why}"


@dataclass(frozen=True)
class SaveIntervalMetric(Metric):
    """The interval of timed saves has changed."""

    every_s: Seconds
    stall_s: Seconds
    flush_s: Seconds
    why: str

    def __str__(self) -> str:
        """The interval, and why it is that."""
        return f"save interval is now {format_duration(self.every_s)}: {self.why}"


@dataclass(frozen=True)
class FlushMetric(Metric):
    """Progress of a save that somebody waits for."""

    tiers: Texts
    """Those that do not have it yet."""
    size_bytes: Count
    done_bytes: Count | None
    """Written to the run directory; None if it does not go there or this is not known yet."""
    seconds: Seconds
    """Since the save was begun."""

    def __str__(self) -> str:
        """How much is written, and to which tiers."""
        tiers, size = ", ".join(self.tiers), self.size_bytes
        if not size:
            text = f"being written to {tiers}"
        elif self.done_bytes is None:
            text = f"{format_bytes(size)} being written to {tiers}"
        else:
            share = min(1.0, self.done_bytes / size)
            text = f"{format_bytes(self.done_bytes)} of {format_bytes(size)} written to {tiers} ({share:.0%})"
        return f"step {self.step}: {text} after {self.seconds:.1f} s"


METRIC_CLASSES: Mapping[str, type[Metric]] = {
    "start": StartMetric,
    "step": StepMetric,
    "eval": EvalMetric,
    "restore": RestoreMetric,
    "weights": WeightsMetric,
    "save": SaveMetric,
    "stored": StoredMetric,
    "save_failed": SaveFailedMetric,
    "save_stalled": SaveStalledMetric,
    "save_skipped": SaveSkippedMetric,
    "save_unchanged": SaveUnchangedMetric,
    "save_interval": SaveIntervalMetric,
    "flush": FlushMetric,
}
_KINDS = {cls: kind for kind, cls in METRIC_CLASSES.items()}


@dataclass(frozen=True)
class _Stamp:
    attempt: Count
    time: Seconds


@dataclass(frozen=True)
class MetricRecord:
    """One line."""

    attempt: int
    time: float
    """Wall clock of rank 0's host."""
    metric: Metric
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only newer versions know."""

    @property
    def kind(self) -> str:
        """The kind of the line."""
        return metric_kind(self.metric)

    def __str__(self) -> str:
        """The text of the metric, and the fields of a newer version."""
        text = str(self.metric)
        extra = ", ".join(f"{name}={value}" for name, value in self.extra.items())
        return f"{text} ({extra})" if text and extra else text

    def as_json(self) -> dict[str, Any]:
        """The JSON object of the line."""
        return {"attempt": self.attempt, "time": self.time, **metric_as_json(self.metric), **self.extra}


def metric_kind(metric: Metric) -> str:
    """The `kind` that the line of a metric has."""
    return metric.kind if isinstance(metric, UnknownMetric) else _KINDS[type(metric)]


def metric_as_json(metric: Metric) -> dict[str, Any]:
    """The JSON object of a line without its stamp."""
    values = metric.values if isinstance(metric, UnknownMetric) else dump_typed(metric)
    return {"kind": metric_kind(metric), **values}


def parse_metric(values: Any) -> MetricRecord:
    """Parse the JSON object of a line; WrongValue names the missing or wrong field."""
    rest: dict[str, Any] = {}
    metric = parse_unstamped_metric(values, rest)
    extra: dict[str, Any] = {}
    stamp = parse_typed(_Stamp, rest, extra=extra)
    return MetricRecord(stamp.attempt, stamp.time, metric, extra)


def parse_unstamped_metric(values: Any, extra: dict[str, Any]) -> Metric:
    """Parse the result of metric_as_json; `extra` gets the fields that its class does not have."""
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise WrongValue(f"kind: expected a text, not {repr(kind)[:60]}")
    if (cls := METRIC_CLASSES.get(kind)) is not None:
        metric = parse_typed(cls, values, extra=extra)
        del extra["kind"]
        return metric
    extra |= {name: values[name] for name in ("attempt", "time") if name in values}
    step = values.get("step")
    fields = {name: value for name, value in values.items() if name not in ("kind", *extra)}
    return UnknownMetric(step if type(step) is int and step >= 0 else 0, kind, fields)


class MetricReader(TypedLineReader[MetricRecord]):
    """Reads metrics.jsonl as it grows, from `offset` or from its current end."""

    def __init__(self, run: RunDir, offset: int = 0, *, from_now: bool = False) -> None:
        super().__init__(run.metrics, parse_metric, file_size(run.metrics) if from_now else offset)


def read_metrics(run: RunDir) -> Iterator[MetricRecord]:
    """Read all lines written so far."""
    yield from MetricReader(run).read()


def newest_steps(records: Iterable[MetricRecord]) -> list[StepMetric]:
    """The steps in order; where attempts overlap, that of the newest attempt."""
    newest: dict[int, tuple[int, StepMetric]] = {}
    for record in records:
        metric = record.metric
        if isinstance(metric, StepMetric):
            before = newest.get(metric.step)
            if before is None or record.attempt >= before[0]:
                newest[metric.step] = record.attempt, metric
    return [newest[step][1] for step in sorted(newest)]
