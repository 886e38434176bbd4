"""One attempt at running a job: its processes, what happens to them, and that none of them stays."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.launch import hydra
from hpcrun.launch.inbox import Inbox
from hpcrun.launch.shim import RUN_ID_VARIABLE
from hpcrun.launch.shm import mpi_segments, remove_segments, segments_of, unmapped
from hpcrun.process import Handle, ProcessId
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import Attempt

_TICK_S = 0.1
_LOOK_AROUND_S = 0.25
"""How often files are looked at while nothing wakes us."""
_CALM_S = 0.5
"""The same while all ranks train: a death wakes us at once, and ranks need the cores more than we do."""
_STARTING_S = 0.03
"""The same until every rank has been seen."""
_LOST_S = 1.0
_MOMENT_S = 0.05


@dataclass(frozen=True)
class Launch:
    """What is to be started: an attempt as a value."""

    attempt: Attempt
    ranks: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    mpiexec: Path


@dataclass(frozen=True)
class RankUp:
    """A rank has recorded itself and takes signals."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class RanksMet:
    """Every rank is up and inside MPI."""


@dataclass(frozen=True)
class RankEnded:
    """The process of a rank is gone, for better or worse."""

    rank: int
    node: str
    pid: int | None
    """None for one that was gone before anyone saw it."""
    wait_status: int | None
    """As waitpid gives it; None where the kernel does not tell."""
    time: float


@dataclass(frozen=True)
class RankGaveUp:
    """A rank has written down why it cannot go on; its process may still be there."""

    rank: int


@dataclass(frozen=True)
class LauncherEnded:
    """Mpiexec is gone; its status says nothing about success."""

    wait_status: int
    time: float


@dataclass(frozen=True)
class Finished:
    """The ranks agreed that the attempt ended well, and rank 0 has written the result."""

    result: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """Somebody sent the supervisor a signal."""

    number: signal.Signals


@dataclass(frozen=True)
class Tick:
    """Nothing happened for a moment."""


Happening = RankUp | RanksMet | RankEnded | RankGaveUp | LauncherEnded | Finished | Asked | Tick


@dataclass
class _Rank:
    node: str
    handle: Handle
    up: bool = False
    ended: bool = False


