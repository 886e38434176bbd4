"""Connects ranks over TCP: this node's address, a store that listens there alone, and a connection test."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hpcrun.address import LOOPBACK, HostAddress, reachable_address
from hpcrun.errors import RanksDiedError, SiteError
from hpcrun.health.connection_test import (
    ConnectionTest,
    choose_targets,
    describe_unreachable,
    why_unreachable,
)

if TYPE_CHECKING:
    from hpcrun.launcher_world import World
    from hpcrun.runtime.control import Control

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_BACKLOG = 4096


def rank_address(control: Control) -> HostAddress:
    """Return the address for ranks of other nodes: that of gloo's interface, where it is set."""
    if control.one_node:
        return HostAddress(LOOPBACK, "lo")
    interface = os.environ.get(GLOO_INTERFACE, "").partition(",")[0]
    return reachable_address(interface or None, control.nodes)


def open_tcp_store(control: Control, address: str) -> TCPStore:
    """Open a store on rank 0, at this address alone, and connect the other ranks to it."""
    server: TCPStore | None = None
    place: tuple[str, int] = ("", 0)
    if control.rank == 0:
        listening = _listen(address)
        place = (address, int(listening.getsockname()[1]))
        # The store has its own descriptor from here on.
        fd = listening.detach()
        server = TCPStore(
            *place, control.size, True, default_pg_timeout, wait_for_workers=False, master_listen_fd=fd
        )
    host, port = control.broadcast(place)
    if server is not None:
        return server
    # A first failure may be a matter of time.
    if why := why_unreachable(address, host, port) and why_unreachable(address, host, port):
        raise RanksDiedError(f"does not reach the store of rank 0 on node {control.nodes[0]}: {why}")
    return TCPStore(host, port, control.size, False, default_pg_timeout, wait_for_workers=False)


def check_node_connectivity(control: Control, here: HostAddress) -> None:
    """RanksDiedError with the nodes that do not reach each other; torch would wait for half an hour."""
    with contextlib.ExitStack() as stack:
        mine: list[Any] | None = None
        if control.local_rank == 0:
            trial = ConnectionTest(here.text)
            stack.callback(trial.close)
            mine = [control.node, trial.place]
        places = dict(filter(None, control.allgather(mine)))
        failed: dict[str, str] = {}
        if control.local_rank == 0:
            targets = choose_targets(places, control.node)
            failed = trial.failures(targets) and trial.failures(targets)
        answers = control.allgather([control.node, failed, here.warning] if control.local_rank == 0 else None)
    tried = {node: failures for node, failures, _ in filter(None, answers)}
    words, _ = describe_unreachable(tried, [*tried])
    if words:
        names = [f"{node}: {warning}" for node, _, warning in filter(None, answers) if warning]
        raise RanksDiedError("; ".join([f"the nodes do not reach each other: {words}", *names[:2]]))


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def join_environment_store(world: World) -> Store:
    """Join the store that launchers like torchrun name in the environment."""
    for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.size)):
        os.environ.setdefault(name, str(value))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SiteError(
            f"{world.size} ranks were started by {world.kind}, but {' and '.join(missing)} is not set and"
            " there is no MPI to ask; set MASTER_ADDR and MASTER_PORT, or start with mpiexec"
        )
    store: Store
    store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=default_pg_timeout)))
    return store
