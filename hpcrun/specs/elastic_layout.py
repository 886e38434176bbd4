"""Whether the section `elastic` goes together with the rest of a job."""

from __future__ import annotations

from hpcrun.errors import SpecProblem
from hpcrun.specs.elastic import ElasticSpec
from hpcrun.specs.job import ParallelSpec


def check_elastic(
    elastic: ElasticSpec | None, parallel: ParallelSpec, command: list[str] | None
) -> list[SpecProblem]:
    """What of the section does not go together with the rest of the job."""
    if elastic is None:
        return []
    if command is not None:
        text = "cannot be combined with command, which alone can redistribute its batch; leave one out"
        return [SpecProblem("elastic", text)]
    problems = []
    dp = parallel.dp_replicate * parallel.dp_shard
    if dp == 1:
        text = "there is one replica, none can be spared; raise dp_replicate or dp_shard, or leave it out"
        problems.append(SpecProblem("elastic", text))
    elif elastic.min_replicas > dp:
        text = f"{elastic.min_replicas} is more than the {dp} replicas of the job; use at most {dp}"
        problems.append(SpecProblem("elastic.min_replicas", text))
    if elastic.batch == "keep" and elastic.lr != "keep":
        text = (
            f"{elastic.lr} has nothing to follow, batch keep leaves the global batch as it is;"
            " use batch shrink, or leave lr out"
        )
        problems.append(SpecProblem("elastic.lr", text))
    return problems
