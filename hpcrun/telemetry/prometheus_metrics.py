"""The figures of runs as Prometheus reads them, under names that dashboards and alerts can rely on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcrun import __version__
from hpcrun.telemetry.run_counters import STEP_BOUNDS_S, TELEMETRY_STATES, RunCounters

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

_KNOWN_CAUSES = ("crash", "node")
"""Counted from the start, so that the first one is an increase."""


@dataclass(frozen=True)
class RunMetrics:
    """What is known of one run at one moment. Every series of it has the label `run`."""

    run: str
    tally: RunCounters
    name: str = ""
    slurm_job: str = ""
    host: str = ""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """How many are active, spare, excluded; empty where nobody knows."""
    heartbeat_ages_s: Mapping[str, float] = field(default_factory=dict)
    """For how long nobody has heard of the agent of a node."""
    scrape_errors: int = 0
    now: float | None = None
    """The wall clock while the run continues; None for one that does not."""


def render_exposition(runs: Sequence[RunMetrics]) -> str:
    """The text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_collector(runs))
    return generate_latest(registry).decode()


def metric_samples(runs: Sequence[RunMetrics]) -> list[tuple[str, dict[str, str], float]]:
    """The same as values: name, labels, value."""
    return [(one.name, dict(one.labels), one.value) for each in metric_families(runs) for one in each.samples]


def _collector(runs: Sequence[RunMetrics]) -> Collector:
    from prometheus_client.registry import Collector

    class _Figures(Collector):
        def collect(self) -> Iterator[Metric]:
            return metric_families(runs)

    return _Figures()


def metric_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    """One family a name, with the series of all runs; labels are text that every encoding takes."""
    for make in (
        _info_families,
        _progress_families,
        _save_families,
        _time_families,
        _fault_families,
        _node_families,
    ):
        for family in make(runs):
            family.samples = [one._replace(labels=_encodable_labels(one.labels)) for one in family.samples]
            yield family


def _encodable_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """A record may hold half a character (a lone surrogate), which no file takes."""
    return {name: value.encode("utf-8", "backslashreplace").decode() for name, value in labels.items()}


def _info_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    text = "The version of hpcrun; always 1"
    built = GaugeMetricFamily("hpcrun_build_info", text, labels=["run", "version"])
    text = "The attempt of a run, and the Slurm job that it belongs to; always 1"
    attempt = GaugeMetricFamily(
        "hpcrun_attempt_info", text, labels=["run", "name", "attempt", "slurm_job", "host"]
    )
    state = GaugeMetricFamily("hpcrun_state", "1 for the state that the run is in", labels=["run", "state"])
    for run in runs:
        built.add_metric([run.run, __version__], 1)
        if run.tally.attempt:
            attempt.add_metric([run.run, run.name, str(run.tally.attempt), run.slurm_job, run.host], 1)
        for name in TELEMETRY_STATES:
            state.add_metric([run.run, name], name == run.tally.state)
    yield from (built, attempt, state)


def _progress_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    step = GaugeMetricFamily("hpcrun_step", "The newest step; after a fault it goes back", labels=["run"])
    text = "How long steps took, those that were done again included"
    took = HistogramMetricFamily("hpcrun_step_duration_seconds", text, labels=["run"])
    text = "Tokens that steps have computed on, those that were done again included"
    tokens = CounterMetricFamily("hpcrun_tokens", text, labels=["run"])
    saved = GaugeMetricFamily(
        "hpcrun_checkpoint_last_step", "The newest step that is durable", labels=["run"]
    )
    text = "When the newest durable save was complete (seconds since 1970)"
    saved_at = GaugeMetricFamily("hpcrun_checkpoint_timestamp_seconds", text, labels=["run"])
    for run in runs:
        tally, label = run.tally, [run.run]
        if tally.step is not None:
            step.add_metric(label, tally.step)
        below, buckets = 0, []
        for bound, count in zip((*map(str, STEP_BOUNDS_S), "+Inf"), tally.step_counts, strict=True):
            below += count
            buckets.append((bound, below))
        took.add_metric(label, buckets, tally.steps_s)
        tokens.add_metric(label, tally.tokens)
        if tally.saved_step is not None and tally.saved_at is not None:
            saved.add_metric(label, tally.saved_step)
            saved_at.add_metric(label, tally.saved_at)
    yield from (step, took, tokens, saved, saved_at)


