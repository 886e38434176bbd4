"""Values that look left over and that a platform's own documentation or software asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcrun.tuning.lint.environment import VariableAssignment


@dataclass(frozen=True)
class PlatformDemand:
    """Values of one variable that a platform asks for, or that do nothing there."""

    values: re.Pattern[str]
    source: str
    """Repository and path, or document, that has them."""


@dataclass(frozen=True)
class NetworkPlatform:
    """A network that shows in an environment, and what it asks for."""

    name: str
    signs: re.Pattern[str]
    """What shows in an environment that this is it: NAME=VALUE."""
    demands: Mapping[str, PlatformDemand]


def _demands(rows: Mapping[str, tuple[str, str]]) -> dict[str, PlatformDemand]:
    return {name: PlatformDemand(re.compile(rule, re.I), source) for name, (rule, source) in rows.items()}


_EFA_GUIDE = "aws/aws-ofi-nccl doc/efa-env-var.md"
_EFA_CODE = "aws/aws-ofi-nccl src/platform-aws.cpp"
_EFA_PROTO = "aws/aws-ofi-nccl src/nccl_ofi_net.cpp; doc/efa-env-var.md up to 1.5"
_EFA_SAMPLE = "aws-samples/awsome-distributed-training 1.architectures/7.sagemaker-hyperpod-eks/slinky-slurm"
_PLUGIN_FIRST = "NVIDIA/nccl src/plugin/net.cc: a plugin's network is taken before its own"
_HPE = "HewlettPackard/shs-ccl-docs ccl_env.sh; olcf/olcf-user-docs software/analytics/pytorch_frontier.rst"
_CSCS = "eth-cscs/cscs-docs docs/software/communication/nccl_env_vars"
_A3_HIGH = "GoogleCloudPlatform/cluster-toolkit examples/machine-learning/a3-highgpu-8g/nccl-tests"
_A3_MEGA = "GoogleCloudPlatform/cluster-toolkit examples/machine-learning/a3-megagpu-8g/nemo-framework"
_GKE = "GoogleCloudPlatform/cluster-toolkit examples/gke-a3-highgpu/nccl-config.yaml"

NETWORK_PLATFORMS = (
    NetworkPlatform(
        "EFA",
        re.compile(
            r"FI_PROVIDER=.*\befa\b.*|FI_EFA_\w+=.*|OFI_NCCL_\w+=.*|NCCL_NET=AWS Libfabric|NCCL_NET=ofi"
            r"|NCCL_(NET|TUNER)_PLUGIN=.*(aws-ofi|\bofi|nccl-ofi).*|LD_LIBRARY_PATH=.*(aws-ofi-nccl|/efa/).*",
            re.I,
        ),
        _demands(
            {
                "NCCL_PROTO": ("simple", _EFA_PROTO),
                "NCCL_ALGO": ("ring", f"{_EFA_SAMPLE}/p5"),
                "NCCL_MIN_NCHANNELS": ("8", f"{_EFA_SAMPLE}/p5; 8 is what {_EFA_GUIDE} gives for p4d"),
                "NCCL_NVLS_ENABLE": ("0", f"{_EFA_CODE}, before NCCL 2.18.5"),
                "NCCL_IB_DISABLE": ("1", _PLUGIN_FIRST),
                "FI_EFA_USE_DEVICE_RDMA": ("1", f"{_EFA_GUIDE}: needed up to 1.6, harmless later"),
                "FI_EFA_FORK_SAFE": ("1", f"{_EFA_CODE} sets it itself"),
            }
        ),
    ),
    NetworkPlatform(
        "Slingshot",
        re.compile(
            r"FI_PROVIDER=.*\bcxi\b.*|FI_CXI_\w+=.*|NCCL_NET=AWS Libfabric|NCCL_SOCKET_IFNAME=.*\bhsn.*", re.I
        ),
        _demands(
            {
                "NCCL_PROTO": (r"\^LL128", f"{_CSCS}: from 2.27 on"),
                "NCCL_NET_GDR_LEVEL": ("PHB|3", f"{_HPE}; {_CSCS}"),
                "NCCL_IB_DISABLE": ("1", _PLUGIN_FIRST),
                "NCCL_NET": ("Socket", f"{_HPE}: jobs of one node, which have no Slingshot network"),
            }
        ),
    ),
    NetworkPlatform(
        "Google",
        re.compile(
            r"NCCL_(GPUDIRECTTCPX|FASTRAK|SHIMNET)_\w+=.*|NCCL_NET=(GPUDirectTCPX\w*|FasTrak|gIB)"
            r"|LD_LIBRARY_PATH=.*(tcpx|tcpxo|fastrak|/gib/).*|NCCL_TUNER_CONFIG_PATH=.*",
            re.I,
        ),
        _demands(
            {
                "NCCL_ALGO": (
                    "ring|ring,tree|tree,ring",
                    f"{_A3_HIGH}; allenai/OLMo scripts/augusta (A3 Mega)",
                ),
                "NCCL_PROTO": ("simple|simple,ll128|ll128,simple", f"{_A3_HIGH}; {_A3_MEGA}"),
                "NCCL_NVLS_ENABLE": ("0", "allenai/OLMo scripts/augusta (A3 Mega)"),
                "NCCL_MIN_NCHANNELS": ("4|8", f"{_A3_MEGA}: 4; {_GKE}: 8"),
                "NCCL_NET_GDR_LEVEL": ("PIX", f"{_A3_HIGH}; {_A3_MEGA}"),
                "NCCL_IB_DISABLE": ("1", _PLUGIN_FIRST),
            }
        ),
    ),
)


def is_demanded_by_platform(name: str, value: str, environment: Mapping[str, VariableAssignment]) -> bool:
    """Whether a platform that the rest of the environment shows asks for this value."""
    others = [
        f"{key}={setting.value}" for key, setting in environment.items() if key != name and setting.value
    ]
    for platform in NETWORK_PLATFORMS:
        demand = platform.demands.get(name)
        is_here = any(platform.signs.fullmatch(other) for other in others)
        if demand is not None and is_here and demand.values.fullmatch(value.strip()):
            return True
    return False
