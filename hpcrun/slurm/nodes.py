"""Nodes as scontrol and sinfo print them, read into one record. No parser raises."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcrun.slurm.output_formats import (
    json_number,
    json_string,
    leading_integer,
    nested_value,
    parse_json_objects,
    parse_key_value_records,
    parse_slurm_table,
    text_or_empty,
)
from hpcrun.slurm.states import UNKNOWN
from hpcrun.units import parse_slurm_memory

SINFO_FORMAT = "%N|%T|%P|%c|%m|%G|%f|%E"
"""What to ask sinfo for (with -N -h): the reason comes last, because it may hold the delimiter."""

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
        """Whether jobs may be started on it, now or once it is free; None when Slurm said something new."""
        words = {self.name, *self.flags}
        if words & _KNOWN - _IN_SERVICE:
            return False
        return True if words <= _KNOWN else None


def parse_node_state(text: str | list[str]) -> NodeState:
    """`IDLE+DRAIN+PLANNED`, `mixed-`, `drain`, `down*`, `plnd`, or a JSON list; a new flag stays as it is."""
    words = [str(word) for word in text] if isinstance(text, list) else text.split("+")
    names: list[str] = []
    for word in words:
        bare = word.strip().rstrip("".join(_MARKS))
        names += _SAME.get(bare.upper(), (bare.upper(),))
        names += (_MARKS[mark] for mark in word.strip()[len(bare) :])
    names = [name for index, name in enumerate(names) if name and name not in names[:index]]
    shown = next((name for name in names if name in _KNOWN), UNKNOWN)
    base = next((name for name in names if name in _BASE), shown)
    return NodeState(base, tuple(name for name in names if name != base))


@dataclass(frozen=True)
class NodeRecord:
    """What Slurm says about a node; a part that it does not say is empty or None."""

    name: str
    state: NodeState
    partitions: tuple[str, ...] = ()
    cpus: int | None = None
    memory_mib: int | None = None
    gpus: int | None = None
    """GPUs that Slurm counts; None where it was not asked for them."""
    gpu_type: str = ""
    features: tuple[str, ...] = ()
    reason: str = ""
    """Why it was taken out of service, with who and when where the command says so."""
    address: str = ""
    version: str = ""
    reservation: str = ""
    """The reservation that holds it now, where Slurm names it."""


def parse_gpus(text: str) -> tuple[int, str]:
    """How many GPUs, and their first type, in `gpu:4`, `gpu:h100:8(S:0-1)`, `gres/gpu:2`, `gpu:a:1,gpu:b`."""
    found = [
        _GPU.fullmatch(re.sub(r"^gres[:/]", "", item.strip())) for item in re.split(r",(?![^(]*\))", text)
    ]
    gpus = [match for match in found if match]
    kinds = [match["type"] for match in gpus if match["type"]]
    return sum(int(match["count"] or 1) for match in gpus), kinds[0] if kinds else ""


def parse_scontrol_nodes(text: str) -> list[NodeRecord]:
    """The nodes of `scontrol show node`, with -o or without."""
    return [_from_scontrol(fields) for fields in parse_key_value_records(text, "NodeName")]


def _from_scontrol(fields: dict[str, str]) -> NodeRecord:
    gpus, kind = parse_gpus(fields.get("Gres", ""))
    memory = parse_slurm_memory(fields.get("RealMemory", ""))
    return NodeRecord(
        name=fields["NodeName"],
        state=parse_node_state(fields.get("State", "")),
        partitions=_names(fields.get("Partitions", "")),
        cpus=leading_integer(fields.get("CPUTot", "")),
        memory_mib=memory.mib if memory else None,
        gpus=gpus if "Gres" in fields else None,
        gpu_type=kind,
        features=_names(fields.get("ActiveFeatures", fields.get("AvailableFeatures", ""))),
        reason=text_or_empty(fields.get("Reason", "")),
        address=text_or_empty(fields.get("NodeAddr", "")),
        version=text_or_empty(fields.get("Version", "")),
        reservation=text_or_empty(fields.get("ReservationName", "")),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text_or_empty(text).split(",") if name.strip())


def parse_sinfo(text: str, layout: str = SINFO_FORMAT) -> list[NodeRecord]:
    """The nodes of `sinfo -N -h -o LAYOUT`, fields parted by `|`; one record a node, partitions gathered."""
    letters = [part.strip().lstrip("%.0123456789") for part in layout.split("|")]
    lines = (line.split("|", len(letters) - 1) for line in text.splitlines())
    rows = (dict(zip(letters, line, strict=True)) for line in lines if len(line) == len(letters))
    return _merge_by_node(_from_sinfo(row) for row in rows if row.get("N"))


def _from_sinfo(row: dict[str, str]) -> NodeRecord:
    gpus, kind = parse_gpus(row.get("G", ""))
    memory = parse_slurm_memory(row.get("m", ""))
    return NodeRecord(
        name=row["N"],
        state=parse_node_state(row.get("T", row.get("t", ""))),
        partitions=_names(row.get("P", "").rstrip("*")),
        cpus=leading_integer(row.get("c", "")),
        memory_mib=memory.mib if memory else None,
        gpus=gpus if "G" in row else None,
        gpu_type=kind,
        features=_names(row.get("f", "")),
        reason=text_or_empty(row.get("E", "")),
    )


def _merge_by_node(records: Iterable[NodeRecord]) -> list[NodeRecord]:
    """One record a node: sinfo prints a node once for each of its partitions."""
    nodes: dict[str, NodeRecord] = {}
    for record in records:
        seen = nodes.setdefault(record.name, record)
        partitions = tuple(dict.fromkeys((*seen.partitions, *record.partitions)))
        nodes[record.name] = dataclasses.replace(seen, partitions=partitions)
    return list(nodes.values())


class NodeGroup(NamedTuple):
    """A row of sinfo's own tables: nodes, as a host list, that share a state or a reason."""

    nodes: str
    state: NodeState
    partition: str = ""
    reason: str = ""


