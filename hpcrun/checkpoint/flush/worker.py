"""The checkpoint worker: one process a node, next to the ranks; `hpcrun _checkpoint_worker` is its command.

Orders of its host come on stdin and its answers go to stdout, lines of JSON; ranks speak to it over the
socket in the arena. It outlives ranks and attempts, and ends with its host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.flush import tiers
from hpcrun.checkpoint.flush.arena import (
    SHM,
    SOCKET_NAME,
    Arena,
    make_arena_folder,
    open_arena_folder,
    remove_arena_folder,
)
from hpcrun.checkpoint.flush.pipeline import FlushPipeline
from hpcrun.checkpoint.flush.rank_requests import RankRequestHandler
from hpcrun.checkpoint.flush.spare_replicas import SpareReplicaStore
from hpcrun.checkpoint.flush.tier_context import (
    PeerServiceProtocol,
    SupportsWriteProbe,
    TierContext,
    make_tier_context,
)
from hpcrun.checkpoint.flush.tiers import OpenPeerService, TierFactory
from hpcrun.checkpoint.parity.blocks import list_parity_entries
from hpcrun.checkpoint.part_check import DamagedPart, exclude_damaged_parts, find_damaged_parts
from hpcrun.checkpoint.tier import InventoryEntry, Tier, TierName
from hpcrun.errors import SiteError
from hpcrun.files import OwnedDirectory
from hpcrun.messages.lines import MessageStream, VersionMismatchError, listen_unix_socket
from hpcrun.messages.listeners import accept_own_user
from hpcrun.specs.rundir import RunDir
from hpcrun.typed_json import WrongValue

_NICE = 10
_PREDECESSOR_TIMEOUT_S = 60.0
"""For the worker before this one to finish what it must not leave half done."""
_FINAL_FLUSH_S = 1.0
_STALL_CHECK_S = 1.0
"""Between looks at whether what is being stored gets on."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


