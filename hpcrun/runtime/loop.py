"""The training loop: steps, metrics, evaluation, saves, and stopping on request."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcrun.checkpoint.policy.auto_interval import AutoInterval
from hpcrun.errors import NotANumberError
from hpcrun.formulas import train_flops_per_token
from hpcrun.launch.watch.progress import progress
from hpcrun.runtime.async_checkpoint import AsyncCheckpointer
from hpcrun.runtime.control import Control
from hpcrun.runtime.data_loader import Batches, TokenSource, eval_batches
from hpcrun.runtime.device import Device
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer
from hpcrun.runtime.initial_weights import adopt_initial_weights
from hpcrun.runtime.optimizer import learning_rate_of_step
from hpcrun.runtime.profiler import StepProfiler
from hpcrun.runtime.restore import restore_from_plan
from hpcrun.runtime.sharded_model import ShardedModel, sum_over_ranks
from hpcrun.runtime.speed_probe import SpeedProbe
from hpcrun.runtime.worker_endpoint import find_worker
from hpcrun.specs.job import JobSpec
from hpcrun.specs.metrics import (
    EvalMetric,
    Metric,
    MetricRecord,
    RestoreMetric,
    SaveIntervalMetric,
    SaveMetric,
    StartMetric,
    StepMetric,
)
from hpcrun.specs.plan import Plan
from hpcrun.specs.records import JsonLineWriter
from hpcrun.specs.rundir import Attempt

if TYPE_CHECKING:
    from hpcrun.launch.attempt_monitor import RunObserver
    from hpcrun.launch.rank_shim import RankRequests

_SAVE, _STOP = 1, 2


class Trainer:
    """Trains from the newest saved step of a run to its last one, or until asked to stop."""

    def __init__(
        self,
        job: JobSpec,
        plan: Plan,
        attempt: Attempt,
        control: Control,
        device: Device,
        source: TokenSource,
        requests: RankRequests,
        observer: RunObserver | None = None,
    ) -> None:
        assert job.model is not None
        self._job, self._plan, self._control, self._device = job, plan, control, device
        self._source, self._requests, self._observer = source, requests, observer
        self._model = ShardedModel(job.model, plan, job.train, device, control.rank)
        spec = job.checkpoint
        self._checkpoints = DirectCheckpointer(
            attempt.run.checkpoints,
            control,
            attempt=attempt.number,
            keep=spec.keep,
            keep_every=spec.keep_every,
            durable=spec.durable,
            record=self._record,
        )
        self._async_checkpointer: AsyncCheckpointer | None = None
        if spec.memory:
            home = find_worker(os.environ, attempt.run.path, spec, control, attempt.number)
            home.begin(control)
            self._async_checkpointer = AsyncCheckpointer(spec, self._checkpoints, control, home, self._record)
        is_auto = spec.every == "auto" and control.rank == 0
        self._auto = AutoInterval(len(control.nodes), time.monotonic()) if is_auto else None
        self._deferred_metrics: list[Metric] | None = None
        self._attempt, self._files = attempt.number, attempt
        self._metrics = JsonLineWriter(attempt.run.metrics) if control.rank == 0 else None
        self._speed = SpeedProbe(device)
        self._profiler = StepProfiler(job.train.profile, attempt.profile, control.rank)
        self._clock: dict[str, float] = {}
        self._saved_step = self._first_step = 0
        peak = device.peak_flops(job.train.precision)
        self._peak = peak * control.size if peak is not None else None
        self._flops_per_token = train_flops_per_token(job.model, plan.seq_len)

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate in torch's mesh."""
        return self._model.mesh.seen()

    def run(self) -> dict[str, Any]:
        """Train; return how it ended, at which step, with which losses."""
        start, position = self._restore()
        self._first_step = start + 1
        steps, every = self._job.train.steps, self._job.train.eval.every
        result: dict[str, Any] = {"status": "done", "first_step": start + 1, "step": start}
        device = self._device
        self._write(StartMetric(start, str(device.torch_device), device.name, device.reason))
        if start == 0:
            result["eval_loss_before"], _ = self._evaluate(0)
        self._profiler.step(start)
        if 0 < start == steps and self._saved_step != start and self._job.checkpoint.at_end:
            self._save(start, position, ends=True, requested=False)
        with self._batches(position) as batches, self._profiler:
            for step in range(start + 1, steps + 1):
                loss, requests = self._step(step, batches)
                self._requests.has_begun()
                result |= {"step": step, "loss": loss}
                last = step == steps
                if every and step % every == 0 and not last:
                    requests |= self._evaluate(step)[1]
                every_steps = self._job.checkpoint.every_steps
                due = every_steps and step % every_steps == 0
                ends = last or bool(requests & _STOP)
                if requests or due or (last and self._job.checkpoint.at_end):
                    self._save(step, batches.position, ends=ends, requested=bool(requests))
                if requests & _STOP and not last:
                    self._finish_saves()
                    return result | {"status": "saved"}
        self._finish_saves()
        result["eval_loss_after"], requests = self._evaluate(steps)
        if requests & _STOP and self._saved_step == steps:
            # The next attempt evaluates what is saved.
            return result | {"status": "saved"}
        progress(steps, "end")
        return result

    def _batches(self, position: int) -> Batches:
        plan = self._plan
        assert self._job.model is not None
        return Batches(
            self._source,
            seq_len=plan.seq_len,
            seed=self._job.train.seed,
            gbs=plan.gbs,
            mbs=plan.mbs,
            dp_rank=self._model.mesh.dp_rank,
            dp_size=plan.degrees.dp,
            start_sample=position,
            vocab=self._job.model.vocab,
            rounds=plan.grad_accum if plan.is_uneven else None,
        )

    def _pending_requests(self) -> int:
        is_due = self._auto is not None and self._auto.is_due(time.monotonic())
        return (_SAVE if self._requests.save or is_due else 0) | (_STOP if self._requests.stop else 0)

    def _restore(self) -> tuple[int, int]:
        optimizer, begin = self._model.optimizer, time.monotonic()
        state, expected = optimizer.state(), self._model.expected_entries()
        restored = restore_from_plan(self._checkpoints, self._files, self._control, state, expected)
        if restored is None:
            model = self._job.model
            if model is not None and model.weights is not None:
                kept = self._job.train.kept_dtype
                origin = adopt_initial_weights(model, self._files.run, self._control, kept)
                self._write(origin)
            return 0, 0
        optimizer.loaded(restored.step)
        # A state that came from memory alone is not saved durably yet.
        self._saved_step = restored.step if restored.saved is not None else 0
        if self._async_checkpointer is not None:
            self._async_checkpointer.record_restored(restored.generation)
        passed_over, seconds = tuple(restored.passed_over), time.monotonic() - begin
        self._write(RestoreMetric(restored.step, seconds, passed_over, restored.lost_steps))
        return restored.step, restored.position

    def _save(self, step: int, position: int, *, ends: bool, requested: bool) -> None:
        # This save answers the request for one, whichever rank received it.
        self._requests.save = False
        if self._auto is not None:
            self._auto.saved(time.monotonic())
        if step == self._saved_step:
            return
        progress(step, "checkpoint")
        begin, state = time.monotonic(), self._model.optimizer.state()
        if self._async_checkpointer is None:
            self._checkpoints.save(step, position, state)
            self._write(SaveMetric(step, time.monotonic() - begin))
        elif ends:
            self._async_checkpointer.save_durably(step, position, state)
        elif not self._async_checkpointer.save(step, position, state, lasting=requested):
            return
        self._saved_step = step

    def _finish_saves(self) -> None:
        """Wait until every save is in the run directory, or is recorded as failed; then close."""
        if self._async_checkpointer is not None:
            self._async_checkpointer.settle("durable")
            self._async_checkpointer.close()

    def _record(self, metric: Metric) -> None:
        """Write a metric; during a step, after the metric of that step, whose time includes its cause."""
        if self._deferred_metrics is None:
            self._write(metric)
        else:
            self._deferred_metrics.append(metric)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._clock[part] = time.perf_counter() - begin

    def _step(self, step: int, batches: Batches) -> tuple[float, int]:
        """Do one step; return the loss, and the requests that any rank had before it."""
        compiles = self._job.train.compile and step == self._first_step
        progress(step, "compile" if compiles else "step")
        self._speed.step(step)
        begin = time.perf_counter()
        self._clock, self._deferred_metrics = {}, []
        with self._timed("data"):
            inputs, targets = next(batches)
        with self._timed("forward_backward"):
            share = self._model.forward_backward(inputs, targets)
            self._device.synchronize()
        # As late as the exchange still overlaps with the rest of the step and costs no waiting.
        finish_agreeing = self._control.start_agreeing(self._pending_requests())
        with self._timed("reduce"):
            loss, norm, squares = self._model.totals(share)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._report_not_a_number(step, loss, norm, share, squares)
        lr = learning_rate_of_step(self._job, self._plan, step)
        if self._async_checkpointer is not None:
            with self._timed("fence"):
                self._async_checkpointer.fence()
        with self._timed("optimizer"):
            self._model.optimizer.step(lr, norm)
            self._device.synchronize()
        with self._timed("agree"):
            agreed = finish_agreeing()
        self._profiler.step(step)
        self._record_step(step, loss, norm, lr, time.perf_counter() - begin)
        deferred, self._deferred_metrics = self._deferred_metrics, None
        for metric in deferred:
            self._write(metric)
        return loss, agreed

    def _record_step(self, step: int, loss: float, norm: float, lr: float, seconds: float) -> None:
        tokens_per_s = self._plan.gbs * self._plan.seq_len / seconds
        self._write(
            StepMetric(
                step,
                loss=loss,
                grad_norm=norm,
                lr=lr,
                tokens_per_s=tokens_per_s,
                step_time_s=seconds,
                time_s=self._clock,
                mfu=self._flops_per_token * tokens_per_s / self._peak if self._peak else None,
                peak_memory_bytes=self._device.peak_memory_bytes(),
            )
        )

    def _write(self, metric: Metric) -> None:
        if self._metrics is not None:
            self._metrics.write(MetricRecord(self._attempt, time.time(), metric).as_json())
        if self._observer is not None:
            self._observer.step(metric)
        if self._auto is not None and (chosen := self._auto.take(metric)) is not None:
            self._write(SaveIntervalMetric(metric.step, **asdict(chosen)))

    def _report_not_a_number(
        self, step: int, loss: float, norm: float, share: Tensor, squares: Tensor
    ) -> None:
        finite = [bool(share.isfinite()), bool(squares.isfinite())]
        views = self._control.allgather([*finite, self._control.node])
        what, column = ("loss", 0) if not math.isfinite(loss) else ("gradient norm", 1)
        # The loss spreads into every gradient: only the first symptom names a culprit.
        ranks = [f"rank {rank} on {view[2]}" for rank, view in enumerate(views) if not view[column]]
        newest = self._checkpoints.newest()
        kept = f"the save of step {newest.step} is kept" if newest else "there was no save yet"
        value = loss if what == "loss" else norm
        raise NotANumberError(
            f"step {step}: {what} is {value} on {', '.join(ranks[:8]) or 'the sum of all ranks'}; {kept}."
            " Lower train.lr, raise train.warmup, or look at the data of this step"
        )

    def _evaluate(self, step: int) -> tuple[float | None, int]:
        """Return the mean loss over held-out sequences, the same ones at every call and on every layout.

        Also returns the requests that any rank has had meanwhile; a stop ends it early, without a loss.
        """
        plan, limit, model = self._plan, self._job.train.eval.sequences, self._job.model
        assert model is not None
        available = self._source.corpus.eval_sequences
        rounds = min(available, limit or available) // plan.gbs
        if rounds == 0:
            return None, 0
        batches = eval_batches(
            self._source,
            gbs=plan.gbs,
            mbs=plan.mbs,
            rounds=plan.grad_accum,
            dp_rank=self._model.mesh.dp_rank,
            dp_size=plan.degrees.dp,
            sequences=rounds * plan.gbs,
            vocab=model.vocab,
        )
        progress(step, "eval")
        begin = time.perf_counter()
        shares, requests = list[Tensor](), 0
        for inputs, targets in batches:
            answer = self._control.start_agreeing(self._pending_requests())
            shares.append(self._model.evaluate(inputs, targets))
            requests |= answer()
            if requests & _STOP:
                return None, requests
        total = sum(shares)
        assert isinstance(total, Tensor)
        (loss,) = sum_over_ranks([total / rounds], self._device.torch_device)
        seconds = time.perf_counter() - begin
        finite_loss = loss if math.isfinite(loss) else None
        self._write(EvalMetric(step, finite_loss, rounds * plan.gbs, seconds))
        return loss, requests
