"""The agent: one a node of an allocation; starts, watches, signals and clears up the node's ranks.

It takes orders, one JSON object a line, from whoever leads the run, and answers in the same way. When it
hears nothing for long, others may have gone on without it: then it ends its ranks and looks for the next
supervisor, or becomes the one who starts it.
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
from types import FrameType
from typing import Any

from hpcrun import process
from hpcrun.fabric.inventory import try_inventory
from hpcrun.files import append_to
from hpcrun.health.preflight import answer
from hpcrun.launch.agents.local_ranks import NodeRanks
from hpcrun.launch.agents.memory_cleanup import sweep_arenas
from hpcrun.launch.agents.supervisor_client import Uplink
from hpcrun.launch.agents.worker_process import DrainHost
from hpcrun.launch.attempt_events import encode
from hpcrun.launch.failover.successor_process import Heir
from hpcrun.launch.rendezvous import NodeRendezvous
from hpcrun.launcher_world import without_world
from hpcrun.runs.run_lock import sweep_segments
from hpcrun.slurm.allocation import find_allocation
from hpcrun.specs.io_retry import say
from hpcrun.specs.rundir import RunDir

_TICK_S = 0.2
_STARTING_S = 0.05
_CLEAR_S = 5.0
_KILLED_S = 1.0
_LOADS = "import os; os.nice(19); import hpcrun.runtime.rank"
_REPORT_S = 1.0
"""How often the supervisor is told where the ranks say they are."""


class Agent:
    """Carries out a supervisor's orders on this node."""

    def __init__(self, run: RunDir, *, is_called_back: bool = False) -> None:
        """`is_called_back`: started in place of one that was lost."""
        self._run, self._is_called_back = run, is_called_back
        # Slurm's name for the node is that of the orders.
        self._node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        allocation = find_allocation(os.environ)
        self._is_batch = allocation is not None and allocation.is_batch
        self._heir = Heir(run, allocation) if allocation is not None and allocation.is_batch else None
        nodes = allocation.nodes if allocation is not None else ()
        position = nodes.index(self._node) if self._node in nodes else 0
        self._uplink = Uplink(run, self._node, position, self._heir.may_claim if self._heir else None)
        found = try_inventory()
        self._inside = found.as_json() if found else None
        self._vault = DrainHost(run, self._node, lambda message: self._say(message), os.environ)
        self._meeting = NodeRendezvous()
        self._ranks: NodeRanks | None = None
        self._attempt: int | None = None
        self._reported, self._is_warm = 0.0, False
        self._children: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._input_ended = self._is_told_to_end = self._is_to_ask = False

    def serve(self) -> None:
        """Work until the supervisor says so, or is gone and nobody comes after it."""
        # Slurm signals every process of a step, and only the supervisor knows what is meant by it. They are
        # handled, not ignored: ranks would inherit the latter, and no shell traps what it was born deaf to.
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._take_signal)
        process.become_subreaper()
        self._own_log()
        for text in sweep_arenas(self._run):
            say(text)
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(self._vault.fileno(), selectors.EVENT_READ)
        with contextlib.suppress(PermissionError):  # a file or /dev/null never ends
            self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        with contextlib.ExitStack() as leaving:
            # From the last to the first, and each of them whatever becomes of those before it.
            if self._heir is not None:
                leaving.callback(self._heir.see_off)
            leaving.callback(self._uplink.close)
            leaving.callback(self._say, {"kind": "left"})
            leaving.callback(self._vault.close)
            leaving.callback(self._meeting.close)
            leaving.callback(self._clear, [])
            while self._take_orders() and not self._is_deserted():
                self._watch()

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._is_told_to_end = self._is_to_ask = True

    def _own_log(self) -> None:
        """What we say must not depend on a supervisor that reads it."""
        descriptor = os.open(
            self._run.agent_logs / f"{self._node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(descriptor, sys.stderr.fileno())
        os.close(descriptor)

    def _is_deserted(self) -> bool:
        """Whether nobody leads and nobody will; ranks without a leader end in any case."""
        vigil = self._uplink.vigil
        # Where Slurm ends the job as well there is not the time to look whether the supervisor comes back.
        is_orphaned = vigil.is_orphaned or (self._is_told_to_end and vigil.is_quiet)
        if is_orphaned and self._ranks is not None:
            say("the supervisor does not answer; the ranks here are ended")
            self._end_ranks(self._ranks)
        if self._heir is None:
            # Outside of a batch job the supervisor is somebody's command, and ends with it.
            return self._input_ended or vigil.is_orphaned
        if self._is_to_ask and vigil.is_quiet:
            # Who is killed gives no memory back, and Slurm kills soon after it has told us.
            self._is_to_ask = False
            if not self._heir.may_claim():
                say("the supervisor does not answer, and Slurm ends the job: so does this agent")
                return True
        if self._uplink.won is not None:
            if self._heir.tend(self._uplink.won, self._uplink.epoch):
                self._uplink.won = None
            return self._heir.has_ended_job
        return False

    def _end_ranks(self, ranks: NodeRanks) -> None:
        """Without an order; a supervisor that comes back after all is told which have ended."""
        ranks.kill()
        deadline = time.monotonic() + _KILLED_S
        while not ranks.is_over and time.monotonic() < deadline:
            self._watch()
            time.sleep(0.02)
        self._clear([])

    def _take_orders(self) -> bool:
        """Wait a moment for orders and carry them out; False when there is no more to do."""
        starting = self._ranks is not None and not self._ranks.is_complete
        self._selector.select(_STARTING_S if starting else _TICK_S)
        self._read_input()
        channel = self._uplink.session.channel
        orders = self._uplink.hear()
        if channel is not None and self._uplink.session.channel is not channel:
            self._forget_channel()
        goes_on = all(self._obey(order) for order in orders if "do" in order)
        if (arrived := self._uplink.arrive()) is not None:
            self._forget_channel()
            self._selector.register(arrived[0], selectors.EVENT_READ, "channel")
            if arrived[1]:
                # What another supervisor has started is nothing to this one.
                self._clear([])
                address = [os.environ.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN")]
                hello = {"kind": "hello", "node": self._node, "pid": os.getpid(), "address": address}
                self._say(hello | {"called": self._is_called_back, "inside": self._inside})
        return goes_on

    def _forget_channel(self) -> None:
        for key in [key for key in self._selector.get_map().values() if key.data == "channel"]:
            self._selector.unregister(key.fileobj)

    def _read_input(self) -> None:
        """Nothing is said there; its end is what counts."""
        with contextlib.suppress(BlockingIOError):
            if not self._input_ended and not os.read(sys.stdin.fileno(), 65536):
                self._input_ended = True
                with contextlib.suppress(KeyError):
                    self._selector.unregister(sys.stdin.fileno())

    def _obey(self, order: dict[str, Any]) -> bool:
        if order["do"] in ("start", "signal", "kill", "dump") and order["attempt"] not in (
            None,
            self._attempt,
        ):
            return True  # it came too late
        match order["do"]:
            case "preflight":
                self._say(answer(self._run, order) | {"attempt": order["attempt"]})
            case "meeting":
                self._say(self._meeting.answer(order))
            case "trial":
                self._say(self._meeting.try_others(order))
            case "watch":
                self._clear([])
                sweep_segments(self._run)
                attempt = self._run.attempt(order["attempt"])
                self._ranks = NodeRanks(attempt, order["ranks"], order["hears"])
                self._attempt = attempt.number
                self._selector.register(self._ranks.fileno(), selectors.EVENT_READ)
                self._say({"kind": "watching", "attempt": self._attempt})
            case "start":
                self._start(order["argv"], Path(order["log"]))
            case "signal":
                if self._ranks is not None:
                    self._ranks.signal(order["number"], order["rank"])
            case "dump":
                ranks = self._ranks.dump(order["timeout_s"]) if self._ranks is not None else {}
                self._say({"kind": "dumped", "attempt": order["attempt"], "ranks": ranks})
            case "kill":
                if self._ranks is not None:
                    self._ranks.kill()
            case "clear":
                stuck = self._clear(order["spared"]) if order["attempt"] in (None, self._attempt) else []
                self._meeting.close()
                self._say({"kind": "cleared", "attempt": order["attempt"], "stuck": stuck})
            case "warm":
                self._warm()
            case "drain":
                self._vault.obey(order["told"])
            case "beat":
                pass
            case _:
                return False
        return True

    def _start(self, argv: list[str], log: Path) -> None:
        """Start a process of the launcher's, whose descendants the ranks are."""
        if self._ranks is None:
            return
        self._ranks.below = process.identify(os.getpid())
        with append_to(log) as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=without_world(os.environ),
                start_new_session=True,
            )
        self._children.append(process.hold(child))

    def _warm(self) -> None:
        """Load once what ranks load: from then on it lies in the page cache, which is what a spare is for."""
        if self._is_warm:
            return
        self._is_warm = True
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _LOADS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=without_world(os.environ),
            start_new_session=True,
        )
        self._children.append(process.hold(child))

    def _watch(self) -> None:
        self._vault.look()
        if self._ranks is not None:
            for happening in (*self._ranks.ended(), *self._ranks.appeared()):
                self._say(json.loads(encode(happening)) | {"attempt": self._attempt})
            if time.monotonic() - self._reported > _REPORT_S:
                self._reported = time.monotonic()
                for one in self._ranks.heard():
                    self._say(json.loads(encode(one)) | {"attempt": self._attempt})

    def _clear(self, spared: list[int]) -> list[int]:
        if self._ranks is None:
            return []
        self._selector.unregister(self._ranks.fileno())
        for rank in self._ranks.ended():
            self._say(json.loads(encode(rank)) | {"attempt": self._attempt})
        heir = [] if self._heir is None or self._heir.pid is None else [self._heir.pid]
        stuck = self._ranks.clear(_CLEAR_S, [*spared, *heir, *self._vault.pids])
        self._ranks = self._attempt = None
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0 if stuck else None)
        self._children = []
        process.reap_orphans()
        return stuck

    def _say(self, message: dict[str, Any]) -> None:
        self._uplink.session.say(**message)
