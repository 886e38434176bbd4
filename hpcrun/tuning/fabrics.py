"""Kinds of fabrics as data: what jobs need on them, and what their admins check."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.yaml import load_yaml
from hpcrun.tuning.lint.traffic_classes import TrafficClass, decode_traffic_class, encode_traffic_class
from hpcrun.typed_json import parse_typed

_FILE = Path(__file__).with_name("fabrics.yaml")
CHECKLIST_TOPICS = {
    "pfc": "PFC: the class that must not lose packets",
    "ecn": "ECN: where switches mark (Kmin, Kmax, Pmax)",
    "cnp": "CNP: the answers to marks",
    "trust": "trust mode",
    "mtu": "MTU",
    "buffers": "lossless buffers",
    "scheduling": "scheduling",
    "routing": "routing",
    "sharp": "in-network reduction",
}
_CONNECTX = """\
mlnx_qos -i IF --trust dscp --pfc {pfc}
cma_roce_tos -d DEVICE -t {tc}
echo {tc} > /sys/class/infiniband/DEVICE/tc/1/traffic_class
echo 1 > /sys/class/net/IF/ecn/roce_np/enable/{priority}
echo 1 > /sys/class/net/IF/ecn/roce_rp/enable/{priority}
echo {cnp_dscp} > /sys/class/net/IF/ecn/roce_np/cnp_dscp
echo {cnp_priority} > /sys/class/net/IF/ecn/roce_np/cnp_802p_prio"""
_BROADCOM = "bnxt_setupcc.sh -d DEVICE -i IF -m 3 -s {dscp} -p {cnp_dscp} -r {priority} -c {cnp_priority}"
_HOST = {"connectx": _CONNECTX, "broadcom": _BROADCOM}


@dataclass(frozen=True)
class SystemFact:
    """An environment variable that a fabric asks for."""

    name: str
    value: str
    reason: str
    needs: str = ""


@dataclass(frozen=True)
class PublishedTuning:
    """Tuning that somebody publishes for a fabric; nobody has measured it here."""

    name: str
    value: str
    says: str


@dataclass(frozen=True)
class FabricKind:
    """One kind of fabric."""

    name: str
    title: str
    transport: str
    """infiniband, roce, efa or tcp."""
    source: str
    traffic_class: int | None = None
    service_level: int | None = None
    data: Mapping[str, int] | None = None
    """DSCP and priority of the data, on RoCE."""
    cnp: Mapping[str, int] | None = None
    trust: str = ""
    host: str = ""
    """The vendor of the adapters in the host's part of the checklist."""
    settings: tuple[SystemFact, ...] = ()
    published: tuple[PublishedTuning, ...] = ()
    notes: tuple[str, ...] = ()
    switch: Mapping[str, str] | None = None
    has_script: bool = False
    """Whether its owner ships a script that sets everything; then hpcrun sets nothing."""


@cache
def load_fabric_kinds() -> dict[str, FabricKind]:
    """Every kind, by name."""
    return {name: _parse_fabric_kind(name, values) for name, values in load_yaml(_FILE).values.items()}


def find_fabric_kind(name: str, where: str = "") -> FabricKind:
    """A kind by its name; UsageError lists what there is."""
    kind = load_fabric_kinds().get(name)
    if kind is None:
        close = difflib.get_close_matches(name, load_fabric_kinds(), n=1)
        near = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"{where + ': ' if where else ''}{name}: no such fabric{near}; there are"
            f" {', '.join(load_fabric_kinds())}"
        )
    return kind


def _parse_fabric_kind(name: str, values: Mapping[str, Any]) -> FabricKind:
    fields = {key: value for key, value in values.items() if key != "source_script"}
    return parse_typed(FabricKind, {**fields, "name": name, "has_script": "source_script" in values})


def render_fabric_checklist(kind: FabricKind) -> str:
    """What an admin goes through, switches first; a text to review, never applied."""
    lines = [
        f"# {kind.title}: a checklist to review; nothing of it is applied",
        f"# source: {kind.source}; figures and commands differ by release: check them against yours",
    ]
    if kind.data:
        tc = data_traffic_class(kind)
        lines += ["", "classes"]
        lines.append(
            f"  data  {tc if tc else 'unknown'}" + (f"  -> priority {kind.data['priority']}" if tc else "")
        )
        if kind.cnp:
            lines.append(f"  CNP   DSCP {kind.cnp['dscp']} -> priority {kind.cnp['priority']}, strict")
    if kind.switch:
        lines += ["", "switches"]
        lines += [f"  [ ] {CHECKLIST_TOPICS[topic]}\n      {text}" for topic, text in kind.switch.items()]
    if kind.transport == "roce":
        lines += ["", "hosts", *_host_lines(kind)]
    if kind.notes:
        lines += ["", "notes", *(f"  {note}" for note in kind.notes)]
    lines += ["", *_READING] if kind.transport == "roce" and kind.host else []
    return "\n".join(lines) + "\n"


_READING = [
    "how to tell that it works (`hpcrun doctor --counters`, twice)",
    "  many CNPs and few pauses: healthy",
    "  constant pauses and few marks: ECN thresholds too high, or ECN not on this class",
    "  discards: PFC does not cover the class",
    "  Kmin, Kmax and Pmax depend on the switch's buffer, ports and cables: take the vendor's for the model",
]


def data_traffic_class(kind: FabricKind) -> TrafficClass | None:
    """The traffic class of its data."""
    if kind.traffic_class is not None:
        return decode_traffic_class(kind.traffic_class)
    return encode_traffic_class(kind.data["dscp"]) if kind.data else None


def _host_lines(kind: FabricKind) -> list[str]:
    lines = [
        "  [ ] MTU the same on every host and switch port; RoCE's 4096 needs an interface of 4200 at least"
    ]
    if kind.trust:
        lines.append(
            f"  [ ] trust mode {kind.trust}: `cat /sys/class/net/IF/qos/trust` (adapters begin with pcp)"
        )
    if not kind.host or not kind.data or not kind.cnp:
        return [*lines, "  [ ] the rest is the cloud's own"]
    priority = kind.data["priority"]
    tc = data_traffic_class(kind)
    proposal = _HOST[kind.host].format(
        pfc=",".join(str(int(at == priority)) for at in range(8)),
        tc=tc.tc if tc else "",
        dscp=kind.data["dscp"],
        priority=priority,
        cnp_dscp=kind.cnp["dscp"],
        cnp_priority=kind.cnp["priority"],
    )
    lines.append(f"  [ ] PFC on priority {priority} alone; adapters begin with PFC off on all eight")
    lines.append(f"  [ ] DCQCN on for priority {priority} at both ends, CNPs in DSCP {kind.cnp['dscp']}")
    lines.append("  proposal, as root, with the site's IF and DEVICE, and again at each boot:")
    return [*lines, *(f"      {line}" for line in proposal.splitlines())]
