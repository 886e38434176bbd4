"""Where ranks come with their states: what each has reserved, claimed and filled, by lines of JSON.

reserve   slots for this rank, decided when all ranks of the node have asked, for all alike
plan      what it will put into them, once for each structure
claim     a slot for the next save; `busy` where none can be given without losing something
filled    the bytes are in place
lost      they will not be: nobody needs to wait for this rank's part
ping      a sign of life is wanted
hasten    somebody waits for what is on its way
degrade   the save that was just refused a slot is wanted more than the oldest one's next levels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.checkpoint.flush.arena import ArenaSlot
from hpcrun.checkpoint.flush.pipeline import FlushPipeline, PipelineListener
from hpcrun.checkpoint.format import ChunkSpec
from hpcrun.checkpoint.levels import CHECKPOINT_LEVELS, CheckpointLevel, GenerationId, StoreResult
from hpcrun.checkpoint.seal import SlotPlan, plan_slot
from hpcrun.errors import SiteError

SendMessage = Callable[[dict[str, Any]], None]


@dataclass
class _ConnectedRank:
    """A rank that is connected."""

    send: SendMessage
    wish: tuple[int, int, tuple[int, ...]] | None = None
    """Bytes, slots, all ranks of the node: not decided yet."""
    plans: dict[str, SlotPlan] = field(default_factory=dict)
    refused: str = ""
    """The generation that it could not have a slot for."""


class RankRequestHandler(PipelineListener):
    """Serves the ranks of a node, and tells the host what came of it."""

    def __init__(self, tell_host: SendMessage) -> None:
        self._tell_host = tell_host
        self._ranks: dict[int, _ConnectedRank] = {}
        self._pipeline: FlushPipeline | None = None
        self._attempt = 0

    def open(self, pipeline: FlushPipeline, attempt: int) -> None:
        """From now on there is an arena, and this is the attempt."""
        self._pipeline, self._attempt = pipeline, attempt

    def hear(self, message: Any, send: SendMessage) -> int | None:
        """Do what a rank asks; its number, where it has said it."""
        try:
            rank = int(message["rank"])
            if self._pipeline is None:
                raise ValueError("the worker has no arena yet")
            known = self._ranks.get(rank)
            if known is not None and known.send is not send:
                self.leave(rank, known.send)  # it has come again before its end was noticed
            if known is None or known.send is not send:
                known = self._ranks[rank] = _ConnectedRank(send)
            handle = {
                "reserve": self._reserve,
                "plan": self._plan,
                "claim": self._claim,
                "filled": self._filled,
                "lost": self._lost,
                "degrade": self._degrade,
                "hasten": self._hasten,
                "ping": self._ping,
            }.get(message["do"])
            if handle is None:
                raise ValueError(f"unknown verb {message['do']}")
            handle(self._pipeline, rank, known, message)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError) as error:
            send({"kind": "error", "why": f"{type(error).__name__}: {error}"})
            return None
        return rank

    def leave(self, rank: int, send: SendMessage) -> None:
        """A connection has ended; a rank that has come again meanwhile is not gone."""
        known = self._ranks.get(rank)
        if known is not None and known.send is send:
            del self._ranks[rank]
            if self._pipeline is not None:
                self._pipeline.lose(rank)

    def _reserve(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        ranks = tuple(sorted(map(int, message["ranks"])))
        if rank not in ranks or int(message["slots"]) < 1:
            raise ValueError(f"rank {rank} asks for {message['slots']} slots beside ranks {list(ranks)}")
        known.wish = int(message["size_bytes"]), int(message["slots"]), ranks
        wishes = {one: self._ranks[one].wish for one in ranks if one in self._ranks}
        if any(wish is None or wish[2] != ranks for wish in wishes.values()) or len(wishes) < len(ranks):
            return
        decided = {one: wish for one, wish in wishes.items() if wish is not None}
        pipeline.ranks = ranks
        # All its pages are made now, which may take minutes.
        self._tell_host({"kind": "reserving"})
        answers: dict[int, dict[str, Any]] = {}
        try:
            sizes = {one: wish[0] for one, wish in decided.items()}
            count = min(wish[1] for wish in decided.values())
            given = pipeline.reserve(sizes, count)
            for one, slots in given.items():
                names = [str(slot.path) for slot in slots]
                answers[one] = {"kind": "reserved", "slots": names, "levels": pipeline.levels}
        except (SiteError, OSError) as error:
            answers = {one: {"kind": "refused", "why": str(error)} for one in ranks}
        for one, answer in answers.items():
            self._ranks[one].wish = None
            self._ranks[one].send(answer)

    def _plan(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        pieces = [ChunkSpec(n, d, tuple(w), tuple(o), tuple(s)) for n, d, w, o, s in message["pieces"]]
        plan = plan_slot(rank, pieces, int(message["file"]), int(message["start"]))
        known.plans[str(message["key"])] = plan
        known.send({"kind": "planned", "key": message["key"], "size_bytes": plan.layout.size_bytes})

    def _claim(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        generation, published = str(message["generation"]), message["published"]
        if published is not None:
            pipeline.published = str(published)
        slot = pipeline.arena.claim(rank, generation, published, self._attempt, pipeline.is_kept_elsewhere)
        if isinstance(slot, str):
            known.refused = generation
            known.send({"kind": "busy", "generation": generation, "why": slot})
            return
        known.refused = ""
        number = pipeline.arena.slots[rank].index(slot)
        known.send({"kind": "claimed", "generation": generation, "slot": number, "path": str(slot.path)})

    def _filled(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        stamp = GenerationId(**message["stamp"])
        levels = [level for level in CHECKPOINT_LEVELS if level in message["levels"]]
        if unknown := set(message["levels"]) - set(CHECKPOINT_LEVELS):
            raise ValueError(
                f"unknown levels {', '.join(sorted(unknown))}; known: {', '.join(CHECKPOINT_LEVELS)}"
            )
        slots = pipeline.arena.slots.get(rank, [])
        slot = slots[int(message["slot"])] if 0 <= int(message["slot"]) < len(slots) else None
        plan = known.plans.get(str(message["key"]))
        problem = _find_fill_problem(slot, plan, stamp)
        if problem or slot is None or plan is None:
            # It comes from before this worker, or never was.
            pipeline.fail(stamp, f"rank {rank}: {problem}")
            return
        pipeline.fill(slot, plan, stamp, levels)

    def _lost(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        stamp = GenerationId(**message["stamp"])
        for slot in pipeline.arena.slots.get(rank, []):
            if slot.state == "claimed":
                slot.empty()
        pipeline.fail(stamp, f"rank {rank}: {message['why']}")

    def _ping(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        known.send({"kind": "pong"})

    def _hasten(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        pipeline.hasten()

    def _degrade(
        self, pipeline: FlushPipeline, rank: int, known: _ConnectedRank, message: dict[str, Any]
    ) -> None:
        if known.refused:
            pipeline.degrade(known.refused)

    def sealed(self, rank: int, stamp: GenerationId) -> None:
        """Tell the rank."""
        self._send([rank], {"kind": "sealed", "generation": stamp.generation, "step": stamp.step})

    def all_sealed(self, stamp: GenerationId, size_bytes: int) -> None:
        """Tell the host."""
        self._tell_host({"kind": "sealed", **asdict(stamp), "size_bytes": size_bytes})

    def stored(self, stored: StoreResult, ranks: Sequence[int]) -> None:
        """Tell the ranks and the host."""
        told = asdict(stored)
        self._tell_host({"kind": "stored", **told})
        if stored.problem is None:
            self._send(ranks, {"kind": "stored", **told})
        else:
            words = {"generation": stored.stamp.generation, "level": stored.level, "why": stored.problem}
            self._send(ranks, {"kind": "failed", **words})

    def failed(self, stamp: GenerationId, ranks: Sequence[int], why: str) -> None:
        """Tell the ranks and the host."""
        words = {"generation": stamp.generation, "level": "memory", "why": why}
        self._send(ranks, {"kind": "failed", **words})
        self._tell_host({"kind": "failed", **words, "step": stamp.step, "attempt": stamp.attempt})

    def stalled(
        self, stamp: GenerationId, level: CheckpointLevel, ranks: Sequence[int], what: str, seconds: float
    ) -> None:
        """Tell the ranks, and people."""
        why = f"{what}: nothing has moved for {seconds:.0f} s"
        words = {"generation": stamp.generation, "level": level, "why": why, "seconds": seconds}
        self._send(ranks, {"kind": "stalled", **words})
        self._tell_host({"kind": "log", "text": f"the save of step {stamp.step} ({level}) is held up: {why}"})

    def _send(self, ranks: Sequence[int], message: dict[str, Any]) -> None:
        for rank in ranks:
            if (known := self._ranks.get(rank)) is not None:
                known.send(message)


def _find_fill_problem(slot: ArenaSlot | None, plan: SlotPlan | None, stamp: GenerationId) -> str:
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
        return f"{stamp.generation} is no generation: 32 hexadecimal digits"
    return ""
