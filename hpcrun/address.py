"""Which address other nodes reach this host at: one answer, whatever /etc/hosts says of the host's own name.

Debian puts a host's name on a loopback line, files of hosts grow stale, and bridges of containers have the
same address everywhere: a name alone is never believed here, only an address that this host really has.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcrun.errors import SiteError

_VIRTUAL_INTERFACES = re.compile(
    r"(lo|docker|virbr|podman|cni|lxcbr|lxdbr|veth|cali|flannel|vmnet|vboxnet)[0-9.]*\Z|br-[0-9a-f]{12}\Z"
    r"|(veth|cali)\w+\Z"
)
"""Interfaces of containers and virtual machines: other hosts have the same addresses on theirs."""
_INTERFACE_UP_FLAGS = 0x1 | 0x40
_SIOCGIFFLAGS = 0x8913
_RTM_GETADDR, _RTM_NEWADDR, _NLMSG_DONE = 22, 20, 3
_REQUEST_DUMP = 0x1 | 0x300
_IFA_ADDRESS, _IFA_LOCAL, _IFA_LABEL = 1, 2, 3
_UNUSABLE_FLAGS = 0x40 | 0x08
"""An IPv6 address that is still being tried, or that another host has."""
_MAX_PEERS, _ENOUGH_PEERS = 8, 2
"""So many peers are asked for the way to them, until so many agree."""
_RESOLVE_S = 2.0
"""Names that are looked up together have so long: a name service that is down must not hold up a node."""
_DOCUMENTATION_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has: the way to them is the default route."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostAddress:
    """An address of this host, and the interface that has it (empty: not known)."""

    text: str
    interface: str
    source: str = ""
    """How it was found."""
    warning: str = ""
    """What is wrong with the host's own name; empty: nothing."""


@dataclass(frozen=True)
class _LocalAddress:
    text: str
    interface: str
    label: str
    index: int
    is_up: bool

    @property
    def reaches_other_hosts(self) -> bool:
        """Whether other hosts can reach it, as far as this one knows."""
        return self.is_up and is_routable(self.text) and not _VIRTUAL_INTERFACES.match(self.interface)


def is_routable(text: str) -> bool:
    """Whether an address means this host on others too: neither loopback nor of one link alone."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return not (
        address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    )


def reachable_address(
    interface: str | None = None, peers: Sequence[str] = (), suffix: str = ""
) -> HostAddress:
    """The address for other nodes to reach this host at; SiteError where there is none.

    That of `interface`, where it is here and up; else what this host's name (with `suffix` before without)
    means, if the host has that address on a network and is one of `peers`; else where the way to them begins.
    """
    local = _local_addresses()
    if interface is not None and (best := _best_interface_address(local, interface)) is not None:
        return HostAddress(best.text, best.interface, f"network.interface {interface}")
    out = sorted(
        (address for address in local if address.reaches_other_hosts), key=lambda address: ":" in address.text
    )
    name = os.uname().nodename
    meant: list[str] = []
    own: list[_LocalAddress] = []
    for one_name in _with_suffix(name, suffix):
        if not own:
            meant = resolve_host_names([one_name])[one_name]
            own = [address for address in out if address.text in meant]
    warning = _host_name_problem(name, meant, local)
    others = [peer for peer in peers if peer.partition(".")[0] != name.partition(".")[0]]
    # The name of a host that is none of them, such as a login node, may mean another network.
    is_one_of_them = len(others) < len(peers)
    if own and (not others or (len(own) == 1 and is_one_of_them)):
        return HostAddress(own[0].text, own[0].interface, f"the name {name}", warning)
    if (way := _source_address_toward(others, suffix, own if own and is_one_of_them else out)) is not None:
        return HostAddress(way.text, way.interface, "the way to the other nodes", warning)
    if own:
        return HostAddress(own[0].text, own[0].interface, f"the name {name}", warning)
    if (way := _most_common_source(_source_addresses(_DOCUMENTATION_ADDRESSES), out, 1)) is not None:
        return HostAddress(way.text, way.interface, "the default route", warning)
    if len({address.interface for address in out}) == 1:
        return HostAddress(out[0].text, out[0].interface, "the only network", warning)
    if not others:
        return HostAddress(LOOPBACK, "lo", "there is no network", warning)
    has = ", ".join(f"{address.text} on {address.interface}" for address in out)
    which = f"it has several, and nothing says which: {has}" if has else "it has none on a network that is up"
    raise SiteError(
        f"{name}: no address for other nodes to reach it at: {'; '.join(filter(None, (warning, which)))};"
        " set network.interface in the profile, or mend /etc/hosts there"
    )


def resolve_host_names(names: Sequence[str]) -> Mapping[str, list[str]]:
    """The addresses that names have on this host; none for one that cannot be resolved, or not soon."""
    addresses: dict[str, list[str]] = {name: [] for name in names}

    def look_up(name: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses[name] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in addresses]
    until = time.monotonic() + _RESOLVE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(addresses)


def _with_suffix(name: str, suffix: str) -> tuple[str, ...]:
    short, dot, domain = name.partition(".")
    return (f"{short}{suffix}{dot}{domain}", name) if suffix else (name,)


def _host_name_problem(name: str, meant: Sequence[str], local: Sequence[_LocalAddress]) -> str:
    """What is wrong with a host's own name, in words; empty where it means an address that is here and up."""
    if not meant:
        return f"its own name {name} cannot be resolved"
    here = {address.text: address for address in local}
    why = {}
    for text in meant:
        local_address = here.get(text)
        if local_address is not None and local_address.reaches_other_hosts:
            return ""
        if not is_routable(text):
            why[text] = "which other nodes cannot reach"
        elif local_address is None:
            why[text] = "which no interface of it has"
        else:
            why[text] = f"of {local_address.interface}, which " + (
                "leads nowhere" if local_address.is_up else "is down"
            )
    return f"its own name {name} means {' and '.join(f'{text}, {of}' for text, of in why.items())}"


