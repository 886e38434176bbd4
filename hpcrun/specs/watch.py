"""How a run is watched: when no progress is a hang, and what is done about nodes that are slow."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from hpcrun.errors import UsageError
from hpcrun.specs.fields import SpecSection, TimeText, parsed_by
from hpcrun.units import parse_time


def _limited(text: str) -> None:
    if not 0 < parse_time(text).seconds < math.inf:
        raise UsageError(f"time: {text} is not a limit; write 30s, 10m or 2h")


_Limit = Annotated[TimeText, parsed_by(_limited)]


class WatchSpec(SpecSection):
    """When ranks that report progress count as hanging, learnt from the past duration of sections."""

    hangs: bool = Field(default=True, description="end an attempt that makes no progress, and continue")
    factor: float = Field(
        default=5.0, ge=1.5, description="a section may take this many times its longest time so far"
    )
    floor: _Limit | None = Field(
        default=None,
        description="a step may always take this long; default: 30s in training, 10m for a command",
    )
    slow: _Limit = Field(
        default="10m",
        description="other sections (save, evaluation, compilation) and the first steps of an attempt"
        " may always take this long",
    )
    stragglers: Literal["off", "report", "replace"] = Field(
        default="report",
        description="nodes that do a fixed piece of work more slowly than the others: report them, or"
        " also replace them by a spare",
    )
