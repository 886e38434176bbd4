"""What the user's runs tell the next one: how often nodes and ranks fail, and what saves have cost."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, get_args

from hpcrun.checkpoint.policy.failure_rates import FailureHistory, FailureKind
from hpcrun.checkpoint.tier import TierName
from hpcrun.errors import HpcrunError, UsageError
from hpcrun.files import read_regular
from hpcrun.runs.ledger import account_attempts, read_ledger
from hpcrun.runs.time_account import Fault
from hpcrun.specs.events.log import EventRecord, read_events
from hpcrun.specs.identity import check_run_schema
from hpcrun.specs.job import JobSpec
from hpcrun.specs.load import load_run_job
from hpcrun.specs.metrics import MetricRecord, SaveMetric, StepMetric, StoredMetric, read_metrics
from hpcrun.specs.placement import read_placement
from hpcrun.specs.rundir import Attempt, RunDir

MAX_HISTORY_RUNS = 200
"""The newest of the user's runs; what is older says little of the machine as it is."""
_MAX_SIMILAR_RUNS = 20
_MAX_LINES, _MAX_STORED = 20_000, 64
_TIERS: tuple[TierName, ...] = get_args(TierName)
_NAME_LINE = re.compile(r"^name: *[\"']?([A-Za-z0-9._-]+)", re.M)
_PROGRAM_FAULTS = ("deterministic", "data")
_FAILURE_KINDS: Mapping[str, FailureKind] = {
    **dict.fromkeys(("crash", "hang", "supervisor lost"), "process"),
    **dict.fromkeys(("node", "node lost"), "node"),
}


@dataclass(frozen=True)
class TierTiming:
    """What one tier took in the saves that were seen: medians, in seconds."""

    stall_s: float | None = None
    """For which training waited; in the background, by how much the steps beside it were longer."""
    flush_s: float | None = None
    lag_s: float | None = None
    """From the save until the tier had it."""
    saves: int = 0


@dataclass(frozen=True)
class MeasuredCosts:
    """What earlier runs of a job have taken."""

    runs: tuple[str, ...] = ()
    step_s: float | None = None
    tiers: Mapping[TierName, TierTiming] = field(default_factory=dict)
    restart_s: float | None = None
    """From the last sign of progress before a fault to new progress, the mean over faults."""


def count_run_failures(runs: Iterable[RunDir], cluster: str | None) -> FailureHistory:
    """Failures and node time of the newest runs on a cluster (None: runs without a profile).

    Runs with injected faults say nothing of the machine and are left out.
    """
    total = FailureHistory()
    for run in list(runs)[-MAX_HISTORY_RUNS:]:
        with suppress(HpcrunError, OSError):  # of a damaged record others complain
            check_run_schema((run.sweep_of_element or run).path)
            if _cluster_name(run) == cluster and not run.chaos.exists():
                total += count_attempt_failures(
                    read_events(run.events),
                    {one.number: _node_count(one) for one in run.attempts()},
                )
    return total


def count_attempt_failures(events: Sequence[EventRecord], nodes: Mapping[int, int]) -> FailureHistory:
    """What the attempts of one run went through, on so many nodes each."""
    account, attempts = account_attempts(events, ())
    timelines = {attempt.timeline.number: attempt.timeline for attempt in attempts}
    counts: dict[FailureKind, int] = {}
    left_out = 0
    for fault in account.faults:
        kind = _failure_kind(fault)
        if fault.cause == "supervisor lost" and not timelines[fault.attempt].is_over:
            # A later attempt shows that this one did not end by itself, and nobody was left to say why.
            kind = "site"
            if fault.attempt == account.attempt:
                continue
        if kind is None:
            left_out += 1
        else:
            counts[kind] = counts.get(kind, 0) + 1
    node_s = math.fsum(timeline.length * nodes.get(number, 1) for number, timeline in timelines.items())
    return FailureHistory(node_s, counts, 1 if attempts else 0, left_out)


def _failure_kind(fault: Fault) -> FailureKind | None:
    """The kind of a fault; None for one that is the program's own, or no failure at all."""
    if fault.cause == "not a number" or fault.kind in _PROGRAM_FAULTS:
        return None
    kind = _FAILURE_KINDS.get(fault.cause)
    return "site" if kind == "node" and len(fault.nodes) > 1 else kind


