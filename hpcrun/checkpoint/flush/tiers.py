"""The tiers of a checkpoint worker, made anew from the supervisor's order at the start of each attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrun.checkpoint.flush.durable_tier import DurableTier
from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.flush.peer_service import PeerService
from hpcrun.checkpoint.flush.tier_context import (
    PeerServiceProtocol,
    TierContext,
)
from hpcrun.checkpoint.lustre.storage import CheckpointStorage
from hpcrun.checkpoint.objects.object_tier import ObjectTier
from hpcrun.checkpoint.tier import InventoryEntry, Tier, TierName

TierFactory = Callable[[TierContext], Tier | None]
"""None where the job does not ask for this tier. OSError or SiteError where the node cannot have it."""

OpenPeerService = Callable[[TierContext, Callable[[], Sequence[InventoryEntry]]], PeerServiceProtocol]
"""Given a way to ask for all that this node holds; called once, with the first `configure`."""


def _make_local_tier(around: TierContext) -> Tier | None:
    directory = around.spec.local
    if directory is None:
        return None
    tier = LocalTier(str(directory), around.run.run_id, around.node, around.on_write, around.say)
    return tier.with_watch(around.watch)


_DIRECT_IO_FILE_SYSTEMS = ("ext4", "xfs")
"""Where direct writes are as quick as others, as far as that was measured; elsewhere a job asks for them."""


def _make_durable_tier(around: TierContext) -> Tier | None:
    place, direct = CheckpointStorage(around.run.checkpoints, around.spec.durable), around.spec.durable.direct
    return DurableTier(
        around.run.checkpoints,
        keep=around.spec.keep,
        keep_every=around.spec.keep_every,
        direct=place.mount.kind in _DIRECT_IO_FILE_SYSTEMS if direct is None else direct,
        prepare_file=place.prepare_file,
        retry_file=place.retry_file,
        layout_facts=place.layout_facts,
        hurry=around.hurry,
        written=around.on_write,
        say=around.say,
        watch=around.watch,
        file_system=place.mount.words,
    )


def _make_parity_tier(around: TierContext) -> Tier | None:
    return None if around.peer_service is None else around.peer_service.tier(around)


def _make_object_tier(around: TierContext) -> Tier | None:
    spec = around.spec.object
    if spec is None:
        return None
    return ObjectTier(spec, around.run.run_id, around.run.checkpoints, hurry=around.hurry)


def _open_peer_service(
    around: TierContext, holdings: Callable[[], Sequence[InventoryEntry]]
) -> PeerServiceProtocol:
    return PeerService(around, holdings)


TIER_FACTORIES: dict[TierName, TierFactory] = {
    "local": _make_local_tier,
    "parity": _make_parity_tier,
    "durable": _make_durable_tier,
    "object": _make_object_tier,
}
"""A tier that is missing here is not offered."""

OPEN_PEER_SERVICE: OpenPeerService | None = _open_peer_service
"""It listens where the host has named an address and a secret."""
