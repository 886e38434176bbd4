"""A node's arena: the memory that holds the newest states of its ranks, whoever dies.

    /dev/shm/hpcrun-UID/RUN/NODE/       0700, ours alone
        slot-RANK-K.bin                 the image of one rank's part; made once, with all its pages
        slot-RANK-K.json                which generation it holds: written when it is sealed, removed before
                                        the slot is used again, so that a slot without it holds nothing
        guest-GENERATION-NUMBER.*       a copy of another node's part, and its record
        drain.sock                      where ranks speak to the drain worker

RUN is the run's id with each / replaced by +. The folder RUN also holds run.json, the run's directory, by
which anybody finds out whether that run still lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcrun.checkpoint.drain.room import Room, find_room, gib
from hpcrun.checkpoint.format import PART_ALIGN, padded
from hpcrun.checkpoint.levels import HeldPart, Holding, Stamp
from hpcrun.checkpoint.partrecord import PartRecord, parse_part_record, render_part_record
from hpcrun.errors import SiteError
from hpcrun.specs.records import write_json, write_whole

SHM = Path("/dev/shm")
SOCKET = "drain.sock"
_RUN = "run.json"
_SLOT = re.compile(r"slot-([0-9]+)-([0-9]+)\.bin")
_BLOCK_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23

SlotState = Literal["free", "claimed", "filled", "sealed"]


def arena_folder(root: Path, run_id: str, node: str) -> Path:
    """Where a node's arena of a run lies; NODE is the agent's name of it."""
    return root / f"hpcrun-{os.getuid()}" / run_id.replace("/", "+") / node


def make_folder(root: Path, run: Path, run_id: str, node: str) -> Path:
    """The folder of a node's arena, made if need be; SiteError where somebody else's is in its place."""
    folder = arena_folder(root, run_id, node)
    for one in (folder.parents[1], folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            one.mkdir(mode=0o700)
        _check_folder(one)
    if not (folder.parent / _RUN).exists():
        write_json(folder.parent / _RUN, str(run))
    return folder


def _check_folder(folder: Path) -> None:
    """Names in /dev/shm are anybody's to take."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise SiteError(f"{folder}: is no directory; remove it")
    if status.st_uid != os.getuid():
        raise SiteError(f"{folder}: belongs to user {status.st_uid}, not to you; have it removed")
    if status.st_mode & 0o077:
        raise SiteError(
            f"{folder}: is open to others (mode {stat.S_IMODE(status.st_mode):o}); chmod 700, or remove it"
        )


@dataclass
class Slot:
    """The memory of one state of one rank."""

    rank: int
    path: Path
    size_bytes: int
    memory: mmap.mmap
    state: SlotState = "free"
    generation: str = ""
    """What a rank fills it with, or what it holds."""
    record: PartRecord | None = None
    """What is sealed in it."""
    in_flight: bool = False
    """It is being sealed or stored, and must stay as it is."""

    @property
    def record_path(self) -> Path:
        """Where its record lies."""
        return self.path.with_suffix(".json")

    def image(self, size_bytes: int) -> memoryview:
        """Its first bytes."""
        return memoryview(self.memory)[:size_bytes]

    def empty(self) -> None:
        """Whatever it held is gone; the record first, for whoever looks at the files."""
        self.record_path.unlink(missing_ok=True)
        self.state, self.generation, self.record = "free", "", None

    def hold(self, record: PartRecord) -> None:
        """It is sealed: from now on it survives ranks and worker."""
        write_whole(self.record_path, render_part_record(record))
        self.state, self.record, self.generation = "sealed", record, record.stamp.generation


