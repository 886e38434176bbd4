"""The section `elastic` of a job: with how few replicas it goes on, and what becomes of its batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcrun.specs.fields import SpecSection

if TYPE_CHECKING:
    pass


class ElasticSpec(SpecSection):
    """Continue with fewer data-parallel replicas when nodes are lost and no spare is left."""

    min_replicas: int = Field(
        default=1,
        ge=1,
        description="smallest number of replicas (of dp_replicate · dp_shard) to continue with",
    )
    batch: Literal["keep", "shrink"] = Field(
        default="keep",
        description="keep: same global batch, shared by the remaining replicas; shrink: proportional to"
        " the replicas",
    )
    lr: Literal["keep", "linear", "sqrt"] = Field(
        default="keep", description="with batch: shrink, how the learning rate follows the global batch"
    )

    def lr_factor(self, gbs: int, whole_gbs: int) -> float:
        """What the learning rate is multiplied by while a step has gbs sequences instead of all."""
        ratio = gbs / whole_gbs
        return {"keep": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr]
