"""A plan with fewer replicas: what is left of a job's layout when ranks are missing, as pure arithmetic.

A replica is pp · cp · tp ranks; there are dp = dp_replicate · dp_shard of them. Whole groups that share
their states go while there are several (dp_replicate falls); the last one loses sharding ranks (dp_shard
falls), and those that are left hold more each. Saves are read on any layout, so nothing else changes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from hpcrun.errors import UsageError
from hpcrun.specs.job import JobSpec
from hpcrun.specs.plan import Plan, next_even_rounds
from hpcrun.specs.records import read_json


def ranks_per_replica(plan: Plan) -> int:
    """How many ranks a replica takes."""
    return plan.degrees.world_size // plan.degrees.dp


def shrink_plan(job: JobSpec, plan: Plan, available_ranks: int) -> Plan | None:
    """The job's plan, or what of it so many ranks can hold; None when the job does not go on with so few."""
    if available_ranks >= plan.degrees.world_size:
        return plan
    dp = _largest_possible_dp(plan, available_ranks // ranks_per_replica(plan))
    if job.elastic is None or dp < job.elastic.min_replicas:
        return None
    return plan_with_replicas(job, plan, dp)


def minimum_ranks(job: JobSpec, plan: Plan) -> int:
    """With how many ranks the job still goes on."""
    least = plan.degrees.dp if job.elastic is None else job.elastic.min_replicas
    dp = next(dp for dp in range(least, plan.degrees.dp + 1) if _largest_possible_dp(plan, dp) == dp)
    return dp * ranks_per_replica(plan)


def plan_with_replicas(job: JobSpec, plan: Plan, dp: int) -> Plan:
    """The whole plan of a job with only `dp` of its replicas; `shrink` says which numbers are possible."""
    if dp == plan.degrees.dp:
        return plan
    replicate, shard = (dp // plan.dp_shard, plan.dp_shard) if dp >= plan.dp_shard else (1, dp)
    keeps = job.elastic is None or job.elastic.batch == "keep"
    microbatches = plan.gbs // plan.mbs
    # Everybody runs as many rounds, since collectives wait inside of them; what is too much counts nothing.
    rounds = next_even_rounds(plan.schedule, plan.pp, -(-microbatches // dp)) if keeps else plan.grad_accum
    return plan.model_copy(
        update={
            "dp_replicate": replicate,
            "dp_shard": shard,
            "zero": plan.zero if shard > 1 else 0,
            "gbs": plan.gbs if keeps else plan.mbs * plan.grad_accum * dp,
            "grad_accum": rounds,
            "whole_dp": plan.degrees.dp,
        }
    )


def _largest_possible_dp(plan: Plan, dp: int) -> int:
    """The largest number of replicas up to `dp` that the layout can be cut to."""
    return dp - dp % plan.dp_shard if dp >= plan.dp_shard else dp


def read_attempt_plan(path: Path, job: JobSpec, whole: Plan) -> Plan:
    """The plan of an attempt: the job's, or one with fewer replicas; UsageError for any other."""
    record = read_json(path)
    if record is None:
        raise UsageError(f"{path}: is missing; start the run again")
    try:
        plan = Plan.model_validate_json(json.dumps(record))
    except (ValidationError, OSError):
        raise UsageError(f"{path}: is not a plan of this version of hpcrun; start the run again") from None
    dp = plan.degrees.dp
    possible = 1 <= dp <= whole.degrees.dp and _largest_possible_dp(whole, dp) == dp
    if not possible or plan != plan_with_replicas(job, whole, dp):
        raise UsageError(
            f"{path}: says {plan.describe()}, but the job makes {whole.describe()}; start the run again"
        )
    return plan
