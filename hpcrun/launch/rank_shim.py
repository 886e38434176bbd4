"""The first thing in a rank, before torch and MPI: logs, signals, and the record that says who we are."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from hpcrun import process
from hpcrun.errors import EXIT_RANKS_DIED, EXIT_SAVED
from hpcrun.launch.cpu_binding import bind_process
from hpcrun.launch.node_environment import apply_node_environment
from hpcrun.launch.watch.progress import progress
from hpcrun.launcher_world import World
from hpcrun.shm_segments import mapped_segments
from hpcrun.specs.placement import read_placement
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.run_variables import (
    NODE_MARK,
    RUN_ID_VARIABLE,
    WORKER_SOCKET_VARIABLE,
)
from hpcrun.specs.rundir import Attempt
from hpcrun.specs.saves import resumable_checkpoints

_STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass
class RankRequests:
    """What the rank was asked for so far; whoever has done it takes it back."""

    save: bool = False
    stop: bool = False
    interrupted: bool = False
    leave: Callable[[], None] | None = None
    """Ends this process, for as long as a stop finds nothing in it that is worth a save."""

    def has_begun(self) -> None:
        """From now on there is something to save: a stop waits for the end of a step."""
        self.leave = None


_entered: RankRequests | None = None


def enter_rank(attempt: Attempt, world: World) -> RankRequests:
    """Make this process a well-behaved rank: from here on signals are requests. A second call does nothing.

    USR1 asks to save now, USR2 and TERM to save and stop, INT the same as an interruption.
    """
    global _entered
    if _entered is None:
        _entered = RankRequests()
        if is_supervised():
            _die_with_supervisor(attempt)
            _redirect_output(attempt, world.rank)
        faulthandler.enable()
        _install_handlers(_entered)
        progress(section="init")
        _resolve_worker_socket(attempt, world.rank)
        bound = _bind_to_cpus(attempt, world.rank) | (
            apply_node_environment(attempt, os.environ) if is_supervised() else {}
        )
        write_json(attempt.rank_record(world.rank), _rank_record(world) | bound)
    return _entered


def exit_at_stop(attempt: Attempt, requests: RankRequests) -> None:
    """From here until `has_begun` a stop ends this rank at once, whatever it is doing.

    That is importing, compiling, restoring, or waiting for other ranks in a library that returns to Python
    when they have come: signals are heard in a thread of their own. What the run has in the memory of nodes
    alone has to be saved first.
    """
    restored = read_json(attempt.restore) or {}
    if restored.get("stamp") and restored.get("save") is None:
        return
    owner, leaves = os.getpid(), threading.Lock()

    def leave() -> None:
        # Its children have the same handlers; and the handler and the thread below may come at the same time.
        if os.getpid() == owner and leaves.acquire(blocking=False):
            with contextlib.suppress(OSError):
                write_json(attempt.result, _stopped_early_result(attempt))
            os.write(2, b"hpcrun: asked to stop before a step was done: there is nothing to save\n")
            os._exit(EXIT_SAVED)

    requests.leave = leave
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reader, True)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: _reset_wakeup_in_child(owner))
    threading.Thread(target=_await_stop_signal, args=(reader, requests), name="signals", daemon=True).start()
    if requests.stop:
        leave()


def _await_stop_signal(reader: int, requests: RankRequests) -> None:
    """In a thread of its own, for as long as there is nothing to save."""
    while requests.leave is not None:
        for number in os.read(reader, 64):
            if number in _STOP_SIGNALS and (leave := requests.leave) is not None:
                leave()


def _reset_wakeup_in_child(owner: int) -> None:
    if os.getpid() != owner and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def _stopped_early_result(attempt: Attempt) -> dict[str, Any]:
    saves = resumable_checkpoints(attempt.run.checkpoints)
    step = saves[-1].step if saves else 0
    return {"attempt": attempt.number, "status": "saved", "step": step, "steps_done": 0}


def ignore_request_signals() -> None:
    """Nothing can be asked for any more: Hydra signals ranks when others end, and Python would die of it."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def is_supervised() -> bool:
    """Whether our own supervisor started this process."""
    return RUN_ID_VARIABLE in os.environ


def record_shared_memory(attempt: Attempt, rank: int) -> None:
    """Add to the rank's record what it maps in /dev/shm; this also tells the supervisor that MPI is up."""
    path = attempt.rank_record(rank)
    write_json(path, read_json(path) | {"shm": sorted(mapped_segments())})


def _rank_record(world: World) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "node": os.uname().nodename,
        "pid": os.getpid(),
        "start_ticks": process.start_ticks(os.getpid()),
        "started": time.time(),
    }


def _resolve_worker_socket(attempt: Attempt, rank: int) -> None:
    """Put the name of this rank's node where all ranks were told the same."""
    template = os.environ.get(WORKER_SOCKET_VARIABLE, "")
    placement = read_placement(attempt.placement) if NODE_MARK in template else None
    if placement is not None and rank < len(placement[0].ranks):
        os.environ[WORKER_SOCKET_VARIABLE] = template.replace(NODE_MARK, placement[0].ranks[rank])


def _bind_to_cpus(attempt: Attempt, rank: int) -> dict[str, Any]:
    placement = read_placement(attempt.placement) if is_supervised() else None
    if placement is None or rank >= len(placement[0].ranks):
        return {}
    return {"binding": bind_process(placement[0].binding(rank))}


def _die_with_supervisor(attempt: Attempt) -> None:
    process.die_with_parent(signal.SIGKILL)
    job = read_json(attempt.supervisor) or {}
    # Whoever died before the line above sends us nothing any more.
    if job.get("host") == os.uname().nodename and not process.is_alive(
        process.ProcessId(job["pid"], job["start_ticks"])
    ):
        os._exit(EXIT_RANKS_DIED)


def _redirect_output(attempt: Attempt, rank: int) -> None:
    descriptor = os.open(attempt.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
        _line_buffered(stream)
    os.close(descriptor)


def _line_buffered(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)


def _install_handlers(requests: RankRequests) -> None:
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            _handle_signal_in_child(number)
        elif number == signal.SIGUSR1:
            requests.save = True
        else:
            requests.stop = True
            requests.interrupted |= number == signal.SIGINT
            if requests.leave is not None:
                requests.leave()

    for number in (signal.SIGUSR1, *_STOP_SIGNALS):
        signal.signal(number, handle)


def _handle_signal_in_child(number: int) -> None:
    """In a child that a rank forked (a data worker), TERM and INT end the process as they always do."""
    if number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
