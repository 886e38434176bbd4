"""One attempt at running a job: its ranks, what happens to them, and that none of them stays."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from hpcrun import process
from hpcrun.errors import EXIT_DONE, EXIT_SAVED
from hpcrun.launch.agents.nodes import AttemptRanks
from hpcrun.launch.attempt_events import (
    AttemptEvent,
    AttemptFinished,
    Idle,
    LauncherEnded,
    NodeLost,
    RankConnected,
    RankFailed,
    RankStarted,
    SignalReceived,
    WorldReady,
)
from hpcrun.launch.launchers import LaunchRequest
from hpcrun.launch.signal_queue import SignalQueue
from hpcrun.launch.watch.progress import PROGRESS_SOCKET_VARIABLE
from hpcrun.launch.watch.stacks import RankStack, parse_stack_frames, parse_stack_lines
from hpcrun.process import ProcessHandle
from hpcrun.specs.records import read_json

_IDLE_EVENT_S = 0.1
_POLL_S = 0.25
"""How often files are looked at while nothing wakes us."""
_POLL_STEADY_S = 0.5
"""The same while all ranks train: a death wakes us at once, and ranks need the cores more than we do."""
_POLL_STARTING_S = 0.03
"""The same until every rank has been seen."""


class AttemptProcesses:
    """The processes of an attempt, from their start until nothing is left of them."""

    def __init__(self, launch: LaunchRequest, inbox: SignalQueue, nodes: AttemptRanks) -> None:
        self.launch = launch
        self._signal_queue, self._nodes = inbox, nodes
        self._up: set[int] = set()
        self._met: set[int] = set()
        self._gave_up: set[int] = set()
        self._is_troubled = self._finished = self._launcher_ended = False
        self._looked = 0.0
        inbox.queue_interrupts()
        nodes.watch(launch.attempt, launch.placement, launch.environ[PROGRESS_SOCKET_VARIABLE])
        self._launcher = process.protect_from_reaper(launch.launcher.start(launch, nodes))
        identity = process.identify_process(self._launcher.pid)
        # Until we collect it, a child keeps its pid.
        assert identity is not None
        nodes.launcher_started(identity)
        self._launcher_handle = ProcessHandle(identity)
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox.fileno(), selectors.EVENT_READ)
        self._selector.register(nodes.fileno(), selectors.EVENT_READ)
        descriptor = self._launcher_handle.fileno()
        if descriptor is not None:
            self._selector.register(descriptor, selectors.EVENT_READ)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not recorded themselves."""
        return [rank for rank in range(self.launch.ranks) if rank not in self._up]

    @property
    def is_over(self) -> bool:
        """Whether the launcher and all ranks have ended."""
        return self._launcher_ended and (self._nodes.is_over or not self._nodes.is_complete)

    def watch(self) -> Iterator[AttemptEvent]:
        """What happens, as it happens, with a Tick at every look around; never ends by itself."""
        while True:
            pause = _POLL_S if self._nodes.is_complete else _POLL_STARTING_S
            self._selector.select(_POLL_STEADY_S if self._is_calm() else min(pause, _IDLE_EVENT_S))
            is_due, is_new = time.monotonic() - self._looked > pause, False
            for event in self._seen(look=is_due):
                is_new = True
                yield from self._take(event)
            if is_due or is_new:
                yield from self._look_around()
            if is_due or not is_new:
                yield Idle()

    def _seen(self, *, look: bool) -> Iterator[AttemptEvent]:
        for number in self._signal_queue.read():
            yield SignalReceived(number)
        yield from self._nodes.news(look=look)
        if self._has_launcher_ended():
            code = self._launcher.returncode
            yield LauncherEnded(-code if code < 0 else code << 8, time.time())

    def _take(self, happening: AttemptEvent) -> Iterator[AttemptEvent]:
        match happening:
            case RankStarted(rank):
                self._up.add(rank)
                yield happening
            case RankConnected(rank):
                self._met.add(rank)
                if len(self._met) == self.launch.ranks:
                    yield WorldReady()
            case _:
                self._is_troubled |= isinstance(happening, NodeLost)
                yield happening

    def _is_calm(self) -> bool:
        troubled = self._is_troubled or self._finished or self._launcher_ended or self._gave_up
        return self._nodes.is_calm and not troubled

    def _has_launcher_ended(self) -> bool:
        if self._launcher_ended or self._launcher.poll() is None:
            return False
        self._launcher_ended = True
        descriptor = self._launcher_handle.fileno()
        if descriptor is not None:
            self._selector.unregister(descriptor)
        return True

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""
        self._nodes.signal(number, rank)

    def dump_stacks(self, timeout_s: float = 5.0) -> list[RankStack]:
        """Where every rank stands, by its stack and by what the kernel tells, after so long at most."""
        seen = self._nodes.dump(timeout_s)
        stacks = []
        for rank, node in enumerate(self.launch.placement.ranks):
            stack = seen.get(rank, {})
            text = ""
            with contextlib.suppress(OSError):
                text = self.launch.attempt.stack(rank).read_text(errors="replace")
            state, waits_in = stack.get("state", ""), stack.get("waits_in", "")
            stacks.append(
                RankStack(rank, node, state, waits_in, parse_stack_frames(text), parse_stack_lines(text))
            )
        return stacks

    def end(self, timeout_s: float = 5.0) -> list[str]:
        """End whatever is still there, remove what it left, and say what could not be ended."""
        self._nodes.kill()
        # The launcher knows how each rank ended, and prints it when the last one has.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(0.5)
        stuck = self._nodes.clear(timeout_s, self._launcher.pid)
        process.kill_tree(self._launcher_handle.process)
        self._launcher_handle.signal(9)
        self._launcher.wait()
        self._selector.close()
        self._launcher_handle.close()
        return stuck

    def _look_around(self) -> Iterator[AttemptEvent]:
        self._looked = time.monotonic()
        attempt = self.launch.attempt
        names = {entry.name for entry in os.scandir(attempt.rank_record(0).parent)}
        for rank in range(self.launch.ranks):
            if rank not in self._gave_up and attempt.error_record(rank).name in names:
                self._gave_up.add(rank)
                yield RankFailed(rank)
        if not self._finished:
            result = (
                self._command_result(names) if self.launch.uses_exit_records else read_json(attempt.result)
            )
            if isinstance(result, dict) and result.get("attempt") == attempt.number:
                self._finished = True
                # A short attempt may be over before anyone has looked who came up.
                for event in self._nodes.news(look=True):
                    yield from self._take(event)
                yield AttemptFinished(result)

    def _command_result(self, names: set[str]) -> dict[str, Any] | None:
        """How a command went: well when every rank says so, saved when every rank ended with that code."""
        attempt, ranks = self.launch.attempt, range(self.launch.ranks)
        if not all(attempt.exit_record(rank).name in names for rank in ranks):
            return None
        codes = {int((read_json(attempt.exit_record(rank)) or {}).get("exit_code", -1)) for rank in ranks}
        status = {EXIT_DONE: "done", EXIT_SAVED: "saved"}.get(codes.pop()) if len(codes) == 1 else None
        return None if status is None else {"attempt": attempt.number, "status": status}
