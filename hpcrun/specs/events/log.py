"""Lines of events.jsonl and chaos.jsonl: written, parsed, and read as they grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

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
    RankStartedEvent,
    RankStoppedEvent,
    ResultEvent,
    StacksEvent,
)
from hpcrun.specs.events.checkpoint import (
    CheckpointFailedEvent,
    CheckpointStoredEvent,
    CheckpointWorkerDiedEvent,
    DurabilityOverdueEvent,
    ErasureSetsEvent,
    RestoreEvent,
    SpareReplicaEvent,
    SuspectSaveEvent,
)
from hpcrun.specs.events.event import Event, EventStamp, shorten
from hpcrun.specs.events.supervisor import (
    ChaosEvent,
    FailoverEvent,
    FaultEvent,
    NodeLostEvent,
    PreflightEvent,
    RelaunchEvent,
    RequeueEvent,
    SignalEvent,
    StragglerEvent,
)
from hpcrun.specs.records import JsonLineWriter, TypedLineReader
from hpcrun.typed_json import WrongValue, dump_typed, parse_typed

EVENT_CLASSES: Mapping[str, type[Event]] = {
    "preflight": PreflightEvent,
    "launch": LaunchEvent,
    "rank_started": RankStartedEvent,
    "ranks_connected": RanksConnectedEvent,
    "ranks_not_connected": RanksNotConnectedEvent,
    "rank_stopped": RankStoppedEvent,
    "rank_continued": RankContinuedEvent,
    "rank_ended": RankEndedEvent,
    "rank_failed": RankFailedEvent,
    "node_lost": NodeLostEvent,
    "launcher_ended": LauncherEndedEvent,
    "result": ResultEvent,
    "signal": SignalEvent,
    "straggler": StragglerEvent,
    "hang": HangEvent,
    "stacks": StacksEvent,
    "processes_ended": ProcessesEndedEvent,
    "exit": ExitEvent,
    "fault": FaultEvent,
    "relaunch": RelaunchEvent,
    "requeue": RequeueEvent,
    "failover": FailoverEvent,
    "erasure_sets": ErasureSetsEvent,
    "restore": RestoreEvent,
    "checkpoint_stored": CheckpointStoredEvent,
    "checkpoint_failed": CheckpointFailedEvent,
    "spare_replica": SpareReplicaEvent,
    "durability_overdue": DurabilityOverdueEvent,
    "checkpoint_worker_died": CheckpointWorkerDiedEvent,
    "suspect_save": SuspectSaveEvent,
    "chaos": ChaosEvent,
}
_NAMES = {cls: name for name, cls in EVENT_CLASSES.items()}
_STAMP_FIELDS = (*(stamp_field.name for stamp_field in fields(EventStamp)), "event")


@dataclass(frozen=True)
class UnknownEvent(Event):
    """An event of a newer version."""

    name: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return shorten(" ".join([self.name, *_format_fields(self.values)]))


@dataclass(frozen=True)
class EventRecord:
    """One line; `extra` has the fields that only newer versions know."""

    stamp: EventStamp
    event: Event
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the event."""
        return self.event.name if isinstance(self.event, UnknownEvent) else _NAMES[type(self.event)]

    @property
    def attempt(self) -> int:
        """The attempt of the event."""
        return self.stamp.attempt

    @property
    def time(self) -> float:
        """Wall clock of its host."""
        return self.stamp.time

    def __str__(self) -> str:
        """The text of the event, and the fields of a newer version."""
        text = str(self.event)
        return f"{text} ({', '.join(_format_fields(self.extra))})" if text and self.extra else text

    def as_json(self) -> dict[str, Any]:
        """The JSON object of the line."""
        values = self.event.values if isinstance(self.event, UnknownEvent) else dump_typed(self.event)
        return {**dump_typed(self.stamp), "event": self.name, **values, **self.extra}


class EventWriter(JsonLineWriter):
    """Appends events, stamped with the current time and host."""

    def append(self, event: Event, attempt: int) -> None:
        """Write one event; OSError if the file system is full."""
        self.write(EventRecord(EventStamp.now(attempt), event).as_json())


def parse_event(values: Any) -> EventRecord:
    """Parse the JSON object of a line; WrongValue names the missing or wrong field."""
    stamp = parse_typed(EventStamp, values, allow_extra=True)
    name = values.get("event")
    if not isinstance(name, str):
        raise WrongValue(f"event: expected the name of an event, not {name!r}")
    rest = {key: value for key, value in values.items() if key not in _STAMP_FIELDS}
    cls = EVENT_CLASSES.get(name)
    if cls is None:
        return EventRecord(stamp, UnknownEvent(name, rest))
    extra: dict[str, Any] = {}
    try:
        return EventRecord(stamp, parse_typed(cls, rest, extra=extra), extra)
    except WrongValue as error:
        raise WrongValue(f"{name}: {error}") from None


def open_events(path: Path, offset: int = 0) -> TypedLineReader[EventRecord]:
    """Open events.jsonl or chaos.jsonl for reading as it grows."""
    return TypedLineReader(path, parse_event, offset)


def read_events(path: Path) -> list[EventRecord]:
    """Read all events of a file; skips damaged lines and reports them once on standard error."""
    return open_events(path).read()


def _format_fields(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]
