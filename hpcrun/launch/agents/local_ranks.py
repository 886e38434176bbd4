"""The ranks of an attempt that stand on this node: found, heard, signalled, ended, and cleared up after."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from hpcrun import process
from hpcrun.launch.attempt_events import NodeEvent, RankConnected, RankEnded, RankStarted, RankStopped
from hpcrun.launch.watch.hang_probe import dump_stacks
from hpcrun.launch.watch.progress_listener import ProgressListener
from hpcrun.launcher_world import rank_from_environment
from hpcrun.process import ProcessHandle, ProcessId
from hpcrun.shm_segments import mapped_segments, mpi_segments, remove_segments, unmapped_segments
from hpcrun.specs.records import read_json
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import Attempt

_NEVER_SEEN_S = 1.0
_MOMENT_S = 0.05


@dataclass
class _RankState:
    handle: ProcessHandle
    up: bool = False
    met: bool = False
    ended: bool = False


class NodeRanks:
    """Takes hold of ranks as they appear, and lets go when nothing of them is left.

    Made before the ranks are started, so that what they leave can be told from what was there.
    """

    below: ProcessId | None = None
    """The process whose descendants the ranks are; without one they are known by their environment alone."""

    def __init__(self, attempt: Attempt, ranks: Collection[int], hears: str) -> None:
        """`hears`: the name of the socket through which ranks report their progress."""
        self._attempt, self._expected = attempt, frozenset(ranks)
        self._listener = ProgressListener(hears, ranks)
        self._node = os.uname().nodename
        self._ranks: dict[int, _RankState] = {}
        self._lost: set[int] = set()
        self._stopped: set[int] = set()
        self._first_seen: float | None = None
        self._segments: set[str] = set()
        self._segments_before = mpi_segments()
        self._began = time.time()
        self._selector = selectors.EpollSelector()
        process.become_subreaper()
        self._before = {*process.descendants(os.getpid())}

    def fileno(self) -> int:
        """Becomes readable when a rank ends."""
        return self._selector.fileno()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has been seen, if only as one that has gone."""
        return len(self._ranks) + len(self._lost) >= len(self._expected)

    @property
    def is_calm(self) -> bool:
        """Whether all ranks have met and none has ended."""
        return not self._lost and self._all_met and not any(rank.ended for rank in self._ranks.values())

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""
        return self.is_complete and all(rank.ended for rank in self._ranks.values())

    @property
    def _all_met(self) -> bool:
        met = {rank for rank, state in self._ranks.items() if state.met}
        return met >= self._expected

    def ended(self) -> Iterator[NodeEvent]:
        """Who has ended since the last call, first death first."""
        # The kernel gives them in the order in which they became ready.
        woken = [key.data for key, _ in self._selector.select(0)]
        for number in dict.fromkeys([*woken, *self._ranks]):
            rank = self._ranks[number]
            if not rank.ended and not rank.handle.is_alive():
                rank.ended = True
                self._unregister(rank.handle)
                status = rank.handle.wait_status()
                yield RankEnded(number, self._node, rank.handle.process.pid, status, time.time())

    def appeared(self) -> Iterator[NodeEvent]:
        """Who has come up, or met the others, since the last call."""
        if self._all_met:
            return
        if not self.is_complete:
            yield from self._find_processes()
        for number in sorted(self._expected):
            rank = self._ranks.get(number)
            if rank is not None and rank.met:
                continue
            record = read_json(self._attempt.rank_record(number))
            if record is None or record["node"] != self._node:
                continue
            if rank is None or not rank.up:
                self._hold(number, ProcessId(record["pid"], record["start_ticks"]))
                self._ranks[number].up = True
                yield RankStarted(number, record["node"], record["pid"])
            if "shm" in record:
                self._ranks[number].met = True
                yield RankConnected(number)
        self._sample_segments()

    def _find_processes(self) -> Iterator[NodeEvent]:
        """Take hold of ranks as soon as they are started: they may end before they have said a word."""
        if self._ranks and self._first_seen is None:
            self._first_seen = time.monotonic()
        for candidate in self._candidates():
            environ = process.read_initial_environment(candidate.pid)
            rank = (
                rank_from_environment(environ)
                if environ.get(ATTEMPT_VARIABLE) == str(self._attempt.number)
                else None
            )
            if rank is not None and rank in self._expected and rank not in self._ranks:
                self._hold(rank, candidate)
        # All ranks of a node start at once: who is not there a moment later has come and gone.
        if self._first_seen is not None and time.monotonic() - self._first_seen > _NEVER_SEEN_S:
            for number in self._expected - self._ranks.keys() - self._lost:
                self._lost.add(number)
                yield RankEnded(number, self._node, None, None, time.time())

    def _candidates(self) -> list[ProcessId]:
        if self.below is not None:
            return process.descendants(self.below)
        return process.processes_with_env(RUN_ID_VARIABLE, self._attempt.run.run_id)

    def heard(self) -> Iterator[NodeEvent]:
        """Where the ranks say they are, those that have spoken since the last call, and who is stopped."""
        yield from self._listener.hear()
        handles = {rank: state.handle for rank, state in self._ranks.items() if not state.ended}
        for rank, handle in (handles | self._listener.dumpable()).items():
            is_stopped = process.state(handle.process.pid) in ("T", "t")
            if is_stopped != (rank in self._stopped):
                self._stopped ^= {rank}
                yield RankStopped(rank, self._node, is_stopped)

    def dump(self, timeout_s: float) -> dict[int, dict[str, str]]:
        """Have every rank write its stacks, for so long at most; what else is seen of each, from outside."""
        handles = {rank: state.handle for rank, state in self._ranks.items() if not state.ended}
        return dump_stacks(self._attempt, handles, self._listener.dumpable(), timeout_s)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or to all that are up."""
        for state in self._ranks.values() if rank is None else [self._ranks[rank]]:
            if state.up and not state.ended:
                state.handle.signal(number)

    def kill(self) -> None:
        """End the ranks; what they have started besides stays until `clear`."""
        self._sample_segments()
        process.kill_processes(rank.handle.process for rank in self._ranks.values() if not rank.ended)

    def clear(self, timeout_s: float, spared: Iterable[int] = ()) -> list[int]:
        """End whatever of the attempt is still here, and remove what it left.

        `spared` processes and those below them are let live. Gives the pids of what could not be ended.
        """
        self.kill()
        deadline = time.monotonic() + timeout_s
        kept = set(spared)
        while alive := self._processes(kept):
            process.kill_processes(alive)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._remove_segments()
        self._close()
        return [left.pid for left in alive]

    def _processes(self, spared: set[int]) -> list[ProcessId]:
        """All living processes of the attempt: below the launcher, and those that left that tree."""
        processes = {*process.descendants(self.below)} if self.below is not None else set()
        marked = process.processes_with_env(RUN_ID_VARIABLE, self._attempt.run.run_id)
        number = str(self._attempt.number)
        processes |= {
            marked_process
            for marked_process in marked
            if process.read_initial_variable(marked_process.pid, ATTEMPT_VARIABLE) == number
        }
        # Whoever has lost his parents becomes our child, whatever session and environment he has.
        ours = {child for child in process.descendants(os.getpid()) if child != self.below}
        processes |= ours - self._before - {*self._below(self._before)}
        kept = spared | {child.pid for pid in spared for child in process.descendants(pid)}
        return sorted(candidate for candidate in processes if candidate.pid not in kept)

    def _below(self, processes: Iterable[ProcessId]) -> Iterator[ProcessId]:
        for parent in processes:
            yield from process.descendants(parent)

    def _remove_segments(self) -> None:
        records = (read_json(self._attempt.rank_record(rank)) for rank in self._expected)
        here = (record for record in records if record and record.get("node") == self._node)
        segments = self._segments.union(*(record.get("shm", ()) for record in here))
        if not self._all_met:
            # A rank that dies inside MPI_Init has had no time to tell. What came since the launch and stays
            # without a process is garbage; a segment that another run just makes is mapped a moment later.
            strays = unmapped_segments(mpi_segments() - self._segments_before)
            if strays:
                time.sleep(_MOMENT_S)
            segments |= strays
        remove_segments(segments, since=self._began)

    def _hold(self, rank: int, rank_process: ProcessId) -> None:
        state = self._ranks.get(rank)
        if state is not None:
            if state.handle.process == rank_process:
                return
            # A wrapper around the rank was seen first.
            if not state.ended:
                self._unregister(state.handle)
            state.handle.close()
        self._ranks[rank] = _RankState(ProcessHandle(rank_process))
        descriptor = self._ranks[rank].handle.fileno()
        if descriptor is not None:
            self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def _sample_segments(self) -> None:
        for rank in self._ranks.values():
            if not rank.ended:
                self._segments |= mapped_segments(rank.handle.process.pid)

    def _unregister(self, handle: ProcessHandle) -> None:
        descriptor = handle.fileno()
        if descriptor is not None:
            self._selector.unregister(descriptor)

    def _close(self) -> None:
        self._selector.close()
        self._listener.close()
        for rank in self._ranks.values():
            rank.handle.close()
