"""The guardian: the small parent of a submitted job's supervisor, which restarts it when it is killed.

Slurm ends the job with its batch script, and the batch script ends with this process. A supervisor that the
kernel kills when memory runs out must not take healthy nodes down with it. The guardian forwards signals,
exits with the supervisor's exit code, and starts another supervisor when one was killed by a signal.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from hpcrun import process
from hpcrun.errors import EXIT_RANKS_DIED
from hpcrun.launch.signal_queue import SUPERVISOR_SIGNALS
from hpcrun.specs.io_retry import log_line

_MAX_IN_A_ROW = 3
"""Restarts in a row on this host."""
_STABLE_S = 600.0
"""A supervisor that lived this long starts a new row."""
_RESTART_PAUSE_S = 1.0


class SupervisorCrash(NamedTuple):
    """Record of consecutive supervisor crashes of this job on this host."""

    parent: int
    """The guardian's pid."""
    pids: tuple[int, ...]
    """Pids of all supervisors that this job has had on this host."""
    signal_name: str
    """The signal that killed the last one."""
    in_a_row: int
    """Number of crashes, each soon after the one before."""
    began: float
    """Start of the first supervisor, wall clock."""

    @property
    def is_last(self) -> bool:
        """Whether the limit of restarts on this host is reached."""
        return self.in_a_row > _MAX_IN_A_ROW


def supervise_with_restarts(supervise: Callable[[SupervisorCrash | None], int]) -> int:
    """Run `supervise` in a child, again after each kill by a signal; returns the exit code in both processes.

    The caller must have one thread and its signals blocked: they reach every child from its first line on.
    """
    process.become_subreaper()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    # Caught, not just waited for: the batch shell holds signals back until it sees handlers.
    handled = (*SUPERVISOR_SIGNALS, signal.SIGCHLD)
    caught = [
        signum for signum in handled if signal.getsignal(signum) != signal.SIG_IGN or signum == signal.SIGCHLD
    ]
    before = {signum: signal.signal(signum, lambda _number, _frame: None) for signum in caught}
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    crash: SupervisorCrash | None = None
    pending: list[int] = []
    first, parent = time.time(), os.getpid()
    while True:
        began = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            for signum, handler in before.items():
                signal.signal(signum, handler if signum != signal.SIGCHLD else signal.SIG_DFL)
            _become_child(parent)
            return supervise(crash)
        for number in pending:
            os.kill(child, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        status = _forward_signals(reader, child, pending)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        name = signal.Signals(os.WTERMSIG(status)).name
        if crash is not None and crash.is_last:
            log_line(f"the supervisor (pid {child}) was killed by {name} once more")
            return EXIT_RANKS_DIED
        is_new = crash is None or time.monotonic() - began > _STABLE_S
        pids = (*(crash.pids if crash else ()), child)
        in_a_row = 1 if is_new or crash is None else crash.in_a_row + 1
        crash = SupervisorCrash(parent, pids, name, in_a_row, first)
        log_line(f"the supervisor (pid {child}) was killed by {name}")
        # If Slurm is killing the whole job, this process is next.
        time.sleep(_RESTART_PAUSE_S)


def _become_child(parent: int) -> None:
    process.die_with_parent()
    if os.getppid() != parent:
        os._exit(EXIT_RANKS_DIED)
    # Signals to the batch shell's process group are forwarded by the guardian and must not arrive twice.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _forward_signals(reader: int, child: int, pending: list[int]) -> int:
    """Forward signals until the child ends; returns its wait status. `pending`: those for a successor."""
    while (status := _reap_child(child)) is None:
        for number in os.read(reader, 4096):
            if number == signal.SIGCHLD:
                continue
            if number != signal.SIGUSR1 and number not in pending:
                pending.append(number)
            os.kill(child, number)
    return status


def _reap_child(child: int) -> int | None:
    """The wait status of the child if it has ended; also reaps orphans that it left."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None
