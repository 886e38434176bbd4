"""Control: how ranks find each other and agree; MPI where there is one, torch's TCPStore elsewhere.

Messages are small JSON values. Nothing here moves tensors, and nothing here burns a core while it waits.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hpcrun.errors import SiteError, UsageError
from hpcrun.launch.shm import unname_segments
from hpcrun.runtime.meeting import address_of_rank, open_store

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrun.launch.world import World

_SPINS = 50
"""Polls of a pending MPI request before the first sleep: a message that is nearly there costs no sleep."""
_NAP_S = (0.0001, 0.0004)
"""Shortest and longest sleep between polls; a collective takes several, on one rank after the other."""


class Control(ABC):
    """The ranks of one attempt, as seen from one of them."""

    rank: int
    size: int
    node: str
    local_rank: int
    local_size: int
    one_node: bool
    """All ranks stand on one node."""
    nodes: tuple[str, ...]
    """The nodes, in the order of their first ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.node = socket.gethostname()

    def _find_neighbours(self) -> None:
        nodes = self.allgather(self.node)
        mine = [rank for rank, node in enumerate(nodes) if node == self.node]
        self.local_rank, self.local_size = mine.index(self.rank), len(mine)
        self.one_node = len(mine) == self.size
        self.nodes = tuple(dict.fromkeys(nodes))

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""

    @abstractmethod
    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags on their way; what comes back waits for the union (bitwise or) of all."""

    def agree(self, flags: int) -> int:
        """The union of every rank's flags, the same on every rank."""
        return self.start_agreeing(flags)()

    def union(self, bits: int) -> int:
        """As `agree`, of up to 62 bits; it takes longer where there is no MPI."""
        return functools.reduce(operator.or_, self.allgather(bits), 0)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree(0)

    def everywhere(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and give its value to all; its failure is raised on every rank."""
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome["value"] = action()
            except UsageError as error:
                outcome["usage"] = str(error)
            except (SiteError, OSError) as error:
                outcome["site"] = str(error)
        outcome = self.broadcast(outcome)
        if "usage" in outcome:
            raise UsageError(outcome["usage"])
        if "site" in outcome:
            raise SiteError(outcome["site"])
        return outcome["value"]

    def shared_rank(self) -> int | None:
        """The place among the ranks that share memory with this one, as the library sees it; or unknown."""
        return None

    @abstractmethod
    def store(self) -> Store:
        """The store through which torch's process groups meet."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """Take every rank down with an exit code; does not return where MPI can do it."""


class MPIControl(Control):
    """Control over MPI: non-blocking collectives, polled with sleeps (every blocking call busy-waits)."""

    def __init__(self, world: World, *, private: bool = False) -> None:
        """`private`: beside a program that uses MPI itself."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise SiteError(f"MPI cannot be loaded: {error}; pip install 'hpcrun-slurm[train]'") from None
        self._mpi = MPI
        self._comm: MPI.Comm = MPI.COMM_WORLD.Dup() if private else MPI.COMM_WORLD
        super().__init__(self._comm.rank, self._comm.size)
        if self.size != world.size:
            raise SiteError(
                f"the launcher started {world.size} ranks, but MPI sees a world of {self.size}: launcher and"
                " MPI library do not belong together; use the mpiexec of the MPI that mpi4py loads"
                f" ({MPI.Get_library_version().splitlines()[0][:60]})"
            )
        self._find_neighbours()

    def _wait(self, request: MPI.Request) -> None:
        for _ in range(_SPINS):
            if request.Test():
                return
        nap, longest = _NAP_S
        while not request.Test():
            time.sleep(nap)
            nap = min(2 * nap, longest)

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        mine = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        length, lengths = np.array([mine.size], dtype=np.int64), np.empty(self.size, dtype=np.int64)
        self._wait(self._comm.Iallgather(length, lengths))
        every = np.empty(int(lengths.sum()), dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        layout = [every, (lengths.tolist(), starts[:-1].tolist()), self._mpi.BYTE]
        self._wait(self._comm.Iallgatherv(mine, layout))
        return [json.loads(every[a:b].tobytes()) for a, b in itertools.pairwise(starts)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        mine = np.frombuffer(json.dumps(value).encode() if self.rank == 0 else b"", dtype=np.uint8)
        length = np.array([mine.size], dtype=np.int64)
        self._wait(self._comm.Ibcast(length, root=0))
        message = mine.copy() if self.rank == 0 else np.empty(int(length[0]), dtype=np.uint8)
        self._wait(self._comm.Ibcast(message, root=0))
        return json.loads(message.tobytes())

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags on their way; what comes back waits for the union (bitwise or) of all."""
        mine, union = np.array([flags], dtype=np.int64), np.empty(1, dtype=np.int64)
        request = self._comm.Iallreduce(mine, union, op=self._mpi.BOR)

        # mpi4py holds on to the buffers for as long as the call lasts, but Open MPI reads them until the end.
        def finish(kept: Any = mine) -> int:
            self._wait(request)
            return int(union[0])

        return finish

    def union(self, bits: int) -> int:
        """The union of every rank's bits, 62 at most."""
        return self.start_agreeing(bits)()

    def shared_rank(self) -> int | None:
        """The rank in MPI's own split by shared memory."""
        neighbours = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        place = int(neighbours.rank)
        neighbours.Free()
        return place

    def store(self) -> Store:
        """Rank 0 opens a store on a free port, MPI tells the others where."""
        return open_store(self, address_of_rank(self).text)

    def abort(self, code: int) -> None:
        """MPI_Abort: the launcher takes every rank down."""
        sys.stdout.flush()
        sys.stderr.flush()
        # Abort leaves MPI's shared memory lying about; whoever still maps it does so without its name.
        unname_segments()
        self._comm.Abort(code)


class StoreControl(Control):
    """Control over a TCPStore, for ranks that torchrun started: there is no MPI among them."""

    def __init__(self, world: World, *, store: Store | None = None, prefix: str = "hpcrun") -> None:
        """`store`: one that the ranks have already; `prefix`: of the keys, other than all others' there."""
        super().__init__(world.rank, world.size)
        self._store = store if store is not None else self._rendezvous(world)
        self._control = PrefixStore(prefix, self._store)
        self._round = 0
        self._find_neighbours()

    def _rendezvous(self, world: World) -> Store:
        for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.size)):
            os.environ.setdefault(name, str(value))
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise SiteError(
                f"{world.size} ranks were started by {world.kind}, but {' and '.join(missing)} is not set and"
                " there is no MPI to ask; set MASTER_ADDR and MASTER_PORT, or start with mpiexec"
            )
        found: Store
        found, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=default_pg_timeout)))
        return found

    def _meet(self, contribution: int) -> int:
        """Add to a sum that counts arrivals in its low bits, and wait for all."""
        self._arrive(contribution)
        return self._published(self._round)

    def _arrive(self, contribution: int) -> None:
        """Add to the sum of the next round; the last to arrive publishes it."""
        self._round += 1
        total = self._control.add(f"{self._round}/sum", contribution)
        if total % _ARRIVALS == self.size:
            self._control.set(f"{self._round}/done", str(total))
            if self._round > 2:
                # Everyone has read the round before the last: to arrive here they had to.
                self._control.delete_key(f"{self._round - 2}/sum")
                self._control.delete_key(f"{self._round - 2}/done")

    def _published(self, number: int) -> int:
        return int(self._control.get(f"{number}/done"))

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self._control.set(f"{self._round + 1}/{self.rank}", json.dumps(value))
        self._meet(1)
        texts = self._control.multi_get([f"{self._round}/{rank}" for rank in range(self.size)])
        values = [json.loads(text) for text in texts]
        mine = f"{self._round}/{self.rank}"
        self._meet(1)
        self._control.delete_key(mine)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.rank == 0:
            self._control.set(f"{self._round + 1}/value", json.dumps(value))
        self._meet(1)
        key = f"{self._round}/value"
        text = self._control.get(key)
        self._meet(1)
        if self.rank == 0:
            self._control.delete_key(key)
        return json.loads(text)

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags on their way; what comes back waits for the union (bitwise or) of all."""
        self._arrive(1 + sum(_ARRIVALS ** (bit + 1) for bit in range(2) if flags >> bit & 1))
        number = self._round

        def finish() -> int:
            votes = self._published(number) // _ARRIVALS
            return (1 if votes % _ARRIVALS else 0) | (2 if votes // _ARRIVALS else 0)

        return finish

    def store(self) -> Store:
        """The store that brought the ranks together."""
        return PrefixStore("groups", self._store)

    def abort(self, code: int) -> None:
        """Leave; whoever started the ranks notices and ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class LoneControl(Control):
    """Control of one process that is alone: it agrees with itself."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._find_neighbours()

    def allgather(self, value: Any) -> list[Any]:
        """The value, as it would arrive elsewhere."""
        return [json.loads(json.dumps(value))]

    def broadcast(self, value: Any) -> Any:
        """The value, as it would arrive elsewhere."""
        return json.loads(json.dumps(value))

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """The flags."""
        return lambda: flags

    def store(self) -> Store:
        """A store in memory."""
        return HashStore()

    def abort(self, code: int) -> None:
        """Leave."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_ARRIVALS = 1 << 20
"""Arrivals and votes share one 64-bit sum, 20 bits each: worlds below a million ranks, two flags."""


def connect(world: World | None) -> Control:
    """The control for the world this process was started in (a lone process is a world of one)."""
    from hpcrun.launch.world import World

    world = world or World(kind="single", rank=0, size=1, local_rank=0, local_size=1)
    if world.kind == "torchrun":
        return StoreControl(world)
    return MPIControl(world)
