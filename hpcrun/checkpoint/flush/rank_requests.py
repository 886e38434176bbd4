"""Where ranks come with their states: what each has reserved, claimed and filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.flush.arena import ArenaSlot
from hpcrun.checkpoint.flush.pipeline import FlushPipeline, PipelineListener
from hpcrun.checkpoint.format import ChunkSpec
from hpcrun.checkpoint.seal import SlotPlan, plan_slot
from hpcrun.checkpoint.tier import TIER_NAMES, CheckpointId, StoreResult, TierName
from hpcrun.errors import SiteError

SendMessage = Callable[[Any], None]


@dataclass
class _ConnectedRank:
    """A rank that is connected."""

    send: SendMessage
    wish: tuple[int, int, tuple[int, ...]] | None = None
    """Bytes, slots, all ranks of the node: not decided yet."""
    plans: dict[int, SlotPlan] = field(default_factory=dict)
    refused: str = ""
    """The generation that it could not have a slot for."""


class RankRequestHandler(PipelineListener):
    """Serves the ranks of a node, and tells the host what came of it."""

    def __init__(self, tell_host: Callable[[wire.WorkerMessage], None]) -> None:
        self._tell_host = tell_host
        self._ranks: dict[int, _ConnectedRank] = {}
        self._pipeline: FlushPipeline | None = None
        self._attempt = 0

    def open(self, pipeline: FlushPipeline, attempt: int) -> None:
        """From now on there is an arena, and this is the attempt."""
        self._pipeline, self._attempt = pipeline, attempt

    def hear(self, request: wire.AnyRankRequest, send: SendMessage) -> bool:
        """Do what a rank asks; whether that could be done."""
        try:
            if self._pipeline is None:
                raise ValueError("the worker has no arena yet")
            known = self._ranks.get(request.rank)
            if known is not None and known.send is not send:
                self.leave(request.rank, known.send)  # it has come again before its end was noticed
            if known is None or known.send is not send:
                known = self._ranks[request.rank] = _ConnectedRank(send)
            self._answer(self._pipeline, known, request)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError) as error:
            send(wire.RequestRefused(f"{type(error).__name__}: {error}"))
            return False
        return True

    def _answer(self, pipeline: FlushPipeline, known: _ConnectedRank, request: wire.AnyRankRequest) -> None:
        match request:
            case wire.ReserveSlots():
                self._reserve(pipeline, known, request)
            case wire.PlanSlot():
                pieces = [ChunkSpec(n, d, tuple(w), tuple(o), tuple(s)) for n, d, w, o, s in request.pieces]
                known.plans[request.key] = plan_slot(request.rank, pieces, request.file, request.start)
                known.send(wire.SlotPlanned())
            case wire.ClaimSlot():
                known.send(self._claim(pipeline, known, request))
            case wire.SlotFilled():
                self._fill(pipeline, known, request)
            case wire.SlotLost(rank, stamp, why):
                for slot in pipeline.arena.slots.get(rank, []):
                    if slot.state == "claimed":
                        slot.empty()
                pipeline.fail(stamp, f"rank {rank}: {why}")
            case wire.DegradeSaves():
                if known.refused:
                    pipeline.degrade(known.refused)
            case wire.HastenFlush():
                pipeline.hasten()
            case wire.PingFromRank():
                known.send(wire.WorkerPong())

    def leave(self, rank: int, send: SendMessage) -> None:
        """A connection has ended; a rank that has come again meanwhile is not gone."""
        known = self._ranks.get(rank)
        if known is not None and known.send is send:
            del self._ranks[rank]
            if self._pipeline is not None:
                self._pipeline.lose(rank)

    def _reserve(self, pipeline: FlushPipeline, known: _ConnectedRank, request: wire.ReserveSlots) -> None:
        ranks = tuple(sorted(request.ranks))
        if request.rank not in ranks or request.slots < 1:
            raise ValueError(f"rank {request.rank} asks for {request.slots} slots beside ranks {list(ranks)}")
        known.wish = request.size_bytes, request.slots, ranks
        wishes = {rank: self._ranks[rank].wish for rank in ranks if rank in self._ranks}
        if any(wish is None or wish[2] != ranks for wish in wishes.values()) or len(wishes) < len(ranks):
            return
        decided = {rank: wish for rank, wish in wishes.items() if wish is not None}
        pipeline.ranks = ranks
        # All its pages are made now, which may take minutes.
        self._tell_host(wire.ReservingMemory())
        answers: dict[int, wire.RankAnswer] = {}
        try:
            sizes = {rank: wish[0] for rank, wish in decided.items()}
            count = min(wish[1] for wish in decided.values())
            for rank, slots in pipeline.reserve(sizes, count).items():
                answers[rank] = wire.SlotsReserved(
                    tuple(str(slot.path) for slot in slots), tuple(pipeline.tiers)
                )
        except (SiteError, OSError) as error:
            answers = {rank: wire.RequestRefused(str(error)) for rank in ranks}
        for rank, answer in answers.items():
            self._ranks[rank].wish = None
            self._ranks[rank].send(answer)

    def _claim(
        self, pipeline: FlushPipeline, known: _ConnectedRank, request: wire.ClaimSlot
    ) -> wire.RankAnswer:
        if request.published is not None:
            pipeline.published = request.published
        slot = pipeline.arena.claim(
            request.rank, request.generation, request.published, self._attempt, pipeline.is_kept_elsewhere
        )
        if isinstance(slot, str):
            known.refused = request.generation
            return wire.SlotsBusy(slot)
        known.refused = ""
        return wire.SlotClaimed(pipeline.arena.slots[request.rank].index(slot))

    def _fill(self, pipeline: FlushPipeline, known: _ConnectedRank, request: wire.SlotFilled) -> None:
        tiers = [tier for tier in TIER_NAMES if tier in request.tiers]
        slots = pipeline.arena.slots.get(request.rank, [])
        slot = slots[request.slot] if 0 <= request.slot < len(slots) else None
        plan = known.plans.get(request.key)
        problem = _find_fill_problem(slot, plan, request.stamp)
        if problem or slot is None or plan is None:
            # It comes from before this worker, or never was.
            pipeline.fail(request.stamp, f"rank {request.rank}: {problem}")
            return
        pipeline.fill(slot, plan, request.stamp, tiers)

    def sealed(self, rank: int, stamp: CheckpointId) -> None:
        """Tell the rank."""
        self._send([rank], wire.PartSealed(stamp))

    def all_sealed(self, stamp: CheckpointId, size_bytes: int) -> None:
        """Tell the host."""
        self._tell_host(wire.GenerationSealed(stamp, size_bytes))

    def stored(self, stored: StoreResult, ranks: Sequence[int]) -> None:
        """Tell the ranks and the host."""
        self._tell_host(stored)
        why = stored.problem
        self._send(ranks, stored if why is None else wire.SaveFailed(stored.stamp, stored.tier, why))

    def failed(self, stamp: CheckpointId, ranks: Sequence[int], why: str) -> None:
        """Tell the ranks and the host."""
        message = wire.SaveFailed(stamp, "memory", why)
        self._send(ranks, message)
        self._tell_host(message)

    def stalled(
        self, stamp: CheckpointId, tier: TierName, ranks: Sequence[int], what: str, seconds: float
    ) -> None:
        """Tell the ranks, and people."""
        why = f"{what}: nothing has moved for {seconds:.0f} s"
        self._send(ranks, wire.SaveStalled(stamp, tier, why, seconds))
        self._tell_host(wire.WorkerLog(f"the save of step {stamp.step} ({tier}) is held up: {why}"))

    def _send(self, ranks: Sequence[int], message: wire.RankNews) -> None:
        for rank in ranks:
            if (known := self._ranks.get(rank)) is not None:
                known.send(message)


def _find_fill_problem(slot: ArenaSlot | None, plan: SlotPlan | None, stamp: CheckpointId) -> str:
    """Why what was filled cannot be taken; empty where it can."""
    if slot is None:
        return "has no such slot"
    if plan is None:
        return "has filled a slot by a plan that this worker does not know"
    if slot.state != "claimed" or slot.generation != stamp.generation:
        return f"{slot.path.name} is not claimed for step {stamp.step}"
    if plan.layout.size_bytes > slot.size_bytes:
        return f"a part of {plan.layout.size_bytes} bytes does not fit into {slot.path.name}"
    try:
        if len(bytes.fromhex(stamp.generation)) != 16:
            raise ValueError
    except ValueError:
        return f"{stamp.generation} is not a generation: 32 hexadecimal digits"
    return ""
