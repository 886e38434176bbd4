"""A doctor's report of one node: what it says about itself, what NCCL would choose, what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpcrun.errors import UsageError
from hpcrun.fabric.ports import NetworkInterface, PciLink, RdmaPort
from hpcrun.finding import Finding
from hpcrun.tuning.host.check_input import HostCheckInput
from hpcrun.tuning.host.checks import check_host, predict_port_gid
from hpcrun.tuning.host.node_report import HostReport, SharedMemory
from hpcrun.tuning.host.routes import NetworkRoute
from hpcrun.tuning.lint.named_files import NamedFile
from hpcrun.tuning.registry.device_names import choose_socket_interface
from hpcrun.typed_json import WrongValue, parse_typed

_LISTS = ("ports", "interfaces", "links", "routes", "files", "findings")


@dataclass(frozen=True)
class DoctorReport:
    """What is found on a node."""

    host: HostReport
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
            "findings": [finding.as_json() for finding in self.findings],
        }


def examine_host(question: HostCheckInput) -> DoctorReport:
    """Judge a node by what it says about itself."""
    host = question.host
    chosen = choose_socket_interface(host.interfaces, question.socket_names, question.nccl)
    gids = {
        port.name: predict_port_gid(question, port).index for port in host.ports if port.is_roce and port.gids
    }
    return DoctorReport(host, gids, chosen.name if chosen else None, check_host(question))


def parse_doctor_reports(values: Any, where: str) -> dict[str, dict[str, Any]]:
    """The reports in what `doctor --json` printed, of one node or of several, by node."""
    reports = values.get("nodes", [values]) if isinstance(values, dict) else None
    if not isinstance(reports, list) or not all(
        isinstance(report, dict) and isinstance(report.get("node"), str) for report in reports
    ):
        raise UsageError(f"{where}: holds no report; make one with `hpcrun doctor --json`, or --all --json")
    return {report["node"]: _drop_damaged_parts(report) for report in reports}


@cache
def _field_types() -> dict[str, TypeAdapter[Any]]:
    shapes: dict[str, Any] = {
        "ports": RdmaPort,
        "interfaces": NetworkInterface,
        "links": PciLink,
        "routes": NetworkRoute,
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


def _drop_damaged_parts(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report without its damaged parts: what is not there counts as unknown."""
    kept = dict(report)
    for key, shape in _field_types().items():
        if key in _LISTS and isinstance(kept.get(key), list):
            kept[key] = [item for item in kept[key] if isinstance(item, dict) and _fits(shape, item)]
        elif key in kept and (key in _LISTS or not _fits(shape, kept[key])):
            del kept[key]
    return kept


def _fits(shape: TypeAdapter[Any], value: Any) -> bool:
    try:
        shape.validate_python(value)
    except ValidationError:
        return False
    return True


def ports_of_report(report: Mapping[str, Any]) -> tuple[RdmaPort, ...]:
    """The RDMA ports that a report tells of; those of a damaged one are left out."""
    ports = []
    for values in report.get("ports") or ():
        with contextlib.suppress(WrongValue):
            ports.append(parse_typed(RdmaPort, values))
    return tuple(ports)
