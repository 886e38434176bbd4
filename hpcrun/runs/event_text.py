"""The story of a run: what its supervisor saw and did, and what was saved, in plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, TypeGuard

from hpcrun.errors import UsageError
from hpcrun.hostlist import fold_hosts
from hpcrun.process import describe_status
from hpcrun.runs.follow import PollIntervals, follow_until_end
from hpcrun.runs.level_text import LEVEL_EVENTS, describe_level_event
from hpcrun.runs.save_text import describe_save, describe_weights, is_durable_save
from hpcrun.runs.timeline import is_valid_count
from hpcrun.specs.placement import read_placement
from hpcrun.specs.records import JsonLineReader
from hpcrun.specs.rundir import RunDir

Record = Mapping[str, Any]
NodesOfAttempt = Callable[[int], Sequence[str]]
"""The nodes of an attempt, empty where nobody knows them."""

_COMMON_FIELDS = ("time", "monotonic", "attempt", "event", "kind", "host")
_SIGNAL_MEANINGS = {"SIGUSR1": "save", "SIGUSR2": "save and stop, to be queued again"}
_MAX_TEXT_LENGTH = 300
_OMITTED_EVENTS = ("rank up", "result", "step")


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
        self._said: dict[int, Any] = {}

    def tell(
        self, events: Iterable[Record], metrics: Iterable[Record] = (), chaos: Iterable[Record] = ()
    ) -> list[EventLine]:
        """The entries of further records, in the order of their times; damaged records are passed over."""
        lines = [self._metric(one) for one in metrics if _is_valid_record(one)]
        rehearsed = [_format_chaos(one) for one in chaos if _is_valid_record(one)]
        groups: list[list[Record]] = []
        for event in filter(_is_valid_record, events):
            if groups and _differ_only_in_rank(groups[-1][-1], event):
                groups[-1].append(event)
            else:
                groups.append([event])
        both = (filter(None, one) for one in (lines, rehearsed, map(self._event, groups)))
        # Attempts first: a clock may be set between two of them.
        return list(merge(*both, key=lambda entry: (entry.attempt, entry.time)))

    def _event(self, alike: Sequence[Record]) -> EventLine | None:
        """The entry of one event, or of several that differ in their ranks alone."""
        first = alike[0]
        name, attempt = str(first["event"]), first["attempt"]
        if name in ("rank ended", "rank gave up"):
            text = self._ranks(name, attempt, alike)
        elif name == "launch":
            text = self._launch(first)
        else:
            if name == "result":
                self._finished.add(attempt)
            if name in ("exit", "fault"):
                # The two may hold the same words, which are told once.
                if self._said.get(attempt) == first.get("message"):
                    first = {**first, "message": None}
                else:
                    self._said[attempt] = first.get("message")
            # Only where neither a rank nor the result was there before is its end worth a line.
            is_told = name == "launcher ended" and attempt in self._finished | self._fallen.keys()
            text = "" if is_told or name in _OMITTED_EVENTS else _format_event(name, first)
        return EventLine(first["time"], attempt, name, text.partition("\n")[0]) if text else None

    def _launch(self, event: Record) -> str:
        nodes = list(self._places(event["attempt"]))
        where = f" on {_format_hosts(nodes)}" if nodes else ""
        ranks = event.get("ranks")
        return f"launch of {_format_count(ranks, 'rank') if is_valid_count(ranks) else 'the ranks'}{where}"

    def _ranks(self, name: str, attempt: int, alike: Sequence[Record]) -> str:
        """The first rank to fall is told whole, those after it as a number; an orderly end is not told."""
        if attempt in self._finished:
            return ""
        fallen = self._fallen.setdefault(attempt, set())
        new = [one for one in alike if is_valid_count(one.get("rank")) and one["rank"] not in fallen]
        if not new:
            return ""
        is_first = not fallen
        fallen.update(one["rank"] for one in new)
        text = _format_process_end(new[0]) if is_first else ""
        if rest := [one["rank"] for one in new[is_first:]]:
            what = "gave up" if name == "rank gave up" else "ended"
            after = f"; {'ranks' if len(rest) > 1 else 'rank'} {_format_rank_ranges(rest)} {what} after it"
            text = text + after if text else after[2:]
        return text

    def _metric(self, line: Record) -> EventLine | None:
        kind, step = str(line.get("kind", "step")), line.get("step")
        if not is_valid_count(step):
            return None
        passed_over = line.get("passed_over") if isinstance(line.get("passed_over"), list) else []
        texts = {
            "restore": f"goes back to step {step}: {'; '.join(map(str, passed_over))}" if passed_over else "",
            "weights": describe_weights(line) if kind == "weights" else "",
            "start": f"goes on after step {step}" if step else "begins with the first step",
            "save": f"step {step} saved{_format_seconds(line.get('seconds'), ' in {} s')}"
            if is_durable_save(line)
            else "",
            "eval": f"step {step}: eval loss {_format_number(line.get('eval_loss'))}",
        }
        text = texts[kind] if kind in texts else "" if kind == "draining" else describe_save(line)
        return EventLine(line["time"], line["attempt"], kind, text) if text else None


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
        self._events, self._metrics = JsonLineReader(run.events), JsonLineReader(run.metrics)
        self._chaos = JsonLineReader(run.chaos)
        self._teller = EventFormatter(lambda attempt: _attempt_nodes(run, attempt))

    def new(self) -> list[EventLine]:
        return self._teller.tell(self._events.read(), self._metrics.read(), self._chaos.read())


def _attempt_nodes(run: RunDir, attempt: int) -> Sequence[str]:
    try:
        found = read_placement(run.attempt(attempt).placement)
    except UsageError:  # of another version, or damaged: the story goes on without
        return ()
    return found[0].nodes if found else ()


def _is_valid_record(record: Record) -> bool:
    moment = record.get("time")
    is_time = isinstance(moment, int | float) and not isinstance(moment, bool) and 0 <= moment < 1e11
    return is_time and is_valid_count(record.get("attempt"))


def _differ_only_in_rank(first: Record, second: Record) -> bool:
    name = first.get("event")
    return name in ("rank ended", "rank gave up", "rank up") and all(
        first.get(key) == second.get(key) for key in ("event", "attempt")
    )


def _format_event(name: str, event: Record) -> str:
    """One event in words; of an event that is not known here, what it holds."""
    if name in LEVEL_EVENTS:
        return describe_level_event(name, event)[:_MAX_TEXT_LENGTH]
    match name:
        case "ranks met":
            return f"ranks met{_format_seconds(event.get('seconds'), ' after {} s')}"
        case "signal":
            number = str(event.get("signal"))
            return f"{number}: {_SIGNAL_MEANINGS.get(number, 'save and stop')}"
        case "node lost":
            return f"node {event.get('node')} lost: {event.get('why')}"
        case "hang" | "straggler" | "not met":
            return str(event.get("what") or event.get("message") or name)
        case "rank stopped" | "rank goes on":
            how = "was stopped by a signal" if name == "rank stopped" else "goes on"
            return f"rank {event.get('rank')} on {event.get('node')} {how}"
        case "dump":
            return _format_stacks(event.get("groups"))
        case "takeover":
            if killed_by := event.get("killed_by"):
                return f"the supervisor on {event.get('former')} was killed by {killed_by}"
            return (
                f"the supervisor on {event.get('former')} is gone; {event.get('host')} goes on with the run"
            )
        case "launcher ended":
            status = event.get("wait_status")
            return f"the launcher {describe_status(status)}" if _is_status(status) and status else ""
        case "ended":
            stuck = event.get("stuck")
            listed = ", ".join(map(str, stuck)) if isinstance(stuck, list) else ""
            return f"could not be ended: {listed}" if listed else ""
        case "exit":
            status, message = event.get("status"), str(event.get("message") or "")
            return message if status in ("done", "saved") and message else f"{status}: {message}"
        case "fault":
            return _format_fault(event)
        case "relaunch":
            return _format_relaunch(event)
        case "preflight":
            return _format_preflight(event)
        case "requeue":
            return f"queued again ({str(event.get('cause') or 'unknown cause').replace('_', ' ')})"
    more = [f"{key}={value}" for key, value in event.items() if key not in _COMMON_FIELDS]
    return " ".join([name, *more])[:_MAX_TEXT_LENGTH]


def _format_stacks(groups: Any) -> str:
    """Where the ranks stood when they hung, the odd ones first."""
    told = [
        f"rank{'s' * (len(one['ranks']) > 1)} {_format_rank_ranges(one['ranks'])}: {one.get('place')}"
        for one in (groups if isinstance(groups, list) else ())
        if isinstance(one, dict)
        and isinstance(one.get("ranks"), list)
        and all(map(is_valid_count, one["ranks"]))
    ]
    return f"stacks: {'; '.join(told)}"[:_MAX_TEXT_LENGTH] if told else "no rank gave a stack"


def _format_fault(event: Record) -> str:
    rank, nodes = event.get("rank"), event.get("nodes") or [event.get("node")]
    names = [str(one) for one in nodes if one is not None] if isinstance(nodes, list) else []
    who = [f"rank {rank}"] if rank is not None else []
    who += [f"node{'s' * (len(names) > 1)} {_format_hosts(names)}"] if names else []
    cause = str(event.get("cause") or "unknown").replace("_", " ")
    message, kind = event.get("message"), event.get("kind")
    cause += f", {kind}" if isinstance(kind, str) and kind != "unknown" else ""
    at = f" of {' on '.join(who)}" if who else ""
    return f"fault: {cause}{at}" + (f": {message}" if message else "")


def _format_preflight(event: Record) -> str:
    """Silent about one node that is well."""
    nodes, found, excluded = (event.get(key) for key in ("nodes", "found", "excluded"))
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    if not is_valid_count(nodes) or (nodes == 1 and not listed):
        return ""
    without = (
        f"; left out: {_format_hosts(list(map(str, excluded)))}"
        if excluded and isinstance(excluded, list)
        else ""
    )
    what = (
        "; ".join(f"{one.get('node')}: {one.get('check')}: {one.get('text')}" for one in listed) or "all well"
    )
    return f"preflight of {_format_count(nodes, 'node')}{without}: {what}"


def _format_relaunch(event: Record) -> str:
    excluded, left = event.get("excluded"), event.get("spares_left")
    names = list(map(str, excluded)) if isinstance(excluded, list) else []
    without = f" without {_format_hosts(names)}" if names else ""
    spares = f"; {_format_count(left, 'spare')} left" if is_valid_count(left) else ""
    return f"relaunch in the same allocation{without}{_format_replicas(event)}{spares}"


def _format_replicas(event: Record) -> str:
    now, before, whole = (event.get(f"replicas{end}") for end in ("", "_before", "_whole"))
    if not (is_valid_count(now) and is_valid_count(before) and is_valid_count(whole)):
        return ""
    was = "" if now == before else f", it had {before}"
    return f" with {now} of {whole} replicas{was}"


def _format_chaos(record: Record) -> EventLine | None:
    """A fault that somebody has rehearsed, so that nobody takes what came of it for the cluster's doing."""
    node, text = record.get("node"), record.get("text")
    if not isinstance(node, str) or not isinstance(text, str):
        return None
    return EventLine(record["time"], record["attempt"], "rehearsal", f"rehearsal on {node}: {text}")


