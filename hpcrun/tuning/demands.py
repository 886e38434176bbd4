"""Values that look left over and that a platform's own documentation asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcrun.tuning.environment import Setting


@dataclass(frozen=True)
class _Platform:
    signs: re.Pattern[str]
    """What shows in an environment that this is it: NAME=VALUE."""
    values: Mapping[str, re.Pattern[str]]
    """What it asks for."""
    source: str


def _values(**rules: str) -> dict[str, re.Pattern[str]]:
    return {name: re.compile(rule, re.I) for name, rule in rules.items()}


_PLATFORMS = (
    _Platform(
        re.compile(
            r"FI_PROVIDER=.*\befa\b.*|FI_EFA_\w+=.*|OFI_NCCL_\w+=.*|NCCL_NET=AWS Libfabric|NCCL_NET=ofi"
            r"|NCCL_NET_PLUGIN=.*(aws-ofi|\bofi).*|LD_LIBRARY_PATH=.*(aws-ofi-nccl|/efa/).*",
            re.I,
        ),
        _values(
            NCCL_PROTO="simple",
            NCCL_ALGO="ring",
            FI_EFA_USE_DEVICE_RDMA="1",
            FI_EFA_FORK_SAFE="1",
            RDMAV_FORK_SAFE="1",
        ),
        "AWS: EFA with NCCL, and aws-ofi-nccl's release notes",
    ),
    _Platform(
        re.compile(
            r"FI_PROVIDER=.*\bcxi\b.*|FI_CXI_\w+=.*|NCCL_NET=AWS Libfabric|NCCL_SOCKET_IFNAME=.*\bhsn.*", re.I
        ),
        _values(NCCL_PROTO=r"\^LL128|simple", NCCL_NET_GDR_LEVEL="PHB|3", RDMAV_FORK_SAFE="1"),
        "HPE: Slingshot with aws-ofi-nccl; CSCS, NERSC and OLCF on NCCL",
    ),
    _Platform(
        re.compile(
            r"NCCL_(GPUDIRECTTCPX|FASTRAK|SHIMNET)_\w+=.*|NCCL_NET=(GPUDirectTCPX\w*|FasTrak|gIB)"
            r"|LD_LIBRARY_PATH=.*(tcpx|tcpxo|fastrak|/gib/).*|NCCL_TUNER_CONFIG_PATH=.*",
            re.I,
        ),
        _values(
            NCCL_ALGO="ring|ring,tree|tree,ring",
            NCCL_PROTO="simple|simple,ll128|ll128,simple|ll,ll128,simple",
            NCCL_NVLS_ENABLE="0",
            NCCL_MIN_NCHANNELS="[0-9]+",
            NCCL_NET_GDR_LEVEL="PIX",
        ),
        "Google: GPUDirect-TCPX and TCPXO on A3, gIB",
    ),
)


def is_demanded(name: str, value: str, environment: Mapping[str, Setting]) -> bool:
    """Whether a platform that the rest of the environment shows asks for this value."""
    others = [f"{key}={one.value}" for key, one in environment.items() if key != name and one.value]
    for platform in _PLATFORMS:
        rule = platform.values.get(name)
        is_here = any(platform.signs.fullmatch(other) for other in others)
        if rule is not None and is_here and rule.fullmatch(value.strip()):
            return True
    return False
