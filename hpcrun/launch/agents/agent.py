"""The agent: one a node of an allocation; starts, watches, signals and clears up the node's ranks.

It takes orders, one JSON object a line, from whoever leads the run, and answers in the same way. When it
hears nothing for long, others may have gone on without it: then it ends its ranks and looks for the next
supervisor, or becomes the one who starts it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hpcrun import process
from hpcrun.fabric.inventory import try_read_node_inventory
from hpcrun.files import open_for_append
from hpcrun.health.preflight import PreflightRequest, answer_preflight
from hpcrun.launch.agents import messages as wire
from hpcrun.launch.agents.local_ranks import NodeRanks
from hpcrun.launch.agents.memory_cleanup import clean_up_memory
from hpcrun.launch.agents.supervisor_client import SupervisorClient
from hpcrun.launch.agents.worker_process import WorkerProcess
from hpcrun.launch.failover.successor_process import SuccessorProcess
from hpcrun.launch.rendezvous import ConnectionTestStep, NodeRendezvous, RendezvousAnswer, RendezvousRequest
from hpcrun.launcher_world import without_rank_variables
from hpcrun.runs.run_lock import clean_up_segments
from hpcrun.slurm.allocation import find_allocation
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.rundir import RunDir

_POLL_S = 0.2
_POLL_STARTING_S = 0.05
_CLEAN_UP_S = 5.0
_KILL_WAIT_S = 1.0
_WARM_UP_CODE = "import os; os.nice(19); import hpcrun.runtime.rank"
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
        self._successor = (
            SuccessorProcess(run, allocation) if allocation is not None and allocation.is_batch else None
        )
        nodes = allocation.nodes if allocation is not None else ()
        position = nodes.index(self._node) if self._node in nodes else 0
        self._supervisor_client = SupervisorClient(
            run, self._node, position, self._successor.may_claim if self._successor else None
        )
        inventory = try_read_node_inventory()
        self._inside = inventory.as_json() if inventory else None
        self._worker_process = WorkerProcess(
            run, self._node, lambda message: self._say(wire.ForwardedMessage(message)), os.environ
        )
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
        self._redirect_log()
        for text in clean_up_memory(self._run):
            log_line(text)
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(self._worker_process.fileno(), selectors.EVENT_READ)
        with contextlib.suppress(PermissionError):  # a file or /dev/null never ends
            self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        with contextlib.ExitStack() as leaving:
            # From the last to the first, and each of them whatever becomes of those before it.
            if self._successor is not None:
                leaving.callback(self._successor.await_exit)
            leaving.callback(self._supervisor_client.close)
            leaving.callback(self._say, wire.AgentLeft())
            leaving.callback(self._worker_process.close)
            leaving.callback(self._meeting.close)
            leaving.callback(self._clear, [])
            while self._take_orders() and not self._has_no_leader():
                self._watch()

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._is_told_to_end = self._is_to_ask = True

    def _redirect_log(self) -> None:
        """What we say must not depend on a supervisor that reads it."""
        descriptor = os.open(
            self._run.agent_logs / f"{self._node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(descriptor, sys.stderr.fileno())
        os.close(descriptor)

    def _has_no_leader(self) -> bool:
        """Whether nobody leads and nobody will; ranks without a leader end in any case."""
        vigil = self._supervisor_client.lease_monitor
        # Where Slurm ends the job as well there is not the time to look whether the supervisor comes back.
        is_orphaned = vigil.is_orphaned or (self._is_told_to_end and vigil.is_quiet)
        if is_orphaned and self._ranks is not None:
            log_line("the supervisor does not answer; the ranks here are ended")
            self._end_ranks(self._ranks)
        if self._successor is None:
            # Outside of a batch job the supervisor is somebody's command, and ends with it.
            return self._input_ended or vigil.is_orphaned
        if self._is_to_ask and vigil.is_quiet:
            # Who is killed gives no memory back, and Slurm kills soon after it has told us.
            self._is_to_ask = False
            if not self._successor.may_claim():
                log_line("the supervisor does not answer, and Slurm ends the job: so does this agent")
                return True
        if self._supervisor_client.won_epoch is not None:
            if self._successor.ensure_started(
                self._supervisor_client.won_epoch, self._supervisor_client.epoch
            ):
                self._supervisor_client.won_epoch = None
            return self._successor.has_ended_job
        return False

    def _end_ranks(self, ranks: NodeRanks) -> None:
        """Without an order; a supervisor that comes back after all is told which have ended."""
        ranks.kill()
        deadline = time.monotonic() + _KILL_WAIT_S
        while not ranks.is_over and time.monotonic() < deadline:
            self._watch()
            time.sleep(0.02)
        self._clear([])

    def _take_orders(self) -> bool:
        """Wait a moment for orders and carry them out; False when there is no more to do."""
        starting = self._ranks is not None and not self._ranks.is_complete
        self._selector.select(_POLL_STARTING_S if starting else _POLL_S)
        self._read_input()
        channel = self._supervisor_client.session.channel
        orders = self._supervisor_client.receive()
        if channel is not None and self._supervisor_client.session.channel is not channel:
            self._forget_channel()
        goes_on = all(map(self._obey, orders))
        if (arrived := self._supervisor_client.take_new_connection()) is not None:
            self._forget_channel()
            self._selector.register(arrived[0], selectors.EVENT_READ, "channel")
            if arrived[1]:
                # What another supervisor has started is nothing to this one.
                self._clear([])
                place, pattern = (os.environ.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN"))
                called = self._is_called_back
                self._say(wire.AgentHello(self._node, os.getpid(), (place, pattern), called, self._inside))
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

    def _obey(self, order: wire.AgentOrder) -> bool:
        """Carry out an order; False for the last one."""
        if isinstance(order, wire.AttemptOrder) and order.attempt not in (None, self._attempt):
            return True  # it came too late
        match order:
            case PreflightRequest():
                self._say(answer_preflight(self._run, order))
            case RendezvousRequest():
                self._say(RendezvousAnswer(order.attempt, self._meeting.answer(order)))
            case ConnectionTestStep():
                self._say(self._meeting.probe_peers(order))
            case wire.WatchRanks():
                self._clear([])
                clean_up_segments(self._run)
                attempt = self._run.attempt(order.attempt)
                self._ranks = NodeRanks(attempt, order.ranks, order.progress_socket)
                self._attempt = attempt.number
                self._selector.register(self._ranks.fileno(), selectors.EVENT_READ)
                self._say(wire.WatchingRanks(attempt.number))
            case wire.StartProcess(_, argv, log):
                self._start(argv, Path(log))
            case wire.SignalRanks(_, number, rank):
                if self._ranks is not None:
                    self._ranks.signal(number, rank)
            case wire.DumpStacks(number, timeout_s):
                stacks = self._ranks.dump(timeout_s) if self._ranks is not None else {}
                self._say(wire.StacksDumped(number, {str(rank): seen for rank, seen in stacks.items()}))
            case wire.KillRanks():
                if self._ranks is not None:
                    self._ranks.kill()
            case wire.ClearRanks(number, spared):
                stuck = self._clear(spared) if number in (None, self._attempt) else []
                self._meeting.close()
                self._say(wire.RanksCleared(number, tuple(stuck)))
            case wire.WarmUp():
                self._warm()
            case wire.ForwardedOrder(worker_order):
                self._worker_process.obey(worker_order)
            case wire.LeaveRun():
                return False
        return True

    def _start(self, argv: Sequence[str], log: Path) -> None:
        """Start a process of the launcher's, whose descendants the ranks are."""
        if self._ranks is None:
            return
        self._ranks.below = process.identify_process(os.getpid())
        with open_for_append(log) as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=without_rank_variables(os.environ),
                start_new_session=True,
            )
        self._children.append(process.protect_from_reaper(child))

    def _warm(self) -> None:
        """Load once what ranks load: from then on it lies in the page cache, which is what a spare is for."""
        if self._is_warm:
            return
        self._is_warm = True
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _WARM_UP_CODE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=without_rank_variables(os.environ),
            start_new_session=True,
        )
        self._children.append(process.protect_from_reaper(child))

    def _watch(self) -> None:
        self._worker_process.look()
        if self._ranks is not None:
            for happening in (*self._ranks.ended(), *self._ranks.appeared()):
                self._say(wire.NodeReport(self._attempt, happening))
            if time.monotonic() - self._reported > _REPORT_S:
                self._reported = time.monotonic()
                for event in self._ranks.heard():
                    self._say(wire.NodeReport(self._attempt, event))

    def _clear(self, spared: Sequence[int]) -> list[int]:
        if self._ranks is None:
            return []
        self._selector.unregister(self._ranks.fileno())
        for rank in self._ranks.ended():
            self._say(wire.NodeReport(self._attempt, rank))
        heir = [] if self._successor is None or self._successor.pid is None else [self._successor.pid]
        stuck = self._ranks.clear(_CLEAN_UP_S, [*spared, *heir, *self._worker_process.pids])
        self._ranks = self._attempt = None
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0 if stuck else None)
        self._children = []
        process.reap_orphans()
        return stuck

    def _say(self, message: wire.AgentMessage) -> None:
        self._supervisor_client.session.send(message)
