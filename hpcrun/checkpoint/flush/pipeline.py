"""The way of a save through the tiers: sealed in memory, then from tier to tier, beside training.

One thread seals, another goes with the loads: one load after the other, oldest first, because nodes that
chose differently would wait for each other. A third copies to the object store what is in the run directory,
so that no memory, and no save, waits for that. All else happens in the worker's own thread, by `settle`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from hpcrun.checkpoint.flush.arena import Arena, ArenaSlot
from hpcrun.checkpoint.flush.stall_watch import StallWatch
from hpcrun.checkpoint.flush.throttle import Throttle
from hpcrun.checkpoint.flush.tier_context import SupportsAbandon, UsesNodeMemory
from hpcrun.checkpoint.format import PART_ALIGN, Part, align_size
from hpcrun.checkpoint.os_errors import explain_os_error
from hpcrun.checkpoint.part_record import PartRecord
from hpcrun.checkpoint.seal import SlotPlan, seal_part
from hpcrun.checkpoint.tier import (
    TIER_NAMES,
    CheckpointId,
    InventoryEntry,
    NodeShards,
    SealedPart,
    StoreResult,
    Tier,
    TierName,
)
from hpcrun.errors import SiteError
from hpcrun.specs.saves import SavedCheckpoint, read_saved_checkpoint, resumable_checkpoints

_WHOLE_COPY_TIERS: frozenset[TierName] = frozenset({"local", "durable", "object"})
"""Tiers that have a node's parts themselves, and not only what others need to make them again."""
_NODE_OWNED_TIERS: tuple[TierName, ...] = ("local", "parity")
"""Tiers that each node cleans up for itself."""
_PRUNED_TIERS: tuple[TierName, ...] = (*_NODE_OWNED_TIERS, "durable")
"""Tiers where old states are deleted when a new one is stored: afterwards, nobody waits for that."""
_SUPERSEDED = "left behind: a newer save was due"


class PipelineListener:
    """Who hears of what became of a save; the methods are called in the worker's own thread."""

    def sealed(self, rank: int, stamp: CheckpointId) -> None:
        """A rank's part is sealed."""

    def all_sealed(self, stamp: CheckpointId, size_bytes: int) -> None:
        """The parts of all ranks of the node are."""

    def stored(self, stored: StoreResult, ranks: Sequence[int]) -> None:
        """What came of a load at a tier."""

    def failed(self, stamp: CheckpointId, ranks: Sequence[int], why: str) -> None:
        """A generation goes nowhere from here."""

    def stalled(
        self, stamp: CheckpointId, tier: TierName, ranks: Sequence[int], what: str, seconds: float
    ) -> None:
        """A load at a tier has not got on for so long."""


@dataclass
class _SealingGeneration:
    """A generation of which some ranks' parts are not sealed yet."""

    stamp: CheckpointId
    tiers: list[TierName]
    slots: dict[int, ArenaSlot] = field(default_factory=dict)
    rested_s: float = 0.0


@dataclass
class _Transfer:
    """A load on its way."""

    load: NodeShards
    tiers: list[TierName]
    slots: list[ArenaSlot]
    why_not: str = ""
    """Set when it goes no further than it has come."""
    is_copied: bool = False
    """It is to be in the object store as well."""
    is_durable: bool = False
    """The run directory has it."""
    rested_s: float = 0.0
    """Between pieces of its work, until now."""


