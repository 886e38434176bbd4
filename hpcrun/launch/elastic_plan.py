"""How many replicas of a job an attempt gets: as many as the nodes that are left can hold."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.runs.snapshot import read_replica_counts
from hpcrun.specs.plan import Plan
from hpcrun.specs.reduced_plan import minimum_ranks, shrink_plan
from hpcrun.specs.rundir import Attempt
from hpcrun.submission.prepare import PreparedJob


@dataclass(frozen=True)
class ElasticPlan:
    """What fits on the nodes that are left: by which plan (None for a command), on how many of them."""

    plan: Plan | None
    nodes: int

    def __str__(self) -> str:
        return f" with {self.plan.replicas}" if self.plan is not None and self.plan.replicas else ""

    def replicas_after(self, last: Attempt) -> tuple[int | None, ...]:
        """How many replicas there are, were, and should be; empty where none is missing."""
        if self.plan is None:
            return ()
        now, missing = self.plan, read_replica_counts(last)
        if now.whole_dp is None and missing is None:
            return ()
        before, whole = missing or (now.whole_dp, now.whole_dp)
        return now.degrees.dp, before, whole


def plan_for_nodes(prepared: PreparedJob, per_node: int, left: int) -> ElasticPlan:
    """The whole job, else what it goes on with; also the whole where the nodes are too few for anything."""
    plan = prepared.plan
    if plan is not None:
        plan = shrink_plan(prepared.spec, plan, left * per_node) or plan
    ranks = prepared.ranks if plan is None else plan.degrees.world_size
    return ElasticPlan(plan, -(-ranks // per_node))


def min_nodes(prepared: PreparedJob, per_node: int) -> int:
    """With how many nodes the job still goes on."""
    plan = prepared.plan
    ranks = prepared.ranks if plan is None else minimum_ranks(prepared.spec, plan)
    return -(-ranks // per_node)