class CheckpointWorker:
    """Serves one host, and the ranks of its node."""

    def __init__(
        self,
        root: Path,
        host: MessageStream[wire.WorkerOrder],
        factories: Mapping[TierName, TierFactory] | None = None,
        open_neighbour: OpenPeerService | None = None,
    ) -> None:
        """`root`: where arenas lie; the others default to those of `flush/tiers.py`."""
        self._root, self._host = root, host
        self._factories = tiers.TIER_FACTORIES if factories is None else factories
        self._open_peer_service = open_neighbour or tiers.OPEN_PEER_SERVICE
        self._rank_requests = RankRequestHandler(host.send)
        self._context: TierContext | None = None
        self._pipeline: FlushPipeline | None = None
        self._peer_service: PeerServiceProtocol | None = None
        self._replica_store: SpareReplicaStore | None = None
        self._locked_arena: OwnedDirectory | None = None
        """The arena, with the lock by which others see that it is served."""
        self._orders = ThreadPoolExecutor(1, "orders")
        self._answers = SimpleQueue[wire.WorkerMessage]()
        self._damaged_parts: Mapping[DamagedPart, str] = {}
        """Parts that have not proved themselves: nobody is told of them any more."""
        self._refused_versions = set[str]()
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listening: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_descriptor, selectors.EVENT_READ)
        self._is_running = True
        self._is_of_script = False
        """A script has started it for itself: there is no agent, and the memory ends with the script."""

    def serve(self) -> None:
        """Work until the host says so, or is gone; what a script has begun is finished without it."""
        with contextlib.suppress(PermissionError):  # a file never keeps anybody waiting
            self._selector.register(self._host.reading, selectors.EVENT_READ, self._host)
        try:
            while self._is_running:
                self._run_once()
                self._check_arena()
            if self._is_of_script and self._host.is_closed:
                self._finish()
        finally:
            self._close()

    def _run_once(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _RankConnection):
                waits = selectors.EVENT_WRITE if key.data.lines.has_pending_output else 0
                self._selector.modify(key.fileobj, selectors.EVENT_READ | waits, key.data)
        is_at_tier = self._pipeline is not None and self._pipeline.is_at_tier
        timeout = 0.1 if self._host.has_pending_output else _STALL_CHECK_S if is_at_tier else None
        for key, events in self._selector.select(timeout):
            if key.fileobj == self._wake_descriptor:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_descriptor)
            elif key.data is self._host:
                self._handle_host_orders()
            elif isinstance(key.data, _RankConnection):
                self._handle_rank_messages(key.data, events)
            else:
                self._welcome()
        self._host.flush()
        if self._pipeline is not None:
            self._pipeline.settle()
        with contextlib.suppress(Empty):
            while True:
                self._host.send(self._answers.get_nowait())

    def _finish(self) -> None:
        """Nobody comes back for what is in memory: it is stored now, and the memory given back."""
        self._selector.unregister(self._host.reading)
        while self._pipeline is not None and self._pipeline.is_storing:
            self._pipeline.hasten()
            self._run_once()
            self._check_arena()

    def _check_arena(self) -> None:
        """In an arena that is gone nobody finds this worker; the next one makes it anew."""
        if self._is_running and self._pipeline is not None and not self._pipeline.arena.folder_exists:
            raise SiteError(f"{self._pipeline.arena.folder}: somebody has removed it")

    def _handle_host_orders(self) -> None:
        try:
            orders = self._host.receive()
        except VersionMismatchError as error:
            raise SiteError(str(error)) from None
        for order in orders:
            if isinstance(order, WrongValue):
                self._host.send(wire.WorkerError(str(order)))
            elif self._is_running:
                try:
                    self._obey(order)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    self._host.send(wire.WorkerError(f"{type(error).__name__}: {error}"))
                except (OSError, SiteError) as error:
                    self._host.send(wire.WorkerError(str(error)))
        self._is_running &= not self._host.is_closed

    def _obey(self, order: wire.WorkerOrder) -> None:
        match order:
            case wire.ConfigureWorker():
                self._configure(order)
            case wire.TakeInventory():
                self._take_inventory(order)
            case wire.RebuildParts():
                self._rebuild(order)
            case wire.ReleaseGenerations(keep):
                self._opened().release(set(keep))
                self._require_replica_store().retain(keep)
            case wire.CopyParts():
                self._copy(order)
            case wire.DismissReplicas(generation, numbers):
                self._require_replica_store().dismiss(generation, numbers)
            case wire.PingWorker():
                self._host.send(wire.WorkerPong())
            case wire.EndWorker():
                self._is_running = False

    def _take_inventory(self, order: wire.TakeInventory) -> None:
        """Tell what is here; of generations in doubt only what proves itself, read beside everything else."""
        doubted, held = set(order.prove), self._holdings()
        if not doubted:
            self._host.send(wire.WorkerInventory(order.id, tuple(held)))
            return
        proving = self._orders.submit(find_damaged_parts, held, doubted)
        proving.add_done_callback(partial(self._proved, order.id, held))

    def _proved(
        self, number: int, held: list[InventoryEntry], proving: Future[dict[DamagedPart, str]]
    ) -> None:
        """In the other thread."""
        if proving.cancelled():
            return
        if (error := proving.exception()) is not None:
            self._answer(wire.WorkerError(f"inventory: {error}"))
            return
        damages = proving.result()
        self._damaged_parts = {**self._damaged_parts, **damages}
        for why in damages.values():
            self._say(f"damaged, and left out: {why}")
        self._answer(wire.WorkerInventory(number, tuple(exclude_damaged_parts(held, damages))))

    def _answer(self, message: wire.WorkerMessage) -> None:
        """In another thread."""
        self._answers.put(message)
        os.eventfd_write(self._wake_descriptor, 1)

    def _copy(self, order: wire.CopyParts) -> None:
        replicas = self._require_replica_store()
        if self._peer_service is None or self._context is None:
            raise ValueError("this worker talks to no other nodes")
        replicas.obey(order, self._peer_service, self._context.spec.flush_duty)

    def _require_replica_store(self) -> SpareReplicaStore:
        if self._replica_store is None:
            raise ValueError("configure comes first")
        return self._replica_store

    def _configure(self, order: wire.ConfigureWorker) -> None:
        """For each attempt, and again when the peers are known; the same attempt goes on undisturbed."""
        run = RunDir(Path(order.run))
        if order.run_ids:  # a script's directory gets its identity at the first save
            run.assume(order.run_ids[0], order.run_ids[1:])
        if self._pipeline is None:
            self._is_of_script = order.is_of_script
            folder = self._make_arena(run, order.node)
            self._pipeline = FlushPipeline(
                Arena(folder), self._rank_requests, partial(os.eventfd_write, self._wake_descriptor, 1)
            )
            self._replica_store = SpareReplicaStore(self._pipeline.arena, self._answer)
            self._listening = listen_unix_socket(self._pipeline.arena.files, SOCKET_NAME)
            self._selector.register(self._listening, selectors.EVENT_READ)
        around = make_tier_context(order, self._pipeline.arena.folder)
        around = replace(around, throttle=self._pipeline.throttle, watch=self._pipeline.watch, say=self._say)
        around.throttle.flush_duty = around.spec.flush_duty
        before = self._context
        if before is not None and (before.run, before.node) != (around.run, around.node):
            raise ValueError(f"this worker is that of node {before.node} in run {before.run.path}")
        if before is not None and before.attempt == around.attempt:
            around = replace(around, hurry=before.hurry)
        elif self._replica_store is not None:
            self._replica_store.end()
        if self._open_peer_service is not None:
            if self._peer_service is None:
                self._peer_service = self._open_peer_service(around, self._holdings)
            around = replace(around, peer_service=self._peer_service)
            self._peer_service.reconfigure(around)
        found, missing = _make_tiers(self._factories, around)
        self._pipeline.configure(found, missing, around.run.checkpoints, around.hurry)
        self._rank_requests.open(self._pipeline, around.attempt)
        self._context = around
        if before is None:
            self._withdraw(around)
            # A file system that hangs must not keep anybody from what is in memory, nor us from our end.
            threading.Thread(target=self._prove, args=(found,), name="prove", daemon=True).start()
        for name, why in missing.items():
            if why:
                self._host.send(wire.WorkerLog(f"tier {name}: {why}"))
        peers = self._peer_service
        address, port = (peers.address, peers.port) if peers is not None else (None, None)
        tiers = ("memory", *found)
        self._host.send(wire.WorkerReady(address, port, str(around.arena / SOCKET_NAME), tiers))

    def _prove(self, found: Mapping[TierName, Tier]) -> None:
        """In a thread of its own: whether saves can get to each tier, before there are any."""
        problems: dict[str, str] = {}
        for name, tier in found.items():
            if isinstance(tier, SupportsWriteProbe):
                try:
                    tier.prove()
                except (OSError, SiteError) as error:
                    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
                    problems[name] = f"{where}{getattr(error, 'strerror', None) or error}"
        self._answer(wire.WritesProbed(problems))

    def _say(self, text: str) -> None:
        """Tell the host a line for people; from any thread."""
        self._answer(wire.WorkerLog(text))

    def _make_arena(self, run: RunDir, node: str) -> Path:
        """The folder of this node's arena, locked; made anew where it was cleared away before that."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                folder = make_arena_folder(self._root, run.path, run.run_id, node, self._say)
                files = open_arena_folder(folder)
                self._lock_arena(files)
                if os.path.samestat(folder.lstat(), files.status()):
                    self._locked_arena = files
                    return folder

    def _lock_arena(self, files: OwnedDirectory) -> None:
        """One worker an arena; the one before may still be busy with the end of its work."""
        deadline = time.monotonic() + _PREDECESSOR_TIMEOUT_S
        while True:
            try:
                fcntl.flock(files.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SiteError(f"{files.path}: another worker serves it; end it first") from None
            time.sleep(0.05)

    def _withdraw(self, around: TierContext) -> None:
        """What a worker before this one had begun in this attempt nobody goes on with."""
        assert self._pipeline is not None
        for held in self._pipeline.arena.holdings(around.node):
            if held.stamp.attempt == around.attempt:
                numbers = [part.number for part in held.parts]
                self._pipeline.withdraw(
                    held.stamp, numbers, "the checkpoint worker was lost; a new one took its place"
                )

    def _opened(self) -> FlushPipeline:
        if self._pipeline is None:
            raise ValueError("configure comes first")
        return self._pipeline

    def _holdings(self) -> list[InventoryEntry]:
        pipeline = self._opened()
        node = self._context.node if self._context is not None else ""
        found = pipeline.holdings(node)
        if self._replica_store is not None:
            found += self._replica_store.holdings(node)
        if not any(one.tier == "parity" for one in found):
            # Also a node that is in no set now may keep what others need.
            found += list_parity_entries(pipeline.arena.files)
        return exclude_damaged_parts(found, self._damaged_parts) if self._damaged_parts else found

    def _rebuild(self, order: wire.RebuildParts) -> None:
        """Beside everything else: it takes as long as the network does."""
        if self._peer_service is None:
            self._host.send(wire.PartsRebuilt(order.id, problem="this worker talks to no other nodes"))
            return
        rebuilding = self._orders.submit(self._peer_service.rebuild, order.order)
        rebuilding.add_done_callback(partial(self._rebuilt, order.id))

    def _rebuilt(self, number: int, rebuilding: Future[InventoryEntry]) -> None:
        """In the other thread."""
        if rebuilding.cancelled():
            return
        error = rebuilding.exception()
        if error is not None:
            self._answer(wire.PartsRebuilt(number, problem=str(error)))
        else:
            self._answer(wire.PartsRebuilt(number, rebuilding.result()))

    def _welcome(self) -> None:
        assert self._listening is not None
        for connection, _ in accept_own_user(self._listening):
            self._selector.register(connection, selectors.EVENT_READ, _RankConnection(connection))

    def _handle_rank_messages(self, caller: _RankConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            caller.lines.flush()
        try:
            messages = caller.lines.receive() if events & selectors.EVENT_READ else []
        except VersionMismatchError as error:
            messages = []
            if str(error) not in self._refused_versions:  # it comes again and again
                self._refused_versions.add(str(error))
                self._host.send(wire.WorkerLog(str(error)))
        for message in messages:
            if isinstance(message, WrongValue):
                caller.send(wire.RequestRefused(str(message)))
            elif self._rank_requests.hear(message, caller.send):
                caller.ranks.add(message.rank)
        if caller.lines.is_closed:
            self._selector.unregister(caller.connection)
            caller.connection.close()
            for rank in caller.ranks:
                self._rank_requests.leave(rank, caller.send)

    def _close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            if self._locked_arena is not None:
                self._locked_arena.unlink(SOCKET_NAME)
        if self._replica_store is not None:
            self._replica_store.close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._peer_service is not None:
            self._peer_service.close()
        self._orders.shutdown(wait=False, cancel_futures=True)
        if self._is_of_script and self._pipeline is not None:
            remove_arena_folder(self._pipeline.arena.folder)
        self._host.flush_all(_FINAL_FLUSH_S)


class _RankConnection:
    """A connection of a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.ranks = connection, set[int]()
        number = connection.fileno()
        self.lines = MessageStream(
            number, number, wire.RANK_REQUESTS, ours="its checkpoint worker", theirs="a rank of this node"
        )
        # One and the same object each time: the request handler tells connections apart by it.
        self.send = self.lines.send


