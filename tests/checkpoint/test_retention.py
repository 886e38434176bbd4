"""What counts as saved: nothing before its commit, and no file that only claims so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpcrun.checkpoint.commit import apply_retention, begin_generation
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.specs.saves import COMMIT_RECORD, resumable_checkpoints
from tests.checkpoint.generations import content_of, pieces_of, save


def half_a_save(root: Path, step: int) -> Path:
    """All bytes of a save are there, but nobody has committed it."""
    draft = begin_generation(root, step, 1)
    pieces = pieces_of(0, 1)
    write_part(draft.file(0), draft.generation, 0, pieces, [content_of(piece, step) for piece in pieces])
    return draft.aside


def test_the_save_before_stays_the_newest_until_the_commit(tmp_path: Path) -> None:
    """Neither what is loaded next nor what is deleted goes by a save that is still being written."""
    save(tmp_path, 2)
    aside = half_a_save(tmp_path, 4)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2]
    apply_retention(tmp_path, 1)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2]
    assert aside.is_dir(), "and the save in flight is left alone"


@pytest.mark.parametrize("leave", [[], [COMMIT_RECORD], [COMMIT_RECORD, "data-00000.bin"]], ids=str)
def test_an_unfinished_newer_directory_deletes_no_whole_save(tmp_path: Path, leave: list[str]) -> None:
    """A directory under a committed name that was never committed, as an rsync or a crash may leave it."""
    save(tmp_path, 2)
    unfinished = tmp_path / "step-00000004"
    unfinished.mkdir()
    for name in leave:
        (unfinished / name).write_bytes(b"")
    apply_retention(tmp_path, 1)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2]
    assert unfinished.is_dir()


def test_no_pointer_leads_astray(tmp_path: Path) -> None:
    """Which save is the newest stands in the saves alone: other files say nothing."""
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "latest").symlink_to("step-00000009")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    (tmp_path / "step-latest").write_text("9")
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [2, 4]
    apply_retention(tmp_path, 1)
    assert [one.step for one in resumable_checkpoints(tmp_path)] == [4]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_a_directory_that_another_node_has_just_made_may_show_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    true, tries = os.open, list[int]()

    def late(path: str, flags: int, mode: int = 0o777) -> int:
        if Path(path).name == "data-00000.bin" and flags & os.O_CREAT and len(tries) < 2:
            tries.append(number)
            raise OSError(number, os.strerror(number))
        return true(path, flags, mode)

    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr(os, "open", late)
    saved = save(tmp_path, 2)
    assert len(tries) == 2
    with GenerationReader(saved) as generation:
        assert list(generation.damages()) == []


def test_a_directory_that_never_shows_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    pieces = pieces_of(0, 1)
    with pytest.raises(FileNotFoundError):
        write_part(
            tmp_path / "no" / "data-00000.bin", bytes(16), 0, pieces, [bytes(p.size_bytes) for p in pieces]
        )
