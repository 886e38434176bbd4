"""A node's arena: the memory that holds the newest states of its ranks, whoever dies.

    /dev/shm/hpcrun-UID/RUN/NODE/       0700, ours alone
        slot-RANK-K.bin                 the image of one rank's part; made once, with all its pages
        slot-RANK-K.json                which generation it holds: written when it is sealed, removed before
                                        the slot is used again, so that a slot without it holds nothing
        replica-GENERATION-NUMBER.*     a copy of another node's part, and its record
        worker.sock                      where ranks speak to the checkpoint worker

RUN is the run's id with each / replaced by +. The folder RUN also holds run.json, the run's directory, by
which anybody finds out whether that run still lives.

Any user can make /dev/shm/hpcrun-UID before we do. What is trusted or removed here is reached level by level
from /dev/shm, and each level is proved to be ours (`hpcrun.files`). Where the name is taken, a folder
hpcrun-UID.RANDOM stands in for it, which everybody who looks for this node's arena finds by its owner.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcrun.checkpoint.format import PART_ALIGN, align_size
from hpcrun.checkpoint.part_record import PartRecord, parse_part_record, render_part_record
from hpcrun.checkpoint.policy.shm_capacity import ShmCapacity, measure_shm_capacity
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry
from hpcrun.errors import SiteError
from hpcrun.files import OwnedDirectory, UntrustedFileError, is_tamper_proof_directory
from hpcrun.units import format_bytes

SHM = Path("/dev/shm")
SOCKET_NAME = "worker.sock"
RUN_RECORD_NAME = "run.json"
"""Says in the folder of a run where that run's directory is."""
_SLOT_NAME = re.compile(r"slot-([0-9]+)-([0-9]+)\.bin")
_BLOCK_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23

SlotState = Literal["free", "claimed", "filled", "sealed"]


def locate_arena(root: Path, run_id: str, node: str) -> Path:
    """Where a node's arena of a run lies, or usually would; NODE is the agent's name of it."""
    return find_arena(root, run_id, node) or default_arena_folder(root, run_id, node)


def default_arena_folder(root: Path, run_id: str, node: str) -> Path:
    """Where a node's arena of a run lies unless others have taken the name; to be shown, not to be used."""
    return root / _user_folder_name() / escape_run_id(run_id) / node


def find_arena(root: Path, run_id: str, node: str) -> Path | None:
    """The folder of a node's arena, every level of which is ours; None where there is none."""
    found = (folder for folder in find_arenas(root, run_id) if folder.name == node)
    return next(found, None)


def find_arenas(root: Path, run_id: str) -> Iterator[Path]:
    """The arenas of a run that are here, a folder a node, every level of which is ours."""
    name = escape_run_id(run_id)
    for top in find_user_folders(root):
        with contextlib.suppress(OSError, UntrustedFileError), top.folder(name) as run:
            for node in run.names():
                with contextlib.suppress(OSError, UntrustedFileError), run.folder(node) as folder:
                    yield folder.path


def escape_run_id(run_id: str) -> str:
    """A run's id as the name of one level."""
    return run_id.replace("/", "+")


def make_arena_folder(
    root: Path, run: Path, run_id: str, node: str, say: Callable[[str], None] = lambda text: None
) -> Path:
    """The folder of a node's arena, made if need be; `say` is told why it has not its usual name.

    SiteError where there can be none.
    """
    try:
        with OwnedDirectory.below(root) as base:
            if not is_tamper_proof_directory(base.status()):
                raise SiteError(
                    f"{root}: others can rename what is in it; have the admin run: chmod +t {root}"
                )
            there = find_arena(root, run_id, node)
            top = (
                base.open_or_substitute(_user_folder_name(), say)
                if there is None
                else base.folder(there.parents[1].name)
            )
            with (
                top,
                top.folder(escape_run_id(run_id), make=True) as own,
                own.folder(node, make=True) as folder,
            ):
                for one in (top, own, folder):
                    os.fchmod(one.fileno(), 0o700)
                if not own.has(RUN_RECORD_NAME):
                    own.write_whole(RUN_RECORD_NAME, f"{json.dumps(str(run))}\n".encode())
                return folder.path
    except UntrustedFileError as error:
        raise SiteError(str(error)) from None


def open_arena_folder(folder: Path) -> OwnedDirectory:
    """An arena's folder as it was found or made; SiteError where it is not ours any more."""
    try:
        return OwnedDirectory.below(folder.parents[2], *folder.parts[-3:])
    except UntrustedFileError as error:
        raise SiteError(str(error)) from None


