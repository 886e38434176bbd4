"""A process ends when torch's own threads have put their work down.

A thread of gloo lets go of a collective's tensors after whoever waited for it goes on. Where that is the
last hold on them it needs Python's lock, and once the interpreter is being taken down, asking for the lock
ends the thread in a way that C++ answers with SIGABRT: "terminate called without an active exception". On a
busy node a thread may be that late, also after destroy_process_group(), which leaves the threads for as long
as anything refers to their group. So such threads are given the time to come to rest before that.
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
"""What the names of torch's threads begin with; those of the transport below only wait for bytes."""
_LOOK_S, _MOST_S = 0.003, 30.0


@functools.cache
def await_idle_threads_at_exit() -> None:
    """From now on this process waits at its end, a moment as a rule, until torch's threads are at rest."""
    atexit.register(await_idle_threads)


def await_idle_threads(most_s: float = _MOST_S) -> bool:
    """Wait until all threads of torch's sleep and have done so since the look before; whether they do.

    Between the looks Python's lock is free: a thread that waits for it gets it then, and is seen to have run.
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
    """Of each thread of torch's: whether it sleeps, and how often it was put to sleep or set aside."""
    known = {str(one.native_id) for one in threading.enumerate()}
    found: dict[str, tuple[bool, str]] = {}
    for task in _TASKS.iterdir():
        # A thread may end between two looks at it.
        with suppress(OSError):
            if task.name not in known and (task / "comm").read_text().startswith(_TORCH_THREAD_PREFIX):
                lines = (task / "status").read_text().splitlines()
                told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                switches = f"{told['voluntary_ctxt_switches']} {told['nonvoluntary_ctxt_switches']}"
                found[task.name] = (told["State"].startswith("S"), switches)
    return found
