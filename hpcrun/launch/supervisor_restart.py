"""The parent of a submitted job's supervisor: hardly any memory, and there when the supervisor dies alone.

Slurm ends a job with its batch script, and that ends with us: a supervisor that the kernel has picked when
memory ran out must not take ranks on nodes that are well with it. We hand signals on, end with the
supervisor's exit code, and have another one come back in its place where it was killed.
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
"""So often in a row another one comes back here."""
_STABLE_S = 600.0
"""One that lived for so long begins a new row."""
_RESTART_PAUSE_S = 1.0


class SupervisorCrash(NamedTuple):
    """That supervisors of this job were killed here, one after the other."""

    parent: int
    """The process that has started them all."""
    pids: tuple[int, ...]
    """All that this job has had on this host."""
    signal_name: str
    """What the last one was killed by."""
    in_a_row: int
    """How many, each soon after the one before."""
    began: float
    """When the first of them all was started, by the wall clock."""

    @property
    def is_last(self) -> bool:
        """Whether nobody is to lead the run here any more."""
        return self.in_a_row > _MAX_IN_A_ROW


def supervise_with_restarts(supervise: Callable[[SupervisorCrash | None], int]) -> int:
    """Supervise in a child, and again where it is killed by a signal; the exit code, to both of them.

    The caller has one thread, and holds its signals back: they reach every child, from its first line on.
    """
    process.become_subreaper()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    # Caught, and not just waited for: the batch shell keeps them back until it sees that they are.
    known = (*SUPERVISOR_SIGNALS, signal.SIGCHLD)
    caught = [one for one in known if signal.getsignal(one) != signal.SIG_IGN or one == signal.SIGCHLD]
    before = {one: signal.signal(one, lambda _number, _frame: None) for one in caught}
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    fall: SupervisorCrash | None = None
    told: list[int] = []
    first, parent = time.time(), os.getpid()
    while True:
        began = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, known)
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            for one, handler in before.items():
                signal.signal(one, handler if one != signal.SIGCHLD else signal.SIG_DFL)
            _become_child(parent)
            return supervise(fall)
        for number in told:
            os.kill(child, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, known)
        status = _forward_signals(reader, child, told)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        name = signal.Signals(os.WTERMSIG(status)).name
        if fall is not None and fall.is_last:
            log_line(f"the supervisor (pid {child}) was killed by {name} once more")
            return EXIT_RANKS_DIED
        is_new = fall is None or time.monotonic() - began > _STABLE_S
        pids = (*(fall.pids if fall else ()), child)
        fall = SupervisorCrash(parent, pids, name, 1 if is_new or fall is None else fall.in_a_row + 1, first)
        log_line(f"the supervisor (pid {child}) was killed by {name}")
        # Where Slurm kills the whole job, we are next.
        time.sleep(_RESTART_PAUSE_S)


def _become_child(parent: int) -> None:
    process.die_with_parent()
    if os.getppid() != parent:
        os._exit(EXIT_RANKS_DIED)
    # What is sent to the group of the batch shell comes from us, and not twice.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _forward_signals(reader: int, child: int, told: list[int]) -> int:
    """Hand signals on until the child ends; its wait status. `told` gets those that a next one must hear."""
    while (status := _reap_child(child)) is None:
        for number in os.read(reader, 4096):
            if number == signal.SIGCHLD:
                continue
            if number != signal.SIGUSR1 and number not in told:
                told.append(number)
            os.kill(child, number)
    return status


def _reap_child(child: int) -> int | None:
    """The wait status of the child, if it has ended; others are those that it has left behind."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None
