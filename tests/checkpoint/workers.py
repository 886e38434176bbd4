"""Real checkpoint workers for tests: a process a node, with pretended ranks that fill its slots."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun import __version__
from hpcrun.checkpoint.flush.arena import SOCKET_NAME, locate_arena, map_slot
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.messages.lines import connect_unix_socket
from hpcrun.specs.rundir import RunDir
from tests.checkpoint.generations import content_of, pieces_of
from tests.checkpoint.loads import fill, plans_of, stamp_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


class Talk:
    """Lines of JSON with a worker; what was not waited for is kept."""

    def __init__(self, reading: int) -> None:
        self.reading = reading
        self._incoming, self.heard = b"", list[dict[str, Any]]()

    def wait(self, *kinds: str, **wanted: Any) -> dict[str, Any]:
        """The next message of these kinds, with these values; AssertionError when the worker is gone."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for message in self.heard:
                if message["kind"] in kinds and all(message.get(key) == wanted[key] for key in wanted):
                    self.heard.remove(message)
                    return message
            ready, _, _ = select.select([self.reading], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self.reading, 65536) if ready else b""
            assert data, f"no {kinds} {wanted}; heard: {self.heard}"
            *lines, self._incoming = (self._incoming + data).split(b"\n")
            self.heard += [message for line in lines if "hpcrun" not in (message := json.loads(line))]


class Host(Talk):
    """An agent, as its checkpoint worker sees it."""

    def __init__(self, root: Path, run: RunDir, node: str) -> None:
        self.root, self.run, self.node = root, run, node
        self.ranks: list[Rank] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpcrun", "_checkpoint_worker", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        super().__init__(self.process.stdout.fileno())
        self.say(hpcrun=__version__)

    def say(self, **order: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def configure(self, attempt: int = 1, **spec: Any) -> dict[str, Any]:
        """The beginning of an attempt."""
        self.say(kind="configure_worker", run=str(self.run.path), node=self.node, attempt=attempt, spec=spec)
        return self.wait("worker_ready")

    @property
    def arena(self) -> Path:
        """Its folder."""
        return locate_arena(self.root, self.run.run_id, self.node)

    def holdings(self) -> list[dict[str, Any]]:
        """All that the node has."""
        self.say(kind="take_inventory", id=7)
        found: list[dict[str, Any]] = self.wait("worker_inventory", id=7)["holdings"]
        return found

    def end(self) -> int:
        """Close stdin, as an agent that ends does."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        for rank in self.ranks:
            rank.close()
        return code

    def kill(self) -> None:
        """With no warning."""
        self.process.send_signal(signal.SIGKILL)
        self.end()


class Rank(Talk):
    """A rank of a node, as the checkpoint worker sees it."""

    def __init__(self, host: Host, rank: int, ranks: Sequence[int], world_size: int, file: int = 0) -> None:
        self.rank, self.ranks, self.world_size = rank, tuple(ranks), world_size
        self.pieces, self.plan = plans_of(ranks, world_size, file)[tuple(ranks).index(rank)]
        self._socket = connect_unix_socket(host.arena, SOCKET_NAME)
        super().__init__(self._socket.fileno())
        self._socket.sendall(json.dumps({"hpcrun": __version__}).encode() + b"\n")
        host.ranks.append(self)
        self.slots: list[str] = []

    def say(self, **order: Any) -> None:
        """Ask for something."""
        self._socket.sendall(json.dumps({"rank": self.rank} | order).encode() + b"\n")

    def ask_slots(self, count: int = 2) -> None:
        """The answer comes when all ranks of the node have asked."""
        size = self.plan.layout.size_bytes
        self.say(kind="reserve_slots", size_bytes=size, slots=count, ranks=self.ranks)

    def have_slots(self) -> None:
        """And tell the plan."""
        self.slots = self.wait("slots_reserved")["slots"]
        pieces = [list(piece) for piece in self.pieces]
        self.say(kind="plan_slot", key=1, pieces=pieces, file=self.plan.file, start=self.plan.start)
        self.wait("slot_planned")

    def claim(self, step: int, published: int | None = None, attempt: int = 1) -> dict[str, Any]:
        """Ask for a slot; the answer."""
        stamp = stamp_of(step, self.world_size, attempt)
        before = stamp_of(published, self.world_size, attempt).generation if published is not None else None
        self.say(kind="claim_slot", generation=stamp.generation, published=before)
        return self.wait("slot_claimed", "slots_busy")

    def copy(self, slot: int, step: int) -> None:
        """The bytes of a step, at their places."""
        memory = map_slot(Path(self.slots[slot]))
        view = memoryview(memory)
        fill(view, self.plan, [content_of(piece, step) for piece in self.pieces])
        view.release()
        memory.close()

    def tell_filled(self, slot: int, step: int, tiers: Sequence[str], attempt: int = 1) -> CheckpointId:
        """The bytes are in place."""
        stamp = stamp_of(step, self.world_size, attempt)
        self.say(kind="slot_filled", slot=slot, key=1, stamp=asdict(stamp), tiers=list(tiers))
        return stamp

    def save(
        self, step: int, tiers: Sequence[str], published: int | None = None, attempt: int = 1
    ) -> CheckpointId:
        """All of it."""
        claimed = self.claim(step, published, attempt)
        assert claimed["kind"] == "slot_claimed", claimed
        self.copy(claimed["slot"], step)
        return self.tell_filled(claimed["slot"], step, tiers, attempt)

    def close(self) -> None:
        """Be gone, as a killed rank is."""
        self._socket.close()


def ranks_of(host: Host, ranks: Sequence[int], world_size: int, file: int = 0, slots: int = 2) -> list[Rank]:
    """All ranks of a node, with their slots."""
    assert pieces_of(0, world_size)
    found = [Rank(host, rank, ranks, world_size, file) for rank in ranks]
    for rank in found:
        rank.ask_slots(slots)
    for rank in found:
        rank.have_slots()
    return found
