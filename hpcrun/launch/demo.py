"""The demonstration: a run stopped halfway and resumed, and the same one undisturbed, curve against curve."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from hpcrun.launch.attempt_monitor import AttemptOutcome, RunObserver
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.supervisor import Supervisor
from hpcrun.specs.metrics import Metric, StepMetric, newest_steps, read_metrics
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.shipped import shipped_file
from hpcrun.submission.prepare import PreparedJob, prepare_job

LEARNED_LOSS = 3.1
"""Held-out loss, in nats a byte, that shows that the model learnt more than how often each byte occurs."""

LossCurve = list[tuple[int, float]]


@dataclass(frozen=True)
class Demonstration:
    """What came out: the interrupted run, the undisturbed one, and whether the promises held."""

    interrupted: RunDir
    stopped_at: int
    undisturbed: RunDir
    first_loss: float
    last_loss: float
    eval_before: float
    eval_after: float
    resumed_curve: LossCurve
    undisturbed_curve: LossCurve

    @property
    def learned(self) -> bool:
        """Whether the model clearly learned."""
        return self.eval_after < LEARNED_LOSS

    @property
    def same_curve(self) -> bool:
        """Whether stopping and resuming left the losses exactly as they would have been."""
        return self.resumed_curve == self.undisturbed_curve


class _StopHalfway:
    """Passes everything on, and at half of the steps asks the supervisor to stop, as a scheduler would."""

    def __init__(self, observer: RunObserver, half: int) -> None:
        self._observer, self._half = observer, half
        self.note, self.ranks_ready, self.finished = observer.note, observer.ranks_ready, observer.finished

    def step(self, metric: Metric) -> None:
        """A line of metrics.jsonl."""
        self._observer.step(metric)
        if isinstance(metric, StepMetric) and metric.step == self._half:
            os.kill(os.getpid(), signal.SIGTERM)


def demonstrate(
    inbox: SignalQueue, display: Callable[[PreparedJob], RunObserver], say: Callable[[str], None]
) -> Demonstration | AttemptOutcome:
    """Run it; an Outcome instead of a Demonstration is the run that did not end as it should."""
    job = shipped_file("jobs/demo.yaml")
    prepared = prepare_job(job)
    half = prepared.spec.train.steps // 2
    say(f"1 of 3: train, and stop after about {half} steps")
    stopped = Supervisor(prepared, inbox, _StopHalfway(display(prepared), half)).run()
    if stopped.status != "saved" or stopped.step is None:
        return stopped
    say(f"2 of 3: resume from step {stopped.step}")
    again = prepare_job(None, resume=stopped.run)
    resumed = Supervisor(again, inbox, display(again)).run()
    if resumed.status != "done":
        return resumed
    say("3 of 3: the same run undisturbed, to compare with")
    whole = Supervisor(prepared, inbox, display(prepared)).run()
    if whole.status != "done":
        return whole
    curve = _loss_curve(whole.run)
    return Demonstration(
        interrupted=stopped.run,
        stopped_at=stopped.step,
        undisturbed=whole.run,
        first_loss=curve[0][1],
        last_loss=curve[-1][1],
        eval_before=whole.result["eval_loss_before"],
        eval_after=resumed.result["eval_loss_after"],
        resumed_curve=_loss_curve(stopped.run),
        undisturbed_curve=curve,
    )


def _loss_curve(run: RunDir) -> LossCurve:
    return [(metric.step, metric.loss) for metric in newest_steps(read_metrics(run))]
