"""Copies on spares: whose parts each of them is to hold, ordered anew for each save that is whole in memory.

A node is covered by a spare near it first, the one that will take its place; then, where there is room, once
more by another one, as far away as can be, because a rack is lost with its spares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpcrun.checkpoint.flush.spare_replicas import is_spare_replica
from hpcrun.checkpoint.parity.sets import FailureDomains
from hpcrun.checkpoint.restore_plan import RestorePlan
from hpcrun.checkpoint.tier import CheckpointId
from hpcrun.checkpoint.worker_messages import PartsCopied, WorkerDied, WorkerMessage
from hpcrun.hostlist import fold_hosts
from hpcrun.launch.agents.nodes import NodeStates
from hpcrun.launch.checkpointing.worker_client import WorkerClient
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.events.checkpoint import SpareReplicaEvent
from hpcrun.specs.placement import Placement
from hpcrun.units import format_bytes, format_duration

_MAX_GENERATIONS = 4
"""So many generations are remembered."""
_MAX_NAMED = 4
_SLOW_COPY_S = 600.0

ReplicaAssignment = dict[str, list[str]]
"""Spare → the nodes whose parts it is to hold, those first that matter most."""


def assign_replicas(
    spares: Sequence[str], nodes: Sequence[str], domains: FailureDomains
) -> ReplicaAssignment:
    """Who copies whose parts: every node once, the nearest first, before any is covered twice.

    Of those for the second time, the ones come first that another spare takes last, and may have no room for.
    """
    shares: ReplicaAssignment = {spare: [] for spare in spares}
    left, holder = list(dict.fromkeys(nodes)), dict[str, str]()
    while left and spares:
        for spare in spares[: len(left)]:
            node = min(left, key=lambda candidate: _fabric_distance(spare, candidate, domains))
            left.remove(node)
            shares[spare].append(node)
            holder[node] = spare
    for node in reversed(holder):
        others = [spare for spare in spares if spare != holder[node]]
        if others:
            second = min(
                others,
                key=lambda candidate: (
                    len(shares[candidate]),
                    -_fabric_distance(candidate, holder[node], domains),
                ),
            )
            shares[second].append(node)
    return shares


def _fabric_distance(node: str, other: str, domains: FailureDomains) -> int:
    """How many levels of the fabric have to be gone up until both are in one unit; unknown is far."""
    for height, units in enumerate(domains.values()):
        if units.get(node) is not None and units.get(node) == units.get(other):
            return height
    return len(domains)


def count_spare_replicas(plan: RestorePlan) -> int:
    """How many parts of a plan come out of copies on spares."""
    return sum(is_spare_replica(source.path) for source in plan.sources)


class SpareReplicaScheduler:
    """One a run: gives the spares their orders, one at a time, and hears what came of them."""

    def __init__(
        self, workers: WorkerClient, nodes: NodeStates, spec: CheckpointSpec, note: Callable[[str], None]
    ) -> None:
        self._workers, self._nodes, self._note = workers, nodes, note
        self._is_wanted = spec.memory > 0 and spec.replicate_to_spares is not False
        self._attempt, self._nodes_in_use = 0, tuple[str, ...]()
        self._shares: ReplicaAssignment = {}
        self._spares: list[str] = []
        self._newest: CheckpointId | None = None
        self._completed = 0
        self._ordered: dict[str, tuple[int, CheckpointId, float]] = {}
        """What each spare is about, and since when."""
        self._waiting: dict[str, CheckpointId] = {}
        self._held: dict[int, dict[str, set[str]]] = {}
        """Step → spare → whose parts it has."""
        self._told: dict[str, list[str]] = {}
        self._noted: set[tuple[str, str]] = set()

    def begin(self, attempt: int, placement: Placement, domains: FailureDomains, plan: RestorePlan) -> None:
        """An attempt begins: of what nodes with ranks hold as replicas, only what it goes on from is kept."""
        there = self._workers.ready
        nodes = tuple(dict.fromkeys(placement.nodes))
        spares = [node for node in placement.spares or there if node in there and node not in nodes]
        self._attempt, self._nodes_in_use = attempt, nodes
        self._newest, self._completed = None, 0
        self._ordered, self._waiting, self._told, self._held = {}, {}, {}, {}
        self._noted = set()
        self._shares = assign_replicas(spares, nodes, domains) if self._is_wanted else {}
        if self._shares and sorted(self._shares) != self._spares:
            self._spares = sorted(self._shares)
            self._note(
                f"spare{'s' * (len(spares) != 1)} {fold_hosts(spares)}: each save is copied there out of the"
                " nodes' memory, as far as there is room; a node is lost without harm where there is a copy"
            )
        used = [source for source in plan.sources if is_spare_replica(source.path)]
        for node in nodes:
            if plan.stamp is not None and node in there:
                numbers = [source.number for source in used if source.node == node]
                self._workers.dismiss(node, plan.stamp.generation, numbers)

    def handle(
        self, node: str, message: WorkerMessage, whole: CheckpointId | None
    ) -> Iterator[SpareReplicaEvent]:
        """The events that a message makes; `whole`: the newest state that all nodes have in memory."""
        if isinstance(message, WorkerDied):
            self._ordered.pop(node, None)
            for holders in self._held.values():
                holders.pop(node, None)
        elif isinstance(message, PartsCopied):
            yield from self._take(node, message)
        if whole is not None and whole.attempt == self._attempt and whole != self._newest:
            self._newest = whole
            self._due(whole)

    def covered_step(self) -> int:
        """The newest step of which spares have all that lost nodes of this attempt had; 0: of none."""
        gone = {node_lost.node for node_lost in self._nodes.lost}
        living = set(self._nodes.alive) - gone
        lost = set(self._nodes_in_use) - living
        for step, holders in sorted(self._held.items(), reverse=True):
            if lost and lost <= set().union(*(of for spare, of in holders.items() if spare in living)):
                return step
        return 0

    def _due(self, stamp: CheckpointId) -> None:
        self._completed += 1
        if self._completed == 2:
            # Only now is the state that the attempt began with of no more use, as its slots are used again.
            for node in self._nodes_in_use:
                self._workers.dismiss(node, stamp.generation, ())
        for spare in self._shares:
            if spare in self._ordered:
                self._waiting[spare] = stamp
                self._watch(spare)
            else:
                self._order(spare, stamp)

    def _order(self, spare: str, stamp: CheckpointId) -> None:
        if spare in self._nodes.alive and spare in self._workers.ready:
            number = self._workers.copy(spare, stamp, self._shares[spare])
            self._ordered[spare] = number, stamp, time.monotonic()

    def _watch(self, spare: str) -> None:
        """Say it once where a spare is long about one save: what it has is old."""
        _, stamp, since = self._ordered[spare]
        silent_s = time.monotonic() - since
        if silent_s > _SLOW_COPY_S and (spare, spare) not in self._noted:
            self._noted.add((spare, spare))
            self._note(f"{spare}: no news of its copies of step {stamp.step} for {format_duration(silent_s)}")

    def _take(self, spare: str, copied: PartsCopied) -> Iterator[SpareReplicaEvent]:
        number, stamp, _ = self._ordered.get(spare, (None, None, None))
        # Numbers begin anew with each supervisor.
        if stamp is None or (copied.id, copied.generation) != (number, stamp.generation):
            return
        del self._ordered[spare]
        if (following := self._waiting.pop(spare, None)) is not None:
            self._order(spare, following)
        nodes, problems = list(copied.nodes), copied.problems
        self._held.setdefault(stamp.step, {})[spare] = set(nodes)
        for step in sorted(self._held)[:-_MAX_GENERATIONS]:
            del self._held[step]
        self._report_problems(spare, stamp, problems)
        no_room, size, seconds = copied.no_room, copied.size_bytes, copied.seconds
        text = ""
        if self._told.get(spare) != nodes:
            self._told[spare] = nodes
            room = f"; no room for {_join_names(no_room)}" if no_room else ""
            text = (
                f"spare {spare} holds what {_join_names(nodes)} had in memory at step {stamp.step}"
                f" ({format_bytes(size)} in {format_duration(seconds)}){room}"
            )
        yield SpareReplicaEvent(
            stamp.step,
            stamp.generation,
            spare,
            tuple(nodes),
            no_room,
            problems,
            size,
            seconds,
            text,
        )

    def _report_problems(self, spare: str, stamp: CheckpointId, problems: dict[str, str]) -> None:
        """Once an attempt for each node that it is about; events have the rest."""
        new = [node for node in problems if (spare, node) not in self._noted]
        self._noted |= {(spare, node) for node in new}
        if new:
            self._note(f"{spare}: has no copy of step {stamp.step} of {_join_names(new)}: {problems[new[0]]}")


def _join_names(nodes: Iterable[str]) -> str:
    names = list(nodes)
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(names[:_MAX_NAMED]) or "no node") + rest
