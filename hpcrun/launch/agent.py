"""The agent: one a node of an allocation; starts, watches, signals and clears up the node's ranks.

It reads orders, one JSON object a line, from its standard input and answers on its standard output; when the
input ends, the supervisor is gone, and so is everything that the agent has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.launch.happenings import encode
from hpcrun.launch.lease import LEADERLESS_S, Lease, take_over
from hpcrun.launch.node import NodeRanks
from hpcrun.launch.preflight import answer
from hpcrun.launch.world import without_world
from hpcrun.specs.rundir import RunDir

BEAT_S = 1.0
"""How often an agent says that it is there."""
_TICK_S = 0.2
_STARTING_S = 0.05
_CLEAR_S = 5.0


class Agent:
    """Carries out a supervisor's orders on this node."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ranks: NodeRanks | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._waiting = b""
        self._beaten = 0.0
        self._heard = time.monotonic()
        self._lease = Lease(run)

    def serve(self) -> None:
        """Work until the supervisor says so or is gone."""
        # Slurm signals every process of a step, and only the supervisor knows what is meant by it. They are
        # handled, not ignored: ranks would inherit the latter, and no shell traps what it was born deaf to.
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)
        process.become_subreaper()
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        address = [os.environ.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN")]
        self._say({"kind": "hello", "node": os.uname().nodename, "pid": os.getpid(), "address": address})
        try:
            while self._take_orders() and not self._is_leaderless():
                self._watch()
        finally:
            self._clear([])
        if self._is_leaderless():
            sys.stderr.write(f"hpcrun: {take_over(self._run)}\n")

    def _is_leaderless(self) -> bool:
        """Whether the supervisor has been silent for long, here and in the run directory too.

        A connection that breaks is not enough, nor is a file system that stalls.
        """
        if time.monotonic() - self._heard < LEADERLESS_S / 2:
            return False
        still_s = self._lease.still_s()
        return time.monotonic() - self._heard > LEADERLESS_S and still_s > LEADERLESS_S / 2

    def _take_orders(self) -> bool:
        """Wait a moment for orders and carry them out; False at the end of the input."""
        starting = self._ranks is not None and not self._ranks.is_complete
        self._selector.select(_STARTING_S if starting else _TICK_S)
        try:
            while data := os.read(sys.stdin.fileno(), 65536):
                self._waiting += data
        except BlockingIOError:
            *lines, self._waiting = self._waiting.split(b"\n")
            self._heard = time.monotonic() if lines else self._heard
            return all(self._obey(json.loads(line)) for line in lines if line)
        return False

    def _obey(self, order: dict[str, Any]) -> bool:
        match order["do"]:
            case "preflight":
                self._say(answer(self._run, order, beat=lambda: self._say({"kind": "beat"})))
            case "watch":
                self._clear([])
                attempt = self._run.attempt(order["attempt"])
                self._ranks = NodeRanks(attempt, order["ranks"], order["hears"])
                self._selector.register(self._ranks.fileno(), selectors.EVENT_READ)
                self._say({"kind": "watching"})
            case "start":
                self._start(order["argv"], Path(order["log"]))
            case "signal":
                if self._ranks is not None:
                    self._ranks.signal(order["number"], order["rank"])
            case "dump":
                ranks = self._ranks.dump(order["timeout_s"]) if self._ranks is not None else {}
                self._say({"kind": "dumped", "ranks": ranks})
            case "kill":
                if self._ranks is not None:
                    self._ranks.kill()
            case "clear":
                self._say({"kind": "cleared", "stuck": self._clear(order["spared"])})
            case "beat":
                pass
            case _:
                return False
        return True

    def _start(self, argv: list[str], log: Path) -> None:
        """Start a process of the launcher's, whose descendants the ranks are."""
        assert self._ranks is not None
        self._ranks.below = os.getpid()
        with log.open("ab") as output:
            self._children.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=without_world(os.environ),
                    start_new_session=True,
                )
            )

    def _watch(self) -> None:
        if self._ranks is not None:
            for happening in (*self._ranks.ended(), *self._ranks.appeared()):
                self._say_line(encode(happening))
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            for one in self._ranks.heard() if self._ranks is not None else ():
                self._say_line(encode(one))
            self._say({"kind": "beat"})

    def _clear(self, spared: list[int]) -> list[int]:
        if self._ranks is None:
            return []
        self._selector.unregister(self._ranks.fileno())
        for rank in self._ranks.ended():
            self._say_line(encode(rank))
        stuck = self._ranks.clear(_CLEAR_S, spared)
        self._ranks = None
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0 if stuck else None)
        self._children = []
        process.reap_orphans(keep=-1)
        return stuck

    def _say(self, message: dict[str, Any]) -> None:
        self._say_line(json.dumps(message))

    def _say_line(self, line: str) -> None:
        # A supervisor that is gone is noticed where its orders are read.
        with contextlib.suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), f"{line}\n".encode())
