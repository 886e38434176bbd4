"""A job that is queued again because nodes were not well asks Slurm for other ones."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrun.errors import SiteError, UsageError
from hpcrun.health.lemon_nodes import max_avoided_nodes
from hpcrun.hostlist import expand_hosts, fold_hosts
from hpcrun.slurm.allocation import Allocation
from hpcrun.slurm.client import run_slurm_client
from hpcrun.slurm.jobs import parse_scontrol_jobs

_ASK_S = 10


def build_requeue_exclusion(allocation: Allocation, nodes: Sequence[str], needed: int) -> str:
    """The job's ExcNodeList with these nodes in it, for after the requeue; empty: it is to stay as it is.

    Asked for before the requeue, whose TERM ends our commands. A job never excludes more of its partition
    than what runs saw may take away, nor so much that it would wait for ever.
    """
    try:
        shown = run_slurm_client(["scontrol", "show", "job", allocation.id], timeout_s=_ASK_S).stdout
        record = next(iter(parse_scontrol_jobs(shown)), None)
        if record is None or not record.partition:
            return ""
        words = ["sinfo", "-h", "-N", "-o", "%N", "-p", record.partition]
        names = dict.fromkeys(run_slurm_client(words, timeout_s=_ASK_S).stdout.split())
        before = expand_hosts(record.excluded_nodes, "ExcNodeList")
    except (SiteError, UsageError):
        return ""
    new = [node for node in nodes if node in names and node not in before]
    most = max_avoided_nodes(len(names), needed + sum(node in names for node in before))
    return fold_hosts([*before, *new[:most]], suffixes=False) if new[:most] else ""


def apply_requeue_exclusion(allocation: Allocation, excluded: str) -> str:
    """Give a job that is in the queue again this ExcNodeList; says what came of it."""
    problem = allocation.update(f"ExcNodeList={excluded}")
    if not problem:
        return f"job {allocation.id} now excludes {excluded}"
    return f"job {allocation.id} may be given the same nodes again: ExcNodeList={excluded}: {problem}"