def parse_sinfo_table(text: str) -> list[NodeGroup]:
    """The rows of plain `sinfo` and of `sinfo -R`."""
    rows = [*parse_slurm_table(text, "PARTITION"), *parse_slurm_table(text, "REASON")]
    return [
        NodeGroup(
            text_or_empty(row.get("NODELIST", "")),
            parse_node_state(row.get("STATE", "")),
            row.get("PARTITION", "").rstrip("*"),
            text_or_empty(row.get("REASON", "")),
        )
        for row in rows
    ]


def parse_nodes_json(text: str) -> list[NodeRecord]:
    """The nodes of `scontrol show nodes --json` and `sinfo --json`, whose shape changed in 23.02.

    The text formats are smaller and change less: ask for those where there is a choice.
    """
    nodes = [_from_json(node) for node in parse_json_objects(text, "nodes") if json_string(node.get("name"))]
    groups = (record for group in parse_json_objects(text, "sinfo") for record in _from_group(group))
    return [*nodes, *_merge_by_node(groups)]


def _json_names(value: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, list) else _names(json_string(value))


def _json_int(value: Any) -> int | None:
    found = json_number(value)
    return int(found) if found is not None and 0 <= found < float("inf") else None


def _from_json(node: dict[str, Any]) -> NodeRecord:
    state, flags = node.get("state"), node.get("state_flags")
    words = [str(word) for word in (state if isinstance(state, list) else [json_string(state)])]
    gpus, kind = parse_gpus(json_string(node.get("gres")))
    return NodeRecord(
        name=json_string(node.get("name")),
        state=parse_node_state([*words, *(flags if isinstance(flags, list) else [])]),
        partitions=_json_names(node.get("partitions")),
        cpus=_json_int(node.get("cpus")),
        memory_mib=_json_int(node.get("real_memory")),
        gpus=gpus if "gres" in node else None,
        gpu_type=kind,
        features=_json_names(node.get("active_features")),
        reason=json_string(node.get("reason")),
        address=json_string(node.get("address")),
        version=json_string(node.get("version")) or json_string(node.get("slurmd_version")),
        reservation=json_string(node.get("reservation")),
    )


def _from_group(group: dict[str, Any]) -> Iterator[NodeRecord]:
    """sinfo since 23.02 prints groups of like nodes; a number told as a range is known if both ends agree."""

    def same(*keys: str) -> int | None:
        low, high = (
            _json_int(nested_value(group, *keys, "minimum")),
            _json_int(nested_value(group, *keys, "maximum")),
        )
        return low if low == high else None

    gpus, kind = parse_gpus(json_string(nested_value(group, "gres", "total")))
    state = nested_value(group, "node", "state")
    for name in _json_names(nested_value(group, "nodes", "nodes")):
        yield NodeRecord(
            name=name,
            state=parse_node_state(state if isinstance(state, list) else json_string(state)),
            partitions=_json_names(nested_value(group, "partition", "name")),
            cpus=same("cpus"),
            memory_mib=same("memory"),
            gpus=gpus if nested_value(group, "gres") is not None else None,
            gpu_type=kind,
            features=_json_names(nested_value(group, "features", "active")),
            reason=json_string(nested_value(group, "reason", "description")),
        )
