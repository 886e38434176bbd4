"""The course of one attempt: what was seen so far, what that means, and what is to be done about it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from hpcrun.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_SAVED
from hpcrun.launch.agents.nodes import Nodes
from hpcrun.launch.attempt_events import (
    AttemptEvent,
    AttemptFinished,
    LauncherEnded,
    NodeLost,
    RankEnded,
    RankFailed,
    RankProgress,
    RankStarted,
    RankStopped,
    SignalReceived,
    WorldReady,
)
from hpcrun.launch.attempt_processes import AttemptProcesses
from hpcrun.launch.failure_cause import FailureCause, explain_failure, explain_hang
from hpcrun.launch.fault_class import FaultClass
from hpcrun.launch.final_save import SaveDurations
from hpcrun.launch.launchers import LaunchRequest
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.watch.stacks import StackGroup, find_outlier, group_stacks
from hpcrun.launch.watch.stragglers import StragglerDetector
from hpcrun.launch.watch.watchdog import Hang, HangWatchdog
from hpcrun.specs.events.attempt import (
    ExitEvent,
    HangEvent,
    LauncherEndedEvent,
    LaunchEvent,
    ProcessesEndedEvent,
    RankContinuedEvent,
    RankEndedEvent,
    RankFailedEvent,
    RanksConnectedEvent,
    RanksNotConnectedEvent,
    RankStacks,
    RankStartedEvent,
    RankStoppedEvent,
    ResultEvent,
    StacksEvent,
)
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.log import EventWriter
from hpcrun.specs.events.supervisor import NodeLostEvent, SignalEvent, StragglerEvent
from hpcrun.specs.job import JobSpec
from hpcrun.specs.metrics import Metric, MetricReader, StepMetric
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.units import parse_time

OutcomeStatus = Literal["done", "saved", "failed", "interrupted"]
_Verdict = Literal["finished", "died", "hung", "not started", "not stopped", "killed"]


class RunObserver(Protocol):
    """Who wants to be told how a run goes: the display of the command line, a test."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def ranks_ready(self, ranks: int, seconds: float) -> None:
        """All ranks have met, so many seconds after the start."""

    def step(self, metric: Metric) -> None:
        """A line of metrics.jsonl: a step, an evaluation, a save."""

    def finished(self, outcome: AttemptOutcome) -> None:
        """The run is over."""


_LAST_POLL_S = 0.3
"""When all processes are gone, no file changes any more; the last ones are yet to be read."""


@dataclass(frozen=True)
class AttemptLimits:
    """How long the supervisor waits before it acts, in seconds."""

    start_s: float = 600.0
    """From the launch until every rank is in MPI."""
    stop_s: float = 120.0
    """From a request to save and stop until the ranks have agreed that they have."""
    settle_s: float = 1.0
    """After a death, for the others to write down what they saw."""
    leave_s: float = 4.0
    """After a rank left in order, for rank 0 to write the result."""
    finish_s: float = 30.0
    """After the result, for the processes to end."""

    @classmethod
    def of(cls, spec: JobSpec) -> AttemptLimits:
        """Those of a job: what it has asked for to save before its end, its ranks get to stop in."""
        grace = parse_time(spec.retries.grace).seconds if spec.retries else 0.0
        return cls(stop_s=max(cls.stop_s, grace))


