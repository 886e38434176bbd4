"""A doctor's report of one node: what it says about itself, what NCCL would choose, what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.fabric.ports import Gid, Port
from hpcrun.tuning.checks import Question, check, gid_choice
from hpcrun.tuning.finding import Finding
from hpcrun.tuning.host import Host
from hpcrun.tuning.names import socket_choice

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Report:
    """What is found on a node."""

    host: Host
    gid_index: Mapping[str, int]
    """What NCCL takes, by RoCE port."""
    socket_interface: str | None
    """What NCCL takes for its sockets."""
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return self.host.as_json() | {
            "gid_index": dict(self.gid_index),
            "socket_interface": self.socket_interface,
            "findings": [one.as_json() for one in self.findings],
        }


def examine(question: Question) -> Report:
    """Judge a node by what it says about itself."""
    host = question.host
    chosen = socket_choice(host.interfaces, question.socket_names, question.nccl)
    gids = {port.name: gid_choice(question, port).index for port in host.ports if port.is_roce and port.gids}
    return Report(host, gids, chosen.name if chosen else None, check(question))


def read_reports(values: Any, where: str) -> dict[str, dict[str, Any]]:
    """The reports in what `doctor --json` printed, of one node or of several, by node."""
    found = values.get("nodes", [values]) if isinstance(values, dict) else None
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get("node"), str) for one in found
    ):
        raise UsageError(f"{where}: holds no report; make one with `hpcrun doctor --json`, or --all --json")
    return {one["node"]: one for one in found}


def ports_in(report: Mapping[str, Any]) -> tuple[Port, ...]:
    """The RDMA ports that a report tells of; those of a damaged one are left out."""
    found = []
    for one in report.get("ports") or ():
        try:
            gids = tuple(Gid(**gid) for gid in one["gids"])
            found.append(Port(**{**one, "gids": gids, "interfaces": tuple(one["interfaces"])}))
        except (KeyError, TypeError):
            continue
    return tuple(found)
