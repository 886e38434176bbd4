"""The host of a node's checkpoint worker: starts it, passes words on, and starts it again when it dies.

The worker is a child of the agent, or of the supervisor where all ranks stand on its own host. It outlives
attempts, as the memory that it looks after does; both end with their host.
"""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.address import LOOPBACK, reachable_address
from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.flush.arena import SHM, locate_arena, remove_arena_folder
from hpcrun.errors import SiteError
from hpcrun.files import open_for_append
from hpcrun.launcher_world import without_rank_variables
from hpcrun.messages.lines import MessageStream, VersionMismatchError
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import WrongValue, render_typed

WORKER_COMMAND = (sys.executable, "-P", "-m", "hpcrun", "_checkpoint_worker")
_MAX_BYTES = 256 << 10
"""Longer inventories are told in pieces: a line between agent and supervisor has its limit."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
_STABLE_S = 60.0
"""A worker that has lived for so long starts with a clean record."""
_SHUTDOWN_S = 3.0
_PING_S = 10.0
_HANG_TIMEOUT_S, _RESERVE_TIMEOUT_S = 120.0, 900.0
"""A worker from which nothing is heard for so long is ended; one that makes memory may take longer."""
_MAX_COUNTED_GAP_S = 2.0
"""A longer time between two looks at it counts for no more: this host itself may have been stopped."""


class WorkerProcess:
    """One node's worker."""

    def __init__(
        self,
        run: RunDir,
        node: str,
        say: Callable[[wire.WorkerMessage], None],
        environ: Mapping[str, str],
        command: Sequence[str] = (),
        address: str | None = None,
    ) -> None:
        """`say` gets what the supervisor is to hear, a message at a time; `environ` finds this package.

        `address`: where the worker is to listen for those of other nodes; else as the order says.
        """
        self._address = address
        self._run, self._node, self._say, self._command = run, node, say, tuple(command or WORKER_COMMAND)
        self._environ = without_rank_variables(environ)
        # By these the processes of an attempt are known.
        for name in (RUN_ID_VARIABLE, RUN_DIR_VARIABLE, ATTEMPT_VARIABLE):
            self._environ.pop(name, None)
        self._child: subprocess.Popen[bytes] | None = None
        self._selector = selectors.EpollSelector()
        self._stream: MessageStream[wire.WorkerMessage] | None = None
        self._configured: wire.ConfigureWorker | None = None
        self._began, self._deaths, self._again_at = 0.0, 0, 0.0
        self._looked, self._quiet_s, self._patience_s, self._is_pinged = 0.0, 0.0, _HANG_TIMEOUT_S, False

    def fileno(self) -> int:
        """Becomes readable when the worker has said something, or has ended."""
        return self._selector.fileno()

    @property
    def pids(self) -> list[int]:
        """The worker's process, where there is one: whoever clears up after ranks spares it."""
        return [] if self._child is None else [self._child.pid]

    def obey(self, order: wire.WorkerOrder) -> None:
        """Pass an order on; the first one starts the worker."""
        if self._child is None and not self._again_at:
            self._start()
        if isinstance(order, wire.ConfigureWorker):
            order = replace(order, address=self._address or self._find_address(order))
            self._configured = order
        if self._stream is not None:  # else it is told when it is there again
            self._stream.send(order)

    def look(self) -> None:
        """Hear what the worker has said; one that has died is started again, after a while."""
        for message in self._messages():
            self._quiet_s, self._is_pinged = 0.0, False
            is_reserving = isinstance(message, wire.ReservingMemory)
            self._patience_s = _RESERVE_TIMEOUT_S if is_reserving else _HANG_TIMEOUT_S
            if not is_reserving and not isinstance(message, wire.WorkerPong):
                self._tell(message)
        self._watch()
        if self._child is not None and self._child.poll() is not None:
            self._handle_worker_exit(self._child)
        if self._child is None and self._again_at and time.monotonic() >= self._again_at:
            self._start()
            if self._configured is not None and self._stream is not None:
                self._stream.send(self._configured)

    def close(self) -> None:
        """End the worker, and give its memory back."""
        child, self._child, self._stream, self._again_at = self._child, None, None, 0.0
        if child is not None:
            # At the end of its input it begins nothing new.
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_SHUTDOWN_S)
            child.kill()
            child.wait()
            child.stdout.close()
        if self._began:
            remove_arena_folder(locate_arena(SHM, self._run.run_id, self._node))
        self._selector.close()

    def _start(self) -> None:
        folder = self._run.agent_logs
        folder.mkdir(exist_ok=True, mode=0o700)
        with open_for_append(folder / f"worker-{self._node}.log") as log:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                cwd="/",
                start_new_session=True,
            )
        process.protect_from_reaper(child)
        assert child.stdin is not None
        assert child.stdout is not None
        self._selector.register(child.stdout, selectors.EVENT_READ)
        self._child, self._began, self._again_at = child, time.monotonic(), 0.0
        self._stream = MessageStream(
            child.stdout.fileno(),
            child.stdin.fileno(),
            wire.WORKER_MESSAGES,
            ours=f"its host on {self._node}",
            theirs="the checkpoint worker",
        )
        self._looked, self._quiet_s, self._patience_s, self._is_pinged = (
            self._began,
            0.0,
            _HANG_TIMEOUT_S,
            False,
        )

    def _watch(self) -> None:
        """A worker that hangs does less for anybody than a new one."""
        now = time.monotonic()
        self._quiet_s += min(now - self._looked, _MAX_COUNTED_GAP_S)
        self._looked = now
        if self._child is None or self._stream is None or self._configured is None:
            return
        if self._quiet_s > self._patience_s:
            self._tell(wire.WorkerLog(f"its checkpoint worker hangs and is ended (pid {self._child.pid})"))
            self._child.kill()
            self._quiet_s = 0.0
        elif self._quiet_s > _PING_S and not self._is_pinged:
            self._is_pinged = True
            self._stream.send(wire.PingWorker())

    def _handle_worker_exit(self, child: subprocess.Popen[bytes]) -> None:
        """Whatever it was storing is lost to the tiers below; what is in memory is not."""
        assert child.stdin is not None
        assert child.stdout is not None
        self._selector.unregister(child.stdout)
        child.stdout.close()
        with contextlib.suppress(OSError):
            child.stdin.close()
        self._child = self._stream = None
        now = time.monotonic()
        self._deaths = 1 if now - self._began > _STABLE_S else self._deaths + 1
        pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 4.0 ** (self._deaths - 1))
        self._again_at = now + pause
        self._tell(wire.WorkerDied(child.returncode, pause, self._last_words()))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            path: Path = self._run.agent_logs / f"worker-{self._node}.log"
            lines = path.read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else ""
        return ""

    def _messages(self) -> list[wire.WorkerMessage]:
        if self._child is None or self._stream is None:
            return []
        self._stream.flush()
        try:
            messages = self._stream.receive()
        except VersionMismatchError as error:
            self._child.kill()
            return [wire.WorkerError(str(error))]
        return [
            wire.WorkerLog(str(message)) if isinstance(message, WrongValue) else message
            for message in messages
        ]

    def _find_address(self, order: wire.ConfigureWorker) -> str:
        """Where other nodes reach this one; where there are none, nobody has to."""
        if len(order.nodes) < 2:
            return LOOPBACK
        try:
            return reachable_address(order.interface, order.nodes, order.suffix).text
        except SiteError as error:
            self._tell(wire.WorkerLog(f"its checkpoint worker talks to no other nodes: {error}"))
            return ""

    def _tell(self, message: wire.WorkerMessage) -> None:
        for piece in split_inventory(message) if isinstance(message, wire.WorkerInventory) else (message,):
            self._say(piece)


def split_inventory(
    message: wire.WorkerInventory, most_bytes: int = _MAX_BYTES
) -> Iterator[wire.WorkerInventory]:
    """An inventory in pieces that are not too long: all but the last say that there is more."""
    piece, size = list[Any](), 0
    for holding in message.holdings:
        length = len(render_typed(holding))
        if piece and size + length > most_bytes:
            yield replace(message, holdings=tuple(piece), has_more=True)
            piece, size = [], 0
        piece.append(holding)
        size += length
    yield replace(message, holdings=tuple(piece))
