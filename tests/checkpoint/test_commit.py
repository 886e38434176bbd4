"""Committing, deleting and cleaning up: killed at any moment, out of space, beside each other."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.checkpoint.commit import (
    GenerationDraft,
    apply_retention,
    begin_generation,
    delete_generation,
    discard_draft,
    find_garbage,
    find_save_problem,
    quarantine_generation,
)
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.specs.saves import COMMIT_RECORD, resumable_checkpoints
from tests.checkpoint.generations import content_of, pieces_of, save

ROOT = Path(__file__).parents[2]


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


@pytest.mark.parametrize(
    ("scenario", "always", "least", "left"),
    [
        ("save_and_retire", {4}, 28, ["step-00000008"]),
        ("drain_and_retire", {4}, 40, ["step-00000008"]),
        ("save_over_damage", {2, 4}, 20, ["step-00000008"]),
        ("put_away", {2, 4}, 2, ["step-00000008"]),
        ("mend", {2, 4}, 30, ["2", "4", "6"]),
        ("take_in", {2, 4}, 20, ["2", "4", "6"]),
        ("clean_up", {2, 4}, 5, ["2", "4"]),
    ],
)
def test_killed_at_any_call_the_old_or_the_new_save_is_whole(
    tmp_path: Path, scenario: str, always: set[int], least: int, left: list[str]
) -> None:
    program = Path(__file__).with_name("killed_writer.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), scenario],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    deaths = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(deaths) >= least
    if scenario.endswith("_and_retire"):
        calls = {one["call"] for one in deaths}
        assert {"openat", "write", "fsync", "rename", "unlinkat", "mkdir"} <= calls
        assert any(call.startswith("pwrite") for call in calls)
    for death in deaths:
        assert always <= set(death["whole"]), death
        assert death["left"] == left, death
        if scenario.endswith("_and_retire"):
            assert death["problems"] == [], "a save that was cut short does not even look like one"
    if scenario not in ("put_away", "clean_up"):
        assert {6 in death["whole"] for death in deaths} == {True, False}


def test_without_space_nothing_of_a_save_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    draft = begin_generation(tmp_path, 4, 1)
    pieces = pieces_of(0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="No space left"):
            write_part(draft.file(0), draft.generation, 0, pieces, [content_of(p, 4) for p in pieces])
    discard_draft(draft)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root; run as root")
def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        saved = save(small, 2)
        draft = begin_generation(small, 4, 1)
        pieces = [pieces_of(0, 1)[0]._replace(shape=(400, 256), sizes=(400, 256))]
        with pytest.raises(OSError, match="No space left"):
            write_part(draft.file(0), draft.generation, 0, pieces, [bytes(pieces[0].size_bytes)])
        discard_draft(draft)
        assert names(small) == ["step-00000002"]
        with GenerationReader(saved) as generation:
            assert list(generation.damages()) == []
        assert save(small, 6).step == 6, "there is space again"
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_short_write_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.pwritev

    def slow(descriptor: int, buffers: list[bytes], position: int) -> int:
        return true(descriptor, [bytes(buffers[0])[:50]], position)

    monkeypatch.setattr(os, "pwritev", slow)
    with GenerationReader(save(tmp_path, 2)) as generation:
        assert list(generation.damages()) == []


def test_a_file_that_shrank_before_the_commit_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file system that lost a write would look like."""
    true = os.fsync

    def shrink(descriptor: int) -> None:
        true(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "manifest.json":
            os.truncate(tmp_path / ".step-00000004.1" / "data-00000.bin", 100)

    save(tmp_path, 2)
    monkeypatch.setattr(os, "fsync", shrink)
    with pytest.raises(DamagedError, match="has 100 bytes instead of"):
        save(tmp_path, 4)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2]


def test_another_save_of_the_step_is_set_aside_and_not_written_over(tmp_path: Path) -> None:
    old = save(tmp_path, 4)
    before = (old.path / "data-00000.bin").read_bytes()
    new = save(tmp_path, 4, attempt=2, descent="")
    assert (new.step, new.attempt) == (4, 2)
    (aside,) = tmp_path.glob("left-*")
    assert (aside / "data-00000.bin").read_bytes() == before
    assert resumable_checkpoints(tmp_path) == [new]


