"""When the state of a job is saved, where it goes from there, and what of it is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from hpcrun.errors import SpecProblem, UsageError
from hpcrun.specs.elastic import ElasticSpec
from hpcrun.specs.fields import ExpandablePath, SpecSection, TimeText, parsed_by
from hpcrun.specs.resources import ResourcesSpec
from hpcrun.units import parse_time


def _finite(text: str) -> None:
    if not 0 < parse_time(text).seconds < math.inf:
        raise UsageError(f"time: {text} is not a limit; write 10m or 2h")


_Limit = Annotated[TimeText, parsed_by(_finite)]


def _steps_or_auto(value: object, check: ValidatorFunctionWrapHandler) -> object:
    try:
        return check(value)
    except ValidationError:
        raise ValueError(f"must be auto or a number of steps, at least 0, not {value!r}") from None


_Every = Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], WrapValidator(_steps_or_auto)]
_Url = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*://[^\x00-\x20\x7f]+$")]


class ParitySpec(SpecSection):
    """Parity blocks on nodes of other racks, from which the part of a lost node is rebuilt."""

    scheme: Literal["auto", "none", "partner", "xor", "rs"] = Field(
        default="auto",
        description="partner: a copy on another node; xor: an erasure set survives the loss of one node;"
        " rs: of two nodes; auto: xor where the nodes allow it",
    )
    set_size: int = Field(default=8, ge=2, le=64, description="approximate number of nodes in an erasure set")
    bandwidth_MBps: float | None = Field(
        default=None, gt=0, description="limit on what a node sends to other nodes; default: no limit"
    )
    survive: str | None = Field(
        default=None,
        pattern=r"^[a-z][a-z0-9_-]{0,31}$",
        description="fabric level whose loss must be survived (node, leaf, ...); a placement that cannot"
        " is refused. Default: the highest level that the placement allows",
    )


class ObjectSpec(SpecSection):
    """Copies in an object store, through fsspec."""

    url: _Url = Field(description="destination: s3://BUCKET/PREFIX, or another scheme that fsspec supports")
    every: int = Field(
        default=0,
        ge=0,
        description="steps between copies; 0: copy every durable save. Must be a multiple of `durable.every`",
    )
    keep: int = Field(default=2, ge=1, description="number of newest copies to keep")
    endpoint: str | None = Field(
        default=None, description="URL of an S3-compatible store other than Amazon's (Ceph, MinIO)"
    )


class DurableSpec(SpecSection):
    """Saves in the run directory, on the file system that all nodes share."""

    every: int = Field(
        default=0,
        ge=0,
        description="steps between durable saves; 0: every save. Must be a multiple of `every`",
    )
    pool: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9._-]{1,15}$", description="Lustre pool of OSTs"
    )
    stripes: int | None = Field(
        default=None, ge=1, le=2000, description="Lustre stripes per file; default: chosen by file size"
    )
    keep_default_below: str = Field(
        default="64G",
        pattern=r"^[0-9]+(\.[0-9]+)?[KMGT]?$",
        description="files smaller than this keep the site's default layout",
    )
    direct: bool | None = Field(
        default=None,
        description="bypass the page cache (O_DIRECT), which leaves more memory bandwidth to training;"
        " null: only on ext4 and xfs",
    )


class CheckpointSpec(SpecSection):
    """When to save, through which tiers, and how many saves to keep."""

    every: _Every = Field(
        default="auto",
        description="steps between saves; auto: by time, as often as the measured cost of a save allows,"
        " every 5 minutes to 1 hour; 0: only on a signal and at the end",
    )
    keep: int = Field(default=2, ge=1, description="number of newest durable saves to keep")
    keep_every: int = Field(
        default=0, ge=0, description="also keep durable saves whose step is a multiple of this; 0: none"
    )
    at_end: bool = Field(default=True, description="save after the last step")
    memory: int = Field(
        default=0,
        ge=0,
        le=2,
        description="saves held in each node's memory (with 2, training continues while one is being"
        " stored; with 1, every save also goes to the run directory); 0: ranks write to the run directory"
        " themselves and wait for it",
    )
    local: ExpandablePath | None = Field(
        default=None,
        description="directory on each node's own disk that also receives every save. Emptied when the"
        " run is done and its newest state is in the run directory; after any other end it is left to the"
        " site, which usually empties it after the job",
    )
    parity: ParitySpec = Field(
        default=ParitySpec(),
        description="parity on other nodes, to survive lost nodes without the run directory",
    )
    replicate_to_spares: bool | None = Field(
        default=None,
        description="spares copy the newest save from the memory of other nodes in advance, using at"
        " most half of their own memory, so that a lost node costs no rebuilding; null: whenever `memory`"
        " is not 0 and the job has spares",
    )
    durable: DurableSpec = Field(default=DurableSpec(), description="saves in the run directory")
    object: ObjectSpec | None = Field(default=None, description="copies in an object store")
    on_backlog: Literal["wait", "skip", "degrade"] = Field(
        default="wait",
        description="what to do when a save is due while the previous one is still being stored: wait"
        " for it, skip the new save, or degrade: stop flushing the older one where it is",
    )
    flush_duty: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="fraction of the time between saves over which hashing and writing are spread, with"
        " pauses, so that training does not slow down; pauses end when a rank waits for a save. 0: as fast"
        " as possible",
    )
    max_durable_age: _Limit | None = Field(
        default=None, description="longest time without a new durable save; null: no limit"
    )
    durability_action: Literal["alert", "stop"] = Field(
        default="alert", description="what to do when `max_durable_age` is exceeded"
    )

    @property
    def every_steps(self) -> int:
        """Steps between saves; 0 where their steps are not known ahead."""
        return 0 if self.every == "auto" else self.every


def check_checkpoint(spec: CheckpointSpec, steps: int | None = None) -> list[SpecProblem]:
    """What of the section cannot work together; `steps`: how many the job has, where that is known."""
    problems = [*_check_step_intervals(spec, steps)]
    if not spec.memory:
        problems += _check_without_memory(spec)
    if spec.durability_action == "stop" and spec.max_durable_age is None:
        text = "stop has no limit to stop at; give checkpoint.max_durable_age, such as 2h, or leave it out"
        problems.append(SpecProblem("checkpoint.durability_action", text))
    return problems


def check_spare_replicas(
    checkpoint: CheckpointSpec, resources: ResourcesSpec, elastic: ElasticSpec | None
) -> list[SpecProblem]:
    """Copies on spares that are asked for need some; an elastic job may come to have them."""
    if not (checkpoint.replicate_to_spares and checkpoint.memory) or resources.spares or elastic is not None:
        return []
    text = "true, but resources.spares is 0, and no node could hold copies; ask for spares, or leave it out"
    return [SpecProblem("checkpoint.replicate_to_spares", text)]


def _check_step_intervals(spec: CheckpointSpec, steps: int | None) -> Iterator[SpecProblem]:
    every, durable = spec.every_steps, spec.durable.every
    copies = spec.object.every if spec.object is not None else 0
    for name, between in (("durable.every", durable), ("object.every", copies)):
        if between and not every and steps is not None:
            why = "saves come by the clock" if spec.every == "auto" else "nothing is saved on the way"
            text = f"{between} needs checkpoint.every in steps, which is {spec.every}: {why}"
            yield SpecProblem(f"checkpoint.{name}", text)
            return
    if every and durable % every:
        use = _nearest_multiples(durable, every)
        text = f"{durable} is not a multiple of checkpoint.every {every}; use {use}"
        yield SpecProblem("checkpoint.durable.every", text)
        return
    between, key = (durable, "durable.every") if durable else (every, "every")
    if between and copies % between:
        text = (
            f"{copies} does not fall on the saves in the run directory, of which the copies are made"
            f" (checkpoint.{key} {between}); use {_nearest_multiples(copies, between)}"
        )
        yield SpecProblem("checkpoint.object.every", text)
    kept = spec.keep_every
    if not kept or steps is None:
        return
    is_reached = bool(between) and math.lcm(kept, between) <= steps
    if not is_reached and not (spec.at_end and steps % kept == 0):
        saves = (
            f"there is a save in the run directory every {between} steps"
            if between
            else f"checkpoint.every is {spec.every}"
        )
        text = f"no save is of a multiple of {kept}: {saves}, and {steps} in all; leave it out, or correct it"
        yield SpecProblem("checkpoint.keep_every", text)


def _check_without_memory(spec: CheckpointSpec) -> Iterator[SpecProblem]:
    """Ranks that write to the run directory themselves write nowhere else, and all that is saved."""
    needs = "needs saves in the memory of nodes; set checkpoint.memory to 1 or 2, or leave it out"
    used = {
        "local": spec.local is not None,
        "parity.scheme": spec.parity.scheme not in ("auto", "none"),
        "parity.survive": spec.parity.survive is not None,
        "durable.every": spec.durable.every not in (0, spec.every_steps),
        "durable.direct": spec.durable.direct,
        "replicate_to_spares": spec.replicate_to_spares,
    }
    for key, is_used in used.items():
        if is_used:
            yield SpecProblem(f"checkpoint.{key}", needs)


def _nearest_multiples(wrong: int, base: int) -> str:
    """The multiples on both sides of a number that is none."""
    below = wrong // base * base
    return f"{below} or {below + base}" if below else f"{base}"
