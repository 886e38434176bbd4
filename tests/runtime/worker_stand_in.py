"""A checkpoint worker in a thread, which stores nothing before a test lets it, and can be taken away."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcrun import __version__
from hpcrun.checkpoint.flush.durable_tier import DurableTier
from hpcrun.checkpoint.format import ChunkSpec
from hpcrun.checkpoint.seal import SlotPlan, plan_slot, seal_part
from hpcrun.checkpoint.tier import CheckpointId, NodeShards, SealedPart, StoreResult
from hpcrun.errors import SiteError
from hpcrun.typed_json import render_typed


class StandIn:
    """Serves the ranks of one node, in the words of the real one; its slots are files in a folder."""

    patience_s = 0.2

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self.folder, self.tier = folder, DurableTier(checkpoints, keep=5)
        self.said: list[dict[str, Any]] = []
        self.stores = threading.Event()
        self.stores.set()
        self.one_by_one = threading.Lock()
        self.refuses = ""
        self.is_stuck = False
        self._server: socket.socket | None = None
        self._lines: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.start()

    def socket(self) -> Path:
        return self.folder / "worker.sock"

    def close(self) -> None:
        """Nothing of a rank's."""

    def start(self) -> None:
        self.socket().unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.socket()))
        self._server.listen()
        self._thread(self._accept, self._server)

    def kill(self) -> None:
        """As a SIGKILL looks from the ranks: lines end, nobody listens."""
        self.stores.set()
        sockets = [*self._lines, *([self._server] if self._server else [])]
        self._server, self._lines = None, []
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.socket().unlink(missing_ok=True)
        for thread in self._threads:
            thread.join(10)
        self._threads = []

    def _thread(self, action: Callable[..., None], *words: Any) -> None:
        thread = threading.Thread(target=action, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, server: Any) -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            self._lines.append(line)
            self._thread(_Rank(self, line).serve)


class _Rank:
    def __init__(self, worker: StandIn, line: socket.socket) -> None:
        self.worker, self.line = worker, line
        self.paths: list[Path] = []
        self.plans: dict[int, SlotPlan] = {}
        self.busy: dict[int, str] = {}
        self.sealed: dict[int, str] = {}

    def serve(self) -> None:
        try:
            self.tell({"hpcrun": __version__})
            lines = self.line.makefile("r")
            assert json.loads(next(lines)) == {"hpcrun": __version__}
            for text in lines:
                told = json.loads(text)
                self.worker.said.append(told)
                answer = getattr(self, told["kind"])(told)
                if answer is not None:
                    self.tell(answer)
        except (OSError, ValueError):
            return

    def tell(self, message: Any) -> None:
        self.line.sendall(render_typed(message).encode() + b"\n")

    def reserve_slots(self, told: dict[str, Any]) -> dict[str, Any]:
        if self.worker.refuses:
            return {"kind": "request_refused", "why": self.worker.refuses}
        self.paths = [self.worker.folder / f"slot-{told['rank']}-{k}.bin" for k in range(told["slots"])]
        for path in self.paths:
            path.write_bytes(bytes(told["size_bytes"]))
        return {"kind": "slots_reserved", "slots": [str(path) for path in self.paths], "tiers": ["durable"]}

    def plan_slot(self, told: dict[str, Any]) -> dict[str, Any]:
        pieces = [ChunkSpec(n, d, *(tuple(x) for x in rest)) for n, d, *rest in told["pieces"]]
        self.plans[told["key"]] = plan_slot(told["rank"], pieces, told["file"], told["start"])
        return {"kind": "slot_planned"}

    def claim_slot(self, told: dict[str, Any]) -> dict[str, Any]:
        for slot in range(len(self.paths)):
            is_only = self.sealed.get(slot) == told["published"] and told["published"] is not None
            if slot not in self.busy and not (is_only and len(self.paths) > 1):
                self.sealed.pop(slot, None)
                return {"kind": "slot_claimed", "slot": slot}
        return {"kind": "slots_busy", "why": "all slots are on their way"}

    def ping_from_rank(self, told: dict[str, Any]) -> dict[str, Any] | None:
        return None if self.worker.is_stuck else {"kind": "worker_pong"}

    def slot_lost(self, told: dict[str, Any]) -> None:
        """Here every rank is alone."""

    def hasten_flush(self, told: dict[str, Any]) -> None:
        """It never rests."""

    def degrade_saves(self, told: dict[str, Any]) -> None:
        self.worker.stores.set()

    def slot_filled(self, told: dict[str, Any]) -> None:
        slot, stamp = told["slot"], CheckpointId(**told["stamp"])
        self.busy[slot] = stamp.generation
        plan = self.plans[told["key"]]
        image = bytearray(self.paths[slot].read_bytes())
        part = seal_part(memoryview(image)[: plan.layout.size_bytes], bytes.fromhex(stamp.generation), plan)
        with self.paths[slot].open("r+b") as file:
            file.write(image)
        self.sealed[slot] = stamp.generation
        self.tell({"kind": "part_sealed", "stamp": vars(stamp)})
        whole = SealedPart(told["rank"], part, memoryview(image)[: part.size_bytes], str(self.paths[slot]))
        self.worker._thread(self.store, slot, NodeShards(stamp, (whole,)), told["tiers"])

    def store(self, slot: int, load: NodeShards, tiers: list[str]) -> None:
        self.worker.stores.wait(20)
        problem = None
        if "durable" in tiers and self.worker._server is not None:
            try:
                with self.worker.one_by_one:
                    self.worker.tier.store(load)
            except (OSError, SiteError) as error:
                problem = str(error)
        self.busy.pop(slot, None)
        try:
            for tier in tiers:
                stored = StoreResult(load.stamp, tier, 0.1, len(load.parts[0].image), problem)  # type: ignore[arg-type]
                self.tell(stored)
        except OSError:
            return