def _best_interface_address(local: Sequence[_LocalAddress], interface: str) -> _LocalAddress | None:
    """The best address of an interface that is up: IPv4 before IPv6, those of one link alone last."""
    index = None
    with contextlib.suppress(OSError):
        index = socket.if_nametoindex(interface)
    mine = [
        address
        for address in local
        if address.is_up and (address.index == index or address.label == interface)
    ]
    mine = [
        address
        for address in mine
        if ":" not in address.text or not ipaddress.ip_address(address.text).is_link_local
    ]
    return min(mine, key=lambda address: (not is_routable(address.text), ":" in address.text), default=None)


def _source_address_toward(
    others: Sequence[str], suffix: str, choice: Sequence[_LocalAddress]
) -> _LocalAddress | None:
    """The address, of these, from which the way to most other nodes begins."""
    queried = [_with_suffix(peer, suffix) for peer in others[:_MAX_PEERS]]
    addresses = resolve_host_names([name for names in queried for name in names])
    meant = (next((addresses[name] for name in names if addresses[name]), []) for names in queried)
    return _most_common_source(
        (next(iter(_source_addresses(texts)), "") for texts in meant), choice, _ENOUGH_PEERS
    )


def _most_common_source(
    texts: Iterable[str], choice: Sequence[_LocalAddress], enough: int
) -> _LocalAddress | None:
    by_text = {address.text: address for address in choice}
    votes: Counter[str] = Counter()
    for text in texts:
        if text in by_text:
            votes[text] += 1
            if votes[text] >= enough:
                break
    return by_text[votes.most_common(1)[0][0]] if votes else None


def _source_addresses(targets: Iterable[str]) -> Iterator[str]:
    """Our own address on the way to each of these; nothing is sent, the kernel only looks up the way."""
    for target in targets:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            source = str(probe.getsockname()[0])
            if is_routable(source):
                yield source


def _local_addresses() -> list[_LocalAddress]:
    """Every address of this host, as the kernel's routing socket lists them; none where it is forbidden."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
            # A header, and an empty ifaddrmsg of any family.
            asking.sendall(struct.pack("=IHHII8x", 24, _RTM_GETADDR, _REQUEST_DUMP, 1, 0))
            return [address for data in _netlink_messages(asking) for address in _parse_netlink_address(data)]
    except OSError:
        return []


def _netlink_messages(asking: socket.socket) -> Iterator[bytes]:
    """The messages of a dump, without their headers."""
    while data := asking.recv(1 << 17):
        while len(data) >= 16:
            length, kind = struct.unpack_from("=IH", data)
            if kind != _RTM_NEWADDR:
                if kind == _NLMSG_DONE or length < 16:
                    return
                raise OSError(f"message {kind} of the routing socket")
            yield data[16:length]
            data = data[(length + 3) & ~3 :]


def _parse_netlink_address(data: bytes) -> Iterator[_LocalAddress]:
    family, _, flags, _, index = struct.unpack_from("=BBBBI", data)
    fields, rest = {}, data[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        fields[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    packed = fields.get(_IFA_LOCAL, fields.get(_IFA_ADDRESS, b""))
    if family not in (socket.AF_INET, socket.AF_INET6) or not packed or flags & _UNUSABLE_FLAGS:
        return
    try:
        name = socket.if_indextoname(index)
    except OSError:
        return  # it has gone meanwhile
    label = fields.get(_IFA_LABEL, b"").rstrip(b"\0").decode(errors="replace")
    yield _LocalAddress(socket.inet_ntop(family, packed), name, label, index, _is_up(name))


def _is_up(name: str) -> bool:
    """Whether an interface is switched on and has a link."""
    request = struct.pack("16sH22x", name.encode()[:15], 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            flags = struct.unpack_from("16sH", fcntl.ioctl(asking.fileno(), _SIOCGIFFLAGS, request))[1]
        except OSError:
            return False
    return bool(flags & _INTERFACE_UP_FLAGS == _INTERFACE_UP_FLAGS)
