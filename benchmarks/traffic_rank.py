"""A rank of placement_lab.py: replays the demo's step traffic, with any of its processes in any place.

Which process plays which rank of the mesh is a permutation, so that one world measures every order of the
nodes in turn. Axis after axis, as the model has it: shards gather, tensor parallel, pipeline, shards scatter.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from hpcrun.launcher_world import detect_world
from hpcrun.mesh import ParallelDegrees
from hpcrun.runtime.connect import connect_ranks
from hpcrun.runtime.control import Control

PHASES = ("dp_shard gather", "tp", "pp", "dp_shard scatter")
NAP_S, SETTLE_S = 0.0002, 0.02
"""Between polls of MPI: eight that spin on a few cores slow each other down; and before every step."""


@dataclass(frozen=True)
class Exchange:
    """The messages of a step: how many of each kind, and the bytes of one."""

    pieces: int
    """Gathers of weights, and as many scatters of gradients, along dp_shard."""
    piece_bytes: int
    """Of what is gathered or scattered, whole."""
    layers: int
    """Gathers and scatters along tp in turn."""
    layer_bytes: int
    microbatches: int
    hop_bytes: int
    """From a stage to the next one, and back."""


class Transport(ABC):
    """Collectives of two ranks and messages between them; every call returns a wait for its end."""

    @abstractmethod
    def gather(self, group: tuple[int, ...], mine: Any, whole: Any) -> Callable[[], object]:
        """All-gather."""

    @abstractmethod
    def scatter(self, group: tuple[int, ...], whole: Any, mine: Any) -> Callable[[], object]:
        """Reduce-scatter."""

    @abstractmethod
    def send(self, peer: int, data: Any) -> Callable[[], object]:
        """To a process."""

    @abstractmethod
    def receive(self, peer: int, data: Any) -> Callable[[], object]:
        """From a process."""

    @abstractmethod
    def buffer(self, size_bytes: int) -> Any:
        """Floats."""


class Mpi(Transport):
    """MPI on numpy's buffers."""

    def __init__(self, groups: Iterable[tuple[int, ...]]) -> None:
        world = MPI.COMM_WORLD
        self._comms = {
            group: world.Create_group(world.group.Incl(group)) for group in groups if world.rank in group
        }

    def gather(self, group: tuple[int, ...], mine: Any, whole: Any) -> Callable[[], object]:
        """Iallgather."""
        return self._waiting(self._comms[group].Iallgather(mine, whole))

    def scatter(self, group: tuple[int, ...], whole: Any, mine: Any) -> Callable[[], object]:
        """Ireduce_scatter_block."""
        return self._waiting(self._comms[group].Ireduce_scatter_block(whole, mine))

    def send(self, peer: int, data: Any) -> Callable[[], object]:
        """Isend."""
        return self._waiting(MPI.COMM_WORLD.Isend(data, peer))

    def receive(self, peer: int, data: Any) -> Callable[[], object]:
        """Irecv."""
        return self._waiting(MPI.COMM_WORLD.Irecv(data, peer))

    def buffer(self, size_bytes: int) -> Any:
        """An array."""
        return np.ones(size_bytes // 4, dtype=np.float32)

    @staticmethod
    def _waiting(request: MPI.Request) -> Callable[[], object]:
        def wait() -> None:
            while not request.Test():
                time.sleep(NAP_S)

        return wait


class Gloo(Transport):
    """torch.distributed on gloo."""

    def __init__(self, groups: Iterable[tuple[int, ...]]) -> None:
        # Torch puts the ranks of a group in their order: in groups of two that changes nothing.
        self._groups = {group: dist.new_group(list(group)) for group in groups}

    def gather(self, group: tuple[int, ...], mine: Any, whole: Any) -> Callable[[], object]:
        """all_gather_into_tensor."""
        return _ended(dist.all_gather_into_tensor(whole, mine, self._groups[group], async_op=True))

    def scatter(self, group: tuple[int, ...], whole: Any, mine: Any) -> Callable[[], object]:
        """reduce_scatter_tensor."""
        return _ended(dist.reduce_scatter_tensor(mine, whole, group=self._groups[group], async_op=True))

    def send(self, peer: int, data: Any) -> Callable[[], object]:
        """isend."""
        return _ended(dist.isend(data, peer))

    def receive(self, peer: int, data: Any) -> Callable[[], object]:
        """irecv."""
        return _ended(dist.irecv(data, peer))

    def buffer(self, size_bytes: int) -> Any:
        """A tensor."""
        return torch.ones(size_bytes // 4)


def _ended(work: dist.Work | None) -> Callable[[], object]:
    assert work is not None
    return work.wait


@dataclass(frozen=True)
class Part:
    """What one process does in one order of the nodes."""

    stage: int
    pp: tuple[int, ...]
    dp_shard: tuple[int, ...]
    tp: tuple[int, ...]
    """The processes of its groups, in the order of the mesh."""

    @classmethod
    def of(cls, processes: Sequence[int], degrees: ParallelDegrees, rank: int) -> Part:
        """The part of a rank of the mesh; `processes` plays all of them."""
        ranks, own = range(degrees.world_size), degrees.coordinates(rank)
        groups = {
            axis: tuple(
                processes[other]
                for other in ranks
                if all(at == own[name] for name, at in degrees.coordinates(other).items() if name != axis)
            )
            for axis in ("pp", "dp_shard", "tp")
        }
        return cls(own["pp"], **groups)


class Replay:
    """One process's share of the steps, over one transport."""

    def __init__(self, transport: Transport, exchange: Exchange) -> None:
        self._over, self._exchange = transport, exchange
        buffer = transport.buffer
        self._piece, self._shard = buffer(exchange.piece_bytes), buffer(exchange.piece_bytes // 2)
        self._layer, self._slice = buffer(exchange.layer_bytes), buffer(exchange.layer_bytes // 2)
        self._out = [buffer(exchange.hop_bytes) for _ in range(exchange.microbatches)]
        self._in = [buffer(exchange.hop_bytes) for _ in range(exchange.microbatches)]

    def step(self, part: Part) -> list[float]:
        """The times on the clock that all share: at the start, and after each of PHASES."""
        over, exchange = self._over, self._exchange
        marks = [time.monotonic()]
        for _ in range(exchange.pieces):
            over.gather(part.dp_shard, self._shard, self._piece)()
        marks.append(time.monotonic())
        for number in range(exchange.layers):
            if number % 2:
                over.scatter(part.tp, self._layer, self._slice)()
            else:
                over.gather(part.tp, self._slice, self._layer)()
        marks.append(time.monotonic())
        self._pipeline(part)
        marks.append(time.monotonic())
        for _ in range(exchange.pieces):
            over.scatter(part.dp_shard, self._piece, self._shard)()
        marks.append(time.monotonic())
        return marks

    def _pipeline(self, part: Part) -> None:
        """1F1B of two stages, without the arithmetic between: a stage answers what has come in."""
        peer = part.pp[1 - part.stage]
        arrivals = [self._over.receive(peer, data) for data in self._in]
        if part.stage == 0:
            sent = [self._over.send(peer, data) for data in self._out]
            for arrived in arrivals:
                arrived()
        else:
            sent = []
            for arrived, data in zip(arrivals, self._out, strict=True):
                arrived()
                sent.append(self._over.send(peer, data))
        for left in sent:
            left()


class Counter:
    """Bytes over the uplinks, which the benchmark reads for us outside of all nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked = folder, 0

    def read(self) -> int:
        """What is counted by now."""
        self._asked += 1
        answer = self._folder / f"told-{self._asked}"
        (self._folder / f"ask-{self._asked}").touch()
        while not answer.exists():
            time.sleep(0.002)
        return int(answer.read_text())


class World:
    """All orders over all transports, in turn."""

    def __init__(self, control: Control, task: Mapping[str, Any], folder: Path) -> None:
        self._control, self._counter = control, Counter(folder)
        self._rounds: int = task["rounds"]
        self._timed: int = task["timed"]
        self._counted: int = task["counted"]
        degrees, exchange = ParallelDegrees(**task["degrees"]), Exchange(**task["exchange"])
        every = [
            [Part.of(processes, degrees, rank) for rank in range(len(processes))]
            for processes in task["orders"]
        ]
        groups = sorted({group for parts in every for part in parts for group in (part.dp_shard, part.tp)})
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo", store=control.store(), rank=control.rank, world_size=control.size)
        self._replays = {"MPI": Replay(Mpi(groups), exchange), "gloo": Replay(Gloo(groups), exchange)}
        self._parts = [
            parts[processes.index(control.rank)] if control.rank in processes else None
            for processes, parts in zip(task["orders"], every, strict=True)
        ]

    def measure(self) -> dict[str, list[dict[str, Any]]]:
        """For every transport and order: the marks of its steps here, and the bytes that crossed in one."""
        found: dict[str, list[dict[str, Any]]] = {
            name: [{"crossed": self._crossed(replay, part), "marks": []} for part in self._parts]
            for name, replay in self._replays.items()
        }
        turns = [(name, order) for name in found for order in range(len(self._parts))]
        dice = random.Random(0)
        for _ in range(self._rounds):
            dice.shuffle(turns)
            for name, order in turns:
                # The first one wakes the connections up, as a step right before would have.
                self._step(self._replays[name], self._parts[order])
                found[name][order]["marks"] += [
                    self._step(self._replays[name], self._parts[order]) for _ in range(self._timed)
                ]
        return found

    def _crossed(self, replay: Replay, part: Part | None) -> float:
        before = self._count()
        for _ in range(self._counted):
            self._step(replay, part)
        return (self._count() - before) / self._counted

    def _count(self) -> int:
        self._control.barrier()
        return int(self._control.everywhere(self._counter.read))

    def _step(self, replay: Replay, part: Part | None) -> list[float] | None:
        self._control.barrier()
        time.sleep(SETTLE_S)
        return replay.step(part) if part is not None else None


def merged(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From every process's marks: seconds of each step and of its phases, which end when all have ended."""

    def of(name: str, order: int) -> dict[str, Any]:
        every = [found[name][order]["marks"] for found in each]
        playing = np.array([marks for marks in every if marks and marks[0] is not None])
        first, ends = playing[:, :, 0].min(axis=0), playing[:, :, 1:].max(axis=0)
        phases = np.diff(ends, axis=1, prepend=first[:, None])
        return {
            "crossed": each[0][name][order]["crossed"],
            "steps": (ends[:, -1] - first).tolist(),
            "phases": dict(zip(PHASES, phases.T.tolist(), strict=True)),
        }

    return {name: [of(name, order) for order in range(len(each[0][name]))] for name in each[0]}


def main() -> None:
    """`traffic_rank.py FOLDER`: read task.json there, leave result.json."""
    folder = Path(sys.argv[1])
    control = connect_ranks(detect_world(os.environ))
    task = json.loads((folder / "task.json").read_text())
    wanted = task["nodes"][control.rank // task["per_node"]]
    if control.node != wanted:
        sys.exit(f"rank {control.rank} is on {control.node}, and is to be on {wanted}")
    each = control.allgather(World(control, task, folder).measure())
    if control.rank == 0:
        (folder / "result.json").write_text(json.dumps(merged(each)))
    control.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
