"""The nodes of a run as its supervisor counts on them: which may have ranks, and which stay out."""

from __future__ import annotations

from collections.abc import Iterable

from hpcrun.launch.agents.nodes import NodeStates
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.elastic_plan import ElasticPlan, min_nodes, plan_for_nodes
from hpcrun.launch.run_context import RunContext
from hpcrun.specs.events.supervisor import RelaunchEvent
from hpcrun.specs.rundir import Attempt
from hpcrun.submission.prepare import PreparedJob


class NodePool:
    """Who is left. A node that is refused stays out; one that was lost counts again once it answers."""

    def __init__(self, prepared: PreparedJob, site: RunContext) -> None:
        self._prepared, self._context = prepared, site
        self._refused: set[str] = set()
        self._lost: set[str] = set()

    def out(self, nodes: NodeStates) -> set[str]:
        """The nodes that get no ranks now, though they may answer.

        One that came back after it was lost is needed only where others do not hold the whole of what fits.
        """
        fresh = [node for node in self.left(nodes) if node not in self._lost]
        per_node = self._context.per_node(self._prepared.spec)
        is_enough = plan_for_nodes(self._prepared, per_node, len(fresh)).plan == self.fit(nodes).plan
        is_enough &= len(fresh) >= self.fit(nodes).nodes
        return self._refused | self._lost if is_enough else set(self._refused)

    def left(self, nodes: NodeStates) -> list[str]:
        """Those that answer and are not refused, in the allocation's order."""
        return [node for node in nodes.alive if node not in self._refused]

    @property
    def least(self) -> int:
        """With how many nodes the job still goes on."""
        return min_nodes(self._prepared, self._context.per_node(self._prepared.spec))

    def fit(self, nodes: NodeStates) -> ElasticPlan:
        """What of the job fits on those that are left."""
        return plan_for_nodes(
            self._prepared, self._context.per_node(self._prepared.spec), len(self.left(nodes))
        )

    def refuse(self, names: Iterable[str]) -> None:
        """Leave these out from now on."""
        self._refused |= set(names)

    def lose(self, names: Iterable[str]) -> None:
        """These did not answer."""
        self._lost |= set(names)

    def avoid(self, names: Iterable[str], nodes: NodeStates) -> list[str]:
        """Put spares in the place of nodes that are under suspicion; those for which there was one."""
        left, needed = self.left(nodes), self.fit(nodes).nodes
        out = [node for node in dict.fromkeys(names) if node in left][: max(0, len(left) - needed)]
        self.refuse(out)
        return out

    def unreported_losses(self, nodes: NodeStates) -> list[NodeLost]:
        """Nodes that were lost without anybody having said so yet."""
        return [node_lost for node_lost in nodes.lost if node_lost.node not in self._refused | self._lost]

    def shortage(self, nodes: NodeStates) -> str | None:
        """Why too few are left, or None where there are enough."""
        left = len(self.left(nodes))
        return f"{self.least} nodes are needed, and {left} are left" if left < self.least else None

    def relaunch_event(self, nodes: NodeStates, last: Attempt) -> RelaunchEvent:
        """The event of a relaunch after this attempt, with its nodes and replicas."""
        fit = self.fit(nodes)
        excluded = tuple(sorted(self._refused | self._lost.difference(nodes.alive)))
        return RelaunchEvent(excluded, len(self.left(nodes)) - fit.nodes, *fit.replicas_after(last))