@dataclass
class Arena:
    """The slots of a node. What an earlier worker or attempt has left is found again."""

    folder: Path
    room: Callable[[Path], Room] = find_room
    slots: dict[int, list[Slot]] = field(default_factory=dict)
    """Of each rank of this attempt, in the order in which it knows them."""
    old: list[Slot] = field(default_factory=list)
    """Slots that are in use by no rank, and hold something."""
    give_way: Callable[[Callable[[Stamp], bool]], None] = lambda _may_drop: None
    """Lets go of what else is here of states that may be dropped."""

    def __post_init__(self) -> None:
        self._inode = self.folder.stat().st_ino
        for path in sorted(self.folder.iterdir()):
            if match := _SLOT.fullmatch(path.name):
                self.old.append(_reopen(path, int(match[1])))

    @property
    def is_there(self) -> bool:
        """Whether its folder still is: some systems clear /dev/shm when a user's last session ends."""
        try:
            return self.folder.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def every(self) -> Iterator[Slot]:
        """All slots there are."""
        for slots in self.slots.values():
            yield from slots
        yield from self.old

    def reserve(
        self,
        sizes: dict[int, int],
        count: int,
        may_drop: Callable[[Stamp], bool],
        parity_bytes: int = 0,
    ) -> dict[int, list[Slot]]:
        """Slots for all ranks of the node, `count` each, or one where two do not fit; SiteError where none.

        Slots that fit are kept with what they hold. `may_drop` says whether a state is also kept elsewhere,
        and may make room. `parity_bytes`: what is to stay free for parity, that which is there included.
        """
        fitting = self._sort_out(sizes, count)
        there = sum(path.stat().st_size for path in self.folder.glob("parity-*.bin"))
        beside = max(0, parity_bytes - there)
        for may_empty in (False, True):
            if may_empty:
                self._drop(lambda slot: slot.record is None or may_drop(slot.record.stamp))
                self.give_way(may_drop)
            room = self.room(self.folder)
            for each in range(count, 0, -1):
                wanted = {rank: max(0, each - len(fitting[rank])) for rank in sizes}
                size = sum(padded(sizes[rank], PART_ALIGN) * number for rank, number in wanted.items())
                if size + beside <= room.size_bytes and self._make_all(sizes, wanted, fitting):
                    self.slots = fitting
                    return fitting
        held = f"; {gib(sum(s.size_bytes for s in self.old))} hold states of before" if self.old else ""
        parity = f" and parity {gib(parity_bytes)}" if parity_bytes else ""
        self.old += [slot for slots in fitting.values() for slot in slots]
        raise SiteError(
            f"{self.folder}: one state of this node's ranks is {gib(sum(sizes.values()))}{parity}, there is"
            f" room for {room}{held}; ask for more memory (--mem), or set checkpoint.memory=0"
        )

    def _sort_out(self, sizes: dict[int, int], count: int) -> dict[int, list[Slot]]:
        """The slots that can be used on, by rank; the others are old, and those that hold nothing go."""
        fitting: dict[int, list[Slot]] = {rank: [] for rank in sizes}
        every, self.slots, self.old = list(self.every()), {}, []
        for slot in every:
            mine = fitting.get(slot.rank)
            if slot.state != "sealed" and not slot.in_flight:
                slot.empty()
            if mine is not None and slot.size_bytes >= sizes[slot.rank] and len(mine) < count:
                mine.append(slot)
            else:
                self.old.append(slot)
        self._drop(lambda slot: slot.record is None)
        return fitting

    def _make_all(
        self, sizes: dict[int, int], wanted: dict[int, int], fitting: dict[int, list[Slot]]
    ) -> bool:
        """Make the slots that are missing; False, with nothing made, where the space is not there."""
        made: list[Slot] = []
        try:
            for rank in [rank for rank, number in wanted.items() for _ in range(number)]:
                made.append(self._make(rank, padded(sizes[rank], PART_ALIGN)))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFAULT):
                raise
            for slot in made:
                slot.path.unlink()
            return False
        for slot in made:
            fitting[slot.rank].append(slot)
        return True

    def _make(self, rank: int, size_bytes: int) -> Slot:
        """A new slot with all its pages: no copy into it can fail for want of one."""
        number = 0
        while (path := self.folder / f"slot-{rank}-{number}.bin").exists():
            number += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return Slot(rank, path, size_bytes, memory)

    def _drop(self, needless: Callable[[Slot], bool]) -> None:
        """Give back the memory of old slots."""
        for slot in [slot for slot in self.old if not slot.in_flight and needless(slot)]:
            slot.empty()
            slot.path.unlink(missing_ok=True)
            self.old.remove(slot)

    def claim(
        self,
        rank: int,
        generation: str,
        published: str | None,
        attempt: int,
        is_elsewhere: Callable[[Stamp], bool],
    ) -> Slot | str:
        """A slot for a rank's next state, emptied; or why there is none now.

        `published`: the newest generation that all nodes are known to have, restored or sealed. It never
        loses its only place; nor does a state of an earlier attempt while nothing is published.
        """
        mine = self.slots.get(rank, [])
        if not mine:
            return f"rank {rank} has reserved no slot"
        for slot in mine:
            if slot.state == "claimed":  # for a save that the ranks have not gone on with
                slot.empty()
        why = []
        for slot in sorted(mine, key=_age):
            if slot.in_flight or slot.state == "filled":
                why.append(f"{slot.path.name} is on its way to the next level")
                continue
            stamp = slot.record.stamp if slot.record is not None else None
            if (
                stamp is None
                or (stamp.attempt == attempt if published is None else stamp.generation != published)
                or is_elsewhere(stamp)
            ):
                slot.empty()
                slot.state, slot.generation = "claimed", generation
                return slot
            why.append(f"{slot.path.name} holds the only copy of step {stamp.step}")
        return "; ".join(why)

    def release(self, keep: set[str]) -> None:
        """Let go of what is sealed, but for these generations."""
        for slot in self.every():
            if slot.state == "sealed" and not slot.in_flight and slot.generation not in keep:
                slot.empty()
        self._drop(lambda slot: slot.record is None)

    def holdings(self, node: str) -> list[Holding]:
        """What is sealed here, by generation, the newest last."""
        found: dict[Stamp, list[HeldPart]] = {}
        for slot in self.every():
            if (record := slot.record) is not None:
                one = HeldPart(record.number, str(slot.path), 0, record.part)
                found.setdefault(record.stamp, []).append(one)
        return [
            Holding(stamp, "memory", node, tuple(sorted(parts, key=lambda part: part.number)))
            for stamp, parts in sorted(found.items(), key=lambda one: one[0].step)
        ]


