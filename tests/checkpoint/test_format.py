"""The format: what is written comes back, and nothing else ever does."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.checkpoint.format import HEADER_BYTES, MANIFEST_NAME, ChunkSpec, DamagedError, plan_part_layout
from hpcrun.checkpoint.generation import GenerationReader, check_file_sizes
from hpcrun.checkpoint.part_writer import write_synced_file
from hpcrun.checkpoint.slices import TensorSlice, find_coverage_problem, split_slice
from hpcrun.errors import UsageError
from hpcrun.specs.saves import (
    COMMIT_RECORD,
    SavedCheckpoint,
    read_saved_checkpoints,
    render_commit_record,
    resumable_checkpoints,
)
from tests.checkpoint.generations import content_of, pieces_of, save
from tests.checkpoint.injuries import INJURIES, Injury, flip, swap_files


def load(saved: SavedCheckpoint) -> dict[ChunkSpec, bytes]:
    """Everything that a reader gives out of a generation."""
    found = {}
    with GenerationReader(saved) as generation:
        for tensor in generation.manifest.tensors.values():
            for piece, place in tensor.chunks:
                into = bytearray(piece.size_bytes)
                generation.read(piece, place, memoryview(into))
                found[piece] = bytes(into)
    return found


def expected(step: int, ranks: int = 2) -> dict[ChunkSpec, bytes]:
    pieces = [piece for rank in range(ranks) for piece in pieces_of(rank, ranks)]
    return {piece: content_of(piece, step) for piece in pieces}


def damages(saved: SavedCheckpoint) -> list[str]:
    with GenerationReader(saved) as generation:
        return list(generation.damages())


@pytest.mark.parametrize(("files", "ranks"), [(1, 1), (1, 2), (2, 2), (2, 5)])
def test_what_is_written_comes_back(tmp_path: Path, files: int, ranks: int) -> None:
    saved = save(tmp_path, 4, files=files, ranks=ranks)
    (found,) = resumable_checkpoints(tmp_path)
    assert found == saved
    assert load(found) == expected(4, ranks)
    assert damages(found) == []
    assert sorted(path.name for path in found.path.iterdir()) == sorted(
        [COMMIT_RECORD, MANIFEST_NAME, *(f"data-{n:05d}.bin" for n in range(files))]
    )


def test_chunks_are_aligned_and_say_where_they_belong(tmp_path: Path) -> None:
    saved = save(tmp_path, 4)
    data = (saved.path / "data-00000.bin").read_bytes()
    with GenerationReader(saved) as generation:
        for tensor in generation.manifest.tensors.values():
            for piece, place in tensor.chunks:
                at = generation.manifest.parts[place.part].start + place.at
                assert at % HEADER_BYTES == 0
                assert data[at : at + 4] == b"HPCK"
                assert bytes.fromhex(saved.generation) in data[at : at + HEADER_BYTES]
                begin = at + HEADER_BYTES
                assert data[begin : begin + piece.size_bytes] == content_of(piece, 4)


def test_where_a_chunk_lies_is_known_before_its_bytes_are(tmp_path: Path) -> None:
    saved = save(tmp_path, 4)
    with GenerationReader(saved) as generation:
        sizes = [part.size_bytes for part in generation.manifest.parts]
    assert sizes == [plan_part_layout(rank, pieces_of(rank, 2)).size_bytes for rank in range(2)]


def test_no_flipped_byte_is_loaded(tmp_path: Path) -> None:
    """Every byte of every file in turn: what a reader still gives is what was written."""
    saved = save(tmp_path, 4)
    right, found = expected(4), 0
    chance = random.Random(0)
    for name in (COMMIT_RECORD, MANIFEST_NAME, "data-00000.bin"):
        path = saved.path / name
        whole = path.read_bytes()
        places = list(range(len(whole)))
        if len(whole) > 1500:  # all of it takes a minute; headers and a sample of the rest do not
            places = sorted({*range(1500), *range(4096, 4096 + 600), *chance.sample(range(len(whole)), 400)})
        for at in places:
            flip(path, at)
            again: list[SavedCheckpoint] = []
            try:
                again = resumable_checkpoints(tmp_path)
                loaded = load(again[0]) if again else None
            except (DamagedError, UsageError):
                loaded = None
            assert loaded is None or (loaded == right and again == [saved]), f"{name}: byte {at}"
            found += loaded is None
            flip(path, at)
    assert found > 1500


@pytest.mark.parametrize("injury", INJURIES.values(), ids=INJURIES)
def test_nothing_injured_is_loaded(tmp_path: Path, injury: Injury) -> None:
    other = save(tmp_path, 2, files=2, ranks=2)
    saved = save(tmp_path, 4, files=2, ranks=2)
    injury(saved.path, other.path)
    found, unreadable = read_saved_checkpoints(tmp_path)
    if unreadable:
        assert [one.path for one in unreadable] == [saved.path]
    else:
        with pytest.raises(DamagedError, match=str(saved.path)):
            load(found[-1])
    assert load(found[0]) == expected(2), "the other save is as it was"


def test_two_files_of_equal_layout_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    """Of one generation, of one size, each with right hashes: only the headers can tell."""
    shape = (32, 16)
    shares = [[ChunkSpec("model.a", "float32", shape, (16 * r, 0), (16, 16))] for r in range(2)]
    saved = save(tmp_path, 4, files=2, shares=shares)
    assert len(set(saved.file_bytes)) == 1
    swap_files(saved.path, saved.path)
    with pytest.raises(DamagedError, match="belongs at 0 in part 1, not at 0 in part 0"):
        load(saved)


def test_a_record_of_another_save_is_refused(tmp_path: Path) -> None:
    other, saved = save(tmp_path, 2), save(tmp_path, 4)
    shutil.copy(other.path / COMMIT_RECORD, saved.path / COMMIT_RECORD)
    for found in resumable_checkpoints(tmp_path):
        if found.path == saved.path:
            with pytest.raises(DamagedError):
                load(found)


def test_verification_names_every_damaged_chunk(tmp_path: Path) -> None:
    saved = save(tmp_path, 4, files=2)
    path = saved.path / "data-00000.bin"
    with GenerationReader(saved) as generation:
        (first,) = [place for _, place in generation.manifest.tensors["model.a"].chunks if place.part == 0]
        scalar = generation.manifest.tensors["model.scalar"].chunks[0][1]
    flip(path, first.at + HEADER_BYTES + 5)
    flip(path, scalar.at + 3)
    found = damages(saved)
    assert len(found) == 2
    assert any("model.a[0:20, 0:16]: its bytes do not match their hash" in line for line in found)
    assert any("the header of the chunk is damaged" in line for line in found)
    assert all(line.startswith(f"{path} at ") for line in found)


def test_a_newer_format_is_refused_in_one_line(tmp_path: Path) -> None:
    record = save(tmp_path, 4).path / COMMIT_RECORD
    record.write_text(record.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(UsageError, match=r"format 3, this hpcrun reads up to 2; use a newer hpcrun"):
        read_saved_checkpoints(tmp_path)


def test_format_1_is_refused_in_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, 4).path
    record = {"format_version": 1, "step": 4, "position": 8, "world_size": 2, "attempt": 1}
    (path / COMMIT_RECORD).write_text(json.dumps(record))
    with pytest.raises(UsageError) as refused:
        read_saved_checkpoints(tmp_path)
    assert str(refused.value) == (
        f"{path}: save format 1 is no longer read; move it out of the run: without complete.json it is a"
        " checkpoint of torch's, which `hpcrun ckpt import` takes with --step"
    )


def test_a_manifest_whose_chunks_leave_a_gap_is_refused(tmp_path: Path) -> None:
    shape = (32, 16)
    whole = ChunkSpec("model.a", "float32", shape, (0, 0), (20, 16))
    for other in (
        ChunkSpec("model.a", "float32", shape, (21, 0), (11, 16)),
        ChunkSpec("model.a", "float32", shape, (19, 0), (13, 16)),
        ChunkSpec("model.a", "float64", shape, (20, 0), (12, 16)),
    ):
        with pytest.raises(DamagedError, match=r"model\.a"):
            save(tmp_path, 4, shares=[[whole], [other]])
    assert resumable_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("shape", "boxes", "wrong"),
    [
        ((), [((), ())], None),
        ((), [], "0 of its 1"),
        ((), [((), ()), ((), ())], "2 of its 1"),
        ((0, 3), [], None),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))], None),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], None),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlap"),
        ((4, 4), [((0, 0), (4, 5))], "not inside"),
        ((4, 4), [((-1, 0), (4, 4))], "not inside"),
        ((4, 4), [((0,), (4,))], "not inside"),
        ((4, 4), [((0, 0), (3, 4))], "12 of its 16"),
    ],
)
def test_boxes_that_make_up_a_tensor(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], wrong: str | None
) -> None:
    found = find_coverage_problem(shape, [TensorSlice(*box) for box in boxes])
    assert found is None if wrong is None else found is not None and wrong in found


@pytest.mark.parametrize("sizes", [(), (7,), (0, 5), (1, 1, 9), (5, 3, 4), (1, 40, 3), (2, 100)])
@pytest.mark.parametrize("most", [1, 16, 48, 10_000])
def test_a_cut_box_is_covered_by_contiguous_pieces(sizes: tuple[int, ...], most: int) -> None:
    boxes = list(split_slice(sizes, 4, most))
    assert find_coverage_problem(sizes, boxes) is None
    for box in boxes:
        count = 1
        for size in box.sizes:
            count *= size
        assert 4 * count <= max(most, 4)
        # In C order: after the first dimension that is cut, all are whole.
        uncut = [size == whole for size, whole in zip(box.sizes, sizes, strict=True)]
        first = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(sizes))
        assert all(uncut[first + 1 :])


def test_a_thousand_generations_are_listed_from_their_records(tmp_path: Path) -> None:
    """Listing reads the small records and nothing else."""
    saved = save(tmp_path, 0)
    for step in range(1, 1000):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        os.link(saved.path / "data-00000.bin", path / "data-00000.bin")
        os.link(saved.path / MANIFEST_NAME, path / MANIFEST_NAME)
        (path / COMMIT_RECORD).write_text(render_commit_record(replace(saved, step=step)))
    found = resumable_checkpoints(tmp_path)
    for one in found:
        check_file_sizes(one)
    assert [one.step for one in found] == list(range(1000))


def test_nothing_in_the_files_is_a_pickle(tmp_path: Path) -> None:
    saved = save(tmp_path, 4)
    for name in (COMMIT_RECORD, MANIFEST_NAME):
        json.loads((saved.path / name).read_text())
    write_synced_file(tmp_path / "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"
