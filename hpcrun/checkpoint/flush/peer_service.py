"""A checkpoint worker's side of the talk between nodes: it answers the others, keeps parity, and rebuilds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcrun.checkpoint.flush.tier_context import TierContext
from hpcrun.checkpoint.parity.parity_tier import ParityTier
from hpcrun.checkpoint.parity.peers import PartServer, PeerClient, PeerCredentials, PeerServer
from hpcrun.checkpoint.parity.rebuild import rebuild_members
from hpcrun.checkpoint.restore_plan import RebuildOrder
from hpcrun.checkpoint.tier import InventoryEntry
from hpcrun.errors import SiteError
from hpcrun.messages.lines import describe_version_mismatch


class PeerService:
    """Open as soon as the host has named an address to listen at and the run's secret."""

    def __init__(self, around: TierContext, holdings: Callable[[], Sequence[InventoryEntry]]) -> None:
        self.address, self.port = "", 0
        self._holdings, self._arena = holdings, around.arena
        self._door: tuple[str, bytes] | None = None
        self._problem = ""
        self._server: PeerServer | None = None
        self._peers: PeerClient | None = None
        self._parity_tier: ParityTier | None = None
        self._parity_tier_key: tuple[object, ...] | None = None

    def reconfigure(self, around: TierContext) -> None:
        """The set, the peers or the attempt are others now."""
        door = (around.address, around.secret)
        if door != self._door:
            self.close()
            self._problem = "this worker talks to no other nodes, as it was told no address and secret"
            if all(door):
                try:
                    self._open(around)
                except SiteError as error:
                    self._problem = str(error)
            self._door = door
        if self._peers is not None:
            self._peers.update_addresses(around.peers)

    def tier(self, around: TierContext) -> ParityTier | None:
        """The tier of an attempt's set, the same one for as long as these are the same."""
        if around.set is None or not around.parity:
            return None
        if self._server is None or self._peers is None:
            raise SiteError(self._problem)
        wanted = (around.attempt, around.set, around.parity)
        if self._parity_tier is None or wanted != self._parity_tier_key:
            self._parity_tier = ParityTier(
                around.arena,
                around.node,
                around.set,
                around.parity,
                self._peers,
                self._server,
                hurry=around.hurry,
            )
            self._parity_tier_key = wanted
        return self._parity_tier

    def rebuild(self, order: RebuildOrder) -> InventoryEntry:
        """Make again what an order asks for; SiteError where that cannot be."""
        return rebuild_members(order, self._require_peers(), order.node, self._arena)

    def ask(self, node: str, request: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        """What another node answers; SiteError where it does not, or says no."""
        return self._require_peers().ask(node, request, wait_s)

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        """Fill a buffer with what another node was asked for; SiteError unless it gets all of it."""
        self._require_peers().read(node, request, into)

    def _require_peers(self) -> PeerClient:
        if self._peers is None:
            raise SiteError(self._problem)
        return self._peers

    def close(self) -> None:
        """Listen no more, and ask no more."""
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            self._peers.close()
        self._server = self._peers = self._parity_tier = None
        self.address, self.port = "", 0

    def _open(self, around: TierContext) -> None:
        who = PeerCredentials(around.run.id, around.node, around.secret.hex())
        most = around.spec.parity.bandwidth_MBps
        bytes_per_s = most * 1e6 if most is not None else None
        refused = set[tuple[str, str]]()

        def refuse_version(node: str, version: str) -> None:
            if (node, version) not in refused:
                refused.add((node, version))
                theirs = f"the checkpoint worker of {node}"
                around.say(describe_version_mismatch(theirs, version, f"that of {around.node}"))

        self._server = PeerServer(around.address, who, bytes_per_s=bytes_per_s, refuse_version=refuse_version)
        self._peers = PeerClient(who, around.peers)
        PartServer(self._server, self._holdings, around.throttle.await_idle)
        self.address, self.port = self._server.address, self._server.port
