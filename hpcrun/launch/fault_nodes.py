"""Which nodes a fault speaks against, for the jobs that come after; a program's own mistakes blame none."""

from __future__ import annotations

import time
from typing import Any

from hpcrun.health.lemon_nodes import NodeFault
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.recovery import RestartCause, failure_signature
from hpcrun.specs.placement import read_placement
from hpcrun.specs.records import read_json


def attribute_node_faults(outcome: AttemptOutcome, cause: RestartCause, job: int) -> list[NodeFault]:
    """What an attempt's end says of nodes: lost, slow, where a rank hung alone or died without a word."""
    attempt, now = outcome.run.attempt(outcome.attempt), time.time()
    about: dict[str, Any] = {"time": now, "run": outcome.run.id, "attempt": outcome.attempt, "job": job}
    about |= {"evidence": outcome.message.partition("; log: ")[0]}
    logs = outcome.run.agent_logs
    # A node may also go while another one hangs.
    lost = [
        NodeFault(node=node, cause="node lost", log=str(logs / f"{node}.log"), **about)
        for node in outcome.lost
    ]
    if cause == "node":
        return lost
    if cause in ("hang", "straggler"):
        if cause == "hang":
            about |= {"log": str(attempt.stacks), "signature": failure_signature(outcome.message)}
        return [*lost, *(NodeFault(node=node, cause=cause, **about) for node in outcome.suspects)]
    placed = read_placement(attempt.placement)
    rank = outcome.rank
    if cause != "crash" or rank is None or placed is None or rank >= len(placed[0].ranks):
        return []
    record = read_json(attempt.error_record(rank))
    # Whoever could still say why it gave up has found a mistake of the program, or lost another rank.
    if record is not None and "was killed by signal" not in str(record.get("message")):
        return []
    node, log = placed[0].ranks[rank], str(attempt.log(rank))
    return [
        NodeFault(node=node, cause="crash", log=log, signature=failure_signature(outcome.message), **about)
    ]