class RunningAttempt:
    """The processes of an attempt, from their start until nothing is left of them."""

    def __init__(self, launch: Launch, inbox: Inbox) -> None:
        self.launch = launch
        self._inbox = inbox
        self._ranks: dict[int, _Rank] = {}
        self._segments: set[str] = set()
        self._segments_before = mpi_segments()
        self._lost: set[int] = set()
        self._first_seen: float | None = None
        self._gave_up: set[int] = set()
        self._met = self._finished = self._launcher_ended = False
        self._looked = 0.0
        self.began = time.time()
        inbox.collect_interrupts()
        process.become_subreaper()
        self._launcher = hydra.start_ranks(
            launch.mpiexec, launch.ranks, launch.command, launch.environ, launch.attempt.launcher_log
        )
        identity = process.identify(self._launcher.pid)
        # Until we collect it, a child keeps its pid.
        assert identity is not None
        self._launcher_handle = Handle(identity)
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox.fileno(), selectors.EVENT_READ)
        self._register(self._launcher_handle, None)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not recorded themselves."""
        up = {rank for rank, one in self._ranks.items() if one.up}
        return [rank for rank in range(self.launch.ranks) if rank not in up]

    @property
    def is_over(self) -> bool:
        """Whether the launcher and all ranks have ended."""
        return self._launcher_ended and all(rank.ended for rank in self._ranks.values())

    def watch(self) -> Iterator[Happening]:
        """What happens, as it happens; never ends by itself."""
        while True:
            starting = len(self._ranks) + len(self._lost) < self.launch.ranks
            pause = _STARTING_S if starting else _LOOK_AROUND_S
            wait = _CALM_S if self._is_calm() else min(pause, _TICK_S)
            # The kernel gives them in the order in which they became ready: who died first stands first.
            woken = [key.data for key, _ in self._selector.select(wait)]
            happened: list[Happening] = [Asked(number) for number in self._inbox.read()]
            yield from happened
            ended = list(self._find_ended([rank for rank in woken if rank is not None]))
            yield from ended
            if ended or time.monotonic() - self._looked > pause:
                yield from self._look_around()
            if not happened and not ended:
                yield Tick()

    def _is_calm(self) -> bool:
        troubled = self._finished or self._launcher_ended or self._gave_up or self._lost
        return self._met and not troubled and not any(rank.ended for rank in self._ranks.values())

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to one rank or to all that are up; says how many got it."""
        chosen = self._ranks.values() if rank is None else [self._ranks[rank]]
        return sum(one.handle.signal(number) for one in chosen if one.up and not one.ended)

    def end(self, timeout_s: float = 5.0) -> list[ProcessId]:
        """End whatever is still there, remove what it left, and say which processes could not be ended."""
        self._sample_segments()
        process.kill_all(rank.handle.process for rank in self._ranks.values() if not rank.ended)
        # Hydra knows how each rank ended, and prints it when the last one has.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(0.5)
        deadline = time.monotonic() + timeout_s
        while alive := self._processes():
            process.kill_all(alive)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        process.reap_orphans(keep=self._launcher.pid)
        if not alive:
            self._launcher.wait()
        self._close()
        self._remove_segments()
        return alive

    def _remove_segments(self) -> None:
        records = (read_json(self.launch.attempt.rank_record(rank)) for rank in range(self.launch.ranks))
        found = self._segments.union(*(record.get("shm", ()) for record in records if record))
        if not self._met:
            # A rank that dies inside MPI_Init has had no time to tell. What came since the launch and stays
            # without a process is garbage; a segment that another run just makes is mapped a moment later.
            strays = unmapped(mpi_segments() - self._segments_before)
            if strays:
                time.sleep(_MOMENT_S)
            found |= strays
        remove_segments(found, since=self.began)

    def _processes(self) -> list[ProcessId]:
        """All living processes of this run: below the launcher, and those that left that tree."""
        found = {*process.descendants(self._launcher.pid)}
        found |= {*process.processes_with_env(RUN_ID_VARIABLE, self.launch.attempt.run.id)}
        if self._launcher_handle.is_alive():
            found.add(self._launcher_handle.process)
        return sorted(found)

    def _find_ended(self, woken: list[int]) -> Iterator[Happening]:
        for number in dict.fromkeys([*woken, *self._ranks]):
            rank = self._ranks[number]
            if not rank.ended and not rank.handle.is_alive():
                rank.ended = True
                self._unregister(rank.handle)
                status = rank.handle.wait_status()
                yield RankEnded(number, rank.node, rank.handle.process.pid, status, time.time())
        if not self._launcher_ended and self._launcher.poll() is not None:
            self._launcher_ended = True
            self._unregister(self._launcher_handle)
            code = self._launcher.returncode
            yield LauncherEnded(-code if code < 0 else code << 8, time.time())

    def _look_around(self) -> Iterator[Happening]:
        self._looked = time.monotonic()
        attempt = self.launch.attempt
        if not self._met:
            yield from self._find_ranks()
            self._sample_segments()
        names = {entry.name for entry in os.scandir(attempt.rank_record(0).parent)}
        for rank in range(self.launch.ranks):
            if rank not in self._gave_up and attempt.error_record(rank).name in names:
                self._gave_up.add(rank)
                yield RankGaveUp(rank)
        if not self._finished:
            result = read_json(attempt.result)
            if isinstance(result, dict) and result.get("attempt") == attempt.number:
                self._finished = True
                yield Finished(result)

    def _find_ranks(self) -> Iterator[Happening]:
        if len(self._ranks) + len(self._lost) < self.launch.ranks:
            yield from self._find_processes()
        attempt = self.launch.attempt
        records = {rank: read_json(attempt.rank_record(rank)) for rank in range(self.launch.ranks)}
        for rank, record in records.items():
            if record is None or (rank in self._ranks and self._ranks[rank].up):
                continue
            self._hold(rank, record["node"], ProcessId(record["pid"], record["start_ticks"]))
            self._ranks[rank].up = True
            yield RankUp(rank, record["node"], record["pid"])
        if all(record is not None and "shm" in record for record in records.values()):
            self._met = True
            yield RanksMet()

    def _find_processes(self) -> Iterator[Happening]:
        """Take hold of ranks as soon as Hydra has started them: they may end before they have said a word."""
        if self._ranks and self._first_seen is None:
            self._first_seen = time.monotonic()
        for found in process.descendants(self._launcher.pid):
            rank = process.started_with(found.pid, "PMI_RANK")
            if rank is not None and int(rank) not in self._ranks:
                self._hold(int(rank), os.uname().nodename, found)
        # Hydra starts all ranks of a node at once: who is not there a moment later has come and gone.
        if self._first_seen is not None and time.monotonic() - self._first_seen > _LOST_S:
            for number in set(range(self.launch.ranks)) - self._ranks.keys() - self._lost:
                self._lost.add(number)
                yield RankEnded(number, os.uname().nodename, None, None, time.time())

    def _hold(self, rank: int, node: str, found: ProcessId) -> None:
        known = self._ranks.get(rank)
        if known is not None:
            if known.handle.process == found:
                return
            # A wrapper around the rank was seen first.
            if not known.ended:
                self._unregister(known.handle)
            known.handle.close()
        self._ranks[rank] = _Rank(node, Handle(found))
        self._register(self._ranks[rank].handle, rank)

    def _sample_segments(self) -> None:
        for rank in self._ranks.values():
            if not rank.ended:
                self._segments |= segments_of(rank.handle.process.pid)

    def _register(self, handle: Handle, rank: int | None) -> None:
        descriptor = handle.fileno()
        if descriptor is not None:
            self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def _unregister(self, handle: Handle) -> None:
        descriptor = handle.fileno()
        if descriptor is not None:
            self._selector.unregister(descriptor)

    def _close(self) -> None:
        self._selector.close()
        for handle in (self._launcher_handle, *(rank.handle for rank in self._ranks.values())):
            handle.close()
