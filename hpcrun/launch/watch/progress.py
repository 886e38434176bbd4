"""What a rank tells its node of where it is: `hpcrun.progress(step)` in any program, sections in ours.

A message goes over a socket of the node and is never waited for: nobody there, or a full one, costs nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrun.launcher_world import rank_from_environment
from hpcrun.messages.authentication import is_counting_number
from hpcrun.messages.listeners import own_user_peer_pid
from hpcrun.typed_json import Count, Seconds, render_typed

PROGRESS_SOCKET_VARIABLE = "HPCRUN_PROGRESS"
"""Name of the node's socket (Linux's abstract ones, without the zero), set in every rank."""
STACKS_VARIABLE = "HPCRUN_STACKS"
"""Directory for the stacks of ranks that hang, set in every rank."""
DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write its stacks, also while it holds Python's lock; nobody else uses it."""
MAX_PROGRESS_BYTES = 4096
WARM_UP_STEPS = 3
"""So many steps of an attempt say nothing about how long one takes: caches fill, kernels are compiled."""
_RECONNECT_S = 1.0
_MAX_SECTION_LENGTH = 40
_MIN_INTERVAL_S = 0.05
"""Steps that are shorter than this are not told one by one."""


@dataclass(frozen=True)
class ProgressMessage:
    """Where a rank is."""

    rank: Count
    section: str
    step: Count | None
    longest_s: dict[str, Seconds]
    """The longest time that each section has taken since the last message."""
    can_dump: bool
    """It writes its stacks on DUMP_SIGNAL."""
    probe_s: Seconds | None
    """What a fixed piece of work took."""


class ProgressReporter:
    """Tells which section a rank is in, and how long the sections before took at most."""

    def __init__(self, rank: int, name: str) -> None:
        self._rank, self._name = rank, name
        self._owner = os.getpid()
        self._socket: socket.socket | None = None
        self._dump = _register_stack_dump(rank)
        self._section, self._since, self._told_section, self._told = "", 0.0, "", 0.0
        self._steps = 0
        self._longest: dict[str, float] = {}
        self._tried = float("-inf")
        self._connect()

    def _connect(self) -> None:
        """To the node's end; where others crowd its door, again at a later message."""
        now = time.monotonic()
        if now - self._tried < _RECONNECT_S:
            return
        self._tried = now
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        opened.setblocking(False)
        try:
            opened.connect(f"\0{self._name}")
        except BlockingIOError:
            opened.close()
        except OSError:  # nobody is there
            opened.close()
            self._tried = float("inf")
        else:
            # Anybody may take a name where ours does not listen.
            if own_user_peer_pid(opened) is None:
                opened.close()
            else:
                self._socket = opened

    def report(self, section: str, step: int | None = None, *, probe_s: float | None = None) -> None:
        """From now on the rank is in this section; `probe_s`: what a fixed piece of work took."""
        now, section = time.monotonic(), section[:_MAX_SECTION_LENGTH]
        self._record_section_time(now)
        if section == "step":
            self._steps += 1
        self._section, self._since = section, now
        is_due = section != self._told_section or now - self._told >= _MIN_INTERVAL_S or probe_s is not None
        # A child that a rank forks (a data worker) is not the rank.
        if not is_due or os.getpid() != self._owner:
            return
        if self._socket is None:
            self._connect()
        if self._socket is None:
            return
        step = step if is_counting_number(step) else None
        message = ProgressMessage(self._rank, section, step, self._longest, self._dump, probe_s)
        # Whoever does not read has enough of them; the next one tells the same.
        with contextlib.suppress(OSError):
            self._socket.send(render_typed(message).encode()[:MAX_PROGRESS_BYTES])
            self._told_section, self._told, self._longest = section, now, {}

    def close(self) -> None:
        """Tell nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _record_section_time(self, now: float) -> None:
        if self._section and (self._section != "step" or self._steps > WARM_UP_STEPS):
            took = now - self._since
            self._longest[self._section] = max(took, self._longest.get(self._section, 0.0))


def _register_stack_dump(rank: int) -> bool:
    """Whether this process writes its stacks when it is told to."""
    folder = os.environ.get(STACKS_VARIABLE)
    if not folder:
        return False
    try:
        # Kept open for good: a rank that hangs opens nothing any more.
        file = (Path(folder) / f"rank-{rank}.txt").open("a")
        faulthandler.register(DUMP_SIGNAL, file, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        return False
    return True


_reporter: ProgressReporter | None = None


def progress(step: int | None = None, section: str = "step") -> None:
    """Say that this rank has come to a step, once a step; outside of a run it does nothing.

    A run whose ranks do so is watched: one that makes no more progress is ended, with the stacks of all its
    ranks, and goes on from its save (see `watch:` in the job file). Longer work beside the steps has limits
    of its own when it is announced: `hpcrun.progress(step, "checkpoint")`; or "eval", "compile", "init".
    """
    global _reporter
    if _reporter is None:
        name, rank = os.environ.get(PROGRESS_SOCKET_VARIABLE), _own_rank()
        if name is None or rank is None:
            return
        _reporter = ProgressReporter(rank, name)
    _reporter.report(section, step)


def report_probe(seconds: float, step: int) -> None:
    """Tell what a fixed piece of work took at the beginning of a step: nodes are compared by it."""
    if _reporter is not None:
        _reporter.report("step", step, probe_s=seconds)


def _own_rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isascii() and text.isdigit() else rank_from_environment(os.environ)