def _node_count(attempt: Attempt) -> int:
    placement = read_placement(attempt.placement)
    return len(placement[0].nodes) if placement else 1


def _cluster_name(run: RunDir) -> str | None:
    """The name in the profile that the run was submitted with."""
    try:
        text = read_regular((run.sweep_of_element or run).cluster).decode(errors="replace")
    except (OSError, UsageError):
        return None
    match = _NAME_LINE.search(text)
    return match[1] if match else None


def find_similar_runs(spec: JobSpec, runs: Iterable[RunDir]) -> list[RunDir]:
    """The newest runs of the same job: same name, model, layout, precision and nodes; newest first."""
    named = [run for run in runs if run.id.startswith(f"{spec.name}-")]
    similar = []
    for run in reversed(named[-_MAX_SIMILAR_RUNS:]):
        with suppress(HpcrunError, OSError):
            check_run_schema((run.sweep_of_element or run).path)
            if _job_shape(load_run_job(run).spec) == _job_shape(spec):
                similar.append(run)
    return similar


def _job_shape(spec: JobSpec) -> tuple[Any, ...]:
    resources = spec.resources
    return spec.name, spec.model, spec.parallel, spec.train.precision, resources.nodes, spec.ranks_per_node


def measure_runs(runs: Sequence[RunDir]) -> MeasuredCosts:
    """What these runs took, all their lines together; what none of them tells is None."""
    records, restarts = list[MetricRecord](), list[float]()
    for run in runs:
        records += read_metrics(run)
        ledger = read_ledger(run)
        if ledger.mttr_s is not None and ledger.mttd_s is not None:
            restarts.append(ledger.mttd_s + ledger.mttr_s)
    restart = sum(restarts) / len(restarts) if restarts else None
    return measure_metric_records(records, tuple(run.id for run in runs), restart)


def measure_metric_records(
    records: Sequence[MetricRecord], runs: tuple[str, ...] = (), restart_s: float | None = None
) -> MeasuredCosts:
    """What the lines of metrics.jsonl say of steps and saves."""
    steps, times = list[float](), defaultdict[tuple[str, str], list[float]](list)
    for record in records:
        match record.metric:
            case StepMetric(step_time_s=seconds):
                steps.append(seconds)
            case SaveMetric() as save:
                times[save.tier, "stall"].append(save.seconds)
            case StoredMetric() as stored:
                times[stored.tier, "flush"].append(stored.seconds)
                times[stored.tier, "lag"].append(stored.lag_s)
    step_s = _median_or_none(steps)
    if step_s is not None:
        for tier, slowdown_s in _background_slowdowns(records, step_s):
            times[tier, "stall"].append(slowdown_s)
    measured_tiers = {tier for tier, _ in times}
    tiers = {tier: _tier_timing(times, tier) for tier in _TIERS if tier in measured_tiers}
    return MeasuredCosts(runs, step_s, tiers, restart_s)


def _background_slowdowns(records: Sequence[MetricRecord], usual_s: float) -> Iterator[tuple[str, float]]:
    """For each save that a tier stored in the background: how much longer the steps meanwhile were."""
    records = records[-_MAX_LINES:]
    steps = [
        (record.attempt, record.time, record.metric.step_time_s)
        for record in records
        if isinstance(record.metric, StepMetric) and record.metric.step_time_s
    ]
    stores = [(record, record.metric) for record in records if isinstance(record.metric, StoredMetric)]
    for record, stored in stores[-_MAX_STORED:]:
        begin, end = record.time - stored.seconds, record.time
        # A step counts with the part of it during which the save was stored.
        shares = [
            (step_s - usual_s) * max(0.0, min(step_end, end) - max(step_end - step_s, begin)) / step_s
            for attempt, step_end, step_s in steps
            if attempt == record.attempt and step_end > begin and step_end - step_s < end
        ]
        yield stored.tier, max(0.0, sum(shares))


def _tier_timing(times: Mapping[tuple[str, str], list[float]], tier: TierName) -> TierTiming:
    stall, flush, lag = (times.get((tier, name), []) for name in ("stall", "flush", "lag"))
    return TierTiming(
        _median_or_none(stall), _median_or_none(flush), _median_or_none(lag), max(len(stall), len(flush))
    )


def _median_or_none(values: Sequence[float]) -> float | None:
    return median(values) if values else None
