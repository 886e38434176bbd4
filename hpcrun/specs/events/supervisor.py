"""Events about nodes and about what the supervisor decides; injected faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpcrun.finding import Finding
from hpcrun.specs.events.event import (
    Event,
    Texts,
    format_count,
    format_hosts,
)
from hpcrun.typed_json import Count

_SIGNAL_MEANINGS = {"SIGUSR1": "save", "SIGUSR2": "save, stop and requeue"}


@dataclass(frozen=True)
class PreflightEvent(Event):
    """The checks of nodes before an attempt."""

    nodes: Count
    seconds: float
    found: tuple[Finding, ...]
    """Each with its node as `where`."""
    excluded: Texts
    """Nodes that the attempt does not use."""

    def __str__(self) -> str:
        if self.nodes == 1 and not self.found:
            return ""
        without = f"; excluded: {format_hosts(self.excluded)}" if self.excluded else ""
        findings = [
            f"{finding.where}: {finding.check}: {replace(finding, where='')}" for finding in self.found
        ]
        listed = "; ".join(findings) or "passed"
        return f"preflight of {format_count(self.nodes, 'node')}{without}: {listed}"


@dataclass(frozen=True)
class NodeLostEvent(Event):
    """A node no longer answers for its ranks."""

    node: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node} lost: {self.why}"


@dataclass(frozen=True)
class SignalEvent(Event):
    """The supervisor received a signal."""

    signal: str

    def __str__(self) -> str:
        return f"{self.signal}: {_SIGNAL_MEANINGS.get(self.signal, 'save and stop')}"


@dataclass(frozen=True)
class StragglerEvent(Event):
    """A node has become slow: `score` is its speed relative to the others."""

    node: str
    score: float
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class FaultEvent(Event):
    """Why an attempt failed, and which rank or nodes caused it."""

    cause: str
    kind: str
    """program, infrastructure …; `unknown` without evidence."""
    nodes: Texts
    rank: Count | None
    message: str

    def __str__(self) -> str:
        who = [] if self.rank is None else [f"rank {self.rank}"]
        who += [f"node{'s' * (len(self.nodes) > 1)} {format_hosts(self.nodes)}"] if self.nodes else []
        kind = f", {self.kind}" if self.kind != "unknown" else ""
        place = f" of {' on '.join(who)}" if who else ""
        message = f": {self.message}" if self.message else ""
        return f"fault: {self.cause.replace('_', ' ')}{kind}{place}{message}"


@dataclass(frozen=True)
class RelaunchEvent(Event):
    """Another attempt follows in the same allocation; replicas are None when the job has all of them."""

    excluded: Texts
    spares_left: Count
    replicas: Count | None = None
    replicas_before: Count | None = None
    replicas_whole: Count | None = None

    def __str__(self) -> str:
        without = f" without {format_hosts(self.excluded)}" if self.excluded else ""
        before = "" if self.replicas == self.replicas_before else f" (before: {self.replicas_before})"
        replicas = f" with {self.replicas} of {self.replicas_whole} replicas{before}"
        spares = f"; {format_count(self.spares_left, 'spare')} left"
        return f"relaunch in the same allocation{without}{replicas * (self.replicas is not None)}{spares}"


@dataclass(frozen=True)
class RequeueEvent(Event):
    """Slurm has requeued the job."""

    cause: str

    def __str__(self) -> str:
        return f"requeued ({self.cause.replace('_', ' ')})"


@dataclass(frozen=True)
class FailoverEvent(Event):
    """Another supervisor has taken over, here or on another node."""

    former: str
    """The host of the former supervisor."""
    successor: str
    """The host of the new one."""
    epoch: int | None
    claimed: float | None
    """When (wall clock) the new one claimed its epoch."""
    killed_by: str = ""
    """The signal that killed the former one, when both are on the same node."""

    def __str__(self) -> str:
        if self.killed_by:
            return f"the supervisor on {self.former} was killed by {self.killed_by}"
        return f"supervisor on {self.former} lost; {self.successor} continues the run"


@dataclass(frozen=True)
class ChaosEvent(Event):
    """A fault that was injected or removed; a line of chaos.jsonl."""

    phase: Literal["injected", "filled", "removed"]
    do: str
    rank: Count | None
    node: str
    text: str
    pids: tuple[int, ...]
    seed: int | None
    user: str
    """Who injected it."""

    def __str__(self) -> str:
        return f"chaos on {self.node}: {self.text}"
