"""When the state of a job is saved, where it goes from there, and what of it is kept."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpcrun.errors import Problem, UsageError
from hpcrun.specs.fields import Directory, Time, readable
from hpcrun.units import parse_time


def _finite(text: str) -> None:
    if not 0 < parse_time(text).seconds < math.inf:
        raise UsageError(f"time: {text} is no limit; write 10m or 2h")


_Limit = Annotated[Time, readable(_finite)]
_Url = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*://[^\x00-\x20\x7f]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ParitySpec(_Section):
    """Blocks from which the part of a lost node is made again, on nodes of other racks."""

    scheme: Literal["auto", "none", "partner", "xor", "rs"] = Field(
        default="auto",
        description="partner: a copy on another node; xor: a set survives the loss of one node; rs: of two;"
        " auto: xor where the nodes allow it",
    )
    set_size: int = Field(default=8, ge=2, le=64, description="nodes of an erasure set, about")
    bandwidth_MBps: float | None = Field(
        default=None, gt=0, description="the most that a node sends to others; default: no limit"
    )
    survive: str | None = Field(
        default=None,
        pattern=r"^[a-z][a-z0-9_-]{0,31}$",
        description="the level of the fabric whose loss must be survived (node, leaf, …); a placement that"
        " cannot do that is refused. Default: the highest that the placement allows",
    )


class ObjectSpec(_Section):
    """Copies in an object store, by fsspec."""

    url: _Url = Field(description="where: s3://BUCKET/PREFIX, or any other scheme that fsspec knows")
    every: int = Field(
        default=0,
        ge=0,
        description="steps between copies; 0: every durable save. A multiple of `durable.every`",
    )
    keep: int = Field(default=2, ge=1, description="newest copies kept")
    endpoint: str | None = Field(
        default=None, description="URL of a store that is not Amazon's (Ceph, MinIO)"
    )


class DurableSpec(_Section):
    """Saves in the run directory, on the file system that all nodes share."""

    every: int = Field(
        default=0, ge=0, description="steps between those that go there; 0: every save. A multiple of `every`"
    )
    pool: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9._-]{1,15}$", description="Lustre pool of OSTs"
    )
    stripes: int | None = Field(
        default=None, ge=1, le=2000, description="Lustre stripes of a file; default: by its size"
    )
    keep_default_below: str = Field(
        default="64G",
        pattern=r"^[0-9]+(\.[0-9]+)?[KMGT]?$",
        description="smaller files keep the layout that the site gives to new files",
    )
    direct: bool = Field(default=False, description="write past the page cache (O_DIRECT)")


class CheckpointSpec(_Section):
    """When the state is saved, which levels it goes through, and how many saves are kept."""

    every: int = Field(default=0, ge=0, description="steps between saves; 0: only at a signal and at the end")
    keep: int = Field(default=2, ge=1, description="newest durable saves kept")
    keep_every: int = Field(
        default=0, ge=0, description="besides, keep durable saves whose step is a multiple of this; 0: none"
    )
    at_end: bool = Field(default=True, description="save after the last step")
    memory: int = Field(
        default=0,
        ge=0,
        le=2,
        description="saves held in the memory of each node (two let training go on while one is stored);"
        " 0: ranks write to the run directory themselves, and wait for it",
    )
    local: Directory | None = Field(
        default=None, description="a directory on each node's own disk that also gets every save"
    )
    parity: ParitySpec = Field(
        default=ParitySpec(), description="survive lost nodes without the run directory"
    )
    durable: DurableSpec = Field(default=DurableSpec(), description="the run directory")
    object: ObjectSpec | None = Field(default=None, description="an object store")
    behind: Literal["wait", "skip", "degrade"] = Field(
        default="wait",
        description="a save is due and the one before is not stored yet: wait for it, leave this save out,"
        " or let the older one go no further than it has come",
    )
    max_undurable: _Limit | None = Field(
        default=None, description="the longest time without a new durable save; null: no limit"
    )
    undurable: Literal["alert", "stop"] = Field(
        default="alert", description="what happens when it has passed"
    )


def check_saves(asked: CheckpointSpec) -> list[Problem]:
    """What of the section does not go together."""
    problems = []
    if not asked.memory:
        survive = asked.parity.survive
        for key, value in (("local", asked.local), ("parity.survive", survive)):
            if value is not None:
                text = f"needs saves in memory, and checkpoint.memory is 0; use 2, or leave {key} out"
                problems.append(Problem(f"checkpoint.{key}", text))
    durable = asked.durable.every or asked.every
    wanted = [("durable.every", asked.durable.every, "every", asked.every)]
    if asked.object is not None:
        wanted.append(("object.every", asked.object.every, "durable.every", durable))
    for key, steps, below, unit in wanted:
        if steps and not unit:
            text = f"{steps} needs checkpoint.every, which is 0: nothing is saved on the way"
        elif steps and steps % unit:
            text = f"{steps} is not a multiple of checkpoint.{below}, {unit}; use {_nearest(steps, unit)}"
        else:
            continue
        problems.append(Problem(f"checkpoint.{key}", text))
    return problems


def _nearest(steps: int, unit: int) -> str:
    low = steps // unit * unit
    return " or ".join(str(one) for one in (low, low + unit) if one)
