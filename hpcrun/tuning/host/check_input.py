"""What a node's checks look at: its report, the profile, and the NCCL that will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcrun.fabric.ports import RdmaPort
from hpcrun.specs.cluster import NetworkSpec
from hpcrun.tuning.host.node_report import HostReport
from hpcrun.tuning.registry.device_names import parse_device_list


@dataclass(frozen=True)
class HostCheckInput:
    """What a node is judged by: what it says, what the site's profile says, which NCCL will run."""

    host: HostReport
    network: NetworkSpec
    nccl: tuple[int, ...] | None = None
    uses_ucx: bool = False
    advised: Mapping[str, str] = field(default_factory=dict)
    """What hpcrun sets for jobs by the same profile."""
    cuda: tuple[int, ...] | None = None
    """For which NCCL was built, where it is known."""

    @property
    def environ(self) -> dict[str, str]:
        """What a job on this node has: its own environment, and what hpcrun adds."""
        return {**self.advised, **self.host.environ}

    @property
    def used(self) -> list[RdmaPort]:
        """The ports that a job is to use: the profile's, else those of NCCL_IB_HCA, else all active ones."""
        if self.network.hcas:
            return [port for port in self.host.ports if port.device in self.network.hcas]
        devices = parse_device_list(self.host.environ.get("NCCL_IB_HCA", ""))
        if devices.entries:
            return [port for port in self.host.ports if devices.takes(port.device, port.number)]
        return [port for port in self.host.ports if port.is_active]

    @property
    def socket_names(self) -> str:
        """What NCCL_SOCKET_IFNAME says, or will say by the profile; empty: nothing."""
        return self.environ.get("NCCL_SOCKET_IFNAME", "")
