"""Traffic classes of RoCE: TC, DSCP, ECN bits and priority, and whether a job's libraries agree."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpcrun.errors import UsageError
from hpcrun.finding import Finding

UCX_DEFAULT_CLASS = 106
"""What UCX takes on RoCE v2 by itself, where the port has no class of its own."""
NCCL_DEFAULT_CLASS = 0
CLASS_VARIABLES = ("NCCL_IB_TC", "NCCL_IB_FIFO_TC", "NCCL_GIN_IB_TC", "UCX_IB_TRAFFIC_CLASS")
"""The variables that hold one."""
_ECN = ("not-ECT", "ECT(1)", "ECT(0)", "CE")


@dataclass(frozen=True)
class TrafficClass:
    """The byte in every packet's header: DSCP, and two bits for congestion marks."""

    tc: int

    @property
    def dscp(self) -> int:
        """What switches sort by, under trust dscp."""
        return self.tc >> 2

    @property
    def ecn(self) -> str:
        """Whether switches may mark instead of drop: ECT(0), ECT(1), not-ECT, CE."""
        return _ECN[self.tc & 3]

    @property
    def priority(self) -> int:
        """The priority that adapters and switches give it by default: eight DSCPs each."""
        return self.dscp // 8

    def __str__(self) -> str:
        return f"TC {self.tc} = DSCP {self.dscp}, {self.ecn}, priority {self.priority}"


def decode_traffic_class(tc: int) -> TrafficClass:
    """A traffic class by its byte; UsageError where it is none."""
    if not 0 <= tc <= 255:
        raise UsageError(f"traffic class {tc}: is one byte; use 0 to 255")
    return TrafficClass(tc)


def encode_traffic_class(dscp: int, ecn: str = "ECT(0)") -> TrafficClass:
    """The traffic class of a DSCP; UsageError for one that is none."""
    if not 0 <= dscp <= 63:
        raise UsageError(f"dscp {dscp}: has six bits; use 0 to 63")
    if ecn not in _ECN:
        raise UsageError(f"ecn {ecn!r}: is not a mark; use {', '.join(_ECN)}")
    return TrafficClass(dscp << 2 | _ECN.index(ecn))


def traffic_class_of_priority(priority: int) -> TrafficClass:
    """The usual class of a priority, such as DSCP 26 for 3, marks allowed."""
    if not 0 <= priority <= 7:
        raise UsageError(f"priority {priority}: there are eight; use 0 to 7")
    return encode_traffic_class(priority * 8 + 2)


def nccl_traffic_class(environ: Mapping[str, str]) -> int:
    """What NCCL sends in, by its environment; a value that is none counts as unset."""
    tc = _parse_byte(environ.get("NCCL_IB_TC", ""))
    return NCCL_DEFAULT_CLASS if tc is None else tc


def ucx_traffic_class(environ: Mapping[str, str], forced: int | None = None) -> int:
    """What UCX sends in; `forced` is the class that the driver gives the port."""
    tc = _parse_byte(environ.get("UCX_IB_TRAFFIC_CLASS", ""))
    if tc is not None:
        return tc
    return UCX_DEFAULT_CLASS if forced is None else forced


def _parse_byte(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,3}", text) and int(text) < 256 else None


def check_class_agreement(
    environ: Mapping[str, str], subject: str, *, uses_ucx: bool, forced: int | None = None
) -> list[Finding]:
    """Whether NCCL and MPI over UCX share a queue of the fabric; nothing where only one of them runs."""
    if not uses_ucx:
        return []
    if forced is not None and "NCCL_IB_TC" not in environ and "UCX_IB_TRAFFIC_CLASS" not in environ:
        return []
    nccl, ucx = (
        decode_traffic_class(nccl_traffic_class(environ)),
        decode_traffic_class(ucx_traffic_class(environ, forced)),
    )
    if nccl.dscp == ucx.dscp:
        return []
    text = f"NCCL sends in {nccl}, MPI over UCX in {ucx}: two queues of the fabric"
    remedy = f"set NCCL_IB_TC and UCX_IB_TRAFFIC_CLASS alike, to the lossless class ({ucx.tc} is UCX's own)"
    return [Finding("warning", "traffic class", subject, text, remedy, "medium")]


def check_lossless_class(
    tc: int, lossless: Collection[int], trust: str, service_level: int | None, subject: str
) -> list[Finding]:
    """Whether traffic of a class leaves the priorities that PFC protects; nothing where PFC is off on all."""
    if not lossless:
        return []
    used = decode_traffic_class(tc).priority if trust != "pcp" else (service_level or 0)
    if used in lossless:
        return []
    protected = ", ".join(map(str, sorted(lossless)))
    by = (
        decode_traffic_class(tc)
        if trust != "pcp"
        else f"priority {used} (trust pcp: the VLAN tag counts, not the DSCP)"
    )
    text = f"traffic runs in {by}, PFC protects priority {protected}"
    fitting = traffic_class_of_priority(min(lossless))
    remedy = (
        f"set network.traffic_class: {fitting.tc} in the profile" if trust != "pcp" else "ask for trust dscp"
    )
    return [Finding("warning", "traffic class", subject, text, remedy, "high" if trust else "medium")]
