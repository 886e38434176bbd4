"""How many replicas of a job an attempt gets: as many as the nodes that are left can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcrun.launch.prepare import Prepared
from hpcrun.specs.plan import Plan
from hpcrun.specs.replicas import least_ranks, shrink


@dataclass(frozen=True)
class Crew:
    """The ranks of an attempt: by which plan (None for a command), and how many nodes they take."""

    plan: Plan | None
    nodes: int


def crew_on(prepared: Prepared, per_node: int, left: int) -> Crew | None:
    """What so many nodes hold: the whole job, else what it goes on with; None where they are too few."""
    plan = None if prepared.plan is None else shrink(prepared.spec, prepared.plan, left * per_node)
    if prepared.plan is not None and plan is None:
        return None
    nodes = -(-(prepared.ranks if plan is None else plan.degrees.world_size) // per_node)
    return Crew(plan, nodes) if nodes <= left else None


def why_too_few(prepared: Prepared, per_node: int, left: int) -> str:
    """Why the nodes that are left hold no crew."""
    plan, elastic = prepared.plan, prepared.spec.elastic
    ranks = prepared.ranks if plan is None else least_ranks(prepared.spec, plan)
    least = "" if elastic is None else f" for {elastic.min_replicas} replicas"
    return f"{-(-ranks // per_node)} nodes are needed{least}, and {left} are left"


def change(before: Plan | None, now: Plan | None) -> dict[str, Any]:
    """What a relaunch tells of replicas: how many there are, were, should be; nothing where all are there."""
    if before is None or now is None or (before.whole_dp or now.whole_dp) is None:
        return {}
    whole = now.whole_dp or now.degrees.dp
    return {"replicas": now.degrees.dp, "replicas_before": before.degrees.dp, "replicas_whole": whole}
