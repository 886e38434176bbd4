"""Copies of a run's generations outside of its directory: on nodes' own disks and in memory, in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcrun.checkpoint.flush.arena import SHM, Arena, find_arenas
from hpcrun.checkpoint.flush.local_tier import LocalTier
from hpcrun.checkpoint.flush.spare_replicas import list_spare_replicas
from hpcrun.checkpoint.format import DamagedError, Part, data_file_name
from hpcrun.checkpoint.objects.catalogue import (
    ObjectCopy,
    StoredObject,
    read_object_index,
    read_object_manifest,
)
from hpcrun.checkpoint.objects.store import ObjectStore
from hpcrun.checkpoint.parity.blocks import list_parity_entries
from hpcrun.checkpoint.parity.peers import PeerClient, PeerCredentials
from hpcrun.checkpoint.parity.rebuild import rebuild_members
from hpcrun.checkpoint.part_check import exclude_damaged_parts, find_damaged_parts
from hpcrun.checkpoint.restore.decide import plan_rebuilds
from hpcrun.checkpoint.restore_plan import SHARED_NODE
from hpcrun.checkpoint.tier import HeldPart, InventoryEntry
from hpcrun.errors import SiteError
from hpcrun.specs.saves import SavedCheckpoint


class ObjectStoreCopy:
    """A generation in an object store, of which only what is missing elsewhere is fetched."""

    def __init__(self, store: ObjectStore, copy: ObjectCopy) -> None:
        self.name = copy.url
        self.generation: str | None = copy.saved.generation
        self._store, self._copy = store, copy
        self._indices: dict[int, list[StoredObject]] = {}

    def manifest(self) -> bytes | None:
        """The manifest, as it is found there."""
        try:
            return read_object_manifest(self._store, self._copy)
        except DamagedError:
            return None

    def record(self) -> SavedCheckpoint | None:
        """The commit record, as it would be in the run directory."""
        return replace(self._copy.saved, tier="durable")

    def read(self, number: int, part: Part, at: int, into: memoryview) -> bool:
        """Fill a buffer from a place in a part."""
        begin, done = part.start + at, 0
        try:
            if part.file not in self._indices:
                self._indices[part.file] = read_object_index(self._store, self._copy, part.file)
            for chunk in self._indices[part.file]:
                first = max(begin, chunk.start)
                size = min(begin + len(into), chunk.start + chunk.size_bytes) - first
                if size > 0:
                    data = self._store.read(f"{self._copy.place}{chunk.name}", first - chunk.start, size)
                    into[first - begin : first - begin + len(data)] = data
                    done += len(data)
        except (DamagedError, FileNotFoundError, IndexError):
            return False
        return done == len(into)

    def parts(self, generation: bytes) -> Iterator[tuple[int, Part]]:
        """None: its manifest is proved, or it is not there."""
        yield from ()


def find_local_inventory(run_id: str, local: str | None, shm: Path = SHM) -> list[InventoryEntry]:
    """What can be read from this machine of what nodes keep: their memory here, and disks that are mounted.

    `local` is the job's checkpoint.local.
    """
    entries = list[InventoryEntry]()
    for folder in find_arenas(shm, run_id):
        arena = Arena(folder)
        entries += arena.holdings(folder.name)
        entries += list_spare_replicas(arena.files, folder.name)
        entries += [replace(entry, node=folder.name) for entry in list_parity_entries(arena.files)]
    if local is not None:
        try:
            nodes = LocalTier(local, run_id, "").nodes()
        except SiteError:  # a variable that only the nodes have
            return entries
        for node in nodes:
            entries += LocalTier(local, run_id, node).holdings()
    return entries


def rebuild_parts_locally(
    holdings: Sequence[InventoryEntry], save: Path, generation: str, folder: Path
) -> list[InventoryEntry]:
    """Parts of a generation that parity makes again, in files of a folder.

    It is made from what of these holdings, and of the files of the save itself, proves whole.
    """
    own = [replace(entry, node=SHARED_NODE) for entry in holdings if entry.stamp.generation == generation]
    own = exclude_damaged_parts(own, find_damaged_parts(own, {generation}))
    made = list[InventoryEntry]()
    for stamp in {entry.stamp: None for entry in own if entry.parity is not None}:
        mine = [entry for entry in own if entry.stamp == stamp]
        members = {
            part for entry in mine if entry.parity for member in entry.parity.members for part in member.parts
        }
        files = tuple(
            HeldPart(n, str(save / data_file_name(part.file)), part.start, part) for n, part in members
        )
        there = [InventoryEntry(stamp, "durable", SHARED_NODE, files)]
        whole = exclude_damaged_parts(there, find_damaged_parts(there, {generation}))
        peers = PeerClient(PeerCredentials("", SHARED_NODE, ""), {})
        try:
            for order in plan_rebuilds(stamp, [*mine, *whole], SHARED_NODE):
                with suppress(SiteError, OSError):  # too little is left: what is missing is told anyway
                    names = ",".join(order.members[index].node for index in order.lost)
                    made.append(replace(rebuild_members(order, peers, SHARED_NODE, folder), node=names))
        finally:
            peers.close()
    return made
