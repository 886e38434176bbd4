"""TensorBoard and W&B, fed from metrics.jsonl under the names that torchtitan's users know."""

from __future__ import annotations

import importlib
import netrc
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.tier import TIER_NAMES
from hpcrun.errors import HpcrunError
from hpcrun.local_identity import expand_path
from hpcrun.runs.timeline import is_valid_count
from hpcrun.specs.metrics import EvalMetric, Metric, MetricReader, SaveMetric, StepMetric, StoredMetric
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.secrets import read_secrets
from hpcrun.telemetry.prometheus_exporter import read_final_state
from hpcrun.telemetry.run_counters import RunCountersReader
from hpcrun.telemetry.sidecar import load_sidecar_state, print_to_console

_PIECE_BYTES = 4 << 20
_GIB = 2**30
_PLOTTED_KINDS = ("step", "eval", "save", *(f"stored {tier}" for tier in TIER_NAMES))
_WANDB_HOST = "api.wandb.ai"


def metric_scalars(metric: Metric, ranks: int) -> dict[str, float]:
    """The figures of a line of metrics.jsonl, by torchtitan's keys; speed is of one rank, as there."""
    figures: dict[str, float | None] = {}
    match metric:
        case StepMetric(step_time_s=seconds) as step:
            data_s = step.time_s.get("data")
            figures = {
                "loss_metrics/global_avg_loss": step.loss,
                "grad_norm": step.grad_norm,
                "lr": step.lr,
                "throughput(tps)": step.tokens_per_s / max(1, ranks),
                "mfu(%)": None if step.mfu is None else step.mfu * 100,
                "time_metrics/end_to_end(s)": seconds,
                "time_metrics/data_loading(s)": data_s,
                "time_metrics/data_loading(%)": 100 * data_s / seconds if seconds and data_s else None,
                # Of the tensors, as the device counts it; what its allocator keeps besides is not recorded.
                "memory/max_allocated(GiB)": step.peak_memory_bytes and step.peak_memory_bytes / _GIB,
            }
        case EvalMetric(eval_loss=loss):
            figures = {"validation_metrics/loss": loss}
        case SaveMetric(seconds=seconds):
            figures = {"time_metrics/checkpoint(s)": seconds}
        case StoredMetric() as stored:
            figures = {
                f"checkpoint/{stored.tier}_flush(s)": stored.seconds,
                f"checkpoint/{stored.tier}_lag(s)": stored.lag_s,
            }
    return {name: value for name, value in figures.items() if value is not None}


class ScalarReader:
    """The figures of a run, a step at a time, no step twice and none after a later one.

    `state`: where an earlier reader stopped. Steps that a fault makes the run repeat are left out.
    """

    def __init__(self, run: RunDir, ranks: int, state: Mapping[str, Any]) -> None:
        offset, steps = state.get("metrics"), state.get("steps")
        self._reader = MetricReader(run, offset if is_valid_count(offset) else 0)
        steps = steps if isinstance(steps, dict) else {}
        self._steps = {
            kind: steps[kind] if is_valid_count(steps.get(kind)) else -1 for kind in _PLOTTED_KINDS
        }
        self._ranks = ranks

    def new(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Step, wall time and figures of what came since the last call."""
        while records := self._reader.read(_PIECE_BYTES):
            for record in records:
                metric, kind = record.metric, record.kind
                if isinstance(metric, StoredMetric):
                    kind = f"stored {metric.tier}"
                figures = metric_scalars(metric, self._ranks)
                if figures and metric.step > self._steps.get(kind, metric.step):
                    self._steps[kind] = metric.step
                    yield metric.step, record.time, figures

    @property
    def state(self) -> dict[str, Any]:
        """Where all that has been given ends."""
        return {"metrics": self._reader.offset, "steps": self._steps}


class TensorBoard:
    """Event files for TensorBoard, one more for every start of the run."""

    every_s = 2.0

    def __init__(self, run: RunDir, about: Mapping[str, Any], orders: Mapping[str, Any]) -> None:
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writer.EventFileWriter(
            orders["directory"],
            filename_suffix=f".{secrets.token_hex(8)}",  # nobody can have planted it
        )
        self._state = run.sidecar_state("tensorboard")
        self._points = ScalarReader(run, about["ranks"], load_sidecar_state(run, "tensorboard"))

    def turn(self) -> None:
        """Write what is new."""
        written = False
        for step, moment, figures in self._points.new():
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=moment, step=step, summary=summary))
            written = True
        if written:
            self._writer.flush()
            write_json(self._state, self._points.state)

    def close(self) -> None:
        """No more of it."""
        self._writer.close()


class Wandb:
    """The run in W&B, under one id through all its attempts."""

    every_s = 2.0

    def __init__(self, run: RunDir, about: Mapping[str, Any], orders: Mapping[str, Any]) -> None:
        self._run = run
        os.environ.update(orders["env"])
        # A file that is gone by now is no reason to write nothing at all.
        with suppress(HpcrunError):
            os.environ.update(read_secrets(orders["secrets"]))
        self._state = run.sidecar_state("wandb")
        saved = load_sidecar_state(run, "wandb")
        self._id = str(saved.get("id") or os.environ.get("WANDB_RUN_ID") or run.run_id.replace("/", "-"))
        self._points = ScalarReader(run, about["ranks"], saved)
        mode = orders["mode"] or os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        if mode == "offline" and not orders["mode"]:
            print_to_console(
                "wandb: there is no key (WANDB_API_KEY, ~/.netrc): it writes offline; later: wandb sync"
            )
        self._wandb: Any = importlib.import_module("wandb")
        self._logged: Any = self._wandb.init(
            id=self._id,
            resume=os.environ.get("WANDB_RESUME", "allow"),
            name=os.environ.get("WANDB_NAME", run.id),
            project=orders["project"] or os.environ.get("WANDB_PROJECT") or about["name"],
            entity=orders["entity"] or os.environ.get("WANDB_ENTITY"),
            group=orders["group"] or os.environ.get("WANDB_RUN_GROUP"),
            mode=mode,
            dir=str(run.telemetry),
            config=orders["config"],
        )
        # The run in W&B may know more than we do, where a state of ours was lost.
        self._least = int(getattr(self._logged, "step", 0) or 0)

    def turn(self) -> None:
        """Log what is new: all figures of a step at once, as W&B wants it."""
        written = False
        for step, figures in _group_by_step(self._points.new()):
            if step >= self._least:
                self._logged.log(figures, step=step)
                self._least, written = step, True
        if written:
            write_json(self._state, {"id": self._id, **self._points.state})

    def close(self) -> None:
        """Say how it ended, and wait until it has been told."""
        state = read_final_state(
            self._run, RunCountersReader(self._run, load_sidecar_state(self._run, "exporter")).read()
        )
        if state == "requeued":
            self._logged.mark_preempting()
        self._logged.finish(exit_code=0 if state in ("done", "saved") else 1)


def _group_by_step(
    points: Iterable[tuple[int, float, dict[str, float]]],
) -> Iterator[tuple[int, dict[str, float]]]:
    current: tuple[int, dict[str, float]] | None = None
    for step, _, figures in points:
        if current is not None and current[0] == step:
            current[1].update(figures)
            continue
        if current is not None:
            yield current
        current = step, dict(figures)
    if current is not None:
        yield current


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(expand_path(os.environ.get("NETRC") or "~/.netrc"))
    try:
        return netrc.netrc(path).authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