class FlushPipeline:
    """Seals what ranks have filled, and takes it from tier to tier."""

    def __init__(self, arena: Arena, listener: PipelineListener, wake: Callable[[], None]) -> None:
        """`wake` is called in other threads, whenever `settle` has something to do."""
        self.arena, self._listener, self._wake = arena, listener, wake
        self.throttle, self.watch = Throttle(), StallWatch()
        self._at: tuple[CheckpointId, TierName] | None = None
        """What the watch is about."""
        self.ranks: tuple[int, ...] = ()
        """Of this node, in this attempt."""
        self.published: str | None = None
        self._degraded_for = ""
        self._tiers: Mapping[TierName, Tier] = {}
        self._missing: Mapping[TierName, str] = {}
        self._checkpoints: Path | None = None
        self._hurry = threading.Event()
        self._outcomes = SimpleQueue[Callable[[], None]]()
        self._seal_executor = ThreadPoolExecutor(1, "seal")
        self._transfer_executor = ThreadPoolExecutor(1, "flush")
        self._upload_executor = ThreadPoolExecutor(1, "copy")
        self._being_sealed: dict[str, _SealingGeneration] = {}
        self._transfers: list[_Transfer] = []
        self._copies: list[_Transfer] = []
        self._to_release: set[str] | None = None
        """What stays, of all that is to be let go of and has not been yet."""
        self._kept: set[str] = set()
        """Generations that some tier but memory has whole."""
        self._failed: set[str] = set()
        """Those that will never be whole on this node."""

    def configure(
        self,
        tiers: Mapping[TierName, Tier],
        missing: Mapping[TierName, str],
        checkpoints: Path,
        hurry: threading.Event,
    ) -> None:
        """The tiers of an attempt, and why others are missing; what is on its way is hurried on."""
        if hurry is not self._hurry:
            self._hurry.set()
            self.hasten()
            self.throttle.forget()
            self._give_up_transfers(self._transfers, "the attempt is over")
            for gathering in list(self._being_sealed.values()):
                self.fail(gathering.stamp, "the attempt is over")
            self.published = None
        self._tiers, self._missing = tiers, missing
        self._checkpoints, self._hurry = checkpoints, hurry

    @property
    def tiers(self) -> list[TierName]:
        """Those below memory that it has."""
        return [name for name in TIER_NAMES if name in self._tiers]

    def reserve(self, sizes: dict[int, int], count: int) -> dict[int, list[ArenaSlot]]:
        """Slots for the node's ranks, with room for what tiers keep in memory; SiteError: none fit."""
        block = sum(align_size(size, PART_ALIGN) for size in sizes.values())
        takers = [one for one in self._tiers.values() if isinstance(one, UsesNodeMemory)]
        beside = sum(one.memory_bytes(block) for one in takers)
        return self.arena.reserve(sizes, count, self.is_kept_elsewhere, beside)

    def settle(self) -> None:
        """Take note of what the other threads have done."""
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except Empty:
                break
            outcome()
        at = self._at
        if at is not None and (stuck := self.watch.stuck()) is not None:
            self._listener.stalled(*at, self.ranks, *stuck)
        if not self._is_busy:
            self.throttle.resume_throttling()

    @property
    def is_at_tier(self) -> bool:
        """Whether a tier may have stopped without a word."""
        return self._at is not None

    @property
    def _is_busy(self) -> bool:
        return bool(self._transfers or self._being_sealed)

    @property
    def is_storing(self) -> bool:
        """Whether anything is on its way, copies to the object store among it."""
        return self._is_busy or bool(self._copies)

    def hasten(self) -> None:
        """Somebody waits for what is on its way."""
        if self._is_busy:
            self.throttle.hasten()

    def fill(self, slot: ArenaSlot, plan: SlotPlan, stamp: CheckpointId, tiers: list[TierName]) -> None:
        """A rank has copied its bytes into a slot that it had claimed."""
        if stamp.generation in self._failed:
            slot.empty()
            self._listener.failed(stamp, (slot.rank,), "another rank of this node has no part of it")
            return
        slot.state, slot.in_flight = "filled", True
        if stamp.generation not in self._being_sealed:
            self.throttle.begin_save()
            self._being_sealed[stamp.generation] = _SealingGeneration(stamp, tiers)
        sealing = self._seal_executor.submit(self._seal, slot, plan, stamp)
        self._when_done(sealing, lambda: self._sealed(slot, plan, stamp, sealing))

    def _seal(self, slot: ArenaSlot, plan: SlotPlan, stamp: CheckpointId) -> tuple[Part, float]:
        """In a thread of its own; the part, and how long it rested."""
        self.throttle.start()
        image = slot.image(plan.layout.size_bytes)
        part = seal_part(image, bytes.fromhex(stamp.generation), plan, self.throttle.rest)
        return part, self.throttle.rested_s

    def _sealed(self, slot: ArenaSlot, plan: SlotPlan, stamp: CheckpointId, sealing: Future[Any]) -> None:
        gathering = self._being_sealed.get(stamp.generation)
        error = sealing.exception()
        if error is None:
            try:
                slot.hold(PartRecord(stamp, plan.number, sealing.result()[0]))
            except OSError as problem:
                error = problem
        if error is not None:
            slot.empty()
            slot.in_flight = False
            self.fail(stamp, f"rank {plan.number} cannot be sealed: {error}")
            return
        self._listener.sealed(slot.rank, stamp)
        if gathering is None:  # another rank of the node has none
            slot.in_flight = False
            return
        gathering.slots[slot.rank] = slot
        gathering.rested_s += sealing.result()[1]
        if gathering.slots.keys() >= set(self.ranks):
            del self._being_sealed[stamp.generation]
            self._start_transfer(gathering)

    def _start_transfer(self, gathering: _SealingGeneration) -> None:
        slots = [gathering.slots[rank] for rank in sorted(gathering.slots)]
        parts = []
        for slot in slots:
            assert slot.record is not None
            record = slot.record
            image = slot.image(record.part.size_bytes).toreadonly()
            parts.append(SealedPart(record.number, record.part, image, str(slot.path)))
        load = NodeShards(gathering.stamp, tuple(parts))
        self._listener.all_sealed(load.stamp, _shards_size(load))
        tiers: list[TierName] = [
            name for name in TIER_NAMES[1:] if name in gathering.tiers and name != "object"
        ]
        is_copied = "object" in gathering.tiers
        journey = _Transfer(load, tiers, slots, is_copied=is_copied, rested_s=gathering.rested_s)
        self._transfers.append(journey)
        going = self._transfer_executor.submit(self._run_transfer, journey, self._tiers, self._missing)
        self._when_done(going, lambda: self._arrived(journey, going))

    def _copy(self, journey: _Transfer) -> None:
        """On to the object store; of several that wait for it only the newest."""
        self._give_up_transfers(self._copies, "left out: a newer copy is due")
        load = journey.load
        parts = tuple(replace(one, image=memoryview(b"")) for one in load.parts)
        why_not = "" if journey.is_durable else "only what is in the run directory is copied, and this is not"
        copy = _Transfer(NodeShards(load.stamp, parts), ["object"], [], why_not)
        self._copies.append(copy)
        going = self._upload_executor.submit(self._run_transfer, copy, self._tiers, self._missing)
        self._when_done(going, lambda: self._copied(copy, going))

    def _copied(self, copy: _Transfer, going: Future[None]) -> None:
        self._copies.remove(copy)
        if (error := going.exception()) is not None:
            stored = StoreResult(copy.load.stamp, "object", 0.0, 0, f"{type(error).__name__}: {error}")
            self._listener.stored(stored, self.ranks)

    def fail(self, stamp: CheckpointId, why: str) -> None:
        """A generation that cannot become whole on this node; also other nodes are told."""
        gathering = self._being_sealed.pop(stamp.generation, None)
        for slot in gathering.slots.values() if gathering is not None else ():
            slot.in_flight = False
        self._failed.add(stamp.generation)
        self._listener.failed(stamp, self.ranks, why)
        self.withdraw(stamp, self.ranks, why, gathering.tiers if gathering is not None else TIER_NAMES)

    def withdraw(
        self,
        stamp: CheckpointId,
        numbers: Sequence[int],
        why: str,
        tiers: Sequence[TierName] = TIER_NAMES,
    ) -> None:
        """Tell other nodes, wherever they wait for them, that these parts will not come."""
        for name in tiers:
            tier = self._tiers.get(name)
            if numbers and tier is not None and isinstance(tier, SupportsAbandon):
                self._transfer_executor.submit(tier.abandon, stamp, sorted(numbers), why)

    def lose(self, rank: int) -> None:
        """A rank is gone: what it has begun to fill is garbage, and what others wait for will not come."""
        for slot in self.arena.slots.get(rank, []):
            if slot.state == "claimed":
                slot.empty()
        for gathering in list(self._being_sealed.values()):
            if not any(slot.generation == gathering.stamp.generation for slot in self._filled(rank)):
                self.fail(gathering.stamp, f"rank {rank} is gone")

    def _filled(self, rank: int) -> list[ArenaSlot]:
        return [slot for slot in self.arena.slots.get(rank, []) if slot.state in ("filled", "sealed")]

    def degrade(self, generation: str) -> None:
        """Once for each save that is due and finds no slot: the oldest load goes no further."""
        if generation != self._degraded_for:
            self._degraded_for = generation
            self._give_up_transfers(self._transfers[:1], _SUPERSEDED)

    def _give_up_transfers(self, journeys: Sequence[_Transfer], why: str) -> None:
        for journey in journeys:
            journey.why_not = journey.why_not or why

    def release(self, generations: set[str]) -> None:
        """Let go of everything that this node holds, but for these generations and what is on its way."""
        kept = generations | {one.load.stamp.generation for one in self._transfers} | set(self._being_sealed)
        self.arena.release(kept)
        self._to_release = kept
        self._transfer_executor.submit(self._release)

    def _release(self) -> None:
        """After what is on its way; where the worker ends before that, at its end."""
        kept, self._to_release = self._to_release, None
        for name in _NODE_OWNED_TIERS if kept is not None else ():
            if (tier := self._tiers.get(name)) is not None:
                with contextlib.suppress(OSError, SiteError):
                    tier.retain(kept or ())

    def holdings(self, node: str) -> list[InventoryEntry]:
        """All that this node has, at its tiers."""
        found = self.arena.holdings(node)
        for tier in self._tiers.values():
            found += tier.holdings()
        return found

    def is_kept_elsewhere(self, stamp: CheckpointId) -> bool:
        """Whether a state would still be there without this node's memory, or a newer one is."""
        if stamp.generation in self._kept:
            return True
        local = self._tiers.get("local")
        held = local.holdings() if local is not None else ()
        if any(one.stamp.generation == stamp.generation for one in held):
            return True
        if self._checkpoints is None:
            return False
        saved = read_saved_checkpoint(self._checkpoints / f"step-{stamp.step:08d}")
        if isinstance(saved, SavedCheckpoint) and saved.generation == stamp.generation:
            return True
        return any(
            one.step >= stamp.step and one.attempt >= stamp.attempt
            for one in resumable_checkpoints(self._checkpoints)
        )

    def close(self) -> None:
        """End after what cannot be left half done."""
        self._hurry.set()
        self.throttle.hasten()
        why = "the worker ends"
        self._give_up_transfers([*self._transfers, *self._copies], why)
        self._seal_executor.shutdown(cancel_futures=True)
        self.settle()  # what was just sealed sets out
        self._give_up_transfers(self._transfers, why)
        self._transfer_executor.shutdown(cancel_futures=True)
        self._upload_executor.shutdown(cancel_futures=True)
        self._release()
        self.settle()

    def _run_transfer(
        self,
        journey: _Transfer,
        tiers: Mapping[TierName, Tier],
        missing: Mapping[TierName, str],
    ) -> None:
        """In a thread of its own: from tier to tier; one that fails does not hold up the others."""
        load = journey.load
        for name in journey.tiers:
            self.throttle.start()
            began, facts, problem = time.monotonic(), dict[str, Any](), journey.why_not or None
            tier = tiers.get(name)
            if tier is None:
                problem = missing.get(name) or f"this worker has no tier {name}"
            elif problem is None:
                if name != "object":  # that has a thread of its own, and limits of its own
                    self._at = load.stamp, name
                try:
                    facts = tier.store(load)
                except OSError as error:
                    problem = explain_os_error(error, self._checkpoints or Path())
                except SiteError as error:
                    problem = str(error)
                finally:
                    if name != "object":
                        self._at = None
                        self.watch.done()
            elif isinstance(tier, SupportsAbandon):
                tier.abandon(load.stamp, [one.number for one in load.parts], problem)
            seconds = time.monotonic() - began - self.throttle.rested_s
            journey.rested_s += self.throttle.rested_s
            if journey.rested_s:
                facts = facts | {"rested_s": round(journey.rested_s, 6)}
            journey.is_durable |= name == "durable" and problem is None
            stored = StoreResult(load.stamp, name, seconds, _shards_size(load), problem, facts)
            self._post(partial(self._note, stored))
            if name in _PRUNED_TIERS and tier is not None and problem is None:
                with contextlib.suppress(OSError, SiteError):  # it is tried again after the next
                    tier.retain(self._generations_to_keep(tier.holdings(), load.stamp))

    def _generations_to_keep(self, held: Sequence[InventoryEntry], stamp: CheckpointId) -> set[str]:
        """The newest published generation and what is newer; where none is published, the newest two."""
        stamps = sorted((one.stamp for one in held), key=lambda one: (one.attempt, one.step))
        names = [one.generation for one in stamps]
        first = names.index(self.published) if self.published in names else max(0, len(names) - 2)
        return {stamp.generation, *names[first:]}

    def _note(self, stored: StoreResult) -> None:
        if stored.problem is None and stored.tier in _WHOLE_COPY_TIERS:
            self._kept.add(stored.stamp.generation)
        self._listener.stored(stored, self.ranks)

    def _arrived(self, journey: _Transfer, going: Future[None]) -> None:
        self._transfers.remove(journey)
        for slot in journey.slots:
            slot.in_flight = False
        if (error := going.exception()) is not None:
            self._listener.failed(journey.load.stamp, self.ranks, f"{type(error).__name__}: {error}")
        elif journey.is_copied:
            self._copy(journey)

    def _when_done(self, future: Future[Any], then: Callable[[], None]) -> None:
        future.add_done_callback(lambda done: None if done.cancelled() else self._post(then))

    def _post(self, outcome: Callable[[], None]) -> None:
        self._outcomes.put(outcome)
        self._wake()


def _shards_size(load: NodeShards) -> int:
    return sum(one.part.size_bytes for one in load.parts)