def _user_folder_name() -> str:
    return f"hpcrun-{os.getuid()}"


def find_user_folders(root: Path) -> Iterator[OwnedDirectory]:
    """This user's folders in shared memory: the usual one, and those that stand in for it."""
    with contextlib.suppress(OSError), OwnedDirectory.below(root) as base:
        if is_tamper_proof_directory(base.status()):
            yield from base.owned_candidates(_user_folder_name())


@dataclass
class ArenaSlot:
    """The memory of one state of one rank."""

    rank: int
    files: OwnedDirectory
    """Where it lies."""
    name: str
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
    def path(self) -> Path:
        """Where it lies, for those who map it."""
        return self.files.path / self.name

    @property
    def record_path(self) -> Path:
        """Where its record lies."""
        return self.path.with_suffix(".json")

    def image(self, size_bytes: int) -> memoryview:
        """Its first bytes."""
        return memoryview(self.memory)[:size_bytes]

    def empty(self) -> None:
        """Whatever it held is gone; the record first, for whoever looks at the files."""
        self.files.unlink(self.record_path.name)
        self.state, self.generation, self.record = "free", "", None

    def hold(self, record: PartRecord) -> None:
        """It is sealed: from now on it survives ranks and worker."""
        self.files.write_whole(self.record_path.name, render_part_record(record).encode())
        self.state, self.record, self.generation = "sealed", record, record.stamp.generation