def _format_hosts(names: Sequence[str]) -> str:
    try:
        return fold_hosts(names)
    except UsageError:  # no host names: a damaged record
        return ", ".join(names)


def _format_process_end(event: Record) -> str:
    where = f" on {event['node']}" if event.get("node") else ""
    if event.get("event") == "rank gave up":
        return f"rank {event['rank']}{where} gave up"
    status = event.get("wait_status")
    how = describe_status(status) if _is_status(status) else "ended"
    # Of a command's ranks each ends by itself, and only all of them together say that the run is done.
    early = "" if status == 0 else " before the run was done"
    return f"rank {event['rank']}{where} {how}{early}"


def _is_status(value: Any) -> TypeGuard[int]:
    return is_valid_count(value) and value < 2**16


def _format_rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks as 0-2,4-7."""
    return ",".join(
        f"{low}-{high}" if low < high else str(low) for low, high in _consecutive_ranges(sorted(set(ranks)))
    )


def _consecutive_ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    low = high = numbers[0]
    for number in numbers[1:]:
        if number > high + 1:
            yield low, high
            low = number
        high = number
    yield low, high


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _format_seconds(value: Any, form: str) -> str:
    return form.format(f"{value:.1f}") if isinstance(value, int | float) else ""


def _format_number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "unknown"
