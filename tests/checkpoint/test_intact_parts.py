"""Whole parts out of saves that are damaged, were set aside, or were never committed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.checkpoint.commit import quarantine_generation
from hpcrun.checkpoint.distributed_reader import DistributedReader
from hpcrun.checkpoint.flush.durable_tier import CommitTimeouts, DurableTier
from hpcrun.checkpoint.restore.decide import decide_restore
from hpcrun.checkpoint.restore.intact_parts import find_intact_parts
from hpcrun.checkpoint.restore_plan import SHARED_NODE
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry
from hpcrun.errors import SiteError
from hpcrun.specs.saves import SavedCheckpoint
from tests.checkpoint.generations import content_of, save
from tests.checkpoint.loads import load_of

ALL = range(4)


def stamp_of(saved: SavedCheckpoint) -> CheckpointId:
    return CheckpointId(saved.generation, saved.step, saved.position, saved.world_size, saved.attempt)


def numbers(found: InventoryEntry | None) -> list[int]:
    return [] if found is None else [one.number for one in found.parts]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_save_still_has_its_other_parts(tmp_path: Path) -> None:
    saved = save(tmp_path, 4, files=2, ranks=4)
    stamp = stamp_of(saved)
    assert numbers(find_intact_parts(tmp_path, stamp, [1, 3], prove=False)) == [1, 3]
    os.truncate(saved.path / "data-00001.bin", 300)
    assert numbers(find_intact_parts(tmp_path, stamp, ALL, prove=False)) == [0, 1]
    found = find_intact_parts(tmp_path, stamp, ALL, prove=True)
    assert found is not None
    assert (found.stamp, found.tier, found.node) == (stamp, "durable", SHARED_NODE)
    assert {one.path for one in found.parts} == {str(saved.path / "data-00000.bin")}
    # Without its list of parts as well, and when it was set aside.
    flip(saved.path / "manifest.json", 40)
    assert numbers(find_intact_parts(tmp_path, stamp, ALL, prove=True)) == [0, 1]
    quarantine_generation(saved.path)
    assert numbers(find_intact_parts(tmp_path, stamp, ALL, prove=True)) == [0, 1]


def test_a_changed_byte_is_found_where_all_is_read(tmp_path: Path) -> None:
    saved = save(tmp_path, 4, files=2, ranks=4)
    flip(saved.path / "data-00000.bin", 200)
    assert numbers(find_intact_parts(tmp_path, stamp_of(saved), ALL, prove=False)) == [0, 1, 2, 3]
    assert numbers(find_intact_parts(tmp_path, stamp_of(saved), ALL, prove=True)) == [1, 2, 3]


def test_nothing_is_taken_of_another_generation(tmp_path: Path) -> None:
    saved = save(tmp_path, 4, files=2, ranks=4)
    stamp, before = stamp_of(saved), quarantine_generation(saved.path)
    other = save(tmp_path, 4, files=2, ranks=4)
    assert numbers(find_intact_parts(tmp_path, stamp, ALL, prove=False)) == [0, 1, 2, 3]
    # A file of the one in the place of the other's.
    (before / "data-00000.bin").write_bytes((other.path / "data-00000.bin").read_bytes())
    assert numbers(find_intact_parts(tmp_path, stamp, ALL, prove=False)) == [2, 3]
    assert find_intact_parts(tmp_path, replace(stamp, generation="00" * 16), ALL, prove=False) is None


@pytest.mark.parametrize("leads", [True, False])
def test_of_a_save_that_was_never_committed_counts_what_was_synced_and_recorded(
    tmp_path: Path, leads: bool
) -> None:
    """One node has stored its parts and waits, the other one is lost before it has."""
    load = load_of(4, (0, 1) if leads else (2, 3), 4, 0 if leads else 1)
    tier = DurableTier(tmp_path, keep=2, patience=CommitTimeouts(peer_timeout_s=0.05, first_poll_s=0.01))
    with pytest.raises(SiteError, match="in vain"):
        tier.store(load)
    own = [one.number for one in load.parts]
    assert numbers(find_intact_parts(tmp_path, load.stamp, ALL, prove=False)) == own
    (record,) = tmp_path.rglob("parts-*.json")
    record.unlink()
    assert find_intact_parts(tmp_path, load.stamp, ALL, prove=False) is None


def test_parts_of_a_node_and_of_half_a_save_make_up_a_whole_state(tmp_path: Path) -> None:
    lost, kept = load_of(4, (0, 1), 4, 0), load_of(4, (2, 3), 4, 1)
    tier = DurableTier(
        tmp_path / "run", keep=2, patience=CommitTimeouts(peer_timeout_s=0.05, first_poll_s=0.01)
    )
    with pytest.raises(SiteError, match="in vain"):
        tier.store(lost)
    arena = DurableTier(
        tmp_path / "arena", keep=2, patience=CommitTimeouts(peer_timeout_s=0.05, first_poll_s=0.01)
    )
    with pytest.raises(SiteError, match="in vain"):
        arena.store(kept)
    held = find_intact_parts(tmp_path / "arena", kept.stamp, ALL, prove=True)
    assert held is not None
    near = replace(held, node="b", tier="memory")

    def intact_parts(stamp: CheckpointId, missing: object) -> InventoryEntry | None:
        assert set(missing) == {0, 1}  # type: ignore[call-overload]
        return find_intact_parts(tmp_path / "run", stamp, ALL, prove=False)

    plan = decide_restore([near], [], [], [], {}, ["b"], find_intact_parts=intact_parts)
    assert (plan.stamp, plan.tiers) == (lost.stamp, ("memory", "durable"))
    assert [one.node for one in plan.sources] == [SHARED_NODE, SHARED_NODE, "b", "b"]
    with DistributedReader(plan, "b", None) as source:
        assert not list(source.damages())
        for chunks in source.chunks_by_part():
            for piece, place in chunks:
                into = memoryview(bytearray(piece.size_bytes))
                source.read(piece, place, into)
                assert bytes(into) == content_of(piece, 4)
