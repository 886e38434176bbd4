"""The story of a run: what its supervisor saw and did, and what was saved, in plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from hpcrun.errors import UsageError
from hpcrun.runs.follow import PollIntervals, follow_until_end
from hpcrun.specs.events.attempt import (
    ExitEvent,
    LauncherEndedEvent,
    LaunchEvent,
    RankEndedEvent,
    RankFailedEvent,
    ResultEvent,
)
from hpcrun.specs.events.checkpoint import CheckpointFailedEvent, CheckpointStoredEvent
from hpcrun.specs.events.event import Event, format_hosts, format_rank_ranges
from hpcrun.specs.events.log import EventRecord, open_events
from hpcrun.specs.events.supervisor import FaultEvent
from hpcrun.specs.metrics import (
    FlushMetric,
    Metric,
    MetricReader,
    MetricRecord,
    SaveFailedMetric,
    StoredMetric,
)
from hpcrun.specs.placement import read_placement
from hpcrun.specs.rundir import RunDir

NodesOfAttempt = Callable[[int], Sequence[str]]
"""The nodes of an attempt, empty where nobody knows them."""


@dataclass(frozen=True)
class EventLine:
    """One line of the story."""

    time: float
    """Wall clock."""
    attempt: int
    what: str
    """The event's name in events.jsonl, the kind of a line of metrics.jsonl."""
    text: str

    def __str__(self) -> str:
        """As people read it."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"{stamp}  attempt {self.attempt}  {self.text}"


class EventFormatter:
    """Tells a run's records, a piece at a time: ranks that share a fate are folded into one line."""

    def __init__(self, places: NodesOfAttempt = lambda attempt: ()) -> None:
        self._places = places
        self._finished: set[int] = set()
        self._fallen: dict[int, set[int]] = {}
        self._said: dict[int, str] = {}
        self._outcomes: set[tuple[int, int, str, bool]] = set()
        """Attempt, step and tier of each save, and whether the tier has it."""

    def tell(
        self,
        events: Iterable[EventRecord],
        metrics: Iterable[MetricRecord] = (),
        chaos: Iterable[EventRecord] = (),
    ) -> list[EventLine]:
        """The entries of further records, in the order of their times."""
        lines = [
            EventLine(record.time, record.attempt, record.kind, text)
            for record in metrics
            if not isinstance(record.metric, FlushMetric)
            and self._is_news(record.attempt, record.metric)
            and (text := str(record).partition("\n")[0])
        ]
        groups: list[list[EventRecord]] = []
        for record in events:
            if groups and _differ_only_in_rank(groups[-1][-1], record):
                groups[-1].append(record)
            else:
                groups.append([record])
        injected = [_event_line(record, str(record)) for record in chaos]
        both = (filter(None, one) for one in (lines, injected, map(self._event, groups)))
        # Attempts first: a clock may be set between two of them.
        return list(merge(*both, key=lambda entry: (entry.attempt, entry.time)))

    def _event(self, alike: Sequence[EventRecord]) -> EventLine | None:
        """The entry of one event, or of several that differ in their ranks alone."""
        first = alike[0]
        event, attempt = first.event, first.attempt
        match event:
            case RankEndedEvent() | RankFailedEvent():
                return _event_line(first, self._ranks(attempt, [record.event for record in alike]))
            case LaunchEvent():
                nodes = list(self._places(attempt))
                where = f" on {format_hosts(nodes)}" if nodes else ""
                return _event_line(first, f"{first}{where}")
            case ResultEvent():
                self._finished.add(attempt)
            case ExitEvent(message=message) | FaultEvent(message=message):
                # The two may hold the same words, which are told once.
                if self._said.get(attempt) == message:
                    first = replace(first, event=replace(event, message=""))
                else:
                    self._said[attempt] = message
            case LauncherEndedEvent() if attempt in self._finished | self._fallen.keys():
                # Only where neither a rank nor the result was there before is its end worth a line.
                return None
            case _ if not self._is_news(attempt, event):
                return None
        return _event_line(first, str(first))

    def _is_news(self, attempt: int, fact: Event | Metric) -> bool:
        """False for the second record of what became of a save: rank 0 and the supervisor write one each."""
        match fact:
            case StoredMetric(step=step, tier=tier) | CheckpointStoredEvent(step=step, tier=tier):
                outcome = attempt, step, tier, True
            case SaveFailedMetric(step=step, tier=tier) | CheckpointFailedEvent(step=step, tier=tier):
                outcome = attempt, step, tier, False
            case _:
                return True
        is_news = outcome not in self._outcomes
        self._outcomes.add(outcome)
        return is_news

    def _ranks(self, attempt: int, alike: Sequence[Event]) -> str:
        """The first rank to fall is told whole, those after it as a number; an orderly end is not told."""
        if attempt in self._finished:
            return ""
        fallen = self._fallen.setdefault(attempt, set())
        ends = [event for event in alike if isinstance(event, RankEndedEvent | RankFailedEvent)]
        new = [event for event in ends if event.rank not in fallen]
        if not new:
            return ""
        is_first = not fallen
        fallen.update(event.rank for event in new)
        text = str(new[0]) if is_first else ""
        if rest := [event.rank for event in new[is_first:]]:
            verb = "failed" if isinstance(new[0], RankFailedEvent) else "ended"
            after = f"; {'ranks' if len(rest) > 1 else 'rank'} {format_rank_ranges(rest)} {verb} afterwards"
            text = text + after if text else after[2:]
        return text


def format_events(run: RunDir) -> list[EventLine]:
    """The whole story so far."""
    return _RunRecords(run).new()


def follow_events(
    run: RunDir,
    write: Callable[[EventLine], None],
    note: Callable[[str], None],
    pace: PollIntervals | None = None,
) -> int:
    """Write the story so far and go on until the run is over; what is waited for is noted; its exit code."""
    source = _RunRecords(run)

    def render() -> None:
        for entry in source.new():
            write(entry)

    return follow_until_end(run, render, note, pace)


class _RunRecords:
    """The records of a run as they come."""

    def __init__(self, run: RunDir) -> None:
        self._events, self._chaos = open_events(run.events), open_events(run.chaos)
        self._metrics = MetricReader(run)
        self._teller = EventFormatter(lambda attempt: _attempt_nodes(run, attempt))

    def new(self) -> list[EventLine]:
        return self._teller.tell(self._events.read(), self._metrics.read(), self._chaos.read())


def _attempt_nodes(run: RunDir, attempt: int) -> Sequence[str]:
    try:
        placement = read_placement(run.attempt(attempt).placement)
    except UsageError:  # of another version, or damaged: the story continues without
        return ()
    return placement[0].nodes if placement else ()


def _differ_only_in_rank(first: EventRecord, second: EventRecord) -> bool:
    kind = type(first.event)
    return kind in (RankEndedEvent, RankFailedEvent) and (kind, first.attempt) == (
        type(second.event),
        second.attempt,
    )


def _event_line(record: EventRecord, text: str) -> EventLine | None:
    return EventLine(record.time, record.attempt, record.name, text.partition("\n")[0]) if text else None
