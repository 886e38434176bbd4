"""The host of a node's checkpoint worker: starts it, passes words on, and starts it again when it dies.

The worker is a child of the agent, or of the supervisor where all ranks stand on its own host. It outlives
attempts, as the memory that it looks after does; both end with their host.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun import process
from hpcrun.address import LOOPBACK, reachable_address
from hpcrun.checkpoint.flush.arena import SHM, locate_arena, remove_arena_folder
from hpcrun.errors import SiteError
from hpcrun.files import open_for_append
from hpcrun.launcher_world import without_rank_variables
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrun.specs.rundir import RunDir

WORKER_MESSAGE_KIND = "drain"
"""What messages about checkpoint workers are called between agent and supervisor."""
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
        say: Callable[[dict[str, Any]], None],
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
        self._read, self._unsent = b"", b""
        self._configured: dict[str, Any] | None = None
        self._began, self._deaths, self._again_at = 0.0, 0, 0.0
        self._looked, self._quiet_s, self._patience_s, self._is_pinged = 0.0, 0.0, _HANG_TIMEOUT_S, False

    def fileno(self) -> int:
        """Becomes readable when the worker has said something, or has ended."""
        return self._selector.fileno()

    @property
    def pids(self) -> list[int]:
        """The worker's process, where there is one: whoever clears up after ranks spares it."""
        return [] if self._child is None else [self._child.pid]

    def obey(self, told: dict[str, Any]) -> None:
        """Pass an order on; the first one starts the worker."""
        if self._child is None and not self._again_at:
            self._start()
        if told.get("do") == "configure":
            told = told | {"address": self._address or self._address_for(told)}
            self._configured = told
            if self._child is None:
                return  # it is told when it is there again
        self._send(told)

    def look(self) -> None:
        """Hear what the worker has said; one that has died is started again, after a while."""
        self._flush()
        for message in self._messages():
            self._quiet_s, self._is_pinged = 0.0, False
            self._patience_s = _RESERVE_TIMEOUT_S if message.get("kind") == "reserving" else _HANG_TIMEOUT_S
            if message.get("kind") not in ("pong", "reserving"):
                self._tell(message)
        self._watch()
        if self._child is not None and self._child.poll() is not None:
            self._handle_worker_exit(self._child)
        if self._child is None and self._again_at and time.monotonic() >= self._again_at:
            self._start()
            if self._configured is not None:
                self._send(self._configured)

    def close(self) -> None:
        """End the worker, and give its memory back."""
        child, self._child, self._again_at = self._child, None, 0.0
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
        for stream in (child.stdin, child.stdout):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(child.stdout, selectors.EVENT_READ)
        self._child, self._began, self._again_at = child, time.monotonic(), 0.0
        self._read = self._unsent = b""
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
        if self._child is None or self._configured is None:
            return
        if self._quiet_s > self._patience_s:
            self._tell(
                {"kind": "log", "text": f"its checkpoint worker hangs and is ended (pid {self._child.pid})"}
            )
            self._child.kill()
            self._quiet_s = 0.0
        elif self._quiet_s > _PING_S and not self._is_pinged:
            self._is_pinged = True
            self._send({"do": "ping"})

    def _handle_worker_exit(self, child: subprocess.Popen[bytes]) -> None:
        """Whatever it was storing is lost to the levels below; what is in memory is not."""
        assert child.stdin is not None
        assert child.stdout is not None
        self._selector.unregister(child.stdout)
        child.stdout.close()
        with contextlib.suppress(OSError):
            child.stdin.close()
        self._child = None
        now = time.monotonic()
        self._deaths = 1 if now - self._began > _STABLE_S else self._deaths + 1
        pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 4.0 ** (self._deaths - 1))
        self._again_at = now + pause
        self._tell({"kind": "died", "status": child.returncode, "again_s": pause, "why": self._last_words()})

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            path: Path = self._run.agent_logs / f"worker-{self._node}.log"
            lines = path.read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else ""
        return ""

    def _send(self, told: dict[str, Any]) -> None:
        self._unsent += (json.dumps(told, separators=(",", ":")) + "\n").encode()
        self._flush()

    def _flush(self) -> None:
        if self._child is None or not self._unsent:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # full, or gone: the next look tells which
            self._unsent = self._unsent[os.write(self._child.stdin.fileno(), self._unsent) :]

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self._child is None:
            return
        assert self._child.stdout is not None
        with contextlib.suppress(OSError):
            while data := os.read(self._child.stdout.fileno(), 1 << 16):
                self._read += data
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message

    def _address_for(self, told: dict[str, Any]) -> str:
        """Where other nodes reach this one; where there are none, nobody has to."""
        others = told.get("nodes") or []
        if len(others) < 2:
            return LOOPBACK
        try:
            return reachable_address(told.get("interface"), others, told.get("suffix") or "").text
        except SiteError as error:
            self._tell({"kind": "log", "text": f"its checkpoint worker talks to no other nodes: {error}"})
            return ""

    def _tell(self, message: dict[str, Any]) -> None:
        for piece in split_message(message):
            self._say({"kind": WORKER_MESSAGE_KIND, "node": self._node, "told": piece})


def split_message(message: dict[str, Any], most_bytes: int = _MAX_BYTES) -> Iterator[dict[str, Any]]:
    """A message in pieces that are not too long: all but the last say that there is more."""
    holdings = message.get("holdings")
    if not isinstance(holdings, list):
        yield message
        return
    piece, size = list[Any](), 0
    for one in holdings:
        length = len(json.dumps(one))
        if piece and size + length > most_bytes:
            yield message | {"holdings": piece, "more": True}
            piece, size = [], 0
        piece.append(one)
        size += length
    yield message | {"holdings": piece, "more": False}
