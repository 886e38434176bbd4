"""Where the drain worker of this node is: with the node's agent, or one that the node's first rank starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint.drain.arena import SHM, SOCKET, find_folder, remove_folder
from hpcrun.errors import SiteError
from hpcrun.launch.shim import DRAIN_VARIABLE
from hpcrun.launch.world import without_world
from hpcrun.runtime.control import Control
from hpcrun.runtime.drainlink import DrainGoneError
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.rundir import RunDir

_READY_S, _END_S, _KILLED_S = 60.0, 30.0, 5.0


class AgentHome:
    """The agent of this node hosts the worker, and starts it again when it dies."""

    patience_s = 5.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket = Path(environ[DRAIN_VARIABLE])

    def socket(self) -> Path:
        """Where it listens; the agent has set its usual path. DrainGoneError where it has no memory yet."""
        root, run, node = self._socket.parents[3], self._socket.parts[-3], self._socket.parts[-2]
        return _socket_in(root, run, node)

    def close(self) -> None:
        """Nothing: it outlives us."""


class OwnHome:
    """No agent is here: the first rank of each node runs the worker, for as long as it runs itself.

    There is nobody then who would bring the workers of other nodes together: this offers no parity.
    """

    patience_s = _READY_S

    def __init__(self, run: Path, spec: CheckpointSpec, control: Control, attempt: int) -> None:
        self._run, self._spec, self._attempt = run, spec, attempt
        self._leads = control.local_rank == 0
        # Directories of the same name must not share an arena.
        self._node = f"{control.node}-{xxh3_64_hexdigest(str(run).encode())[:8]}"
        self._run_id = RunDir(run).run_id
        self._child: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None

    def socket(self) -> Path:
        """The path of the socket; on the first rank of the node a worker listens there on return.

        DrainGoneError where it has no memory yet.
        """
        if self._leads and (self._child is None or self._child.poll() is not None):
            self._reap()
            self._start()
        return _socket_in(SHM, self._run_id, self._node)

    def close(self) -> None:
        """End the worker and give the memory back; whoever wants all of it stored has waited for that."""
        if self._child is None:
            return
        self._tell({"do": "end"})
        self._reap()
        if (folder := find_folder(SHM, self._run_id, self._node)) is not None:
            remove_folder(folder)

    def _start(self) -> None:
        try:
            # Exec alone: a copy of a process with MPI and CUDA in it would be of no use to anybody.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcrun", "_drain"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise SiteError(f"{sys.executable}: the drain worker cannot be started: {error}") from None
        told: dict[str, Any] = {"spec": self._spec.model_dump(mode="json"), "attempt": self._attempt}
        alone: dict[str, Any] = {"set": None, "parity": 0, "peers": {}, "secret": os.urandom(16).hex()}
        run: dict[str, Any] = {
            "run": str(self._run),
            "run_ids": RunDir(self._run).run_ids,
            "node": self._node,
        }
        self._tell({"do": "configure", **run, **told, **alone})
        self._await_ready()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()

    def _await_ready(self) -> None:
        """Wait for its first word; what it says later its ranks hear too, so that it is only taken in."""
        assert self._child is not None
        assert self._child.stdout is not None
        out, is_ready = self._child.stdout, threading.Event()
        refused: list[str] = []

        def listen() -> None:
            with out:
                for line in out:
                    with suppress(ValueError):
                        told = json.loads(line)
                        if told.get("kind") == "ready":
                            is_ready.set()
                        elif told.get("kind") == "log":
                            sys.stderr.write(f"hpcrun: {self._node}: {told.get('text')}\n")
                        elif told.get("kind") == "error":
                            refused.append(str(told.get("why")))

        self._listener = threading.Thread(target=listen, name="hpcrun-drain", daemon=True)
        self._listener.start()
        for _ in range(int(_READY_S / 0.1)):
            if is_ready.wait(0.1):
                return
            if refused:
                self._reap()
                raise SiteError(f"the drain worker has no memory for saves: {refused[0]}")
            if self._child.poll() is not None:
                raise SiteError(
                    f"the drain worker ended with exit code {self._child.returncode} at its start"
                )
        raise SiteError(f"the drain worker was not ready after {_READY_S:g} s")

    def _reap(self) -> None:
        if self._child is None:
            return
        if self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._await_end(self._child)
        if self._listener is not None:
            self._listener.join(_KILLED_S)
        self._child = self._listener = None

    def _await_end(self, child: subprocess.Popen[bytes]) -> None:
        """What hangs in the kernel ends when that lets go of it, and is not waited for."""
        try:
            child.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            text = f"its drain worker (process {child.pid}) hangs in the kernel, and is left to itself"
            sys.stderr.write(f"hpcrun: {self._node}: {text}\n")
            sys.stderr.flush()


def _socket_in(root: Path, run_id: str, node: str) -> Path:
    folder = find_folder(root, run_id, node)
    if folder is None:
        raise DrainGoneError(f"{root}: no drain worker of node {node} has memory there")
    return folder / SOCKET


def find_home(
    environ: Mapping[str, str], run: Path, spec: CheckpointSpec, control: Control, attempt: int
) -> AgentHome | OwnHome:
    """The agent's worker where this rank was told of one; else one of its own."""
    if DRAIN_VARIABLE in environ:
        return AgentHome(environ)
    return OwnHome(run, spec, control, attempt)


def _environment() -> dict[str, str]:
    """The worker is no rank of anything, and must find the same hpcrun."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return without_world(os.environ) | {"PYTHONPATH": path}
