"""The arena: made once, found again, never robbed of the only copy, and swept when its run is dead."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpcrun.checkpoint.flush.arena import (
    Arena,
    ArenaSlot,
    find_arena,
    locate_arena,
    make_arena_folder,
    map_slot,
    remove_arena_folder,
)
from hpcrun.checkpoint.flush.stale_memory import clean_up_stale_memory
from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.parity.erasure import parity_memory_bytes
from hpcrun.checkpoint.part_record import PartRecord
from hpcrun.checkpoint.policy.shm_capacity import ShmCapacity
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.errors import SiteError

PART = Part(0, 0, 4000, 3000, 500, "0" * 16)


def nowhere(_: CheckpointId) -> bool:
    return False


def everywhere(_: CheckpointId) -> bool:
    return True


def room_of(size_bytes: int) -> Callable[[Path], ShmCapacity]:
    """So much in all, whatever is in use already."""

    def room(folder: Path) -> ShmCapacity:
        used = sum(path.stat().st_size for path in folder.glob("slot-*.bin"))
        return ShmCapacity(size_bytes - used, "of a test")

    return room


def folder_in(root: Path, run: str = "r", node: str = "n") -> Path:
    return make_arena_folder(root, root / run, run, node)


def stamp(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(f"{step:016x}{attempt:016x}", step, step, 2, attempt)


def seal_into(slot: ArenaSlot, step: int, attempt: int = 1) -> None:
    slot.hold(PartRecord(stamp(step, attempt), slot.rank, PART))


def claim(
    arena: Arena, step: int, published: int | None = None, attempt: int = 1, rank: int = 0
) -> ArenaSlot | str:
    name = None if published is None else stamp(published, attempt).generation
    return arena.claim(rank, stamp(step, attempt).generation, name, attempt, nowhere)


def test_files_and_folders_are_ours_alone(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, "sweep/3")
    assert folder == tmp_path / f"hpcrun-{os.getuid()}" / "sweep+3" / "n"
    arena = Arena(folder)
    given = arena.reserve({0: 5000, 1: 100}, 2, nowhere)
    assert [[slot.path.name for slot in slots] for slots in given.values()] == [
        ["slot-0-0.bin", "slot-0-1.bin"],
        ["slot-1-0.bin", "slot-1-1.bin"],
    ]
    for slot in arena.every():
        status = slot.path.stat()
        assert status.st_mode & 0o777 == 0o600
        assert (status.st_size % 4096, status.st_size) == (0, slot.size_bytes)
        assert status.st_blocks * 512 >= status.st_size, "its pages are there"
    for one in (folder, *folder.parents[:2]):
        assert one.stat().st_mode & 0o777 == 0o700


def test_two_slots_where_they_fit_else_one_else_none(tmp_path: Path) -> None:
    sizes = {0: 8192, 1: 4096}
    for room, count in ((24576, 2), (24575, 1), (12288, 1)):
        folder = folder_in(tmp_path, f"r{room}")
        given = Arena(folder, room_of(room)).reserve(sizes, 2, nowhere)
        assert {len(slots) for slots in given.values()} == {count}
    folder = folder_in(tmp_path, "r0")
    with pytest.raises(
        SiteError, match=r"one state of this node's ranks is .* room for .* \(of a test\); ask"
    ):
        Arena(folder, room_of(12287)).reserve(sizes, 2, nowhere)
    assert list(folder.glob("slot-*")) == []


def test_room_is_left_for_parity(tmp_path: Path) -> None:
    # Of 12288 bytes a node, in a set of 3: a third of it for each of two generations; with k=2 twice two
    # blocks, and one more while they are made.
    assert (parity_memory_bytes(12288, 4, 1), parity_memory_bytes(12288, 4, 2)) == (8192, 30720)
    sizes = {0: 8192, 1: 4096}
    for room, count in ((24576 + 8192, 2), (24576 + 8191, 1), (12288 + 8192, 1)):
        folder = folder_in(tmp_path, f"r{room}")
        given = Arena(folder, room_of(room)).reserve(sizes, 2, nowhere, 8192)
        assert {len(slots) for slots in given.values()} == {count}
    folder = folder_in(tmp_path, "r0")
    with pytest.raises(SiteError, match=r"one state of this node's ranks is .* and parity .* room for"):
        Arena(folder, room_of(12288 + 8191)).reserve(sizes, 2, nowhere, 8192)
    # What is there already is not wanted twice.
    (folder / "parity-x.bin").write_bytes(bytes(8192))
    assert len(Arena(folder, room_of(24576)).reserve(sizes, 2, nowhere, 8192)[0]) == 2


def test_when_the_space_is_gone_after_all_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = os.posix_fallocate, []

    def scarce(descriptor: int, begin: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        true(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    arena = Arena(folder_in(tmp_path), room_of(1 << 20))
    given = arena.reserve({0: 4096, 1: 4096}, 2, nowhere)
    assert {len(slots) for slots in given.values()} == {1}
    assert len(list(arena.folder.glob("slot-*.bin"))) == 2


def test_what_was_sealed_is_found_again_and_nothing_else(tmp_path: Path) -> None:
    arena = Arena(folder_in(tmp_path))
    given = arena.reserve({0: 5000, 1: 5000}, 2, nowhere)
    for rank in (0, 1):
        given[rank][0].memory[:4] = b"HPCK"
        seal_into(given[rank][0], 2)
    claimed = claim(arena, 4, 2)
    assert isinstance(claimed, ArenaSlot)
    seal_into(given[1][1], 4)
    record = given[1][1].record_path
    record.write_text(record.read_text().replace('"step": 4', '"step": 5'))
    again = Arena(arena.folder)
    (held,) = again.holdings("n")
    assert (held.stamp, held.tier, [one.number for one in held.parts]) == (stamp(2), "memory", [0, 1])
    assert all(Path(one.path).read_bytes().startswith(b"HPCK") for one in held.parts)
    kept = again.reserve({0: 5000, 1: 5000}, 2, nowhere)
    assert [slot.path for slot in kept[0]] == [slot.path for slot in given[0]]
    assert len(again.holdings("n")[0].parts) == 2


def test_another_layout_gets_other_slots_and_the_old_state_stays_until_it_is_let_go(tmp_path: Path) -> None:
    arena = Arena(folder_in(tmp_path), room_of(40960))
    for slot in (slots[0] for slots in arena.reserve({0: 4096, 1: 4096}, 2, nowhere).values()):
        seal_into(slot, 2)
    given = arena.reserve({0: 8192}, 2, nowhere)
    assert [slot.path.name for slot in given[0]] == ["slot-0-1.bin", "slot-0-2.bin"]
    assert [len(one.parts) for one in arena.holdings("n")] == [2]
    with pytest.raises(SiteError, match="hold states of before"):
        arena.reserve({0: 36864}, 2, nowhere)
    assert [len(one.parts) for one in arena.holdings("n")] == [2]
    assert len(arena.reserve({0: 36864}, 2, everywhere)[0]) == 1
    assert arena.holdings("n") == []
    arena.release(set())
    assert len(list(arena.folder.glob("slot-*.bin"))) == 1


def test_the_record_is_gone_before_the_slot_is_used_again(tmp_path: Path) -> None:
    arena = Arena(folder_in(tmp_path))
    first, second = arena.reserve({0: 4096}, 2, nowhere)[0]
    seal_into(first, 2)
    seal_into(second, 4)
    assert claim(arena, 6, 4) is first
    assert not first.record_path.exists()
    assert second.record_path.exists()


def test_a_state_of_before_is_kept_while_nothing_is_published(tmp_path: Path) -> None:
    arena = Arena(folder_in(tmp_path))
    first, second = arena.reserve({0: 4096}, 2, nowhere)[0]
    seal_into(first, 2, attempt=1)
    seal_into(second, 4, attempt=1)
    assert "the only copy of step 2" in str(claim(arena, 6, attempt=2))
    older = arena.claim(0, stamp(6, 2).generation, stamp(4, 1).generation, 2, nowhere)
    assert older is first


@dataclass
class Model:
    """What must hold: a published state is in a slot, or elsewhere."""

    arena: Arena
    random: random.Random
    steps: int = 0
    published: int | None = None
    elsewhere: set[int] = field(default_factory=set)

    def step(self) -> str:
        """One thing that happens to a rank and its worker."""
        slots = self.arena.slots[0]
        match self.random.choice(["save", "save", "publish", "store", "crash", "release flight"]):
            case "save":
                self.steps += 1
                name = None if self.published is None else stamp(self.published).generation
                slot = self.arena.claim(
                    0, stamp(self.steps).generation, name, 1, lambda one: one.step in self.elsewhere
                )
                if isinstance(slot, str):
                    return f"busy: {slot}"
                assert not slot.in_flight
                if self.random.random() < 0.2:
                    slot.empty()  # the rank has died
                    return "lost"
                seal_into(slot, self.steps)
                slot.in_flight = self.random.random() < 0.5
            case "publish":
                sealed = [slot.record.stamp.step for slot in slots if slot.record is not None]
                self.published = max([self.published or 0, *sealed]) or None
            case "store":
                self.elsewhere |= {s.record.stamp.step for s in slots if s.record and s.in_flight}
            case "crash":
                self.arena = Arena(self.arena.folder)
                self.arena.reserve({0: 4096}, len(slots), nowhere)
            case _:
                for slot in slots:
                    slot.in_flight = False
        return "done"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_published_state_is_somewhere(tmp_path: Path, seed: int, count: int) -> None:
    arena = Arena(folder_in(tmp_path))
    arena.reserve({0: 4096}, count, nowhere)
    model = Model(arena, random.Random(f"{seed} {count}"))
    outcomes = set()
    for _ in range(60):
        outcomes.add(model.step().partition(":")[0])
        held = {one.stamp.step for one in Arena(arena.folder).holdings("n")}
        assert model.published is None or model.published in held | model.elsewhere
    assert outcomes >= {"done", "busy"} if count == 1 else "done" in outcomes
    assert model.steps > 5


@pytest.mark.parametrize("planted", ["open to others", "a link", "a file", "another user's"])
def test_where_the_usual_name_is_taken_another_one_is_used_and_found(tmp_path: Path, planted: str) -> None:
    top = tmp_path / f"hpcrun-{os.getuid()}"
    kept = tmp_path / "elsewhere" / "r" / "n"
    kept.mkdir(parents=True)
    (kept / "slot-0-0.bin").write_bytes(b"precious")
    match planted:
        case "open to others":
            top.mkdir()
            top.chmod(0o777)
        case "a link":
            top.symlink_to(kept.parents[1])
        case "a file":
            top.touch()
        case _ if os.getuid():
            pytest.skip("giving a folder away needs root; run as root")
        case _:
            (top / "r" / "n").mkdir(parents=True, mode=0o700)
            os.chown(top, 12345, -1)
    said: list[str] = []
    folder = make_arena_folder(tmp_path, tmp_path / "r", "r", "n", said.append)
    assert folder.parents[1].parent == tmp_path
    assert folder.parents[1].name.startswith(f"{top.name}.")
    assert len(said) == 1
    assert str(top) in said[0]
    assert str(folder.parents[1]) in said[0]
    assert make_arena_folder(tmp_path, tmp_path / "r", "r", "n") == folder
    assert make_arena_folder(tmp_path, tmp_path / "r", "r", "m").parent == folder.parent
    assert locate_arena(tmp_path, "r", "n") == find_arena(tmp_path, "r", "n") == folder
    Arena(folder).reserve({0: 4096}, 1, nowhere)
    assert clean_up_stale_memory(tmp_path, lambda _: True) == {}
    assert list(clean_up_stale_memory(tmp_path, lambda _: False)) == [folder.parent]
    assert not folder.parents[1].exists()
    assert find_arena(tmp_path, "r", "n") is None
    assert (kept / "slot-0-0.bin").read_bytes() == b"precious"
    assert os.path.lexists(top)


def test_shared_memory_that_others_can_rename_in_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(SiteError, match=r"others can rename what is in it; have the admin run: chmod \+t"):
        folder_in(tmp_path)
    assert find_arena(tmp_path, "r", "n") is None
    assert clean_up_stale_memory(tmp_path, lambda _: False) == {}
    tmp_path.chmod(0o1777)
    assert folder_in(tmp_path) == folder


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file away needs root; run as root")
def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    (folder / "slot-0-0.bin").write_bytes(b"x" * 4096)
    os.chown(folder / "slot-0-0.bin", 12345, -1)
    with pytest.raises(SiteError, match="is not a file of yours alone"):
        Arena(folder)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    precious = tmp_path / "precious"
    precious.write_bytes(b"do not touch")
    (folder / "slot-0-0.bin").symlink_to(precious)
    with pytest.raises(SiteError, match=r"slot-0-0\.bin: is not a regular file"):
        Arena(folder)
    (folder / "slot-0-0.bin").unlink()
    os.link(precious, folder / "slot-0-0.bin")
    with pytest.raises(SiteError, match="is not a file of yours alone"):
        Arena(folder)
    (folder / "slot-0-0.bin").unlink()
    (tmp_path / "kept").mkdir(mode=0o700)
    (tmp_path / "kept" / "slot-0-0.bin").write_bytes(b"do not touch")
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(tmp_path / "kept")
    with pytest.raises(SiteError, match="is not a directory"):
        Arena(folder)
    remove_arena_folder(folder)
    assert (tmp_path / "kept" / "slot-0-0.bin").read_bytes() == precious.read_bytes() == b"do not touch"


def test_a_folder_that_is_swapped_while_it_is_used_changes_nothing_elsewhere(tmp_path: Path) -> None:
    """As where a system clears shared memory, and another user then takes the name."""
    arena = Arena(folder_in(tmp_path))
    slot = arena.reserve({0: 4096}, 1, nowhere)[0][0]
    seal_into(slot, 2)
    other = folder_in(tmp_path, "other")
    (other / "slot-0-0.json").write_text("kept")
    (other / "slot-0-0.bin").write_text("kept")
    arena.folder.parent.rename(tmp_path / "gone")
    arena.folder.parent.symlink_to(other.parent)
    assert not arena.folder_exists
    arena.release(set())
    arena.reserve({0: 8192}, 1, everywhere)
    assert sorted(path.read_text() for path in other.iterdir()) == ["kept", "kept"]


def test_arenas_of_dead_runs_are_swept(tmp_path: Path) -> None:
    for run, node in (("dead", "n1"), ("dead", "n2"), ("alive", "n1"), ("sweep/3", "n1")):
        Arena(folder_in(tmp_path, run, node)).reserve({0: 4096}, 1, nowhere)
    top = tmp_path / f"hpcrun-{os.getuid()}"
    (top / "unknown").mkdir(mode=0o700)
    (top / "damaged").mkdir(mode=0o700)
    (top / "damaged" / "run.json").write_text("{")
    found = clean_up_stale_memory(tmp_path, lambda run: run == tmp_path / "alive")
    assert sorted(path.name for path in found) == ["dead", "sweep+3"]
    assert found[top / "dead"] >= 2 * 4096
    assert sorted(path.name for path in top.iterdir()) == ["alive", "damaged", "unknown"]


def test_the_end_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    folders = [folder_in(tmp_path, "r", node) for node in ("n1", "n2")]
    remove_arena_folder(folders[0])
    assert folders[1].exists()
    remove_arena_folder(folders[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("advice", [23, 9999])
def test_a_rank_s_view_has_its_pages_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    """Also with kernels that do not know the call."""
    monkeypatch.setattr("hpcrun.checkpoint.flush.arena._MADV_POPULATE_WRITE", advice)
    (slot,) = Arena(folder_in(tmp_path)).reserve({0: 8192}, 1, nowhere)[0]
    slot.memory[:] = bytes(range(256)) * 32
    view = map_slot(slot.path)
    assert view[:] == slot.memory[:]
    view[4096] = 99
    assert slot.memory[4096] == 99
