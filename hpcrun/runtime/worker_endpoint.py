"""Where this node's checkpoint worker runs: below the node's agent, or started by the node's first rank."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.flush.arena import SHM, SOCKET_NAME, find_arena, remove_arena_folder
from hpcrun.checkpoint.flush.stale_memory import has_live_worker, is_held_by_script, lock_run_memory
from hpcrun.errors import SiteError
from hpcrun.files import OwnedDirectory
from hpcrun.launch.agents.memory_cleanup import clean_up_memory
from hpcrun.launcher_world import without_rank_variables
from hpcrun.messages.lines import MessageStream, VersionMismatchError
from hpcrun.runtime.control import Control
from hpcrun.runtime.stderr_notes import write_stderr_line
from hpcrun.runtime.worker_client import RankWorkerClient, WorkerGoneError
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.run_variables import WORKER_SOCKET_VARIABLE
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import resumable_checkpoints

_READY_S, _END_S, _KILLED_S = 60.0, 30.0, 5.0
_FINISH_S = 900.0
"""For the worker of a script that has ended to store what was begun: it waits as long for other nodes."""
_POLL_S, _SILENT_S = 0.1, 2.0
_own_workers: dict[str, OwnWorker] = {}
"""Of this process, by node and directory: an earlier one may never have been closed."""


class AgentWorker:
    """The agent of this node hosts the worker, and starts it again when it dies."""

    patience_s = 5.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket = Path(environ[WORKER_SOCKET_VARIABLE])

    def socket(self) -> Path:
        """Where it listens; the agent has set its usual path. WorkerGoneError where it has no memory yet."""
        root, run, node = self._socket.parents[3], self._socket.parts[-3], self._socket.parts[-2]
        return _worker_socket(root, run, node)

    def begin(self, control: Control) -> None:
        """Nothing: its worker is there, or about to be, and tells its agent of what it has tried."""

    def close(self) -> None:
        """Nothing: it outlives us."""


class OwnWorker:
    """No agent is here: the first rank of each node runs the worker, for as long as it runs itself.

    There is nobody then who would bring the workers of other nodes together: this offers no parity.
    """

    patience_s = _READY_S

    def __init__(self, run: Path, spec: CheckpointSpec, control: Control, attempt: int) -> None:
        self._run, self._spec, self._attempt = run, spec, attempt
        self._is_node_leader = control.local_rank == 0
        self._node, self._run_id = _arena_name(RunDir(run), control), RunDir(run).run_id
        self._child: subprocess.Popen[bytes] | None = None
        self._stream: MessageStream[wire.WorkerMessage] | None = None
        self._listener: threading.Thread | None = None
        self._held: OwnedDirectory | None = None
        self._proved = threading.Event()
        self._problems: dict[str, str] = {}

    def begin(self, control: Control) -> None:
        """Have the worker there now, and not at the first save; SiteError on all ranks where one has none.

        That nothing can be stored is an error where there is nothing to load either; else it is told.
        """
        try:
            for step in (
                self._start_now,
                lambda: RankWorkerClient(self.socket(), control.rank).close(),
                self._try,
            ):
                raise_on_all_ranks(control, step)
        except SiteError:
            self.close()
            raise
        mine = [
            f"on node {control.node} saves will fail: {tier}: {why}" for tier, why in self._problems.items()
        ]
        problems = control.allgather(mine)
        if control.rank == 0:
            for text in itertools.chain(*problems):
                write_stderr_line(text)

    def _start_now(self) -> None:
        if self._is_node_leader:
            self.socket()

    def _try(self) -> None:
        """Hear whether the worker can write to each tier."""
        if not self._is_node_leader:
            return
        if not self._proved.wait(_READY_S):
            self._problems["durable"] = f"{self._run}: a small file was not written there in {_READY_S:g} s"
        if (why := self._problems.get("durable")) and not resumable_checkpoints(
            RunDir(self._run).checkpoints
        ):
            raise SiteError(f"nothing can be saved: {why}; name a directory that this user may write")

    def socket(self) -> Path:
        """The path of the socket; on the first rank of the node a worker listens there on return.

        WorkerGoneError where it has no memory yet.
        """
        if self._is_node_leader and (self._child is None or self._child.poll() is not None):
            self._reap()
            self._start()
        return _worker_socket(SHM, self._run_id, self._node)

    def close(self) -> None:
        """End the worker and give the memory back; whoever wants all of it stored has waited for that."""
        if self._child is None:
            return
        self._tell(wire.EndWorker())
        self._reap()
        if (folder := find_arena(SHM, self._run_id, self._node)) is not None:
            remove_arena_folder(folder)
        self._let_go()

    def leave(self) -> None:
        """As if this process had ended: the worker stores what it has, gives the memory back, and ends."""
        if self._child is not None:
            assert self._child.stdin is not None
            with suppress(OSError):
                self._child.stdin.close()
        self._let_go()

    def forget(self) -> None:
        """After `leave`, and when its worker has ended."""
        self._reap()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
        self._held = None
        if _own_workers.get(self._node) is self:
            del _own_workers[self._node]

    def _start(self) -> None:
        try:
            # Exec alone: a copy of a process with MPI and CUDA in it would be of no use to anybody.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcrun", "_checkpoint_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_worker_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise SiteError(f"{sys.executable}: the checkpoint worker cannot be started: {error}") from None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stream = MessageStream(
            self._child.stdout.fileno(),
            self._child.stdin.fileno(),
            wire.WORKER_MESSAGES,
            ours="the rank that started it",
            theirs="the checkpoint worker",
        )
        self._tell(
            wire.ConfigureWorker(
                str(self._run),
                self._node,
                self._attempt,
                self._spec.model_dump(mode="json"),
                tuple(RunDir(self._run).run_ids),
                is_of_script=True,
                secret=os.urandom(16).hex(),
            )
        )
        self._await_ready()
        if (folder := find_arena(SHM, self._run_id, self._node)) is not None:
            held, self._held = self._held, lock_run_memory(folder)
            if held is not None:
                held.close()
        _own_workers[self._node] = self

    def _tell(self, order: wire.WorkerOrder) -> None:
        assert self._stream is not None
        self._stream.send(order)
        self._stream.flush_all(_END_S)

    def _await_ready(self) -> None:
        """Wait for its first word; what it says later its ranks hear too, so that it is only taken in."""
        assert self._child is not None
        assert self._child.stdout is not None
        assert self._stream is not None
        out, stream, is_ready = self._child.stdout, self._stream, threading.Event()
        refused: list[str] = []

        def listen() -> None:
            with out:
                while not stream.is_closed:
                    select.select([out], [], [])
                    try:
                        messages = stream.receive()
                    except VersionMismatchError as error:
                        messages = [wire.WorkerError(str(error))]
                    for message in messages:
                        match message:
                            case wire.WorkerReady():
                                is_ready.set()
                            case wire.WritesProbed(problems):
                                self._problems = problems
                                self._proved.set()
                            case wire.WorkerLog(text):
                                write_stderr_line(f"{self._node}: {text}")
                            case wire.WorkerError(why):
                                refused.append(why)

        self._listener = threading.Thread(target=listen, name="hpcrun-checkpoint-worker", daemon=True)
        self._listener.start()
        for _ in range(int(_READY_S / 0.1)):
            if is_ready.wait(0.1):
                return
            if refused:
                self._reap()
                raise SiteError(
                    f"the checkpoint worker has no memory for saves: {refused[0]}; with memory=0 the ranks"
                    " write to the directory themselves"
                )
            if self._child.poll() is not None:
                raise SiteError(
                    f"the checkpoint worker ended with exit code {self._child.returncode} at its start"
                )
        raise SiteError(f"the checkpoint worker was not ready after {_READY_S:g} s")

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
            text = f"its checkpoint worker (process {child.pid}) hangs in the kernel, and is left to itself"
            write_stderr_line(f"{self._node}: {text}")


def _worker_socket(root: Path, run_id: str, node: str) -> Path:
    folder = find_arena(root, run_id, node)
    if folder is None:
        raise WorkerGoneError(f"{root}: no checkpoint worker of node {node} has memory there")
    return folder / SOCKET_NAME


def await_earlier_workers(run: RunDir, control: Control) -> None:
    """Before a script looks at its saves: those of scripts that have ended are stored, their memory is freed.

    SiteError on all ranks where that never comes to an end.
    """
    raise_on_all_ranks(
        control, lambda: _await_earlier_worker(run, _arena_name(run, control), leads=control.local_rank == 0)
    )


def _await_earlier_worker(run: RunDir, node: str, *, leads: bool) -> None:
    if not leads:
        return
    if (earlier := _own_workers.get(node)) is not None:
        earlier.leave()
    for text in clean_up_memory(run):
        write_stderr_line(text)
    began, is_told = time.monotonic(), False
    while has_live_worker(SHM, run.run_id, node) and not is_held_by_script(SHM, run.run_id, node):
        waited_s = time.monotonic() - began
        if waited_s > _FINISH_S:
            raise SiteError(
                f"{run.path}: after {_FINISH_S:g} s the checkpoint worker of a script that has ended still"
                " stores its last saves; check whether the file system hangs (`hpcrun _checkpoint_worker`)"
            )
        if waited_s > _SILENT_S and not is_told:
            is_told = True
            write_stderr_line(
                f"{run.path}: waiting for the last saves of a script that has ended to be stored"
            )
        time.sleep(_POLL_S)
    if earlier is not None:
        earlier.forget()


def _arena_name(run: RunDir, control: Control) -> str:
    """The name of this node's arena: directories of the same name must not share one."""
    return f"{control.node}-{xxh3_64_hexdigest(str(run.path).encode())[:8]}"


def raise_on_all_ranks(control: Control, action: Callable[[], None]) -> None:
    """Run something on each rank; what goes wrong on one is raised on all, in the words of the first."""
    why = ""
    try:
        action()
    except SiteError as error:
        why = str(error)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    for rank, problem in enumerate(control.allgather(why and f"node {control.node}: {why}")):
        if problem:
            raise SiteError(f"rank {rank} on {problem}" if control.size > 1 else problem)


def find_worker(
    environ: Mapping[str, str], run: Path, spec: CheckpointSpec, control: Control, attempt: int
) -> AgentWorker | OwnWorker:
    """The agent's worker where this rank was told of one; else one of its own."""
    if WORKER_SOCKET_VARIABLE in environ:
        return AgentWorker(environ)
    await_earlier_workers(RunDir(run), control)
    return OwnWorker(run, spec, control, attempt)


def _worker_environment() -> dict[str, str]:
    """The worker is not a rank of anything, and must find the same hpcrun."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return without_rank_variables(os.environ) | {"PYTHONPATH": path}
