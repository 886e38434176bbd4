"""An arena that a worker serves is nobody's garbage, whatever became of its run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hpcrun.checkpoint.drain.arena import make_folder, sweep


def test_an_arena_is_left_alone_for_as_long_as_a_worker_serves_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, Path("/runs/mine"), "mine", "n1")
    (folder / "slot-0-0.bin").write_bytes(bytes(100))
    worker = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(worker, fcntl.LOCK_EX)
    assert sweep(tmp_path, lambda run: False) == {}
    assert folder.exists()
    os.close(worker)
    assert folder.parent in sweep(tmp_path, lambda run: False)
    assert not folder.exists()