@dataclass
class Arena:
    """The slots of a node. What an earlier worker or attempt has left is found again."""

    folder: Path
    room: Callable[[Path], ShmCapacity] = measure_shm_capacity
    slots: dict[int, list[ArenaSlot]] = field(default_factory=dict)
    """Of each rank of this attempt, in the order in which it knows them."""
    old: list[ArenaSlot] = field(default_factory=list)
    """Slots that are in use by no rank, and hold something."""
    evict_replicas: Callable[[Callable[[CheckpointId], bool]], None] = lambda _may_drop: None
    """Lets go of what else is here of states that may be dropped."""

    def __post_init__(self) -> None:
        self.files = open_arena_folder(self.folder)
        try:
            for name in self.files.names():
                if match := _SLOT_NAME.fullmatch(name):
                    self.old.append(_reopen_slot(self.files, name, int(match[1])))
        except UntrustedFileError as error:
            raise SiteError(str(error)) from None

    @property
    def folder_exists(self) -> bool:
        """Whether its folder still is: some systems clear /dev/shm when a user's last session ends."""
        try:
            return os.path.samestat(self.folder.lstat(), self.files.status())
        except OSError:
            return False

    def every(self) -> Iterator[ArenaSlot]:
        """All slots there are."""
        for slots in self.slots.values():
            yield from slots
        yield from self.old

    def reserve(
        self,
        sizes: dict[int, int],
        count: int,
        may_drop: Callable[[CheckpointId], bool],
        parity_bytes: int = 0,
    ) -> dict[int, list[ArenaSlot]]:
        """Slots for all ranks of the node, `count` each, or one where two do not fit; SiteError where none.

        Slots that fit are kept with what they hold. `may_drop` says whether a state is also kept elsewhere,
        and may make room. `parity_bytes`: what is to stay free for parity, that which is there included.
        """
        fitting = self._select_fitting_slots(sizes, count)
        kept = [one for one in self.files.names() if one.startswith("parity-") and one.endswith(".bin")]
        there = sum(self.files.status_of(one).st_size for one in kept)
        beside = max(0, parity_bytes - there)
        for may_empty in (False, True):
            if may_empty:
                self._drop(lambda slot: slot.record is None or may_drop(slot.record.stamp))
                self.evict_replicas(may_drop)
            room = self.room(self.folder)
            for each in range(count, 0, -1):
                wanted = {rank: max(0, each - len(fitting[rank])) for rank in sizes}
                size = sum(align_size(sizes[rank], PART_ALIGN) * number for rank, number in wanted.items())
                if size + beside <= room.size_bytes and self._make_slots(sizes, wanted, fitting):
                    self.slots = fitting
                    return fitting
        held = (
            f"; {format_bytes(sum(s.size_bytes for s in self.old))} hold states of before" if self.old else ""
        )
        parity = f" and parity {format_bytes(parity_bytes)}" if parity_bytes else ""
        self.old += [slot for slots in fitting.values() for slot in slots]
        raise SiteError(
            f"{self.folder}: one state of this node's ranks is {format_bytes(sum(sizes.values()))}{parity},"
            f" there is room for {room}{held}; ask for more memory (--mem), or set checkpoint.memory=0"
        )

    def _select_fitting_slots(self, sizes: dict[int, int], count: int) -> dict[int, list[ArenaSlot]]:
        """The slots that can be used on, by rank; the others are old, and those that hold nothing go."""
        fitting: dict[int, list[ArenaSlot]] = {rank: [] for rank in sizes}
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

    def _make_slots(
        self, sizes: dict[int, int], wanted: dict[int, int], fitting: dict[int, list[ArenaSlot]]
    ) -> bool:
        """Make the slots that are missing; False, with nothing made, where the space is not there."""
        made: list[ArenaSlot] = []
        try:
            for rank in [rank for rank, number in wanted.items() for _ in range(number)]:
                made.append(self._make(rank, align_size(sizes[rank], PART_ALIGN)))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFAULT):
                raise
            for slot in made:
                self.files.unlink(slot.name)
            return False
        for slot in made:
            fitting[slot.rank].append(slot)
        return True

    def _make(self, rank: int, size_bytes: int) -> ArenaSlot:
        """A new slot with all its pages: no copy into it can fail for want of one."""
        number = 0
        while self.files.has(name := f"slot-{rank}-{number}.bin"):
            number += 1
        descriptor = self.files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes)
        except OSError:
            self.files.unlink(name)
            raise
        finally:
            os.close(descriptor)
        return ArenaSlot(rank, self.files, name, size_bytes, memory)

    def _drop(self, needless: Callable[[ArenaSlot], bool]) -> None:
        """Give back the memory of old slots."""
        for slot in [slot for slot in self.old if not slot.in_flight and needless(slot)]:
            slot.empty()
            self.files.unlink(slot.name)
            self.old.remove(slot)

    def claim(
        self,
        rank: int,
        generation: str,
        published: str | None,
        attempt: int,
        is_elsewhere: Callable[[CheckpointId], bool],
    ) -> ArenaSlot | str:
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
        for slot in sorted(mine, key=_slot_age):
            if slot.in_flight or slot.state == "filled":
                why.append(f"{slot.path.name} is on its way to the next tier")
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

    def holdings(self, node: str) -> list[InventoryEntry]:
        """What is sealed here, by generation, the newest last."""
        found: dict[CheckpointId, list[HeldPart]] = {}
        for slot in self.every():
            if (record := slot.record) is not None:
                one = HeldPart(record.number, str(slot.path), 0, record.part)
                found.setdefault(record.stamp, []).append(one)
        return [
            InventoryEntry(stamp, "memory", node, tuple(sorted(parts, key=lambda part: part.number)))
            for stamp, parts in sorted(found.items(), key=lambda one: one[0].step)
        ]


def _slot_age(slot: ArenaSlot) -> tuple[int, int]:
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


def _reopen_slot(files: OwnedDirectory, name: str, rank: int) -> ArenaSlot:
    """A slot that is there already; UntrustedFileError where it is not ours."""
    descriptor = files.open(name, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        # Without a byte, its maker was killed before it had any memory.
        memory = mmap.mmap(descriptor, 0) if size else mmap.mmap(-1, 1)
    finally:
        os.close(descriptor)
    slot = ArenaSlot(rank, files, name, size, memory)
    try:
        record = parse_part_record(json.loads(files.read(slot.record_path.name)))
    except (FileNotFoundError, ValueError, UntrustedFileError):
        return slot
    if size and record.number == rank and record.part.size_bytes <= size:
        slot.state, slot.record, slot.generation = "sealed", record, record.stamp.generation
    return slot


def remove_arena_folder(folder: Path) -> None:
    """Remove a node's arena; also the run's and the user's folder, where nothing else is in them.

    What is not ours stays, and so does what a link leads to.
    """
    top, run, node = folder.parts[-3:]
    with contextlib.suppress(OSError, UntrustedFileError), OwnedDirectory.below(folder.parents[2]) as base:
        with base.folder(top) as ours:
            with ours.folder(run) as of_run:
                of_run.remove_tree(node)
                if of_run.names() == [RUN_RECORD_NAME]:
                    of_run.unlink(RUN_RECORD_NAME)
            ours.remove_empty(run)
        base.remove_empty(top)
