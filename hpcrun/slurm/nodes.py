"""Nodes as scontrol and sinfo print them, parsed into one record. No parser raises."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpcrun.slurm.output_formats import leading_integer, parse_key_value_records, text_or_empty
from hpcrun.slurm.states import UNKNOWN
from hpcrun.units import parse_slurm_memory

SINFO_FORMAT = "%N|%T|%P|%c|%m|%G|%f|%E"
"""The format for sinfo -N -h: the reason comes last because it may contain the delimiter."""
_SINFO_FIELDS = (
    "NodeName",
    "State",
    "Partitions",
    "CPUTot",
    "RealMemory",
    "Gres",
    "ActiveFeatures",
    "Reason",
)
"""The same columns under scontrol's names."""

_BASE = {
    "IDLE": ("IDLE",),
    "ALLOCATED": ("ALLOC",),
    "MIXED": ("MIX",),
    "DOWN": ("DOWN",),
    "ERROR": ("ERR", "ERROR"),
    "FUTURE": ("FUTR",),
}
_FLAGS = {
    "DRAIN": ("DRAIN",),
    "COMPLETING": ("COMP",),
    "NOT_RESPONDING": ("NO_RESPOND",),
    "FAIL": ("FAIL",),
    "FAILING": ("FAILG",),
    "MAINTENANCE": ("MAINT",),
    "RESERVED": ("RESV",),
    "PLANNED": ("PLND",),
    "POWERED_DOWN": ("POW_DN",),
    "POWERING_DOWN": (),
    "POWERING_UP": ("POW_UP",),
    "POWER_DOWN": (),
    "POWER_UP": (),
    "REBOOT": (),
    "REBOOT_ISSUED": ("BOOT",),
    "REBOOT_REQUESTED": (),
    "INVAL": (),
    "INVALID_REG": (),
    "BLOCKED": ("BLOCK",),
    "CLOUD": (),
    "DYNAMIC_NORM": (),
    "DYNAMIC_FUTURE": (),
    "PERFCTRS": ("NPC",),
}
_SAME = {"DRAINED": ("IDLE", "DRAIN"), "DRAINING": ("ALLOCATED", "DRAIN"), "DRNG": ("ALLOCATED", "DRAIN")} | {
    short: (name,) for name, shorts in (_FLAGS | _BASE).items() for short in shorts
}
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
_KNOWN = {*_BASE, *_FLAGS}
_IN_SERVICE = {
    *("IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED", "PERFCTRS"),
    *("CLOUD", "DYNAMIC_NORM", "POWERED_DOWN", "POWERING_UP", "POWER_UP"),
}
_GPU = re.compile(r"gpu(?::(?P<type>[A-Za-z][\w.-]*))?(?::(?P<count>\d{1,6}))?(?:\([^)]*\))?", re.ASCII)


class NodeState(NamedTuple):
    """A node's base state, or the flag that sinfo showed in its place, and its other flags, by full names."""

    name: str
    flags: tuple[str, ...] = ()

    @property
    def usable(self) -> bool | None:
        """Whether jobs may start on it, now or once it is free; None for a state that is not known here."""
        words = {self.name, *self.flags}
        if words & _KNOWN - _IN_SERVICE:
            return False
        return True if words <= _KNOWN else None


def parse_node_state(text: str) -> NodeState:
    """Parse `IDLE+DRAIN+PLANNED`, `mixed-`, `drain`, `down*` or `plnd`; an unknown flag stays as it is."""
    names: list[str] = []
    for word in text.split("+"):
        bare = word.strip().rstrip("".join(_MARKS))
        names += _SAME.get(bare.upper(), (bare.upper(),))
        names += (_MARKS[mark] for mark in word.strip()[len(bare) :])
    names = [name for index, name in enumerate(names) if name and name not in names[:index]]
    shown = next((name for name in names if name in _KNOWN), UNKNOWN)
    base = next((name for name in names if name in _BASE), shown)
    return NodeState(base, tuple(name for name in names if name != base))


@dataclass(frozen=True)
class NodeRecord:
    """What Slurm reports about a node; what it does not report is empty or None."""

    name: str
    state: NodeState
    partitions: tuple[str, ...] = ()
    cpus: int | None = None
    memory_mib: int | None = None
    gpus: int | None = None
    """The GPUs that Slurm counts; None if the output does not include them."""
    gpu_type: str = ""
    features: tuple[str, ...] = ()
    reason: str = ""
    """Why it was taken out of service, with who and when if the command prints that."""
    reservation: str = ""
    """The reservation that holds it now, where Slurm names it."""


def parse_gpus(text: str) -> tuple[int, str]:
    """How many GPUs, and their first type, in `gpu:4`, `gpu:h100:8(S:0-1)`, `gres/gpu:2`, `gpu:a:1,gpu:b`."""
    matches = [
        _GPU.fullmatch(re.sub(r"^gres[:/]", "", item.strip())) for item in re.split(r",(?![^(]*\))", text)
    ]
    gpus = [match for match in matches if match]
    kinds = [match["type"] for match in gpus if match["type"]]
    return sum(int(match["count"] or 1) for match in gpus), kinds[0] if kinds else ""


def parse_scontrol_nodes(text: str) -> list[NodeRecord]:
    """Parse the nodes of `scontrol show node`, with -o or without."""
    return [_node_record(fields) for fields in parse_key_value_records(text, "NodeName")]


def parse_sinfo(text: str) -> list[NodeRecord]:
    """Parse the nodes of `sinfo -N -h -o SINFO_FORMAT`; one record a node, with all its partitions."""
    nodes: dict[str, NodeRecord] = {}
    for line in text.splitlines():
        parts = line.split("|", len(_SINFO_FIELDS) - 1)
        if len(parts) < len(_SINFO_FIELDS) or not parts[0]:
            continue
        record = _node_record(dict(zip(_SINFO_FIELDS, parts, strict=True)))
        partitions = (*nodes.get(record.name, record).partitions, *record.partitions)
        first = nodes.setdefault(record.name, record)
        nodes[record.name] = dataclasses.replace(first, partitions=tuple(dict.fromkeys(partitions)))
    return list(nodes.values())


def _node_record(fields: Mapping[str, str]) -> NodeRecord:
    """Make a record of fields under scontrol's names."""
    gpus, gpu_type = parse_gpus(fields.get("Gres", ""))
    memory = parse_slurm_memory(fields.get("RealMemory", ""))
    return NodeRecord(
        name=fields["NodeName"],
        state=parse_node_state(fields.get("State", "")),
        # sinfo marks the default partition with a star.
        partitions=tuple(name.rstrip("*") for name in _names(fields.get("Partitions", ""))),
        cpus=leading_integer(fields.get("CPUTot", "")),
        memory_mib=memory.mib if memory else None,
        gpus=gpus if "Gres" in fields else None,
        gpu_type=gpu_type,
        features=_names(fields.get("ActiveFeatures", fields.get("AvailableFeatures", ""))),
        reason=text_or_empty(fields.get("Reason", "")),
        reservation=text_or_empty(fields.get("ReservationName", "")),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text_or_empty(text).split(",") if name.strip())
