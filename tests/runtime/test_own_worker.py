"""The worker that a script starts for itself: there from the beginning, and what stays when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

import hpcrun  # noqa: E402
from hpcrun.checkpoint.flush.arena import SHM, find_arenas  # noqa: E402
from hpcrun.errors import SiteError  # noqa: E402
from hpcrun.specs.rundir import RunDir  # noqa: E402
from hpcrun.specs.saves import resumable_checkpoints  # noqa: E402

ROOT = Path(__file__).parents[2]
KILLED = """\
import os, signal, sys, torch, hpcrun
opened = [hpcrun.Checkpointer(directory) for directory in sys.argv[1:]]
for saves in opened:
    saves.save(1, {"weights": torch.ones(1 << 18)})
    saves.fence()
lost = opened[0]._async_checkpointer._home._child
lost.kill()
lost.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def arenas(directory: Path) -> list[Path]:
    return list(find_arenas(SHM, RunDir(directory).run_id))


def test_the_memory_of_a_killed_script_is_stored_and_freed_or_freed_by_the_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost, stored, other = (tmp_path / name for name in ("lost", "stored", "other"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(lost), str(stored)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert arenas(lost)
    # Only loads and closes, and in another directory.
    with hpcrun.Checkpointer(other) as saves:
        assert saves.load({"weights": torch.zeros(1)}) is None
    assert not arenas(lost)
    assert "MiB that a run has left in memory" in capfd.readouterr().err
    # The worker that was not killed has stored what it had, and a start there waits for that.
    state: dict[str, Any] = {"weights": torch.zeros(1 << 18)}
    with hpcrun.Checkpointer(stored, memory=0) as saves:
        assert saves.load(state) == 1
    assert state["weights"].sum() == 1 << 18
    deadline = time.monotonic() + 60
    while arenas(stored) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not arenas(stored)


def test_a_checkpointer_that_was_never_closed_makes_way_for_the_next(tmp_path: Path) -> None:
    state = {"weights": torch.ones(64)}
    first = hpcrun.Checkpointer(tmp_path)
    first.save(1, state)
    first.fence()
    with hpcrun.Checkpointer(tmp_path) as saves:
        assert saves.load(state) == 1
        assert saves.save(2, state)
    first.close()
    assert [saved.step for saved in resumable_checkpoints(tmp_path / "checkpoints")] == [1, 2]
    assert not arenas(tmp_path)


def test_what_cannot_be_stored_is_told_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(SiteError, match=r"/file/mine/.*: Not a directory"):
        hpcrun.Checkpointer(in_the_way / "mine")
    nowhere = Path("/proc/mine")  # nobody may write there, not even root
    with pytest.raises(SiteError, match=r"nothing can be saved: /proc/mine.*; name a directory"):
        hpcrun.Checkpointer(nowhere)
    assert not arenas(nowhere)
    wrong: dict[str, Any] = {
        "local": str(in_the_way / "disk"),
        "object": {"url": f"file://{in_the_way}/store"},
    }
    with hpcrun.Checkpointer(tmp_path / "mine", **wrong):
        told = capfd.readouterr().err
    assert "saves will fail: local: " in told
    assert "saves will fail: object: " in told
