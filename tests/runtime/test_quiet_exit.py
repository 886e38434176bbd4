"""The end of a process waits for torch's threads that still have work in hand."""

from __future__ import annotations

import _thread
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpcrun.runtime.quiet_exit import await_idle_threads


class Busy:
    """A thread that Python does not list, under a name of torch's, busy until it is told to sleep."""

    def __init__(self) -> None:
        self.rests, self._ends, self._is_up = False, threading.Event(), threading.Event()
        _thread.start_new_thread(self._work, ())
        self._is_up.wait()

    def _work(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        self._is_up.set()
        while not self.rests:
            pass
        self._ends.wait()

    def rest(self) -> None:
        self.rests = True

    def end(self) -> None:
        self.rests = True
        self._ends.set()


def test_the_end_waits_for_a_thread_of_torch_that_still_works() -> None:
    busy = Busy()
    try:
        assert not await_idle_threads(0.1)
        late = threading.Timer(0.3, busy.rest)
        late.start()
        assert await_idle_threads()
        assert busy.rests
    finally:
        busy.end()


def test_threads_that_wait_for_work_keep_nobody() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        assert await_idle_threads()
    finally:
        dist.destroy_process_group()
