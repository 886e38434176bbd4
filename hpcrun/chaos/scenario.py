"""Scenarios: faults in a file, each at its time or step, checked as a whole and played in order.

A file is a list: `- {at: 10s, do: kill-rank, rank: 1}` or `- {step: 20, do: vanish, node: n02}`; `at` counts
from the beginning of the play, `step` is one that the run has done. The other keys are the options of
`hpcrun chaos DO`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.chaos.faults import InjectedFault, parse_fault, parse_fault_seconds
from hpcrun.chaos.inject import Injection, InjectionTarget, TargetNotReadyError, find_target
from hpcrun.errors import HpcrunError, SpecError, SpecProblem, UsageError
from hpcrun.runs.follow import RunWatcher
from hpcrun.specs.metrics import MetricReader, StepMetric
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.yaml import LIST_KEY, load_yaml_list

_POLL_S = 0.1
_RETRY_S = 1.0
_VICTIM_TIMEOUT_S = 120.0
"""How long to wait for a target that is not there: the next attempt may be about to start."""


@dataclass(frozen=True)
class ScenarioStep:
    """One fault of a scenario, and when it is due: at a time of the play, or after a step of the run."""

    fault: InjectedFault
    at_s: float | None
    step: int | None
    place: str
    """File and line."""

    @property
    def when(self) -> str:
        """In words."""
        return f"step {self.step}" if self.at_s is None else f"{self.at_s:g} s"


def load_scenario(path: Path) -> list[ScenarioStep]:
    """Read a scenario; SpecError lists all the mistakes in it, with their lines."""
    document = load_yaml_list(path)
    scenes: list[ScenarioStep] = []
    problems: list[SpecProblem] = []
    for number, values in enumerate(document.values[LIST_KEY]):
        key = f"{LIST_KEY}.{number}"
        scene, wrong = _parse_step(values, document.where(key))
        problems += [
            SpecProblem(problem.key, problem.text, document.where(f"{key}.{problem.key}"))
            for problem in wrong
        ]
        if scene is not None:
            problems += _check_order(scenes, scene)
            scenes.append(scene)
    if problems:
        raise SpecError(problems)
    return scenes


def _parse_step(values: Mapping[str, Any], place: str) -> tuple[ScenarioStep | None, list[SpecProblem]]:
    fault, problems = parse_fault({key: value for key, value in values.items() if key not in ("at", "step")})
    at, step = values.get("at"), values.get("step")
    at_s = 0.0
    if (at is None) == (step is None):
        problems.append(SpecProblem("at", "give a time, at: 10s, or a step, step: 20; one of them"))
    elif step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        problems.append(SpecProblem("step", f"{step!r} is not a step; write a whole number"))
    elif at is not None and at != 0:
        try:
            at_s = parse_fault_seconds(at, "at")
        except UsageError as error:
            problems.append(SpecProblem("at", str(error).removeprefix("at: ")))
    if problems or fault is None:
        return None, problems
    return ScenarioStep(fault, None if at is None else at_s, step, place), []


def _check_order(before: list[ScenarioStep], scene: ScenarioStep) -> list[SpecProblem]:
    for key, value, earlier in (
        (
            "at",
            scene.at_s,
            [earlier_scene.at_s for earlier_scene in before if earlier_scene.at_s is not None],
        ),
        (
            "step",
            scene.step,
            [earlier_scene.step for earlier_scene in before if earlier_scene.step is not None],
        ),
    ):
        if value is not None and earlier and value < max(earlier):
            return [SpecProblem(key, f"{scene.when} is after a later one; put them in order", scene.place)]
    return []


def check_targets(run: RunDir, scenes: list[ScenarioStep]) -> list[InjectionTarget | None]:
    """Whom each scene would hit now, None where that is not known yet; SpecError for those who are not."""
    problems, aims = [], []
    for scene in scenes:
        aimed = None
        try:
            aimed = find_target(run, scene.fault)
        except TargetNotReadyError:
            pass
        except UsageError as error:
            problems.append(SpecProblem("", str(error), scene.place))
        aims.append(aimed)
    if problems:
        raise SpecError(problems)
    return aims


@dataclass
class ScenarioRun:
    """A scenario being played on a run; `note` is called with problems, `write` with records."""

    run: RunDir
    note: Callable[[str], None]
    write: Callable[[dict[str, Any]], None]
    _running: list[Injection] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _step: int = -1
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._metrics, self._watch = MetricReader(self.run), RunWatcher([self.run])

    def run_all(self, scenes: list[ScenarioStep]) -> bool:
        """Play all in order, until the last is done or the run is over; whether all were done."""
        all_done = True
        try:
            for scene in scenes:
                done = self._wait_for(scene) and self._inject(scene)
                if not done and self._is_over:
                    self.note(f"the run was over before {scene.when} ({scene.fault.do}, {scene.place})")
                all_done = all_done and done
            while self._running and not self._has_ended():
                self._listen()
        finally:
            for injection in self._running:
                injection.close()
        return all_done

    def _wait_for(self, scene: ScenarioStep) -> bool:
        while not self._has_ended():
            self._listen()
            if scene.at_s is not None and time.monotonic() - self._began >= scene.at_s:
                return True
            if scene.step is not None and self._step >= scene.step:
                return True
        return False

    def _inject(self, scene: ScenarioStep) -> bool:
        """Inject the fault as soon as its target is there: between two attempts there is none."""
        end = time.monotonic() + _VICTIM_TIMEOUT_S
        while not self._has_ended():
            try:
                injection = Injection(find_target(self.run, scene.fault))
            except HpcrunError as error:
                if isinstance(error, TargetNotReadyError) and time.monotonic() < end:
                    self._wait(_RETRY_S)
                    continue
                if not self._has_ended():
                    self.note(f"{scene.place} {scene.fault.do}: not done: {error}")
                return False
            self._running.append(injection)
            self.write(injection.struck)
            return True
        return False

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._has_ended():
            self._listen()

    def _listen(self) -> None:
        """A moment, in which what lasts may come to its end, and steps may be done."""
        time.sleep(_POLL_S)
        for injection in list(self._running):
            for record in injection.news():
                self.write(record)
            if injection.is_over:
                injection.close()
                self._running.remove(injection)
        for line in self._metrics.read():
            if isinstance(line.metric, StepMetric):
                self._step = line.metric.step

    def _has_ended(self) -> bool:
        """Whether the run is over; checked at intervals."""
        if not self._is_over and time.monotonic() - self._looked > self._watch.pace.records:
            self._looked = time.monotonic()
            (state,) = self._watch.look()
            self._is_over = state.is_over
        return self._is_over
