"""Repair: whatever is damaged comes back from other copies bit by bit, or nothing is changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.checkpoint.commit import quarantine_generation
from hpcrun.checkpoint.flush.arena import locate_arena
from hpcrun.checkpoint.flush.durable_tier import DurableTier
from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.format import HEADER_BYTES, MANIFEST_NAME
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_record import PartRecord, render_part_record
from hpcrun.checkpoint.restore.outside_copies import find_local_inventory, rebuild_parts_locally
from hpcrun.checkpoint.restore.repair import RepairReport, find_repair_candidates, repair_generation
from hpcrun.checkpoint.restore.sources import DirectoryCopy, NodeCopy
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry, NodeShards, SealedPart
from hpcrun.checkpoint.verify import find_generation_damages
from hpcrun.specs.saves import COMMIT_RECORD, SavedCheckpoint, read_saved_checkpoints, resumable_checkpoints
from tests.checkpoint.generations import save
from tests.checkpoint.injuries import INJURIES, Injury, flip
from tests.checkpoint.nodes import Nodes


def snapshot(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def chunk_at(saved: SavedCheckpoint, name: str, index: int = 0) -> tuple[Path, int]:
    """The file of a chunk, and where its bytes begin there."""
    with GenerationReader(saved) as generation:
        _, place = generation.manifest.tensors[name].chunks[index]
        part = generation.manifest.parts[place.part]
    return saved.path / f"data-{part.file:05d}.bin", part.start + place.at + HEADER_BYTES


def mended(path: Path, *others: Path, dry_run: bool = False) -> RepairReport:
    told = repair_generation(path, [DirectoryCopy(other) for other in others], dry_run=dry_run)
    assert told is not None
    return told


@pytest.mark.parametrize("injury", INJURIES.values(), ids=INJURIES)
def test_every_injury_is_repaired_from_a_copy(tmp_path: Path, injury: Injury) -> None:
    root = tmp_path / "run"
    other = save(root, 2, files=2)
    saved = save(root, 4, files=2)
    shutil.copytree(saved.path, tmp_path / "copy")
    before, earlier = snapshot(saved.path), snapshot(other.path)
    injury(saved.path, other.path)
    told = mended(saved.path, tmp_path / "copy")
    assert (told.problem, told.missing) == (None, [])
    assert told.repaired == saved.path
    assert snapshot(saved.path) == before, "bit by bit what was written"
    assert snapshot(other.path) == earlier
    assert resumable_checkpoints(root) == [other, saved]
    assert len(list(root.glob("damaged-step-00000004.*"))) == 1, "the damaged files are kept"
    assert repair_generation(saved.path) is None, "there is nothing left to do"


def test_without_another_copy_a_damaged_chunk_stays_and_nothing_is_changed(tmp_path: Path) -> None:
    saved = save(tmp_path, 4)
    path, at = chunk_at(saved, "model.a", 1)
    flip(path, at)
    before = snapshot(saved.path)
    told = mended(saved.path)
    assert told.problem == "1 piece is whole in no copy"
    assert told.missing == ["model.a[20:40, 0:16] (part 1, data-00000.bin)"]
    assert told.repaired is None
    assert snapshot(saved.path) == before
    assert [one.name for one in tmp_path.iterdir()] == [saved.path.name]


def test_two_damaged_copies_make_one_whole_save(tmp_path: Path) -> None:
    """The one was set aside; the other has lost something else."""
    root = tmp_path / "run"
    saved = save(root, 4, files=2)
    before = snapshot(saved.path)
    shutil.copytree(saved.path, tmp_path / "copy")
    path, at = chunk_at(saved, "model.a")
    flip(path, at)
    aside = quarantine_generation(saved.path)
    os.truncate(tmp_path / "copy" / "data-00001.bin", 100)
    (tmp_path / "copy" / MANIFEST_NAME).unlink()
    assert find_repair_candidates(root) == [aside]
    told = mended(aside, tmp_path / "copy")
    assert told.mended == [("model.a[0:20, 0:16]", str(tmp_path / "copy"))]
    assert told.taken["its own files"] > told.taken[str(tmp_path / "copy")] > 0
    assert snapshot(saved.path) == before
    assert aside.is_dir()


def test_what_headers_lost_is_made_again_without_any_copy(tmp_path: Path) -> None:
    """Headers follow from the list of chunks, that list from the headers, the manifest from both."""
    saved = save(tmp_path, 4, files=2)
    before = snapshot(saved.path)
    with GenerationReader(saved) as generation:
        part = generation.manifest.parts[1]
        (chunk,) = [place for _, place in generation.manifest.tensors["model.a"].chunks if place.part == 1]
    for file, at, what in (
        ("data-00000.bin", 3, "headers of part 0"),
        ("data-00001.bin", part.start + part.tail_at + HEADER_BYTES + 9, "tail of part 1"),
        ("data-00001.bin", part.start + chunk.at + 8, "headers of part 1"),
        (MANIFEST_NAME, 300, MANIFEST_NAME),
    ):
        flip(saved.path / file, at)
        told = mended(saved.path)
        assert [one for one, _ in told.mended] == [what]
        assert snapshot(saved.path) == before


def test_files_that_are_whole_are_not_copied(tmp_path: Path) -> None:
    saved = save(tmp_path, 4, files=2)
    inode = (saved.path / "data-00001.bin").stat().st_ino
    flip(saved.path / "data-00000.bin", 3)
    mended(saved.path)
    assert (saved.path / "data-00001.bin").stat().st_ino == inode


def held(saved: SavedCheckpoint, number: int, path: Path, at: int = 0) -> InventoryEntry:
    """A part of a save as a node keeps it, in a file of its own."""
    with GenerationReader(saved) as generation:
        part = generation.manifest.parts[number]
    data = (saved.path / f"data-{part.file:05d}.bin").read_bytes()
    path.write_bytes(bytes(at) + data[part.start : part.start + part.size_bytes] + b"more")
    stamp = CheckpointId(saved.generation, saved.step, saved.position, saved.world_size, saved.attempt)
    return InventoryEntry(stamp, "local", f"node{number}", (HeldPart(number, str(path), at, part),))


def test_parts_that_nodes_keep_repair_a_save(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved = save(root, 4, files=2)
    before = snapshot(saved.path)
    holdings = [held(saved, 0, tmp_path / "a"), held(saved, 1, tmp_path / "b", 4096)]
    (saved.path / "data-00001.bin").unlink()
    told = repair_generation(saved.path, [NodeCopy(one) for one in holdings])
    assert told is not None
    assert told.repaired
    assert told.taken["local of node1"] > 0
    assert "local of node0" not in told.taken
    assert snapshot(saved.path) == before


def test_what_nodes_keep_is_found_in_memory_and_on_disks(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", 4, files=2)
    with GenerationReader(saved) as generation:
        parts = generation.manifest.parts
    stamp = CheckpointId(saved.generation, 4, 32, 2, 1)
    for number, part in enumerate(parts):
        data = (saved.path / f"data-{part.file:05d}.bin").read_bytes()
        image = memoryview(data)[part.start : part.start + part.size_bytes]
        load = NodeShards(stamp, (SealedPart(number, part, image, ""),))
        LocalTier(str(tmp_path / "disk"), "sweep/1", f"node{number}").store(load)
    slot = locate_arena(tmp_path, "sweep/1", "node0") / "slot-0-0.bin"
    slot.parent.mkdir(parents=True, mode=0o700)
    slot.write_bytes((saved.path / "data-00000.bin").read_bytes())
    slot.with_suffix(".json").write_text(render_part_record(PartRecord(stamp, 0, parts[0])))
    found = find_local_inventory("sweep/1", str(tmp_path / "disk"), tmp_path)
    assert [(one.tier, one.node) for one in found] == [
        ("memory", "node0"),
        ("local", "node0"),
        ("local", "node1"),
    ]
    before = snapshot(saved.path)
    for path in saved.path.glob("data-*"):
        path.unlink()
    told = repair_generation(saved.path, [NodeCopy(one) for one in found])
    assert told is not None
    assert told.taken.keys() == {"memory of node0", "local of node1"}
    assert snapshot(saved.path) == before
    assert find_local_inventory("other", "$NO_SUCH_VARIABLE/x", tmp_path) == []


def save_with_parity(root: Path, count: int = 3) -> tuple[SavedCheckpoint, list[InventoryEntry]]:
    """A save of a rank on each node, and what is seen here of the nodes' memory: parity alone."""
    nodes = Nodes(locate_arena(root, "run-1", ""), count, 1)
    loads = nodes.loads(4, [1] * count)
    tiers = [DurableTier(root / "checkpoints", keep=2) for _ in loads]
    stored = [nodes.pool.submit(one.store, load) for one, load in zip(tiers, loads, strict=True)]
    for one in [*nodes.store(loads), *stored]:
        one.result()
    nodes.close()
    (saved,) = resumable_checkpoints(root / "checkpoints")
    return saved, find_local_inventory("run-1", None, root)


