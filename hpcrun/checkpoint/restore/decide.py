"""Which generation a run goes on from: the newest that is whole, from any mix of tiers and nodes.

What a node holds is found by its content, whatever the node is called and wherever it came from. Parts go
together when their whole stamps are equal; those of two generations never do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_values
from typing import NamedTuple

from hpcrun.checkpoint.restore_plan import SHARED_NODE, PartSource, RebuildOrder, RestorePlan, SurvivingMember
from hpcrun.checkpoint.tier import (
    TIER_NAMES,
    CheckpointId,
    HeldParity,
    InventoryEntry,
    SetMember,
    TierName,
)
from hpcrun.specs.descent import lineage_order, select_lineage
from hpcrun.specs.saves import SavedCheckpoint, UnreadableCheckpoint, step_of_directory

SUSPECT_AFTER_FAILURES = 2
"""So many failures, and a generation is passed over."""
_TIER_COST = {tier: cost for cost, tier in enumerate(TIER_NAMES)}


FindIntactParts = Callable[[CheckpointId, Collection[int]], InventoryEntry | None]
"""Those of the given parts of a generation that lie whole in the run directory, though it does not."""


@dataclass(frozen=True)
class ObjectCandidate:
    """A generation that lies whole in an object store."""

    stamp: CheckpointId
    url: str


def decide_restore(
    holdings: Iterable[InventoryEntry],
    saves: Sequence[SavedCheckpoint],
    unreadable: Sequence[UnreadableCheckpoint],
    objects: Sequence[ObjectCandidate],
    poison: Mapping[str, int],
    nodes: Sequence[str],
    check: Callable[[SavedCheckpoint], str | None] = lambda _saved: None,
    find_intact_parts: FindIntactParts = lambda _stamp, _missing: None,
) -> RestorePlan:
    """The plan for the newest generation that is whole, of the line of starts that the run is on.

    Of what is kept of it at several places the nearest by is taken. `saves` are the run's own.
    `nodes`: those that live; what is rebuilt goes to the first of them that has nothing of the generation.
    `check` makes the cheap checks of a save in the run directory: what is wrong with it, or None. It is asked
    only about saves that nothing newer makes needless. `find_intact_parts` likewise: only where
    nodes hold a part of a generation, and neither they nor the run directory have all of it.
    """
    near = _group_entries(holdings, {*nodes, SHARED_NODE})
    poisoned = {generation for generation, count in poison.items() if count >= SUSPECT_AFTER_FAILURES}
    candidates: list[CheckpointId | SavedCheckpoint | ObjectCandidate] = [*near, *saves, *objects]
    line = {
        lineage_order(candidate)
        for candidate in select_lineage(_candidate_id(candidate) for candidate in candidates)
    }
    usable_candidates = _RestoreCandidates(near, nodes, check, find_intact_parts)
    for candidate in candidates:
        usable_candidates.add(
            lineage_order(_candidate_id(candidate)), _suspect_key(candidate, poisoned), candidate
        )
    lost = sorted(unreadable, key=lambda save: step_of_directory(save.path), reverse=True)
    newest = max([step for _, step in line] + [step_of_directory(save.path) for save in lost], default=0)
    used = tuple(sorted(poisoned))
    passed_over: list[str] = []
    for place in sorted(line, reverse=True):
        while lost and step_of_directory(lost[0].path) >= place[1]:
            passed_over.append(_damage_text(lost.pop(0)))
        plan = usable_candidates.best(place, passed_over)
        if plan is not None:
            return with_values(
                plan, lost_steps=newest - place[1], passed_over=tuple(passed_over), poisoned=used
            )
    passed_over += map(_damage_text, lost)
    return RestorePlan(None, lost_steps=max(newest, 0), passed_over=tuple(passed_over), poisoned=used)


def _candidate_id(candidate: CheckpointId | SavedCheckpoint | ObjectCandidate) -> CheckpointId:
    if isinstance(candidate, ObjectCandidate):
        return candidate.stamp
    return candidate if isinstance(candidate, CheckpointId) else checkpoint_id_of(candidate)


def _suspect_key(
    candidate: CheckpointId | SavedCheckpoint | ObjectCandidate, poisoned: Collection[str]
) -> str:
    """What a candidate is poisoned as; empty where it is not."""
    key = _candidate_id(candidate).generation
    is_bad = key in poisoned or (isinstance(candidate, CheckpointId) and node_failure_key(key) in poisoned)
    return key if is_bad else ""


def _damage_text(save: UnreadableCheckpoint) -> str:
    return f"{save.path}: is damaged: {save.problem}"


def node_failure_key(generation: str) -> str:
    """The same for what nodes hold of a generation, of which there may be a whole save besides."""
    return f"near:{generation}"


_RestoreCandidate = CheckpointId | SavedCheckpoint | ObjectCandidate


class _MissingParts(NamedTuple):
    """Why a generation cannot be had from where it was looked for, and the parts that are nowhere there."""

    why: str
    numbers: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return self.why


class _RestoreCandidates:
    """All that is known of each step of each start, and the best of it."""

    def __init__(
        self,
        near: Mapping[CheckpointId, list[InventoryEntry]],
        nodes: Sequence[str],
        check: Callable[[SavedCheckpoint], str | None],
        find_intact_parts: FindIntactParts,
    ) -> None:
        self._near, self._nodes, self._check, self._find_intact_parts = near, nodes, check, find_intact_parts
        self._of: dict[tuple[int, int], list[tuple[str, _RestoreCandidate]]] = {}

    def add(self, place: tuple[int, int], poisoned: str, candidate: _RestoreCandidate) -> None:
        self._of.setdefault(place, []).append((poisoned, candidate))

    def best(self, place: tuple[int, int], passed_over: list[str]) -> RestorePlan | None:
        """The cheapest plan for a step of a start; what is wrong with all others of it is told."""
        usable: list[_RestoreCandidate] = []
        _, step = place
        for poisoned, candidate in self._of[place]:
            if poisoned:
                passed_over.append(
                    f"step {step}, generation {poisoned}: could not be resumed from, or is damaged"
                )
            else:
                usable.append(candidate)
        plans, partial = [], dict[CheckpointId, _MissingParts]()
        for stamp in (candidate for candidate in usable if isinstance(candidate, CheckpointId)):
            outcome = _plan_from_nodes(stamp, self._near[stamp], self._nodes)
            if isinstance(outcome, RestorePlan):
                plans.append(outcome)
            else:
                partial[stamp] = outcome
        if plans:
            return min(plans, key=_plan_cost)
        committed, wrong = self._committed(usable, {other.generation for other in partial})
        plan = committed or self._mixed(partial)
        if plan is not None and plan.stamp in partial:
            # It is gone on from, only from elsewhere.
            del partial[plan.stamp]
        passed_over += [
            f"step {step}, generation {other.generation}: {why}" for other, why in partial.items()
        ]
        passed_over += wrong
        if plan is not None:
            return plan
        for copy in (candidate for candidate in usable if isinstance(candidate, ObjectCandidate)):
            return RestorePlan(copy.stamp, ("object",), copy=copy.url)
        return None

    def _committed(
        self, usable: Sequence[_RestoreCandidate], held: Collection[str]
    ) -> tuple[RestorePlan | None, list[str]]:
        """From a save in the run directory; and what is wrong with others of the step."""
        wrong: list[str] = []
        for saved in (candidate for candidate in usable if isinstance(candidate, SavedCheckpoint)):
            problem = self._check(saved)
            if problem is None:
                is_held = saved.generation in held
                plan = RestorePlan(
                    checkpoint_id_of(saved), ("durable",), save=str(saved.path), is_mendable=is_held
                )
                return plan, wrong
            wrong.append(f"{saved.path}: is damaged: {problem}")
        return None, wrong

    def _mixed(self, partial: dict[CheckpointId, _MissingParts]) -> RestorePlan | None:
        """From what nodes hold and whole parts of files that are no whole save; it is no longer partial."""
        for stamp in sorted(partial, key=lambda item: -item.attempt):
            missing = partial[stamp].numbers
            intact_parts = self._find_intact_parts(stamp, missing) if missing else None
            if intact_parts is None:
                continue
            outcome = _plan_from_nodes(stamp, [*self._near[stamp], intact_parts], self._nodes)
            if isinstance(outcome, RestorePlan):
                del partial[stamp]
                return outcome
            partial[stamp] = outcome
        return None


def checkpoint_id_of(saved: SavedCheckpoint) -> CheckpointId:
    """Which state a save is of."""
    candidate = saved
    return CheckpointId(
        candidate.generation,
        candidate.step,
        candidate.position,
        candidate.world_size,
        candidate.attempt,
        candidate.descent,
    )


def _plan_cost(plan: RestorePlan) -> tuple[int, int, int]:
    assert plan.stamp is not None
    worst = max((_TIER_COST[tier] for tier in plan.tiers), default=0)
    return worst, len(plan.rebuilds), -plan.stamp.attempt


def _group_entries(
    holdings: Iterable[InventoryEntry], living: Collection[str]
) -> dict[CheckpointId, list[InventoryEntry]]:
    by_stamp: dict[CheckpointId, list[InventoryEntry]] = {}
    for entry in holdings:
        if entry.node in living:
            by_stamp.setdefault(entry.stamp, []).append(entry)
    return by_stamp


def _plan_from_nodes(
    stamp: CheckpointId, holdings: Sequence[InventoryEntry], nodes: Sequence[str]
) -> RestorePlan | _MissingParts:
    """How to get a generation from what nodes hold of it, or why that cannot be done."""
    sources: dict[int, PartSource] = {}
    for source in _list_sources(holdings):
        if not 0 <= source.number < stamp.world_size:
            return _MissingParts(f"{source.node} holds part {source.number} of {stamp.world_size}")
        previous = sources.setdefault(source.number, source)
        if previous.part != source.part:
            return _MissingParts(
                f"part {source.number} on {_source_place(previous)} is not the one on {_source_place(source)}"
            )
        if _TIER_COST[source.tier] < _TIER_COST[previous.tier]:
            sources[source.number] = source
    missing = set(range(stamp.world_size)) - sources.keys()
    rebuilds: list[RebuildOrder] = []
    sets = _find_erasure_sets(holdings) if missing else {}
    for members, blocks in sets.items():
        for number, part in (held for member in members for held in member.parts):
            if number in sources and sources[number].part != part:
                where = _source_place(sources[number])
                return _MissingParts(f"part {number} on {where} is not the one that parity was made of")
        if missing & {number for member in members for number, _ in member.parts}:
            order = _plan_rebuild(
                stamp, members, blocks, sources, _choose_builder(nodes, holdings, len(rebuilds))
            )
            if order is not None:
                rebuilds.append(order)
                missing -= {number for index in order.lost for number, _ in members[index].parts}
    if missing:
        return _MissingParts(_describe_missing(stamp, missing, sources, sets), frozenset(missing))
    tiers = {source.tier for source in sources.values()} | ({"parity"} if rebuilds else set())
    return RestorePlan(
        stamp,
        tuple(tier for tier in TIER_NAMES if tier in tiers),
        tuple(sources[number] for number in sorted(sources)),
        tuple(rebuilds),
    )


def _source_place(source: PartSource) -> str:
    return source.node or source.path


def _list_sources(holdings: Iterable[InventoryEntry]) -> Iterator[PartSource]:
    for entry in holdings:
        for held in entry.parts:
            yield PartSource(held.number, entry.node, held.path, held.at, held.part, entry.tier)


_ParityBlocks = dict[int, tuple[str, HeldParity]]


def _find_erasure_sets(holdings: Iterable[InventoryEntry]) -> dict[tuple[SetMember, ...], _ParityBlocks]:
    """The erasure sets, with the blocks that are there, by the place of the member that had them."""
    by_members: dict[tuple[SetMember, ...], _ParityBlocks] = {}
    for entry in holdings:
        if entry.parity is not None and 0 <= entry.parity.index < len(entry.parity.members):
            by_members.setdefault(entry.parity.members, {}).setdefault(
                entry.parity.index, (entry.node, entry.parity)
            )
    return by_members


def _find_lost_members(
    members: Sequence[SetMember], blocks: _ParityBlocks, sources: Mapping[int, PartSource]
) -> tuple[int, ...]:
    """The members that are not whole: a part of them is missing, or their parity blocks are."""
    return tuple(
        index
        for index, member in enumerate(members)
        if index not in blocks or any(number not in sources for number, _ in member.parts)
    )


def _plan_rebuild(
    stamp: CheckpointId,
    members: tuple[SetMember, ...],
    blocks: _ParityBlocks,
    sources: Mapping[int, PartSource],
    node: str,
) -> RebuildOrder | None:
    lost = _find_lost_members(members, blocks, sources)
    if len(lost) == len(members):
        return None
    parity = min(held.parity for _, held in blocks.values())
    if len(lost) > parity:
        return None
    survivors = tuple(
        SurvivingMember(
            index,
            tuple(sources[number] for number, _ in members[index].parts),
            blocks[index][0],
            blocks[index][1].path,
            blocks[index][1].hashes,
        )
        for index in range(len(members))
        if index not in lost
    )
    return RebuildOrder(stamp, node, members, parity, lost, survivors)


def plan_rebuilds(stamp: CheckpointId, holdings: Sequence[InventoryEntry], node: str) -> list[RebuildOrder]:
    """What a node can make again of a generation by parity, whether or not that makes it whole."""
    sources: dict[int, PartSource] = {}
    for source in _list_sources(holdings):
        sources.setdefault(source.number, source)
    orders = []
    for members, blocks in _find_erasure_sets(holdings).items():
        if any(number not in sources for member in members for number, _ in member.parts):
            orders.append(_plan_rebuild(stamp, members, blocks, sources, node))
    return [order for order in orders if order is not None]


def _choose_builder(nodes: Sequence[str], holdings: Iterable[InventoryEntry], turn: int) -> str:
    """Who rebuilds: a node that has nothing of the generation yet, else one after the other."""
    busy = {entry.node for entry in holdings}
    free = [node for node in nodes if node not in busy] or list(nodes)
    return free[turn % len(free)]


def _describe_missing(
    stamp: CheckpointId,
    missing: set[int],
    sources: Mapping[int, PartSource],
    sets: Mapping[tuple[SetMember, ...], _ParityBlocks],
) -> str:
    few = ", ".join(map(str, sorted(missing)[:8])) + (", …" if len(missing) > 8 else "")
    parts = (
        f"part {few} of {stamp.world_size} is"
        if len(missing) == 1
        else f"parts {few} of {stamp.world_size} are"
    )
    text = f"{parts} on no node that answers"
    for members, blocks in sets.items():
        if missing & {number for member in members for number, _ in member.parts}:
            lost = _find_lost_members(members, blocks, sources)
            parity = min(held.parity for _, held in blocks.values())
            names = ",".join(members[index].node for index in lost)
            text += f"; of the set that it was in {names} are not whole, and parity makes up for {parity}"
            return text
    return f"{text}, and there is no parity for it"


def describe_plan_tiers(plan: RestorePlan) -> str:
    """Where a plan gets its state from, for people."""
    words: dict[TierName, str] = {
        "memory": "the memory of nodes",
        "local": "the nodes' own disks",
        "parity": "parity on other nodes",
        "durable": "the run directory",
        "object": "the object store",
    }
    return " and ".join(words[tier] for tier in plan.tiers)