@dataclass(frozen=True)
class AttemptOutcome:
    """How a run ended."""

    run: RunDir
    attempt: int
    status: OutcomeStatus
    exit_code: int
    message: str
    step: int | None
    result: dict[str, Any] = field(default_factory=dict)
    stop: signal.Signals | None = None
    """The signal that made it stop."""
    lost: tuple[str, ...] = ()
    """Nodes that did not answer any more, or that were not well before the start."""
    hung: bool = False
    """Whether it was ended because its ranks made no more progress."""
    never_connected: bool = False
    """Whether its ranks have never met."""
    suspects: tuple[str, ...] = ()
    """Nodes whose ranks stood apart from the others when the run hung, or that are slow."""
    kind: FaultClass = "unknown"
    """Which kind of fault it was, where it failed."""
    rank: int | None = None
    """The rank that was the first to fall, where it is known."""
    leaderless: bool = False
    """Whether it ended because its supervisor was killed, and nothing else."""

    @property
    def files(self) -> Attempt:
        """The files of the attempt that has ended so."""
        return self.run.attempt(self.attempt)

    def as_event(self) -> ExitEvent:
        """The event that ends the attempt."""
        return ExitEvent(self.status, self.exit_code, self.message)


class AttemptMonitor:
    """Follows one attempt from its launch to its outcome."""

    def __init__(
        self,
        launch: LaunchRequest,
        nodes: Nodes,
        observer: RunObserver,
        limits: AttemptLimits,
        events: EventWriter,
        metrics: MetricReader,
        watchdog: HangWatchdog,
        again: Literal["train", "submit"] = "train",
        beside: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`beside` is called again and again: why the ranks are to save and stop, where they are."""
        self._launch, self._nodes, self._observer, self._limits = launch, nodes, observer, limits
        self._events, self._metrics, self._watchdog, self._again = events, metrics, watchdog, again
        self._beside = beside
        watchdog.begin()
        self._pace = SaveDurations()
        self._began = time.monotonic()
        self._ended: list[RankEnded] = []
        self._lost_before = len(nodes.lost)
        gone = {*launch.placement.ranks} - {*nodes.alive}
        self._lost = [node_lost for node_lost in nodes.lost if node_lost.node in gone]
        self._recorded_lost: set[str] = set()
        self._stragglers = StragglerDetector()
        self._replaced: tuple[str, ...] = ()
        self._hang: Hang | None = None
        self._groups: list[StackGroup] = []
        self._unreached: tuple[str, tuple[str, ...]] = ("", ())
        self._launcher: LauncherEnded | None = None
        self._result: dict[str, Any] | None = None
        self._asked: list[signal.Signals] = []
        self._interrupts = 0
        self._stop: signal.Signals | None = None
        self._step: int | None = None
        # Points in time (monotonic) after which we no longer wait; None where nothing is waited for.
        self._start_by: float | None = self._began + limits.start_s
        self._stop_by: float | None = None
        self._settle_by: float | None = None
        self._finish_by: float | None = None

    def run(self, inbox: SignalQueue) -> AttemptOutcome:
        """Start the attempt, follow it to its end, and leave nothing of it behind."""
        launch = self._launch
        if self._lost:
            return self._not_started_outcome()
        self._event(LaunchEvent(launch.ranks, tuple(launch.command), launch.job))
        running = AttemptProcesses(self._launch, inbox, self._nodes)
        try:
            verdict = self._follow(running)
            missing = running.missing
            if verdict == "hung":
                ranks = tuple(self._hang.ranks) if self._hang else ()
                self._event(HangEvent(ranks, str(self._hang)))
                self._dump(running)
            elif verdict == "not started":
                self._unreached = self._nodes.try_connections()
                self._event(RanksNotConnectedEvent(tuple(missing), self._describe_missing_ranks(missing)))
                self._dump(running)
        finally:
            stuck = running.end()
            self._event(ProcessesEndedEvent(tuple(stuck)))
        # Whether a node is gone often shows only when it is told to clear up.
        lost = [*self._nodes.lost][self._lost_before :]
        self._lost = [node_lost for node_lost in lost if node_lost.node in self._launch.placement.ranks]
        for gone in lost:
            self._record_lost_node(gone.node, gone.why)
        self._read_metrics()
        for name in stuck:
            self._observer.note(f"{name} of this run could not be ended")
        outcome = self._outcome(verdict, missing)
        self._event(outcome.as_event())
        return outcome

    def _not_started_outcome(self) -> AttemptOutcome:
        """A node was lost while the attempt was made ready: without it nothing is started."""
        attempt, name = self._launch.attempt, self._launch.launcher.name
        for gone in self._lost:
            self._record_lost_node(gone.node, gone.why)
        outcome = self._failed(
            explain_failure(attempt, self._launch.ranks, [], None, self._lost, name), "failed"
        )
        self._event(outcome.as_event())
        return outcome

    def _follow(self, running: AttemptProcesses) -> _Verdict:
        for happening in running.watch():
            self._take(running, happening)
            verdict = self._verdict(running)
            if verdict is not None:
                return verdict
        raise AssertionError("watch never ends by itself")

    def _take(self, running: AttemptProcesses, happening: AttemptEvent) -> None:
        match happening:
            case RankStarted(rank, node, pid):
                self._event(RankStartedEvent(rank, node, pid))
                for number in self._asked:
                    running.signal(number, rank)
            case WorldReady():
                self._start_by = None
                seconds = time.monotonic() - self._began
                self._event(RanksConnectedEvent(seconds))
                self._observer.ranks_ready(self._launch.ranks, seconds)
                if not self._launch.uses_exit_records:
                    self._nodes.warm(self._launch.placement.spares)
            case RankEnded(rank, node, pid, status):
                self._ended.append(happening)
                self._event(RankEndedEvent(rank, node, pid, status))
                self._settle(self._limits.leave_s if status in (0, None) else self._limits.settle_s)
            case RankProgress():
                self._watchdog.heard(happening, time.monotonic())
                self._stragglers.heard(happening)
                self._report_stragglers(running)
            case RankStopped(rank, node, is_stopped):
                self._event((RankStoppedEvent if is_stopped else RankContinuedEvent)(rank, node))
                self._watchdog.stopped(rank, is_stopped, time.monotonic())
            case RankFailed(rank):
                self._event(RankFailedEvent(rank))
                self._settle(self._limits.settle_s)
            case NodeLost(node, why):
                self._record_lost_node(node, why)
                # A spare has no part in this attempt.
                if node in self._launch.placement.ranks:
                    self._settle(self._limits.settle_s)
            case LauncherEnded(status):
                self._launcher = happening
                self._event(LauncherEndedEvent(status))
                self._settle(self._limits.settle_s)
                if running.is_over:
                    self._settle(_LAST_POLL_S)
            case AttemptFinished(result):
                self._result = result
                # What a program has left in the background is not waited for.
                seconds = self._limits.leave_s if self._launch.uses_exit_records else self._limits.finish_s
                self._finish_by = time.monotonic() + seconds
                self._event(ResultEvent(str(result.get("status", "done")), result.get("step")))
            case SignalReceived(number):
                self._ask(running, number)
            case _:
                self._read_metrics()
                if self._beside() is not None and self._stop is None:
                    self._ask(running, signal.SIGTERM)

    def _record_lost_node(self, node: str, why: str) -> None:
        if node not in self._recorded_lost:
            self._recorded_lost.add(node)
            self._event(NodeLostEvent(node, why))

    def _settle(self, seconds: float) -> None:
        by = time.monotonic() + seconds
        self._settle_by = by if self._settle_by is None else min(by, self._settle_by)

    def _ask(self, running: AttemptProcesses, number: signal.Signals) -> None:
        self._event(SignalEvent(number.name))
        if number == signal.SIGINT:
            self._interrupts += 1
        if number == signal.SIGUSR2 and not self._launch.can_save:
            self._observer.note(
                "SIGUSR2: the time limit is near; without a retry: block nobody is asked to save"
            )
            return
        if number == signal.SIGUSR1:
            passed, what = signal.SIGUSR1, "save"
        else:
            passed, what = self._stop_signal_for(number), "save and stop"
            if self._stop is None:
                self._stop = number
                self._stop_by = time.monotonic() + self._longest_stop_s
        if self._interrupts < 2:
            again = "; a second interrupt ends them at once" if number == signal.SIGINT else ""
            self._observer.note(f"{number.name}: asking the ranks to {what}{again}")
        self._asked.append(passed)
        running.signal(passed)

    @property
    def _longest_stop_s(self) -> float:
        """Ranks that save need at least as long as saves took until now."""
        return max(self._limits.stop_s, self._pace.lead_s)

    def _stop_signal_for(self, number: signal.Signals) -> signal.Signals:
        """How ranks are told to stop: ours know one word for it, programs of others the usual ones."""
        if not self._launch.uses_exit_records or number == signal.SIGUSR2:
            return signal.SIGUSR2
        return signal.SIGTERM

    def _verdict(self, running: AttemptProcesses) -> _Verdict | None:
        now = time.monotonic()
        if self._interrupts > 1:
            return "killed"
        if self._result is not None:
            return "finished" if running.is_over or _is_past(self._finish_by, now) else None
        if _is_past(self._settle_by, now):
            return "died"
        if _is_past(self._stop_by, now):
            return "not stopped"
        # A death explains a silence, and is about to be told.
        self._hang = self._watchdog.hang(now)
        if self._hang is not None and self._settle_by is None:
            return "hung"
        return "not started" if _is_past(self._start_by, now) else None

    def _report_stragglers(self, running: AttemptProcesses) -> None:
        """Say which nodes have become slow; where they are to be replaced, have the ranks save for it."""
        for straggler in self._stragglers.new() if self._launch.stragglers != "off" else ():
            self._event(StragglerEvent(straggler.node, straggler.score, str(straggler)))
            self._observer.note(str(straggler))
            can_replace = self._launch.placement.spares and self._stop is None and not self._replaced
            if self._launch.stragglers == "replace" and can_replace and not self._launch.uses_exit_records:
                self._replaced = (straggler.node,)
                self._stop_by = time.monotonic() + self._longest_stop_s
                running.signal(signal.SIGUSR2)

    def _dump(self, running: AttemptProcesses) -> None:
        """Where every rank stands, before they are ended."""
        self._groups = group_stacks(running.dump_stacks())
        self._event(
            StacksEvent(tuple(RankStacks(group.ranks, group.nodes, group.place) for group in self._groups))
        )

    def _read_metrics(self) -> None:
        records = self._metrics.read()
        self._pace.take(records)
        for record in records:
            if record.attempt == self._launch.attempt.number:
                if isinstance(record.metric, StepMetric):
                    self._step = record.metric.step
                self._observer.step(record.metric)

    def _outcome(self, verdict: _Verdict, missing: list[int]) -> AttemptOutcome:
        if verdict == "finished":
            return self._finished()
        if verdict == "killed":
            text = f"interrupted twice: the ranks were ended without a save{self._at_step()}"
            return self._failed(FailureCause(text, EXIT_INTERRUPTED), "interrupted")
        attempt, ranks = self._launch.attempt, self._launch.ranks
        odd = find_outlier(self._groups)
        # Ranks wait for a node that is gone, but no rank stands still because a node goes after it.
        is_cut_off = verdict == "hung" and self._lost and not (odd and self._is_on_living_nodes(odd))
        if verdict == "died" or is_cut_off:
            name = self._launch.launcher.name
            cause = explain_failure(attempt, ranks, self._ended, self._launcher, self._lost, name)
            if self._stop is not None and self._launch.uses_exit_records and not self._lost:
                text = f"stopped by {self._stop.name}, as asked, without a save (exit code 75 tells of one)"
                return self._failed(FailureCause(text, EXIT_INTERRUPTED), "interrupted")
            return self._failed(cause, "failed")
        if verdict == "hung":
            failure = explain_hang(attempt, str(self._hang), self._groups, odd)
            return replace(self._failed(failure, "failed"), hung=True, suspects=odd.nodes if odd else ())
        if verdict == "not started":
            return self._never_connected_outcome(missing, odd)
        where = f"; logs: {attempt.path / 'logs'}"
        assert self._stop is not None or self._replaced
        why = self._stop.name if self._stop else "being asked to make room for a spare"
        text = (
            f"the ranks did not stop within {self._longest_stop_s:g} s of {why} and were ended"
            f"{self._at_step()}{where}"
        )
        if self._interrupts:
            return self._failed(FailureCause(text, EXIT_INTERRUPTED), "interrupted")
        return self._failed(FailureCause(text), "failed")

    def _describe_missing_ranks(self, missing: list[int]) -> str:
        """Who did not come, and what is in the way between the nodes, in words."""
        within = "; ".join(filter(None, (f"within {self._limits.start_s:g} s", self._unreached[0])))
        if not missing:
            return f"all ranks started, but they did not meet {within}"
        who = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        nodes = dict.fromkeys(self._launch.placement.ranks[rank] for rank in missing)
        where = ", ".join([*nodes][:8]) + (", …" if len(nodes) > 8 else "")
        return f"rank{'s' * (len(missing) > 1)} {who} on {where} did not start {within}"

    def _never_connected_outcome(self, missing: list[int], odd: StackGroup | None) -> AttemptOutcome:
        """Who did not come, what is in the way between the nodes, and where the others wait."""
        blamed, placement = self._unreached[1], self._launch.placement
        late = tuple(dict.fromkeys(placement.ranks[rank] for rank in missing))
        suspects = blamed or (late if len(late) < len(placement.nodes) else ()) or (odd.nodes if odd else ())
        failure = explain_hang(self._launch.attempt, self._describe_missing_ranks(missing), self._groups, odd)
        # Where somebody waits for the others is no evidence against a node.
        return replace(
            self._failed(replace(failure, rank=None), "failed"), never_connected=True, suspects=suspects
        )

    def _is_on_living_nodes(self, odd: StackGroup) -> bool:
        return not set(odd.nodes) & {node_lost.node for node_lost in self._lost}

    def _finished(self) -> AttemptOutcome:
        assert self._result is not None
        step = self._result.get("step", self._step)
        run, number = self._launch.attempt.run, self._launch.attempt.number
        at = "" if step is None else f" at step {step}"
        status: OutcomeStatus
        if self._result.get("status") != "saved":
            return AttemptOutcome(run, number, "done", EXIT_DONE, f"done{at}", step, self._result)
        is_early = self._result.get("steps_done") == 0
        what = f"stopped before a step was done, with nothing new to save{at}" if is_early else f"saved{at}"
        text = f"{what}; continue with: hpcrun {self._again} --resume {run.id}"
        status, code = ("interrupted", EXIT_INTERRUPTED) if self._interrupts else ("saved", EXIT_SAVED)
        if self._replaced and self._stop is None:
            text = f"saved{at}, to continue without {self._replaced[0]}, which is slow"
            return AttemptOutcome(
                run, number, status, code, text, step, self._result, suspects=self._replaced
            )
        return AttemptOutcome(run, number, status, code, text, step, self._result, self._stop)

    def _failed(self, failure: FailureCause, status: OutcomeStatus) -> AttemptOutcome:
        attempt = self._launch.attempt
        code, text = failure.exit_code, failure.message
        lost = tuple(node_lost.node for node_lost in self._lost)
        ended = AttemptOutcome(attempt.run, attempt.number, status, code, text, self._step, stop=self._stop)
        return replace(ended, lost=lost, kind=failure.kind, rank=failure.rank)

    def _at_step(self) -> str:
        return "" if self._step is None else f" at step {self._step}"

    def _event(self, event: Event) -> None:
        self._events.append(event, self._launch.attempt.number)


def _is_past(by: float | None, now: float) -> bool:
    return by is not None and now > by