def test_another_save_of_the_step_by_the_same_line_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 4)
    new = save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]
    assert resumable_checkpoints(tmp_path) == [new]


def test_the_newest_are_kept_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    saves = [save(tmp_path, step) for step in (2, 4, 6)]
    apply_retention(tmp_path, 2, {saves[2].path})
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2, 4, 6]
    apply_retention(tmp_path, 1, {saves[2].path})
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [4, 6]
    apply_retention(tmp_path, 1)
    assert names(tmp_path) == ["step-00000006"]


def test_what_is_garbage_and_what_is_not(tmp_path: Path) -> None:
    saves = [save(tmp_path, step) for step in (2, 4, 6, 8)]
    os.truncate(saves[3].path / "data-00000.bin", 10)
    quarantine_generation(save(tmp_path, 7).path)
    (tmp_path / ".step-00000009.1").mkdir()
    (tmp_path / ".step-00000001.deleted").mkdir()
    found, kept = find_garbage(tmp_path, 1, in_flight=True, damaged=False)
    assert [one.path.name for one in found] == [".step-00000001.deleted", "step-00000002", "step-00000004"]
    assert sorted(one.path.name.partition(".4")[0][:20] for one in kept)[:1] == [".step-00000009.1"]
    assert any(one.path == saves[3].path and "has 10 bytes instead of" in one.why for one in kept)
    found, kept = find_garbage(tmp_path, 2, in_flight=False, damaged=True)
    assert kept == []
    assert {one.path.name.partition("0")[0] for one in found} == {".step-", "step-", "damaged-step-"}
    for one in found:
        delete_generation(one.path)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [4, 6]
    assert len(names(tmp_path)) == 2


def test_the_only_saves_are_kept_even_if_damaged(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    os.truncate(saved.path / "data-00000.bin", 10)
    found, kept = find_garbage(tmp_path, 1, in_flight=False, damaged=True)
    assert found == []
    assert "no save is whole" in kept[0].why


def test_a_reader_beside_a_deletion_gets_the_right_bytes_or_an_error(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    with GenerationReader(saved) as generation:
        delete_generation(saved.path)
        piece, place = generation.manifest.tensors["model.a"].chunks[0]
        into = bytearray(piece.size_bytes)
        generation.read(piece, place, memoryview(into))
        assert bytes(into) == content_of(piece, 2), "an open file is still there"
    assert find_save_problem(saved) is not None
    with pytest.raises(DamagedError, match="is missing"):
        GenerationReader(saved)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere; run as another user")
def test_a_read_only_directory_is_one_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        begin_generation(tmp_path, 2, 1)
    tmp_path.chmod(0o700)


def test_stale_leftovers_go_with_the_next_save(tmp_path: Path) -> None:
    stale = tmp_path / ".step-00000001.1"
    stale.mkdir()
    (stale / COMMIT_RECORD).write_text("{}")
    draft = begin_generation(tmp_path, 2, 1)
    assert isinstance(draft, GenerationDraft)
    assert names(tmp_path) == [".step-00000002.1"]


@pytest.mark.parametrize(
    ("beside", "left"),
    [
        (False, [".step-00000001.3", ".step-00000003.repair", ".step-00000004.2"]),
        # A worker of this run may be committing any of its own now.
        (
            True,
            [
                ".step-00000001.1",
                ".step-00000001.2",
                ".step-00000001.3",
                ".step-00000003.repair",
                ".step-00000004.2.ranks",
            ],
        ),
    ],
)
def test_what_others_may_be_writing_is_left(tmp_path: Path, beside: bool, left: list[str]) -> None:
    for name in ("1.1", "1.2", "1.3", "2.2.ranks", "2.1.ranks", "3.repair", "1.deleted"):
        (tmp_path / f".step-0000000{name}").mkdir()
    begin_generation(tmp_path, 4, 2, beside=beside)
    assert names(tmp_path) == left
