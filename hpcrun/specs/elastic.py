"""The section `elastic` of a job: with how few replicas it goes on, and what becomes of its batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpcrun.errors import SpecProblem

if TYPE_CHECKING:
    from hpcrun.specs.job import ParallelSpec


class ElasticSpec(BaseModel):
    """Going on with fewer data-parallel replicas when nodes are lost and no spare is left."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    min_replicas: int = Field(
        default=1, ge=1, description="replicas (of dp_replicate · dp_shard) below which it does not go on"
    )
    batch: Literal["keep", "shrink"] = Field(
        default="keep",
        description="keep: the same global batch, shared by those that are left; shrink: in proportion",
    )
    lr: Literal["keep", "linear", "sqrt"] = Field(
        default="keep", description="with batch shrink: how the learning rate follows the global batch"
    )

    def lr_factor(self, gbs: int, whole_gbs: int) -> float:
        """What the learning rate is multiplied by while a step has gbs sequences instead of all."""
        ratio = gbs / whole_gbs
        return {"keep": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr]


def check_elastic(
    elastic: ElasticSpec | None, parallel: ParallelSpec, command: list[str] | None
) -> list[SpecProblem]:
    """What of the section does not go together with the rest of the job."""
    if elastic is None:
        return []
    if command is not None:
        text = "stands beside command, whose batch only the command itself can share anew; leave one out"
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
