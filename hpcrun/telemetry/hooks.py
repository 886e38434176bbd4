"""Programs that are called when the state of a run changes: what has changed, and who is told."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.errors import HpcrunError, UsageError
from hpcrun.masking import Masker
from hpcrun.runs.known_secrets import known_secrets
from hpcrun.runs.snapshot import RunSnapshot
from hpcrun.runs.timeline import is_valid_count
from hpcrun.specs.events.attempt import LaunchEvent, RanksConnectedEvent
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.log import EventRecord, open_events
from hpcrun.specs.events.supervisor import FaultEvent, RelaunchEvent, RequeueEvent
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir
from hpcrun.telemetry.sidecar import load_sidecar_state, print_to_console, write_sidecar_log
from hpcrun.typed_json import Count, WrongValue, parse_typed

SCHEMA_VERSION = 1
HOOKS_STATE = "hooks"
TIME_LIMIT_S = 30.0
"""For one call."""
_MAX_QUEUED_CALLS = 64
"""Calls of one hook; where it is that slow, the oldest of them are dropped."""
_STATE_OF_EVENT: Mapping[type[Event], str] = {
    LaunchEvent: "starting",
    RanksConnectedEvent: "running",
    FaultEvent: "fault",
    RelaunchEvent: "relaunched",
    RequeueEvent: "requeued",
}
_OPTIONAL_KEYS = ("cause", "nodes", "excluded", "spares_left")
Record = Mapping[str, Any]


@dataclass
class StateChanges:
    """From events to changes of state; dumps to JSON and reads back."""

    number: Count = 0
    state: str = ""
    attempt: Count = 0
    firing: list[str] = field(default_factory=list)
    """The keys of the faults that the run has not recovered from."""

    def of(self, events: Iterable[EventRecord]) -> Iterator[dict[str, Any]]:
        """The changes that these events are."""
        for record in events:
            state = _STATE_OF_EVENT.get(type(record.event))
            if state is not None:
                self.attempt, values = record.attempt, record.as_json()
                optional = {name: values[name] for name in _OPTIONAL_KEYS if name in values}
                yield self._change(state, record.time, values.get("message", ""), **optional)

    def end(self, record: Record | None) -> Iterator[dict[str, Any]]:
        """The last one, now that the supervisor is gone, by the exit record; none where it told before."""
        if record is not None:
            step = record.get("step")
            more = {"step": step} if is_valid_count(step) else {}
            exit_code = record.get("exit_code")
            yield self._change(
                str(record.get("status")),
                record.get("ended"),
                str(record.get("message") or ""),
                exit_code=exit_code,
                **more,
            )
        elif self.state not in ("", "requeued", "lost"):
            yield self._change("lost", time.time(), "the supervisor is gone without a word")

    def _change(self, state: str, moment: Any, message: str, **more: Any) -> dict[str, Any]:
        previous, self.state = self.state, state
        self.number += 1
        key, resolved = None, []
        if state in ("fault", "failed", "lost"):
            key = f"attempt-{self.attempt}"
            # The end of the attempt that the fault took down is the same alert.
            self.firing += [key] if key not in self.firing else []
        elif state in ("running", "done"):
            resolved, self.firing = self.firing, []
        change = {"id": self.number, "state": state, "previous": previous or None, "time": moment}
        change |= {"attempt": self.attempt or None, "message": message}
        return change | {"alert": key, "resolved": resolved} | more


class Hooks:
    """Calls every hook for each change that it wants to hear of, one at a time and in order.

    A call that had not ended when all ended is made again where the run continues: `id` tells the two apart.
    """

    every_s = 0.5

    def __init__(self, run: RunDir, about: Mapping[str, Any], orders: Mapping[str, Any]) -> None:
        self._run, self._about = run, about
        saved = load_sidecar_state(run, HOOKS_STATE)
        self._changes = _parse_state_changes(saved.get("changes"))
        offset = saved.get("events")
        self._reader = open_events(run.events, offset if is_valid_count(offset) else 0)
        folder = Path(orders["directory"])
        self._hooks = [_HookProgram(one, folder if folder.is_dir() else run.path) for one in orders["hooks"]]
        self._pending: deque[tuple[dict[str, Any], list[Future[None]]]] = deque()

    def turn(self) -> None:
        """Call for what is new, and remember what has been told."""
        self._call(self._changes.of(self._reader.read()))
        while self._pending and all(one.done() for one in self._pending[0][1]):
            state, calls = self._pending.popleft()
            for one in calls:
                if not one.cancelled():
                    one.result()
            write_json(self._run.sidecar_state(HOOKS_STATE), state)

    def _call(self, changes: Iterator[dict[str, Any]]) -> None:
        calls, told = [], False
        for change in changes:
            document, told = self._document(change), True
            calls += [call for hook in self._hooks if (call := hook.call(document)) is not None]
        if told:
            state = {"events": self._reader.offset, "changes": asdict(self._changes)}
            self._pending.append((state, calls))

    def _document(self, change: Mapping[str, Any]) -> dict[str, Any]:
        about = {name: self._about[name] for name in ("run", "name", "slurm_job", "host")}
        step = None
        with suppress(UsageError, OSError):
            step = RunSnapshot(self._run, None).progress().step
        place = {"path": str(self._run.path), "step": step}
        document = {"schema_version": SCHEMA_VERSION, **about, **place, **change}
        # An attempt has secrets of its own: what is known is asked for each time.
        masker = Masker(known_secrets(self._run))
        document["message"] = masker.mask(str(change["message"]))
        if isinstance(change.get("cause"), str):
            document["cause"] = masker.mask(change["cause"])
        return document

    def close(self) -> None:
        """The end of the run, and then until all calls have ended."""
        record = None
        with suppress(UsageError):
            record = self._run.read_exit()
        self._call(self._changes.end(record))
        for hook in self._hooks:
            hook.close()
        self.turn()


class _HookProgram:
    """One program, and the calls of it that wait."""

    def __init__(self, spec: Mapping[str, Any], folder: Path) -> None:
        self._command: Sequence[str] = spec["command"]
        self._on, self._whose, self._folder = set(spec["on"]), spec["whose"], folder
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._has_failed = False

    def call(self, document: Mapping[str, Any]) -> Future[None] | None:
        """Have it called; None where it does not want to hear of this."""
        if self._on and document["state"] not in self._on:
            return None
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if len(self._waiting) >= _MAX_QUEUED_CALLS:
            # The first of them is going on.
            dropped = next(one for one in self._waiting if one.cancel())
            self._waiting.remove(dropped)
            self._log(document, "it is too slow: the call that has waited longest was dropped")
        self._waiting.append(self._pool.submit(self._run, document))
        return self._waiting[-1]

    def _run(self, document: Mapping[str, Any]) -> None:
        try:
            done = process.run_with_input(
                self._command,
                json.dumps(document) + "\n",
                timeout_s=TIME_LIMIT_S,
                env=os.environ | _hook_environment(document),
                cwd=self._folder,
            )
        except (HpcrunError, OSError) as error:
            self._failed(document, str(error))
            return
        if done.exit_code:
            output = done.stdout.strip().splitlines()
            last = f": {output[-1][:300]}" if output else ""
            self._failed(document, f"`{self._command[0]}` ended with exit code {done.exit_code}{last}")
        else:
            self._has_failed = False
            if done.stdout.strip():
                self._log(document, done.stdout.rstrip())

    def _failed(self, document: Mapping[str, Any], why: str) -> None:
        self._log(document, why)
        if not self._has_failed:
            # Once, until it has worked again.
            self._has_failed = True
            words = f"hook of the {self._whose} failed at {document['state']}: {why.splitlines()[0][:300]}"
            print_to_console(f"{words}; the run continues")

    def _log(self, document: Mapping[str, Any], text: str) -> None:
        about = f"{document['id']} {document['state']} {self._command[0]}"
        write_sidecar_log("\n".join(f"{about}: {line}" for line in text.splitlines()))

    def close(self) -> None:
        """Until its calls have ended."""
        self._pool.shutdown(wait=True)


def _hook_environment(document: Mapping[str, Any]) -> dict[str, str]:
    """For those that read no JSON."""
    variables = {"STATE": document["state"], "RUN": document["run"], "RUN_DIR": document["path"]}
    variables |= {"ATTEMPT": document["attempt"], "SLURM_JOB": document["slurm_job"]}
    variables |= {"MESSAGE": str(document["message"]).replace("\0", "")}
    return {f"HPCRUN_HOOK_{name}": str("" if value is None else value) for name, value in variables.items()}


def _parse_state_changes(values: Any) -> StateChanges:
    with suppress(WrongValue):
        return parse_typed(StateChanges, values)
    return StateChanges()
