"""Control of ranks over MPI."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from hpcrun.errors import SiteError
from hpcrun.launcher_world import World
from hpcrun.runtime.control import NAP_S, REPORT_WAIT_AFTER_S, Control
from hpcrun.runtime.rank_alarm import RankAlarm, parse_rank_alarm
from hpcrun.runtime.store_rendezvous import open_tcp_store, rank_address
from hpcrun.shm_segments import unlink_mapped_segments

if TYPE_CHECKING:
    from mpi4py import MPI

_SPINS = 50
"""Polls of a pending MPI request before the first sleep: a message that is nearly there costs no sleep."""
_ALARM_TAG = 7500
_SEND_S = 2.0
"""For the alarm that a rank sends before it ends."""


class MPIControl(Control):
    """Control over MPI: non-blocking collectives, polled with sleeps (every blocking call busy-waits)."""

    def __init__(self, world: World, *, private: bool = False) -> None:
        """`private`: for use beside a program that uses MPI itself."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise SiteError(f"MPI cannot be loaded: {error}; pip install 'hpcrun-slurm[train]'") from None
        self._mpi = MPI
        self._abandoned: list[Any] = []
        """Buffers that MPI may still be reading or writing."""
        self._alarm_tag = _ALARM_TAG
        self._renewing: tuple[MPI.Intracomm, MPI.Request] | None = None
        self._comm: MPI.Intracomm = MPI.COMM_WORLD
        self._base: MPI.Intracomm = MPI.COMM_WORLD
        """For alarms, and for a new communicator where one is abandoned."""
        super().__init__(self._comm.rank, self._comm.size)
        if self.size != world.size:
            raise SiteError(
                f"the launcher started {world.size} ranks, but MPI sees a world of {self.size}: launcher and"
                " MPI library do not belong together; use the mpiexec of the MPI that mpi4py loads"
                f" ({MPI.Get_library_version().splitlines()[0][:60]})"
            )
        if private:
            self._base = self._duplicate(MPI.COMM_WORLD)
            self._comm = self._duplicate(self._base)
        self._find_neighbours()

    def _duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        copy, request = comm.Idup()
        self._wait(request, copy)
        return copy

    def _wait(self, request: MPI.Request, *held: Any) -> None:
        """Wait for a request that uses the buffers `held`."""
        for _ in range(_SPINS):
            if request.Test():
                return
        nap, longest = NAP_S
        begin, report_s = time.monotonic(), REPORT_WAIT_AFTER_S
        try:
            while not request.Test():
                time.sleep(nap)
                nap = min(2 * nap, longest)
                self._listen()
                if (seconds := time.monotonic() - begin) > report_s:
                    report_s *= 2
                    self._report_slow(seconds)
        except BaseException:
            self._abandoned.append((request, held))
            raise

    def broadcast_alarm(self, alarm: RankAlarm) -> None:
        """Tell the ranks that wait for this one that it does not come."""
        data = np.frombuffer(alarm.render(), dtype=np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        requests = [self._base.Isend([data, self._mpi.BYTE], rank, self._alarm_tag) for rank in others]
        self._abandoned.append((requests, data))
        deadline = time.monotonic() + _SEND_S
        while not self._mpi.Request.Testall(requests) and time.monotonic() < deadline:
            time.sleep(NAP_S[1])

    def next_alarm(self) -> RankAlarm | None:
        """Return the next alarm of another rank since the last renewal, or None."""
        status = self._mpi.Status()
        if not self._base.Iprobe(self._mpi.ANY_SOURCE, self._alarm_tag, status):
            return None
        data = np.empty(status.Get_count(self._mpi.BYTE), dtype=np.uint8)
        self._base.Recv([data, self._mpi.BYTE], status.source, self._alarm_tag)
        return parse_rank_alarm(data.tobytes())

    def renew(self) -> None:
        """Begin a new communicator after an alarm; it is complete when all ranks have begun it."""
        self._abandoned.append((self._comm, self._renewing))
        self._alarm_tag += 1
        # Begun here and not at the next use: each rank must begin as many as it has abandoned.
        self._renewing = self._base.Idup()

    def _ready(self) -> MPI.Intracomm:
        """Return the communicator of the current call."""
        if self._renewing is not None:
            copy, request = self._renewing
            self._wait(request, copy)
            self._comm, self._renewing = copy, None
        self._check_same_verb()
        return self._comm

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        comm, mine = self._ready(), np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        length, lengths = np.array([mine.size], dtype=np.int64), np.empty(self.size, dtype=np.int64)
        self._wait(comm.Iallgather(length, lengths), length, lengths)
        texts = np.empty(int(lengths.sum()), dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        layout = [texts, (lengths.tolist(), starts[:-1].tolist()), self._mpi.BYTE]
        self._wait(comm.Iallgatherv(mine, layout), mine, layout)
        return [json.loads(texts[a:b].tobytes()) for a, b in itertools.pairwise(starts)]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        comm, text = self._ready(), json.dumps(value).encode() if self.rank == 0 else b""
        mine = np.frombuffer(text, dtype=np.uint8)
        length = np.array([mine.size], dtype=np.int64)
        self._wait(comm.Ibcast(length, root=0), length)
        message = mine.copy() if self.rank == 0 else np.empty(int(length[0]), dtype=np.uint8)
        self._wait(comm.Ibcast(message, root=0), message)
        return json.loads(message.tobytes())

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags; the function returned waits for the union (bitwise or) of all ranks'."""
        comm = self._ready()
        mine, union = np.array([flags], dtype=np.int64), np.empty(1, dtype=np.int64)
        request = comm.Iallreduce(mine, union, op=self._mpi.BOR)

        # mpi4py keeps the buffers during the call only, but Open MPI reads them until the request ends.
        def finish(kept: Any = mine) -> int:
            self._wait(request, kept, union)
            return int(union[0])

        return finish

    def _union(self, bits: int) -> int:
        return self.start_agreeing(bits)()

    def shared_rank(self) -> int | None:
        """Return the rank in MPI's own split by shared memory."""
        neighbours = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        place = int(neighbours.rank)
        neighbours.Free()
        return place

    def store(self) -> Store:
        """Return a store that rank 0 opens on a free port."""
        return open_tcp_store(self, rank_address(self).text)

    def abort(self, code: int) -> None:
        """Have the launcher end every rank (MPI_Abort)."""
        sys.stdout.flush()
        sys.stderr.flush()
        # Abort does not remove MPI's shared memory; processes that still map it need no name.
        unlink_mapped_segments()
        self._comm.Abort(code)
