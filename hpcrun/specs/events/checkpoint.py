"""Events about checkpoints: what an attempt restores, and which tiers its saves have reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcrun.specs.events.event import (
    Event,
    Texts,
    format_count,
    shorten,
)
from hpcrun.typed_json import Count

_QUIET_TIERS = ("memory", "local", "parity")
"""Reached many times an hour."""


@dataclass(frozen=True)
class ErasureSetsEvent(Event):
    """Which nodes store parity for each other."""

    sets: tuple[Texts, ...]
    message: str

    def __str__(self) -> str:
        return self.message.replace("\n", "; ")


@dataclass(frozen=True)
class RestoreEvent(Event):
    """The checkpoint that the ranks of an attempt resume from; none where `tiers` is empty."""

    step: Count
    generation: str | None
    tiers: Texts
    lost_steps: Count
    """How many steps newer the newest save is that cannot be used."""
    passed_over: Texts
    rebuilt: Count
    """How many parts were rebuilt from parity."""
    from_spares: Count
    """How many parts are read from the memory of spares."""
    silent: Texts
    """Nodes whose checkpoint worker did not start."""
    seconds: float

    def __str__(self) -> str:
        text = "starts from scratch"
        if self.tiers:
            text = f"resumes from step {self.step} ({', '.join(self.tiers)})"
        if self.from_spares:
            text += f"; {format_count(self.from_spares, 'part')} from spares' memory"
        if self.rebuilt:
            text += f"; {format_count(self.rebuilt, 'part')} rebuilt from parity"
        if self.lost_steps:
            text += f"; {format_count(self.lost_steps, 'saved step')} lost"
        if self.passed_over:
            rest = len(self.passed_over) - 1
            text += f": {self.passed_over[0]}" + (f" and {rest} more" if rest else "")
        return shorten(text)


@dataclass(frozen=True)
class CheckpointStoredEvent(Event):
    """A tier has all of a checkpoint."""

    step: Count
    generation: str
    tier: str
    seconds: float | None = None
    size_bytes: Count | None = None

    def __str__(self) -> str:
        if self.tier in _QUIET_TIERS:
            return ""
        return f"step {self.step}: saved" + (f" ({self.tier})" if self.tier != "durable" else "")


@dataclass(frozen=True)
class CheckpointFailedEvent(Event):
    """A save failed at a tier."""

    step: Count
    generation: str
    tier: str
    problem: str

    def __str__(self) -> str:
        return shorten(f"step {self.step}: {self.tier} save failed: {self.problem}")


@dataclass(frozen=True)
class SpareReplicaEvent(Event):
    """A spare has copied the memory of nodes; `message` is set when the set of nodes has changed."""

    step: Count
    generation: str
    node: str
    """The spare."""
    of: Texts
    no_room: Texts
    problems: Mapping[str, str]
    """By node."""
    size_bytes: Count
    seconds: float
    message: str = ""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class DurabilityOverdueEvent(Event):
    """The last durable save is older than the job allows."""

    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class CheckpointWorkerDiedEvent(Event):
    """The checkpoint worker of a node died."""

    node: str
    wait_status: int | None

    def __str__(self) -> str:
        return f"checkpoint worker on {self.node} died; restarting it"


@dataclass(frozen=True)
class SuspectSaveEvent(Event):
    """Attempts that resumed from a checkpoint failed `count` times."""

    step: Count
    generation: str | None
    count: Count

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"attempts resumed from step {self.step} (generation {self.generation}) failed {times}"
