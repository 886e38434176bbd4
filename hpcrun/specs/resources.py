"""What a job asks of a cluster, and how it is run there: the sections that a lone machine can do without."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpcrun.errors import UsageError
from hpcrun.hostlist import expand_hosts
from hpcrun.specs.fields import (
    AbsolutePath,
    ContainerMount,
    MemoryText,
    PositiveInt,
    SbatchOptionName,
    SingleLineText,
    SpecSection,
    TimeText,
    parsed_by,
)
from hpcrun.units import parse_time

RESERVED_OPTIONS = {
    "job-name": "name",
    "output": "",
    "error": "",
    "open-mode": "",
    "signal": "retry.grace",
    "requeue": "retry",
    "no-requeue": "retry",
    "array": "sweep",
    "nodes": "resources.nodes",
    "ntasks": "resources.ranks_per_node",
    "ntasks-per-node": "resources.ranks_per_node",
    "cpus-per-task": "resources.cpus_per_rank",
    "time": "resources.time",
    "mem": "resources.mem",
    "account": "resources.account",
    "partition": "resources.partition",
    "qos": "resources.qos",
    "constraint": "resources.constraint",
    "reservation": "resources.reservation",
    "exclude": "resources.exclude",
    "exclusive": "resources.exclusive",
    "nodelist": "resources.nodelist",
    "switches": "resources.switches",
    "segment": "resources.segment",
    "gpus-per-node": "resources.gpus_per_node",
    "dependency": "--after RUN",
    "parsable": "",
    "wrap": "",
    "clusters": "cluster",
    "test-only": "",
    "wait": "",
}
"""sbatch options that cannot be given raw: the key of each, empty where hpcrun sets it itself."""


_LONGEST_GRACE_S = 65535
"""sbatch --signal takes no more."""
_WHOLE_IN_OTHERS = {"gpus"}
"""Options of sbatch that begin one of ours and are none of them."""


def _require_free_option(option: str) -> str:
    if option in RESERVED_OPTIONS:
        key = RESERVED_OPTIONS[option]
        instead = f"has a key of its own, {key}; use that" if key else "is set by hpcrun; leave it out"
        raise ValueError(instead)
    longer = [own for own in RESERVED_OPTIONS if own.startswith(option)]
    if longer and option not in _WHOLE_IN_OTHERS:  # sbatch would take it for that one
        raise ValueError(f"is short for {' or '.join(longer)}; write the option in full")
    return option


def _option_value(value: Any) -> Any:
    if value is False:
        raise ValueError(
            "false is not a value of an option; write true for one without a value, null for none"
        )
    if not isinstance(value, str | int | None):
        raise ValueError(f"must be text, a whole number, true or null, not a {type(value).__name__}")
    if isinstance(value, str) and any(ord(character) < 0x20 or character == "\x7f" for character in value):
        raise ValueError("must be one line without control characters")
    return value


def _check_time_limit(text: str) -> None:
    """A time limit that limits, or is UNLIMITED."""
    limit = parse_time(text)
    if limit.warning and math.isinf(limit.seconds):
        raise UsageError(f"time: {text} is no limit at all to Slurm; write UNLIMITED for that")


def _check_grace(text: str) -> None:
    if not 0 < parse_time(text).seconds <= _LONGEST_GRACE_S:
        raise UsageError(f"time: {text} is no time to save in; write 1s to 18h, such as 2m")


def _check_switches_wait(text: str) -> None:
    if not 0 < parse_time(text).seconds < math.inf:
        raise UsageError(f"time: {text} has no end, and the job could wait for ever; write 1m, 10m or 2h")


def _check_mount(text: str) -> None:
    source, *others = text.split(":")
    target = others[0] if others else ""
    if source[:1] != "/" or target[:1] != "/" or others[1:] not in ([], ["ro"], ["rw"]):
        raise UsageError(f"mount: {text!r} is not a mount; write /SOURCE:/TARGET or /SOURCE:/TARGET:ro")


def _as_text(value: Any) -> Any:
    """A bare number as Slurm writes it: minutes, or MiB."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_NonEmptyLine = Annotated[SingleLineText, Field(min_length=1)]
"""One line that says something."""


