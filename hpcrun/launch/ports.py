"""A TCP port for the ranks of a program to meet at: free on this node, and none that the kernel gives out.

Between the look and the moment when rank 0 listens it is held by a name alone, which our other runs respect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import random
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.errors import SiteError

_PORT_RANGES = (range(20_000, 30_000), range(10_000, 65_536), range(1_024, 65_536))
"""Where ports are looked for, the quietest first."""
_MIN_PORTS = 256
"""A region with fewer ports outside the kernel's own is passed over."""
_MAX_TRIES = 2_000
_LISTENS, _CLOSING = "0A", "06"
_ANOTHER_RUN = "another run of hpcrun"


@dataclass
class PortLease:
    """A port that was free when it was chosen, kept from other runs of ours for as long as this lives."""

    number: int
    notes: tuple[str, ...] = ()
    """What was in the way of the port that was tried first."""
    _mark: socket.socket | None = field(default=None, repr=False)

    def close(self) -> None:
        """Other runs may have it."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None


def choose_port(seed: int, root: Path = Path("/")) -> PortLease:
    """A port that is free here, the first one that is tried by `seed`; SiteError where all are taken."""
    notes: tuple[str, ...] = ()
    for port in _candidate_ports(seed, ephemeral_ports(root)):
        mark = _reserve_name(port)
        if mark is None or not _is_free(port):
            if not notes:
                holder = _ANOTHER_RUN if mark is None else describe_port_holder(port, root)
                notes = (f"port {port} is taken by {holder}",)
            if mark is not None:
                mark.close()
            continue
        return PortLease(port, tuple(f"{note}; the ranks meet at port {port}" for note in notes), mark)
    raise SiteError(f"{os.uname().nodename}: no TCP port is free for the ranks to meet at; {notes[0]}")


def ephemeral_ports(root: Path = Path("/")) -> range:
    """Those that the kernel gives to connections by itself."""
    try:
        text = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first, last = map(int, text.split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    return range(first, last + 1)


def describe_port_holder(port: int, root: Path = Path("/")) -> str:
    """Who has a port on this node: command and pid where they can be seen, else whose it is."""
    inodes, is_closing = _socket_inodes(port, root)
    if not inodes:
        return "connections that are just closing" if is_closing else "somebody who cannot be seen from here"
    for entry in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            for descriptor in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return _describe_process(entry)
    uid = next(iter(inodes.values()))
    return f"a process of {_describe_user(uid)}, which cannot be seen from here"


def _candidate_ports(seed: int, taken: range) -> Iterator[int]:
    """Ports outside of the kernel's, in an order of the seed's own; where it has them all, any."""
    for region in _PORT_RANGES:
        ports = [port for port in region if port not in taken]
        if len(ports) >= _MIN_PORTS:
            break
    else:
        ports = ports or list(_PORT_RANGES[-1])
    yield from random.Random(seed).sample(ports, min(_MAX_TRIES, len(ports)))


def _reserve_name(port: int) -> socket.socket | None:
    """A name that says to other runs on this node that a port is spoken for; None where it is."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0hpcrun-port-{port}")
    except OSError:
        mark.close()
        return None
    return mark


def _is_free(port: int) -> bool:
    """Whether a program could listen there at every address of either family."""
    for family, anywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((anywhere, port))
        except OSError as error:
            # A host without IPv6 has nobody there.
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return True


def _socket_inodes(port: int, root: Path) -> tuple[Mapping[str, int], bool]:
    """The sockets that have a port, as /proc/PID/fd shows them, and whose they are; listeners first.

    And whether there are connections that are over, but for packets that may still come.
    """
    candidates: list[tuple[bool, str, int]] = []
    is_closing = False
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (root / "proc/net" / name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if len(words) < 10 or int(words[1].rpartition(":")[2], 16) != port:
                    continue
                is_closing |= words[3] == _CLOSING
                if words[9] != "0":
                    candidates.append((words[3] != _LISTENS, f"socket:[{words[9]}]", int(words[7])))
    return {inode: uid for _, inode, uid in sorted(candidates)}, is_closing


def _describe_process(entry: Path) -> str:
    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    shown = " ".join("".join(c if c.isprintable() else "?" for c in word) for word in words if word)
    return f"{shown[:80] or 'a process'} (pid {entry.name}, {_describe_user(entry.stat().st_uid)})"


def _describe_user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"
