"""A doctor's report of one node: what it says about itself, what NCCL would choose, what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpcrun.errors import UsageError
from hpcrun.fabric.ports import Gid, Interface, PciLink, Port
from hpcrun.tuning.finding import Finding
from hpcrun.tuning.host.checks import Question, check, gid_choice
from hpcrun.tuning.host.node_report import Host, SharedMemory
from hpcrun.tuning.host.routes import Route
from hpcrun.tuning.lint.named_files import NamedFile
from hpcrun.tuning.registry.device_names import socket_choice

_LISTS = ("ports", "interfaces", "links", "routes", "files", "findings")


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
    return {one["node"]: _sound(one) for one in found}


@cache
def _shapes() -> dict[str, TypeAdapter[Any]]:
    shapes: dict[str, Any] = {
        "ports": Port,
        "interfaces": Interface,
        "links": PciLink,
        "routes": Route,
        "files": NamedFile,
        "near": dict[str, dict[str, str]],
        "findings": Finding,
        "shm": SharedMemory,
        "lossless": dict[str, tuple[int, ...] | None],
        "limits": dict[str, int | None],
        "environ": dict[str, str],
        "gid_index": dict[str, int],
        "modules": tuple[str, ...] | None,
        "socket_interface": str | None,
        "time": float | None,
        **dict.fromkeys(("memory_bytes", "hugepages", "gpus", "numa_nodes"), int | None),
        **dict.fromkeys(("kernel", "driver", "libfabric"), str),
    }
    return {key: TypeAdapter(shape) for key, shape in shapes.items()}


def _sound(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report without its damaged parts: what is not there counts as unknown."""
    found = dict(report)
    for key, shape in _shapes().items():
        if key in _LISTS and isinstance(found.get(key), list):
            found[key] = [one for one in found[key] if isinstance(one, dict) and _fits(shape, one)]
        elif key in found and (key in _LISTS or not _fits(shape, found[key])):
            del found[key]
    return found


def _fits(shape: TypeAdapter[Any], value: Any) -> bool:
    try:
        shape.validate_python(value)
    except ValidationError:
        return False
    return True


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