class ResourcesSpec(SpecSection):
    """Resources to request from the cluster."""

    nodes: int = Field(default=1, ge=1, description="nodes per attempt")
    gpus_per_node: int | None = Field(
        default=None, ge=0, description="GPUs to request per node; default: all of the partition's nodes"
    )
    ranks_per_node: int | None = Field(
        default=None, ge=1, description="ranks per node; default: from the layout and the nodes"
    )
    cpus_per_rank: int | None = Field(default=None, ge=1, description="CPUs per rank")
    spares: int = Field(default=0, ge=0, description="hot spare nodes")
    time: Annotated[TimeText, BeforeValidator(_as_text), parsed_by(_check_time_limit)] | None = Field(
        default=None, description="time limit, such as 90m, 12h, 1-00:00:00 or UNLIMITED; a number: minutes"
    )
    mem: Annotated[MemoryText, BeforeValidator(_as_text)] | None = Field(
        default=None, description="memory per node, such as 64G; a number: MiB; 0: all"
    )
    account: _NonEmptyLine | None = Field(default=None, description="Slurm account")
    partition: _NonEmptyLine | None = Field(
        default=None, description="Slurm partition, or several separated by commas"
    )
    qos: _NonEmptyLine | None = Field(default=None, description="Slurm quality of service")
    constraint: _NonEmptyLine | None = Field(default=None, description="node features")
    reservation: _NonEmptyLine | None = Field(default=None, description="Slurm reservation")
    exclude: Annotated[str, parsed_by(expand_hosts)] | None = Field(
        default=None,
        description="nodes to exclude, such as n[01-03]; names that do not exist are ignored",
    )
    exclusive: bool | None = Field(
        default=None, description="request whole nodes; default: as in the partition's profile"
    )
    placement: Literal["pack", "spread", "pin", "none"] = Field(
        default="pack",
        description="how to choose nodes: pack (close together), spread (over as many leaf switches as"
        " Slurm gives), pin (those of nodelist), none (leave it to Slurm)",
    )
    nodelist: Annotated[_NonEmptyLine, parsed_by(expand_hosts)] | None = Field(
        default=None, description="with placement: pin, nodes that the job must include, such as n[01-04]"
    )
    switches: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of leaf switches; default: as few as can hold the nodes, where they"
        " are known",
    )
    switches_wait: Annotated[TimeText, parsed_by(_check_switches_wait)] = Field(
        default="10m", description="how long to wait for nodes under that few switches before taking any"
    )
    segment: int | None = Field(
        default=None,
        ge=1,
        description="nodes that must share a block; must divide the number of nodes (Slurm 24.05)",
    )
    topo_exclusive: bool = Field(
        default=False, description="no other job under the same switch or in the same block (Slurm 24.05)"
    )
    sbatch: dict[
        Annotated[SbatchOptionName, AfterValidator(_require_free_option)],
        Annotated[str | int | bool | None, BeforeValidator(_option_value)],
    ] = Field(
        default={},
        description="sbatch options that have no key here, such as comment: text, by their long names"
        " without dashes; true: without a value, null: omit",
    )

    @property
    def all_nodes(self) -> int:
        """The nodes of the job: those of an attempt, and the spares."""
        return self.nodes + self.spares


class JobContainerSpec(SpecSection):
    """Container for the ranks; supervisor and agents stay outside."""

    image: SingleLineText = Field(min_length=1, description="image file or URI, as the runtime accepts it")
    runtime: Literal["pyxis", "apptainer", "singularity"] | None = Field(
        default=None, description="container runtime; default: the cluster profile's"
    )
    mounts: list[Annotated[ContainerMount, parsed_by(_check_mount)]] = Field(
        default=[], description="/SOURCE:/TARGET[:ro]; the run directory is always mounted"
    )
    workdir: AbsolutePath | None = Field(
        default=None, description="working directory inside, an absolute path; default: the image's"
    )
    options: list[SingleLineText] = Field(default=[], description="extra arguments for the runtime")


class RetrySpec(SpecSection):
    """How often a run may continue automatically, per cause: in the same allocation, else requeued."""

    time_limit: int | None = Field(
        default=None, ge=0, description="retries after the time limit, from a save; null: unlimited"
    )
    preemption: int | None = Field(
        default=None, ge=0, description="retries after a preemption, from a save; null: unlimited"
    )
    crash: int = Field(default=3, ge=0, description="retries after ranks died, from the newest save")
    hang: int = Field(
        default=3, ge=0, description="retries after ranks stopped making progress, from the newest save"
    )
    node: int | None = Field(
        default=None,
        ge=0,
        description="retries after a lost node; null: unlimited",
    )
    grace: Annotated[TimeText, parsed_by(_check_grace)] = Field(
        default="2m", description="how long before the time limit to ask the job to save"
    )


# Outside the class, where `list` is still the type.
_Values = dict[SingleLineText, Annotated[list[Any], Field(min_length=1)]]
_Rows = list[dict[SingleLineText, Any]]


class SweepSpec(SpecSection):
    """Values to try: every combination of `grid`, with every row of `zip`, with every entry of `list`."""

    grid: _Values = Field(
        default={},
        description="dotted keys with lists of values, such as train.lr: [1e-3, 1e-4]; all combinations",
    )
    zip: _Values = Field(
        default={},
        description="dotted keys with lists of equal length; the first of each, then the second, ...",
    )
    list: _Rows = Field(default=[], description="mappings of dotted keys to values, one element each")
    throttle: PositiveInt | None = Field(
        default=None, description="elements to run at the same time; null: all"
    )
