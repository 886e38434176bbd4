"""Guests: copies of other nodes' parts in a spare's arena, there before they are needed.

    replica-GENERATION-NUMBER.bin   a part, proved before it has this name
    replica-GENERATION-NUMBER.json  its record, as beside a slot: written last, and removed first

A spare is told whose parts to copy when all nodes have sealed a generation. It asks each of these nodes, and
reads only while that node stores nothing itself. Copies take half of the room at most, and older ones go when
newer ones are there, or before that where both do not fit.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpcrun.checkpoint.flush.arena import Arena
from hpcrun.checkpoint.flush.throttle import Throttle
from hpcrun.checkpoint.format import PART_ALIGN, DamagedError, Part, align_size
from hpcrun.checkpoint.parity.files import ASIDE_SUFFIX, AtomicFile
from hpcrun.checkpoint.part_check import verify_part
from hpcrun.checkpoint.part_record import PartRecord, parse_part_record, render_part_record
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry
from hpcrun.checkpoint.worker_messages import CopyParts, PartsCopied
from hpcrun.errors import HpcrunError, SiteError
from hpcrun.files import OwnedDirectory, UntrustedFileError

_PREFIX = "replica-"
_NAME = re.compile(r"replica-([0-9a-f]{32})-([0-9]+)\.json")
_GENERATION = re.compile(r"[0-9a-f]{32}")
_PIECE_BYTES = 8 << 20
_ROOM_DIVISOR = 2
"""One part in so many of the room is for copies: the spare's own slots must fit when it steps in."""
_PEER_POLL_S, _PEER_IDLE_TIMEOUT_S = 1.0, 600.0
"""How long one question waits for a node to have nothing of its own to store, and all of them together."""