def test_what_is_nowhere_whole_is_made_again_from_parity(tmp_path: Path) -> None:
    saved, held = save_with_parity(tmp_path)
    assert {(one.tier, one.node, len(one.parts)) for one in held} == {
        ("parity", f"n{n}", 0) for n in range(3)
    }
    before = snapshot(saved.path)
    flip(saved.path / "data-00001.bin", 200)
    (tmp_path / "made").mkdir()
    made = rebuild_parts_locally(held, saved.path, saved.generation, tmp_path / "made")
    told = repair_generation(saved.path, [NodeCopy(one) for one in made])
    assert told is not None
    assert told.repaired
    assert [source for _, source in told.mended] == ["parity of n1"]
    assert snapshot(saved.path) == before


def test_two_damaged_files_are_more_than_one_parity_makes_up_for(tmp_path: Path) -> None:
    saved, held = save_with_parity(tmp_path)
    for name in ("data-00001.bin", "data-00002.bin"):
        flip(saved.path / name, 200)
    (tmp_path / "made").mkdir()
    assert rebuild_parts_locally(held, saved.path, saved.generation, tmp_path / "made") == []
    assert rebuild_parts_locally(held, saved.path, "00" * 16, tmp_path / "made") == []


def test_record_and_manifest_are_made_again_from_what_nodes_keep(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved = save(root, 4, files=2)
    before = snapshot(saved.path)
    holding = held(saved, 0, tmp_path / "a")
    for name in (COMMIT_RECORD, MANIFEST_NAME):
        (saved.path / name).unlink()
    told = repair_generation(saved.path)
    assert told is not None
    assert told.problem == f"{COMMIT_RECORD} is damaged, and no other copy has it"
    told = repair_generation(saved.path, [NodeCopy(holding)], [holding.stamp])
    assert told is not None
    assert told.problem is None
    assert [what for what, _ in told.mended] == [MANIFEST_NAME, COMMIT_RECORD]
    (found,) = resumable_checkpoints(root)
    assert replace(found, written=saved.written) == saved
    assert (saved.path / MANIFEST_NAME).read_bytes() == before[MANIFEST_NAME]
    with GenerationReader(found) as generation:
        assert find_generation_damages(generation, 2) == []


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved = save(root, 4, files=2)
    shutil.copytree(saved.path, tmp_path / "copy")
    flip(*chunk_at(saved, "model.a"))
    before = snapshot(saved.path)
    told = mended(saved.path, tmp_path / "copy", dry_run=True)
    assert (told.problem, told.repaired) == (None, None)
    assert told.mended
    assert snapshot(saved.path) == before
    assert [one.name for one in root.iterdir()] == [saved.path.name]


def test_a_copy_of_another_save_gives_nothing(tmp_path: Path) -> None:
    """The same layout and sizes, every hash right, but of another state."""
    saved, other = save(tmp_path / "run", 4), save(tmp_path / "other", 6)
    flip(*chunk_at(saved, "model.scalar"))
    assert mended(saved.path, other.path).problem == "1 piece is whole in no copy"


def test_a_save_that_no_file_can_name_is_left(tmp_path: Path) -> None:
    path = tmp_path / "step-00000004"
    path.mkdir()
    (path / COMMIT_RECORD).write_text("{")
    (path / "data-00000.bin").write_bytes(bytes(5000))
    told = mended(path)
    assert told.problem == "no file says which generation it is of"
    assert [one.path for one in read_saved_checkpoints(tmp_path)[1]] == [path]


def test_a_full_disk_leaves_the_damaged_save_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    saved = save(root, 4, files=2)
    shutil.copytree(saved.path, tmp_path / "copy")
    flip(*chunk_at(saved, "model.a"))
    before = snapshot(saved.path)

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    for call in ("pwrite", "ftruncate", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            with pytest.raises(OSError, match="No space left"):
                mended(saved.path, tmp_path / "copy")
        assert snapshot(saved.path) == before
        assert [one.name for one in root.iterdir()] == [saved.path.name]


def test_verification_in_parallel_finds_the_same(tmp_path: Path) -> None:
    saved = save(tmp_path, 4, files=2, ranks=5)
    hit: list[Callable[[], tuple[Path, int]]] = [
        lambda: chunk_at(saved, "model.a"),
        lambda: chunk_at(saved, "model.a", 3),
        lambda: chunk_at(saved, "model.b", 1),
    ]
    for one in [find() for find in hit]:
        flip(*one)
    with GenerationReader(saved) as generation:
        one_by_one, sizes = list(generation.damages()), list[int]()
        assert find_generation_damages(generation, 4, sizes.append) == one_by_one
        assert sum(sizes) == sum(tensor.size_bytes for tensor in generation.manifest.tensors.values())
    assert len(one_by_one) == 3
