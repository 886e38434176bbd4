"""Lists of interfaces and devices as NCCL reads them, and which interface it takes by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcrun.fabric.ports import Interface

_VIRBR_KNOWN_SINCE = (2, 28, 3)
"""From here on NCCL leaves virbr* for last; before, it takes one like any other."""


@dataclass(frozen=True)
class NameList:
    """`[^][=]name[:port],…`: names, or beginnings of names, to take or to leave out."""

    names: tuple[str, ...]
    excluded: bool = False
    exact: bool = False

    def takes(self, name: str, port: int | None = None) -> bool:
        """Whether an interface, or a device's port, is among those to be used."""
        hit = any(self._matches(wanted, name, port) for wanted in self.names)
        return hit != self.excluded

    def _matches(self, wanted: str, name: str, port: int | None) -> bool:
        wanted, _, number = wanted.partition(":")
        if number and port is not None and number.partition(":")[0] != str(port):
            return False
        return name == wanted if self.exact else name.startswith(wanted)


def parse_names(text: str) -> NameList | None:
    """NCCL_SOCKET_IFNAME or NCCL_IB_HCA; None where nothing is set."""
    excluded = text.startswith("^")
    rest = text.removeprefix("^")
    names = tuple(name.strip() for name in rest.removeprefix("=").split(",") if name.strip())
    return NameList(names, excluded, rest.startswith("=")) if names else None


def render_names(names: Iterable[str]) -> str:
    """A list that takes these and no others: without `=`, mlx5_1 would take mlx5_10 too."""
    return "=" + ",".join(names)


def socket_choice(
    interfaces: Sequence[Interface], text: str = "", nccl: tuple[int, ...] | None = None
) -> Interface | None:
    """The first interface that NCCL takes for its sockets; None where none fits.

    ib* first, then any but docker, lo and (newer ones) virbr, then these. Only those with an address count.
    """
    usable = [one for one in interfaces if one.networks or one.kind == "loopback"]
    wanted = parse_names(text)
    if wanted is not None:
        return next((one for one in usable if wanted.takes(one.name)), None)
    last = ("docker", "lo", "virbr") if nccl is None or nccl >= _VIRBR_KNOWN_SINCE else ("docker", "lo")

    def rank(one: Interface) -> int:
        if one.name.startswith("ib"):
            return 0
        return next((at + 2 for at, start in enumerate(last) if one.name.startswith(start)), 1)

    return min((one for one in usable if one.up is not False), key=rank, default=None)
