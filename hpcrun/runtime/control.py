"""Control: how ranks find each other and agree; MPI where there is one, torch's TCPStore elsewhere.

Messages are small JSON values. Nothing here moves tensors, and nothing here burns a core while it waits.
"""

from __future__ import annotations

import contextlib
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

from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime.collective_verbs import VERBS, Alarm, Neighbours, of_store, on_all, parse_alarm
from hpcrun.runtime.store_rendezvous import address_of_rank, open_store, rendezvous_of
from hpcrun.shm_segments import unlink_mapped_segments

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrun.launcher_world import World

_SPINS = 50
"""Polls of a pending MPI request before the first sleep: a message that is nearly there costs no sleep."""
_NAP_S = (0.0001, 0.0004)
"""Shortest and longest sleep between polls; a collective takes several, on one rank after the other."""
_STORE_NAP_S, _STORE_LOOK_S = 0.02, 0.5
"""The longest sleep between questions to a store, in a world of up to a hundred ranks; and between those
whether another rank has given up."""
_SAY_AFTER_S = 30.0
"""Of waiting for other ranks; then after twice as long, and so on."""
_VERB_AT, _VERB_BITS = 56, 3
_ALARM_TAG = 7500
_SEND_S = 2.0
"""For what a rank tells the others before it goes."""


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
    verb = ""
    """What all ranks are doing together; empty: nothing."""
    is_unproved = False
    """Nobody has told yet whether they do."""
    turn = 0
    """How many things all ranks have begun together, since they last started over."""
    _neighbours: Neighbours | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.node = socket.gethostname()
        self._told: list[Alarm] = []

    def _find_neighbours(self) -> None:
        told = self.allgather([self.node, Neighbours.mine(os.getpid())])
        self._neighbours = Neighbours(told, self.rank, self.node)
        nodes = [node for node, _ in told]
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
        """As `agree`, of up to 56 bits; it takes longer where there is no MPI."""
        if not self.is_unproved:
            return self._union(bits)
        self.is_unproved = False
        code, most = VERBS.index(self.verb) + 1, (1 << _VERB_BITS) - 1
        # With its complement beside it, no two verbs make the union that one of them makes alone.
        told = self._union(bits | (code | (most & ~code) << _VERB_BITS) << _VERB_AT)
        verbs = told >> _VERB_AT
        if verbs & verbs >> _VERB_BITS & most:
            every = enumerate(self.allgather([self.verb, self.node]))
            words = ", ".join(f"rank {rank} on {node} {verb}" for rank, (verb, node) in [*every][:8])
            raise on_all(UsageError(f"ranks do not call the same: {words}; all ranks call each method alike"))
        return told & (1 << _VERB_AT) - 1

    def _union(self, bits: int) -> int:
        return functools.reduce(operator.or_, self.allgather(bits), 0)

    def _prove_verb(self) -> None:
        """Before any other kind of message: ranks that do different things would exchange different kinds."""
        if self.is_unproved:
            self.union(0)

    def sound(self, alarm: Alarm) -> None:  # noqa: B027 - one that is alone has nobody to tell
        """Tell all who wait for this rank that it does not come; waits for nobody, and raises nothing."""

    def renew(self) -> None:  # noqa: B027 - one that is alone is always at the same place
        """After an alarm, on every rank: what was under way is left, and all begin at the same place."""

    def start_over(self) -> None:
        """After an alarm, on every rank."""
        self.turn = 0
        self._told.clear()
        self.renew()

    def heard(self) -> Alarm | None:
        """The next thing that another rank has told since the last renewal, if one gave up."""
        return None

    def _due(self) -> Alarm | None:
        """What ends the thing that all do now. Of a later one this rank hears when it comes to that."""
        if (alarm := self.heard()) is not None:
            self._told.append(alarm)
        return next((one for one in self._told if one.turn <= self.turn), None)

    def _listen(self) -> None:
        """While waiting for others: raise what one of them has told, or that one of this node has ended."""
        alarm = self._due()
        if alarm is None and self._neighbours is not None:
            rank = self._neighbours.ended()
            # It may have said why before it went.
            alarm = self._due() if rank is not None else None
            if rank is not None and alarm is None:
                words = "its process has ended without a word: was it killed?"
                alarm = Alarm(rank, self.node, words, self.turn)
                self.sound(alarm)
        if alarm is not None:
            raise alarm.error(self.verb)

    def _say_slow(self, seconds: float) -> None:
        if self.verb and self.local_rank == 0:
            who = f"rank {self.rank} on {self.node}"
            sys.stderr.write(f"hpcrun: {self.verb}: {who} has waited {seconds:.0f} s for other ranks\n")
            sys.stderr.flush()

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
            raise on_all(UsageError(outcome["usage"]))
        if "site" in outcome:
            raise on_all(SiteError(outcome["site"]))
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
        self._abandoned: list[Any] = []
        """What MPI may still be reading or writing."""
        self._alarm_tag = _ALARM_TAG
        self._renewing: tuple[MPI.Intracomm, MPI.Request] | None = None
        self._comm: MPI.Intracomm = MPI.COMM_WORLD
        self._base: MPI.Intracomm = MPI.COMM_WORLD
        """For alarms, and for making a new communicator where one is left in disorder."""
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
        """Wait for a request, which uses what is held."""
        for _ in range(_SPINS):
            if request.Test():
                return
        nap, longest = _NAP_S
        begin, said = time.monotonic(), _SAY_AFTER_S
        try:
            while not request.Test():
                time.sleep(nap)
                nap = min(2 * nap, longest)
                self._listen()
                if (seconds := time.monotonic() - begin) > said:
                    said *= 2
                    self._say_slow(seconds)
        except BaseException:
            self._abandoned.append((request, held))
            raise

    def sound(self, alarm: Alarm) -> None:
        """Tell all who wait for this rank that it does not come."""
        data = np.frombuffer(alarm.render(), dtype=np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        requests = [self._base.Isend([data, self._mpi.BYTE], rank, self._alarm_tag) for rank in others]
        self._abandoned.append((requests, data))
        deadline = time.monotonic() + _SEND_S
        while not self._mpi.Request.Testall(requests) and time.monotonic() < deadline:
            time.sleep(_NAP_S[1])

    def heard(self) -> Alarm | None:
        """The next thing that another rank has told since the last renewal, if one gave up."""
        status = self._mpi.Status()
        if not self._base.Iprobe(self._mpi.ANY_SOURCE, self._alarm_tag, status):
            return None
        data = np.empty(status.Get_count(self._mpi.BYTE), dtype=np.uint8)
        self._base.Recv([data, self._mpi.BYTE], status.source, self._alarm_tag)
        return parse_alarm(data.tobytes())

    def renew(self) -> None:
        """After an alarm: another communicator, which is made once all ranks have come to make it."""
        self._abandoned.append((self._comm, self._renewing))
        self._alarm_tag += 1
        # Begun here, and not when it is wanted: each rank begins as many as it has left behind.
        self._renewing = self._base.Idup()

    def _ready(self) -> MPI.Intracomm:
        """What all ranks talk over, in the same thing."""
        if self._renewing is not None:
            copy, request = self._renewing
            self._wait(request, copy)
            self._comm, self._renewing = copy, None
        self._prove_verb()
        return self._comm

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        comm, mine = self._ready(), np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        length, lengths = np.array([mine.size], dtype=np.int64), np.empty(self.size, dtype=np.int64)
        self._wait(comm.Iallgather(length, lengths), length, lengths)
        every = np.empty(int(lengths.sum()), dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        layout = [every, (lengths.tolist(), starts[:-1].tolist()), self._mpi.BYTE]
        self._wait(comm.Iallgatherv(mine, layout), mine, layout)
        return [json.loads(every[a:b].tobytes()) for a, b in itertools.pairwise(starts)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        comm, text = self._ready(), json.dumps(value).encode() if self.rank == 0 else b""
        mine = np.frombuffer(text, dtype=np.uint8)
        length = np.array([mine.size], dtype=np.int64)
        self._wait(comm.Ibcast(length, root=0), length)
        message = mine.copy() if self.rank == 0 else np.empty(int(length[0]), dtype=np.uint8)
        self._wait(comm.Ibcast(message, root=0), message)
        return json.loads(message.tobytes())

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags on their way; what comes back waits for the union (bitwise or) of all."""
        comm = self._ready()
        mine, union = np.array([flags], dtype=np.int64), np.empty(1, dtype=np.int64)
        request = comm.Iallreduce(mine, union, op=self._mpi.BOR)

        # mpi4py holds on to the buffers for as long as the call lasts, but Open MPI reads them until the end.
        def finish(kept: Any = mine) -> int:
            self._wait(request, kept, union)
            return int(union[0])

        return finish

    def _union(self, bits: int) -> int:
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
        unlink_mapped_segments()
        self._comm.Abort(code)


class StoreControl(Control):
    """Control over a TCPStore, for ranks that torchrun started: there is no MPI among them."""

    def __init__(self, world: World, *, store: Store | None = None, prefix: str = "hpcrun") -> None:
        """`store`: one that the ranks have already; `prefix`: of the keys, other than all others' there."""
        super().__init__(world.rank, world.size)
        self._store = store if store is not None else rendezvous_of(world)
        self._prefix, self._epoch, self._round, self._alarms_heard = prefix, 0, 0, 0
        self._control = PrefixStore(prefix, self._store)
        self._longest_nap = _STORE_NAP_S * max(1.0, self.size / 100)
        self._find_neighbours()

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

    @of_store
    def _published(self, number: int) -> int:
        return int(self._get(f"{number}/done"))

    def _get(self, key: str) -> bytes:
        """What is there, once it is; not by the store's own wait, during which nobody hears an alarm."""
        nap, begin, said, looked = _NAP_S[0], time.monotonic(), _SAY_AFTER_S, 0.0
        while not self._control.check([key]):
            time.sleep(nap)
            nap = min(2 * nap, self._longest_nap)
            if (seconds := time.monotonic() - begin) > looked + _STORE_LOOK_S:
                looked = seconds
                self._listen()
            if seconds > said:
                said *= 2
                self._say_slow(seconds)
        return self._control.get(key)

    def sound(self, alarm: Alarm) -> None:
        """Tell all who wait for this rank that it does not come."""
        with contextlib.suppress(RuntimeError):  # a store that is gone has its own words for the others
            number = self._control.add("alarms", 1)
            self._control.set(f"alarm/{number}", alarm.render().decode())

    def heard(self) -> Alarm | None:
        """The next thing that another rank has told since the last renewal, if one gave up."""
        key = f"alarm/{self._alarms_heard + 1}"
        if not self._control.check([key]):
            return None
        self._alarms_heard += 1
        return parse_alarm(self._control.get(key))

    def renew(self) -> None:
        """After an alarm: other keys, where all begin to count anew."""
        self._epoch, self._round, self._alarms_heard = self._epoch + 1, 0, 0
        self._control = PrefixStore(f"{self._prefix}-{self._epoch}", self._store)

    @of_store
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self._prove_verb()
        self._control.set(f"{self._round + 1}/{self.rank}", json.dumps(value))
        self._meet(1)
        texts = self._control.multi_get([f"{self._round}/{rank}" for rank in range(self.size)])
        values = [json.loads(text) for text in texts]
        mine = f"{self._round}/{self.rank}"
        self._meet(1)
        self._control.delete_key(mine)
        return values

    @of_store
    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        self._prove_verb()
        if self.rank == 0:
            self._control.set(f"{self._round + 1}/value", json.dumps(value))
        self._meet(1)
        key = f"{self._round}/value"
        text = self._control.get(key)
        self._meet(1)
        if self.rank == 0:
            self._control.delete_key(key)
        return json.loads(text)

    @of_store
    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags on their way; what comes back waits for the union (bitwise or) of all."""
        self._prove_verb()
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
    from hpcrun.launcher_world import World

    world = world or World(kind="single", rank=0, size=1, local_rank=0, local_size=1)
    if world.kind == "torchrun":
        return StoreControl(world)
    return MPIControl(world)