def _make_tiers(
    factories: Mapping[TierName, TierFactory], around: TierContext
) -> tuple[dict[TierName, Tier], dict[TierName, str]]:
    """Those that the node can have, and for the others why not; empty where the job does not ask for it."""
    found, missing = dict[TierName, Tier](), dict[TierName, str]()
    for name, make in factories.items():
        try:
            tier = make(around)
        except (OSError, SiteError) as error:
            missing[name] = str(error)
            continue
        if tier is None:
            missing[name] = ""
        else:
            found[name] = tier
    return found, missing


def lower_priority() -> None:
    """Training comes first, on cores and on disks."""
    os.nice(_NICE)
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        # Where it is refused, the disk knows no classes, or a container allows none.
        ctypes.CDLL(None).syscall(call, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


def main(root: str = "") -> None:
    """Be the worker of the process on the other end of stdin."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Slurm signals every process of a step; the end of our host is what ends us.
        signal.signal(number, signal.SIG_IGN)
    lower_priority()
    reading, writing = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    host = MessageStream(
        reading,
        writing,
        wire.WORKER_ORDERS,
        ours="the checkpoint worker",
        theirs="the process that started it",
    )
    # Whatever else prints must not look like an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    CheckpointWorker(Path(root) if root else SHM, host).serve()