def _save_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    descriptions = {
        "saves": "Saves that a tier has got",
        "failures": "Saves that a tier has not got",
        "stall_s": "Time that training has waited for saves of a tier",
        "flush_s": "Time that a tier has taken to store saves, beside training",
        "size_bytes": "Bytes that a tier has got, of the node of rank 0",
    }
    names = {"stall_s": "stall_seconds", "flush_s": "flush_seconds", "size_bytes": "bytes"}
    labels = ["run", "tier"]
    counters = {
        name: CounterMetricFamily(f"hpcrun_checkpoint_{names.get(name, name)}", text, labels=labels)
        for name, text in descriptions.items()
    }
    text = "From the newest save until a tier had it"
    lag = GaugeMetricFamily("hpcrun_checkpoint_lag_seconds", text, labels=labels)
    text = "Bytes that the newest save took at a tier, to bytes of the state"
    ratio = GaugeMetricFamily("hpcrun_checkpoint_bytes_ratio", text, labels=labels)
    text = "For how long nothing new has become durable, while the run continues"
    undurable = GaugeMetricFamily("hpcrun_checkpoint_durable_age_seconds", text, labels=["run"])
    for run in runs:
        for tier, sums in run.tally.saves.tiers.items():
            for name, counter in counters.items():
                counter.add_metric([run.run, tier], getattr(sums, name))
            if sums.lag_s is not None:
                lag.add_metric([run.run, tier], sums.lag_s)
            if sums.ratio is not None:
                ratio.add_metric([run.run, tier], sums.ratio)
        since = run.tally.saves.durable_since
        if run.now is not None and since is not None:
            undurable.add_metric([run.run], max(0.0, run.now - since))
    yield from (*counters.values(), lag, ratio, undurable)


def _time_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    text = "Time in steps that were done for the first time, up to the newest record"
    productive = CounterMetricFamily("hpcrun_productive_seconds", text, labels=["run"])
    text = "All other time since the first launch; recompute: steps that a fault made be done again"
    badput = CounterMetricFamily("hpcrun_badput_seconds", text, labels=["run", "bucket"])
    for run in runs:
        productive.add_metric([run.run], run.tally.productive_s)
        for bucket, seconds in run.tally.badput_s.items():
            badput.add_metric([run.run, bucket], seconds)
    yield from (productive, badput)


def _fault_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

    text = "Times that the run was started again, in its allocation or through the queue"
    restarts = CounterMetricFamily("hpcrun_restarts", text, labels=["run", "cause", "level"])
    faults = CounterMetricFamily("hpcrun_faults", "What took attempts down", labels=["run", "cause"])
    text = "From the last sign of progress until a fault was seen"
    detection = SummaryMetricFamily("hpcrun_detection_seconds", text, labels=["run"])
    text = "From a fault that was seen to the first step beyond the old ones"
    recovery = SummaryMetricFamily("hpcrun_recovery_seconds", text, labels=["run"])
    for run in runs:
        tally = run.tally
        none = {f"{cause}/{level}": 0 for cause in _KNOWN_CAUSES for level in ("allocation", "requeue")}
        for key, count in (none | tally.restarts).items():
            cause, _, level = key.rpartition("/")
            restarts.add_metric([run.run, cause, level], count)
        for cause, count in (dict.fromkeys(_KNOWN_CAUSES, 0) | tally.fault_counts).items():
            faults.add_metric([run.run, cause], count)
        detection.add_metric([run.run], len(tally.faults), tally.detection_s)
        recovery.add_metric([run.run], len(tally.recoveries_s), sum(tally.recoveries_s))
    yield from (restarts, faults, detection, recovery)


def _node_families(runs: Sequence[RunMetrics]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    nodes = GaugeMetricFamily("hpcrun_nodes", "Nodes of the run by their part in it", labels=["run", "role"])
    text = "For how long the supervisor has heard nothing of the agent of a node"
    heartbeat_age = GaugeMetricFamily("hpcrun_heartbeat_age_seconds", text, labels=["run", "node"])
    text = "Times that the figures of the run could not be read"
    errors = CounterMetricFamily("hpcrun_exporter_scrape_errors", text, labels=["run"])
    for run in runs:
        for role, count in run.nodes.items():
            nodes.add_metric([run.run, role], count)
        for node, seconds in run.heartbeat_ages_s.items():
            heartbeat_age.add_metric([run.run, node], seconds)
        errors.add_metric([run.run], run.scrape_errors)
    yield from (nodes, heartbeat_age, errors)
