"""What one rank alone raises ends all ranks in its words, and the next Checkpointer works: a sample.

`benchmarks/checkpoint_faults.py --only "one rank"` plays every agreement, over MPI and over a store.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

import hpcrun  # noqa: E402
from hpcrun.checkpoint.flush.arena import SHM  # noqa: E402
from hpcrun.errors import UsageError  # noqa: E402
from hpcrun.runtime import checkpointer  # noqa: E402
from hpcrun.runtime.connect import open_control  # noqa: E402
from hpcrun.runtime.storage_wait import wait_for_storage  # noqa: E402
from tests.checkpoint.faults import SkippedError  # noqa: E402
from tests.checkpoint.rank_faults import By, world  # noqa: E402
from tests.runtime.collective_verbs_world import Trap, silent_in  # noqa: E402


@pytest.mark.parametrize(
    ("by", "verbs", "memories", "stride"), [("mpi", "save,load,open", "0", 6), ("store", "wait", "2", 25)]
)
def test_what_one_rank_raises_all_hear(
    by: By, verbs: str, memories: str, stride: int, tmp_path: Path
) -> None:
    try:
        told = world(tmp_path, by, verbs, memories, stride)
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert [wrong for case in told for wrong in silent_in(case)] == []
    assert len(told) >= 12 + 2


def test_after_an_error_inside_with_nothing_of_ours_stays(tmp_path: Path) -> None:
    folders, here = list[Path](), xxh3_64_hexdigest(str(tmp_path).encode())[:8]

    def fail() -> None:
        with hpcrun.Checkpointer(tmp_path) as saves:
            saves.save(1, {"w": torch.ones(4)}, wait=True)
            folders.extend(SHM.glob(f"*/*/*{here}*"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert folders
    assert not any(folder.exists() for folder in folders), "memory and worker are let go of"
    with hpcrun.Checkpointer(tmp_path) as saves:
        fresh = {"w": torch.zeros(4)}
        assert saves.load(fresh) == 1
        saves.save(2, fresh, wait=True)
        with pytest.raises(UsageError, match="is of type object"):
            saves.save(3, {"w": object()})
        saves.save(3, fresh, wait=True)
        assert saves.load(fresh) == 3


def test_however_far_a_close_came_the_next_one_says_as_much_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks each may have come to another place: one that says more waits for ever."""
    counts, number = set[int](), 0
    while True:
        trap = Trap()
        monkeypatch.setattr(
            checkpointer, "open_control", lambda environ, trap=trap: trap.arm(open_control(environ))
        )
        saves = hpcrun.Checkpointer(tmp_path / str(number))
        saves.save(1, {"w": torch.ones(4)})
        trap.set(number)
        with contextlib.suppress(ValueError, KeyboardInterrupt, MemoryError, OSError):
            saves.close()
        if not trap.fired:
            break
        trap.left = -1
        saves.close()
        counts.add(-1 - trap.left)
        number += 1
    assert number >= 6, "settling, letting go, and the end, before and after each"
    assert len(counts) == 1


def test_what_hangs_is_told_of_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from hpcrun.errors import SiteError
    from hpcrun.runtime import storage_wait

    monkeypatch.setattr(storage_wait, "FIRST_REPORT_S", 0.01)
    monkeypatch.setattr(storage_wait, "_POLL_S", 0.01)
    told, hangs = list[str](), threading.Event()
    with pytest.raises(SiteError, match=r"/lustre/x: has not answered"):
        wait_for_storage("/lustre/x", hangs.wait, lambda what, _seconds: told.append(what), 0.1)
    hangs.set()
    assert 0 < len(told) < 6
    assert set(told) == {"/lustre/x"}
    assert wait_for_storage("/lustre/x", lambda: 3, lambda *_: None) == 3