def _age(slot: Slot) -> tuple[int, int]:
    """Empty slots first, then the oldest state."""
    stamp = slot.record.stamp if slot.record is not None else None
    return (stamp.attempt, stamp.step) if stamp is not None else (-1, -1)


def map_slot(path: Path) -> mmap.mmap:
    """A rank's own view of a slot, with all its pages in place, so that no copy has to wait for one.

    What the slot holds stays as it is.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Older kernels know no call for it; a look at each page brings it in as well.
        for begin in range(0, len(memory), _BLOCK_BYTES):
            memory[begin : begin + _BLOCK_BYTES : mmap.PAGESIZE]
    return memory


def _reopen(path: Path, rank: int) -> Slot:
    """A slot that is there already; SiteError where it is not ours."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SiteError(f"{path}: cannot be opened: {error.strerror}; remove it") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_nlink != 1:
            raise SiteError(f"{path}: is no file of yours alone; remove it")
        if not status.st_size:
            # Its maker was killed before it had any memory.
            return Slot(rank, path, 0, mmap.mmap(-1, 1))
        slot = Slot(rank, path, status.st_size, mmap.mmap(descriptor, 0))
    finally:
        os.close(descriptor)
    try:
        record = parse_part_record(json.loads(slot.record_path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return slot
    if record.number == rank and record.part.size_bytes <= slot.size_bytes:
        slot.state, slot.record, slot.generation = "sealed", record, record.stamp.generation
    return slot


def remove_folder(folder: Path) -> None:
    """Remove a node's arena; also the run's and the user's folder, where nothing else is in them."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        if {path.name for path in folder.parent.iterdir()} == {_RUN}:
            (folder.parent / _RUN).unlink()
        folder.parent.rmdir()
        folder.parents[1].rmdir()


def _is_served(node: Path) -> bool:
    """Whether a worker lives there: it holds a lock on its folder."""
    try:
        descriptor = os.open(node, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def sweep(root: Path, is_alive: Callable[[Path], bool]) -> dict[Path, int]:
    """Remove the arenas of runs that are over, by their directories; which folders, and their sizes.

    What belongs to others, or does not say which run it is of, is left alone, and so is what a worker serves:
    ranks that have started it for themselves have no supervisor whose life could be seen.
    """
    top = root / f"hpcrun-{os.getuid()}"
    try:
        _check_folder(top)
        folders = sorted(top.iterdir())
    except (FileNotFoundError, SiteError):
        return {}
    found = {}
    for folder in folders:
        try:
            _check_folder(folder)
            run = Path(json.loads((folder / _RUN).read_text(encoding="utf-8")))
        except (OSError, SiteError, ValueError, TypeError):
            continue
        if not is_alive(run) and not any(_is_served(node) for node in folder.iterdir()):
            found[folder] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        top.rmdir()
    return found
