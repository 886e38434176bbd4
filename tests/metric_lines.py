"""Lines of metrics.jsonl for tests: name what matters, the other fields of the kind are filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrun.specs.metrics import Metric, MetricRecord, parse_metric

_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "start": {"device": "cpu", "device_name": "a CPU", "reason": "no GPU is there"},
    "step": {
        **{"loss": 1.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 1000.0, "step_time_s": 1.0},
        **{"time_s": {}, "mfu": None, "peak_memory_bytes": None},
    },
    "eval": {"eval_loss": 1.0, "sequences": 8, "seconds": 0.25},
    "restore": {"seconds": 0.5, "passed_over": [], "lost_steps": 0},
    "weights": {
        **{"source": "/weights", "dtypes": {"float32": 3}, "kept": "float32", "is_hashed": True},
        **{"carried": [], "absent": [], "left": [], "notes": []},
    },
    "save": {"seconds": 0.5},
    "stored": {"tier": "durable", "seconds": 1.0, "size_bytes": 1000, "lag_s": 1.5},
    "save_failed": {"tier": "durable", "why": "disk full"},
    "save_stalled": {"tier": "durable", "seconds": 30.0, "why": "the disk does not answer"},
    "save_skipped": {"why": "busy"},
    "save_unchanged": {"why": "its bytes are those of the save before"},
    "save_interval": {"every_s": 600.0, "stall_s": 1.0, "flush_s": 10.0, "why": "saves are cheap"},
    "flush": {"tiers": ["durable"], "size_bytes": 1000, "done_bytes": None, "seconds": 2.0},
}


def metric_line(
    kind: str, step: int = 1, *, attempt: int = 1, time: float = 1e9, **fields: Any
) -> dict[str, Any]:
    """The JSON object of a line."""
    stamp = {"attempt": attempt, "time": time, "kind": kind, "step": step}
    return {**stamp, **_FIELDS.get(kind, {}), **fields}


def metric_record(kind: str, step: int = 1, **fields: Any) -> MetricRecord:
    """A line as its readers get it."""
    return parse_metric(metric_line(kind, step, **fields))


def metric(kind: str, step: int = 1, **fields: Any) -> Metric:
    """What a line says besides its stamp."""
    return metric_record(kind, step, **fields).metric
