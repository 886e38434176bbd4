"""Lists of interfaces and devices as NCCL reads them, and which interface it takes by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcrun.fabric.ports import NetworkInterface

_VIRBR_KNOWN_SINCE = (2, 28, 3)
"""From here on NCCL leaves virbr* for last; before, it takes one like any other."""


@dataclass(frozen=True)
class DeviceList:
    """A list of interfaces or adapters: [^][=]name[:port[:rail[:plane]]],..."""

    excludes: bool
    exact: bool
    entries: tuple[tuple[str, ...], ...]
    """Each name with its further fields; none: nothing is asked for, and all are taken."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names alone."""
        return tuple(entry[0] for entry in self.entries)

    def takes(self, name: str, port: int | None = None) -> bool:
        """Whether a device of this name, and its port where one is given, is used as NCCL matches them."""
        if not self.entries:
            return True
        hit = any(self._matches(entry, name, port) for entry in self.entries)
        return hit is not self.excludes

    def _matches(self, entry: tuple[str, ...], name: str, port: int | None) -> bool:
        if port is not None and len(entry) > 1 and entry[1] not in ("", "-1", str(port)):
            return False
        return name == entry[0] if self.exact else name.startswith(entry[0])


def parse_device_list(text: str) -> DeviceList:
    """NCCL's reading of a device list; blanks and further signs are part of a name."""
    excludes = text.startswith("^")
    rest = text.removeprefix("^")
    exact = rest.startswith("=")
    parts = rest.removeprefix("=").split(",")
    entries = tuple(tuple(part.split(":")) for part in parts if part.partition(":")[0])
    return DeviceList(excludes, exact, entries)


def render_exact_names(names: Iterable[str]) -> str:
    """A list that takes these and no others: without `=`, mlx5_1 would take mlx5_10 too."""
    return "=" + ",".join(names)


def choose_socket_interface(
    interfaces: Sequence[NetworkInterface], text: str = "", nccl: tuple[int, ...] | None = None
) -> NetworkInterface | None:
    """The first interface that NCCL takes for its sockets; None where none fits.

    ib* first, then any but docker, lo and (newer ones) virbr, then these. Only those with an address count.
    """
    usable = [interface for interface in interfaces if interface.networks or interface.kind == "loopback"]
    devices = parse_device_list(text)
    if devices.entries:
        return next((interface for interface in usable if devices.takes(interface.name)), None)
    last = ("docker", "lo", "virbr") if nccl is None or nccl >= _VIRBR_KNOWN_SINCE else ("docker", "lo")

    def rank(interface: NetworkInterface) -> int:
        if interface.name.startswith("ib"):
            return 0
        return next((at + 2 for at, start in enumerate(last) if interface.name.startswith(start)), 1)

    return min((interface for interface in usable if interface.up is not False), key=rank, default=None)