class PeerReader(Protocol):
    """The way to other nodes' workers."""

    def ask(self, node: str, request: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        """What a node answers; SiteError where it does not, or says no."""

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        """Fill a buffer with what a node was asked for; SiteError unless it gets all of it."""


def is_spare_replica(path: str) -> bool:
    """Whether a part lies there that is another node's."""
    return Path(path).name.startswith(_PREFIX)


def list_spare_replicas(files: OwnedDirectory, node: str) -> list[InventoryEntry]:
    """The copies of other nodes' parts that lie whole in an arena."""
    return _replica_inventory(_find_replicas(files), node)


@dataclass
class _CopyOrder:
    """One copying, and whether it has been called off."""

    number: int
    stamp: CheckpointId
    nodes: tuple[str, ...]
    peer_reader: PeerReader
    over: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        if self.over.is_set():
            raise SiteError("given up, as something else is to be done")


class SpareReplicaStore:
    """Those of one arena; they are fetched in a thread of its own, all else happens at once."""

    def __init__(self, arena: Arena, say: Callable[[PartsCopied], None]) -> None:
        """`say` gets the answers to orders, in the other thread. They give way where slots need the room."""
        self._files, self._say, self._room = arena.files, say, arena.room
        arena.evict_replicas = self._evict
        self._throttle, self._lock = Throttle(), threading.Lock()
        self._thread = ThreadPoolExecutor(1, "replicas")
        self._order: _CopyOrder | None = None
        self._held = _find_replicas(arena.files)
        for path in map(Path, arena.files.names()):
            is_held = arena.folder / path.with_suffix(".bin") in self._held
            if path.name.startswith(_PREFIX) and (path.suffix == ASIDE_SUFFIX or not is_held):
                arena.files.unlink(path.name)

    def obey(self, copy: CopyParts, asks: PeerReader, flush_duty: float) -> None:
        """Begin what an order asks for, instead of an earlier one; ValueError: it makes no sense."""
        order = _CopyOrder(copy.id, copy.stamp, copy.nodes, asks)
        if not _GENERATION.fullmatch(order.stamp.generation):
            raise ValueError(f"{order.stamp.generation} is not a generation: 32 hexadecimal digits")
        self.end()
        self._throttle.flush_duty, self._order = flush_duty, order
        self._thread.submit(self._copy, order)

    def end(self) -> None:
        """What is being copied is needed no more."""
        with self._lock:
            if self._order is not None:
                self._order.over.set()

    def close(self) -> None:
        """Begin nothing new."""
        self.end()
        self._throttle.hasten()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def holdings(self, node: str) -> list[InventoryEntry]:
        """What is here whole, the newest last."""
        with self._lock:
            held = dict(self._held)
        return _replica_inventory(held, node)

    def retain(self, generations: Collection[str]) -> None:
        """Let go of all but these generations."""
        self._let_go(lambda record: record.stamp.generation not in generations)
        with self._lock:
            if self._order is not None and self._order.stamp.generation not in generations:
                self._order.over.set()

    def dismiss(self, generation: str, numbers: Collection[int]) -> None:
        """Let go of all but these parts of a generation."""
        self.end()
        self._let_go(lambda one: one.stamp.generation != generation or one.number not in numbers)

    def _evict(self, may_drop: Callable[[CheckpointId], bool]) -> None:
        self._let_go(lambda record: may_drop(record.stamp))

    def _let_go(self, needless: Callable[[PartRecord], bool]) -> None:
        with self._lock:
            for path in [path for path, record in self._held.items() if needless(record)]:
                self._drop(path)

    def _drop(self, path: Path) -> None:
        """With the lock held."""
        del self._held[path]
        self._files.unlink(path.with_suffix(".json").name)
        self._files.unlink(path.name)

    def _copy(self, order: _CopyOrder) -> None:
        """In the other thread: node after node, until one does not fit or all are here."""
        begin, generation = time.monotonic(), order.stamp.generation
        whole, left, problems = list[str](), list[str](), dict[str, str]()
        self._throttle.begin_save()
        self._throttle.start()
        for node in order.nodes:
            try:
                (whole if self._copy_share(order, node) else left).append(node)
            except (HpcrunError, OSError, KeyError, TypeError, ValueError) as error:
                if order.over.is_set():
                    break
                problems[node] = str(error)
        if whole and not order.over.is_set():
            self._let_go(lambda one: one.stamp.generation != generation)
        with self._lock:
            held = [one.part.size_bytes for one in self._held.values() if one.stamp == order.stamp]
        seconds = round(time.monotonic() - begin, 6)
        self._say(
            PartsCopied(
                order.number,
                order.stamp.step,
                generation,
                tuple(whole),
                tuple(left),
                problems,
                sum(held),
                seconds,
            )
        )

    def _copy_share(self, order: _CopyOrder, node: str) -> bool:
        """All that a node's ranks have sealed; False where there is no room for it."""
        order.check()
        told = order.peer_reader.ask(node, {"do": "share", "generation": order.stamp.generation})
        if CheckpointId(**told["stamp"]) != order.stamp:
            raise ValueError(
                f"{node}: has another state under the name of generation {order.stamp.generation}"
            )
        records = [PartRecord(order.stamp, int(number), Part(**part)) for number, part in told["parts"]]
        wrong = [one.number for one in records if not 0 <= one.number < order.stamp.world_size]
        if wrong or not records:
            raise ValueError(f"{node}: tells of parts {wrong} of {order.stamp.world_size}")
        missing = [one for one in records if self._held.get(self._path(one)) != one]
        if not self._make_room(missing, order.stamp):
            return False
        for one in missing:
            self._copy_part(order, node, one)
        return True

    def _path(self, record: PartRecord) -> Path:
        return self._files.path / f"{_PREFIX}{record.stamp.generation}-{record.number}.bin"

    def _make_room(self, records: Iterable[PartRecord], stamp: CheckpointId) -> bool:
        """Whether so much more fits; older copies give way where it does not fit beside them."""
        size = sum(align_size(one.part.size_bytes, PART_ALIGN) for one in records)
        with self._lock:
            sizes = {path: align_size(one.part.size_bytes, PART_ALIGN) for path, one in self._held.items()}
            old = [path for path, one in self._held.items() if one.stamp != stamp]
            held = sum(sizes.values())
            most = (self._room(self._files.path).size_bytes + held) // _ROOM_DIVISOR
            if held - sum(sizes[path] for path in old) + size > most:
                return False
            while held + size > most:
                held -= sizes[old[0]]
                self._drop(old.pop(0))
        return True

    def _copy_part(self, order: _CopyOrder, node: str, record: PartRecord) -> None:
        path, size = self._path(record), record.part.size_bytes
        buffer = memoryview(bytearray(min(_PIECE_BYTES, size)))
        request = {"do": "part", "generation": order.stamp.generation, "number": record.number}
        with AtomicFile(self._files, path.name, size) as file:
            for at in range(0, size, _PIECE_BYTES):
                self._await_idle(order, node)
                into = buffer[: size - at]
                order.peer_reader.read(node, request | {"at": at}, into)
                file.write(at, into)
                self._throttle.rest()
            held = HeldPart(record.number, str(file.aside), 0, record.part)
            try:
                verify_part(held, bytes.fromhex(order.stamp.generation))
            except DamagedError:
                # Mostly its slot was used again meanwhile, which the node then says itself.
                order.peer_reader.ask(node, {"do": "share", "generation": order.stamp.generation})
                raise
            with self._lock:
                order.check()
                file.put_in_place()
                self._held[path] = record
                try:
                    told = render_part_record(record).encode()
                    self._files.write_whole(path.with_suffix(".json").name, told)
                except OSError:
                    self._drop(path)
                    raise

    def _await_idle(self, order: _CopyOrder, node: str) -> None:
        """Wait until a node has nothing of its own to store."""
        begin = time.monotonic()
        request = {"do": "calm", "generation": order.stamp.generation, "wait_s": _PEER_POLL_S}
        while True:
            order.check()
            if order.peer_reader.ask(node, request, _PEER_POLL_S)["is_calm"]:
                break
            self._throttle.start()  # to wait is no work
            if time.monotonic() - begin > _PEER_IDLE_TIMEOUT_S:
                raise SiteError(f"{node}: stores saves of its own for more than {_PEER_IDLE_TIMEOUT_S:g} s")


def _find_replicas(files: OwnedDirectory) -> dict[Path, PartRecord]:
    """The copies with their records, by file."""
    found = {}
    for name in map(_NAME.fullmatch, files.names()):
        if name is None:
            continue
        part = files.path / f"{_PREFIX}{name[1]}-{name[2]}.bin"
        try:
            record = parse_part_record(json.loads(files.read(name[0])))
            size = files.status_of(part.name).st_size
        except (OSError, ValueError, UntrustedFileError):
            continue
        is_named = (record.stamp.generation, record.number) == (name[1], int(name[2]))
        if is_named and size == record.part.size_bytes:
            found[part] = record
    return found


def _replica_inventory(held: Mapping[Path, PartRecord], node: str) -> list[InventoryEntry]:
    of = dict[CheckpointId, list[HeldPart]]()
    for path, record in held.items():
        of.setdefault(record.stamp, []).append(HeldPart(record.number, str(path), 0, record.part))
    return [
        InventoryEntry(stamp, "memory", node, tuple(sorted(parts, key=lambda one: one.number)))
        for stamp, parts in sorted(of.items(), key=lambda one: (one[0].attempt, one[0].step))
    ]
