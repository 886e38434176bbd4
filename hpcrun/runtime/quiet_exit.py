"""Delays the exit of a process until torch's own threads are idle.

A thread of gloo releases a collective's tensors after the caller has gone on. If it holds the last reference,
it needs Python's lock. While the interpreter shuts down, taking the lock ends the thread, which C++ answers
with SIGABRT: "terminate called without an active exception". On a busy node a thread may be that late, also
after destroy_process_group(), which leaves the threads as long as anything refers to their group.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_TORCH_THREAD_PREFIX = "pt_"
"""The prefix of torch's thread names; threads of the transport below only wait for data."""
_LOOK_S, _MOST_S = 0.003, 30.0


@functools.cache
def await_idle_threads_at_exit() -> None:
    """Have this process wait at its exit, usually for a moment, until torch's threads are idle."""
    atexit.register(await_idle_threads)


def await_idle_threads(most_s: float = _MOST_S) -> bool:
    """Wait until all of torch's threads have slept since the previous look; return whether they do.

    Between the looks Python's lock is free: a thread that waits for it runs, and is seen to have run.
    """
    deadline = time.monotonic() + most_s
    before = _torch_thread_states()
    while before:
        time.sleep(_LOOK_S)
        now = _torch_thread_states()
        if now == before and all(sleeps for sleeps, _ in now.values()):
            return True
        if time.monotonic() > deadline:
            return False
        before = now
    return True


def _torch_thread_states() -> dict[str, tuple[bool, str]]:
    """Return for each of torch's threads whether it sleeps, and its count of context switches."""
    python_threads = {str(thread.native_id) for thread in threading.enumerate()}
    states: dict[str, tuple[bool, str]] = {}
    for task in _TASKS.iterdir():
        # A thread may end meanwhile.
        with suppress(OSError):
            is_torchs = (task / "comm").read_text().startswith(_TORCH_THREAD_PREFIX)
            if task.name not in python_threads and is_torchs:
                lines = (task / "status").read_text().splitlines()
                status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                switches = f"{status['voluntary_ctxt_switches']} {status['nonvoluntary_ctxt_switches']}"
                states[task.name] = (status["State"].startswith("S"), switches)
    return states
