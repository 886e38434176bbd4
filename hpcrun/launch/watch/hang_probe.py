"""A look into ranks that hang: their stacks, from inside and from outside, and what the kernel tells."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from hpcrun import process
from hpcrun.errors import SiteError
from hpcrun.launch.watch.progress import DUMP_SIGNAL
from hpcrun.process import ProcessHandle
from hpcrun.specs.rundir import Attempt

_POLL_S = 0.05
_STOPPED = ("T", "t", "Z", "X")
"""States of processes that do not act on a signal."""
_MAX_PYTHONS = 4
"""So many Python processes of a rank are looked into from outside."""
NCCL_PIPE_PREFIX = "nccl-"
"""How the pipes begin through which torch's recorder of NCCL calls is asked for what it has."""
NCCL_TRACE_PREFIX = "nccl-trace-"
"""How the files begin that it then writes."""


def dump_stacks(
    attempt: Attempt,
    ranks: Mapping[int, ProcessHandle],
    dumpable: Mapping[int, ProcessHandle],
    timeout_s: float,
) -> dict[int, dict[str, str]]:
    """Have the ranks of this node write their stacks; `state` and `waits_in` of each, by the kernel.

    Those that are `dumpable` do it on a signal, also while they hold Python's lock; py-spy looks into the
    others where it is on PATH and the kernel lets it.
    """
    deadline = time.monotonic() + timeout_s
    processes = {**ranks, **dumpable}
    seen = {rank: _read_kernel_state(handle) for rank, handle in processes.items()}
    waiting = {}
    for rank, handle in dumpable.items():
        if seen[rank]["state"] not in _STOPPED:
            waiting[rank] = _size(attempt.stack(rank))
            handle.signal(DUMP_SIGNAL)
    for rank in processes:
        _trigger_nccl_dump(attempt, rank)
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # One more look after it has grown: the threads are written one after the other.
        grown = {rank for rank, size in waiting.items() if _size(attempt.stack(rank)) > size}
        if grown == waiting.keys():
            time.sleep(_POLL_S)
            break
    _run_py_spy(attempt, {rank: handle for rank, handle in ranks.items() if rank not in dumpable}, deadline)
    return seen


def _read_kernel_state(handle: ProcessHandle) -> dict[str, str]:
    pid = handle.process.pid
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text(errors="replace").strip("0\n")
    except OSError:
        waits_in = ""
    return {"state": process.state(pid) or "", "waits_in": waits_in}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _trigger_nccl_dump(attempt: Attempt, rank: int) -> None:
    """The recorder of NCCL calls writes what it has when a byte comes through its pipe."""
    with contextlib.suppress(OSError):
        pipe = os.open(attempt.stacks / f"{NCCL_PIPE_PREFIX}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1")
        finally:
            os.close(pipe)


def _run_py_spy(attempt: Attempt, ranks: Mapping[int, ProcessHandle], deadline: float) -> None:
    """Look into the Python processes of ranks that have not told how they write their stacks."""
    spy = shutil.which("py-spy") if ranks else None
    if spy is None:
        return
    for rank, handle in ranks.items():
        below = process.descendants(handle.process)
        pythons = [process_id.pid for process_id in (handle.process, *below) if _is_python(process_id.pid)]
        for pid in pythons[:_MAX_PYTHONS]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(SiteError, OSError):
                done = process.run([spy, "dump", "--pid", str(pid)], timeout_s=left)
                with attempt.stack(rank).open("a") as file:
                    file.write(done.stdout or done.stderr)


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False
