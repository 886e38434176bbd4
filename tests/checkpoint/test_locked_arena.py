"""An arena that a worker serves is nobody's garbage, whatever became of its run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hpcrun.checkpoint.flush.arena import make_arena_folder
from hpcrun.checkpoint.flush.stale_memory import clean_up_stale_memory, is_held_by_script, lock_run_memory


def test_an_arena_is_left_alone_for_as_long_as_a_worker_serves_it(tmp_path: Path) -> None:
    folder = make_arena_folder(tmp_path, Path("/runs/mine"), "mine", "n1")
    (folder / "slot-0-0.bin").write_bytes(bytes(100))
    worker = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(worker, fcntl.LOCK_EX)
    assert clean_up_stale_memory(tmp_path, lambda run: False) == {}
    assert folder.exists()
    os.close(worker)
    assert folder.parent in clean_up_stale_memory(tmp_path, lambda run: False)
    assert not folder.exists()


def test_an_arena_is_left_alone_for_as_long_as_a_script_holds_it(tmp_path: Path) -> None:
    folder = make_arena_folder(tmp_path, Path("/runs/mine"), "mine", "n1")
    # Its worker has just died, and is about to be started again.
    with lock_run_memory(folder):
        assert is_held_by_script(tmp_path, "mine", "n1")
        assert clean_up_stale_memory(tmp_path, lambda run: False) == {}
    assert not is_held_by_script(tmp_path, "mine", "n1")
    assert folder.parent in clean_up_stale_memory(tmp_path, lambda run: False)


def test_a_run_in_use_is_not_looked_at_for_its_file_system_may_hang(tmp_path: Path) -> None:
    folder = make_arena_folder(tmp_path, Path("/hangs/run"), "mine", "n1")
    asked: list[Path] = []

    def is_alive(run: Path) -> bool:
        asked.append(run)
        return False

    worker = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(worker, fcntl.LOCK_EX)
    assert clean_up_stale_memory(tmp_path, is_alive) == {}
    assert asked == []
    os.close(worker)
    assert clean_up_stale_memory(tmp_path, is_alive)
    assert asked == [Path("/hangs/run")]
