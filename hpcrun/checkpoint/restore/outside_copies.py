"""Copies of a run's generations outside of its directory: on nodes' own disks and in memory, in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcrun.checkpoint.flush.arena import SHM, Arena, folders_of
from hpcrun.checkpoint.flush.local_tier import LocalStation
from hpcrun.checkpoint.flush.spare_replicas import guest_holdings
from hpcrun.checkpoint.format import DamagedError, Part, file_name
from hpcrun.checkpoint.levels import HeldPart, Holding
from hpcrun.checkpoint.objects.catalogue import ObjectCopy, StoredObject, read_index, read_manifest
from hpcrun.checkpoint.objects.store import Store
from hpcrun.checkpoint.parity.blocks import parity_holdings
from hpcrun.checkpoint.parity.peers import Credentials, Peers
from hpcrun.checkpoint.parity.rebuild import rebuild_members
from hpcrun.checkpoint.part_check import damages_in, without
from hpcrun.checkpoint.restore.decide import rebuilds_of
from hpcrun.checkpoint.restore_plan import SHARED
from hpcrun.errors import SiteError
from hpcrun.specs.saves import Saved


class StoredCopy:
    """A generation in an object store, of which only what is missing elsewhere is fetched."""

    def __init__(self, store: Store, copy: ObjectCopy) -> None:
        self.name = copy.url
        self.generation: str | None = copy.saved.generation
        self._store, self._copy = store, copy
        self._indices: dict[int, list[StoredObject]] = {}

    def manifest(self) -> bytes | None:
        """The manifest, as it is found there."""
        try:
            return read_manifest(self._store, self._copy)
        except DamagedError:
            return None

    def record(self) -> Saved | None:
        """The commit record, as it would be in the run directory."""
        return replace(self._copy.saved, level="durable")

    def read(self, number: int, part: Part, at: int, into: memoryview) -> bool:
        """Fill a buffer from a place in a part."""
        begin, done = part.start + at, 0
        try:
            if part.file not in self._indices:
                self._indices[part.file] = read_index(self._store, self._copy, part.file)
            for one in self._indices[part.file]:
                first = max(begin, one.start)
                size = min(begin + len(into), one.start + one.size_bytes) - first
                if size > 0:
                    data = self._store.read(f"{self._copy.place}{one.name}", first - one.start, size)
                    into[first - begin : first - begin + len(data)] = data
                    done += len(data)
        except (DamagedError, FileNotFoundError, IndexError):
            return False
        return done == len(into)

    def parts(self, generation: bytes) -> Iterator[tuple[int, Part]]:
        """None: its manifest is proved, or it is not there."""
        yield from ()


def holdings_here(run_id: str, local: str | None, shm: Path = SHM) -> list[Holding]:
    """What can be read from this machine of what nodes keep: their memory here, and disks that are mounted.

    `local` is the job's checkpoint.local.
    """
    found = list[Holding]()
    for folder in folders_of(shm, run_id):
        arena = Arena(folder)
        found += arena.holdings(folder.name)
        found += guest_holdings(arena.files, folder.name)
        found += [replace(one, node=folder.name) for one in parity_holdings(arena.files)]
    if local is not None:
        try:
            nodes = LocalStation(local, run_id, "").nodes()
        except SiteError:  # a variable that only the nodes have
            return found
        for node in nodes:
            found += LocalStation(local, run_id, node).holdings()
    return found


def rebuilt_here(holdings: Sequence[Holding], save: Path, generation: str, folder: Path) -> list[Holding]:
    """Parts of a generation that parity makes again, in files of a folder.

    It is made from what of these holdings, and of the files of the save itself, proves whole.
    """
    own = [replace(one, node=SHARED) for one in holdings if one.stamp.generation == generation]
    own = without(own, damages_in(own, {generation}))
    made = list[Holding]()
    for stamp in {one.stamp: None for one in own if one.parity is not None}:
        mine = [one for one in own if one.stamp == stamp]
        members = {
            part for one in mine if one.parity for member in one.parity.members for part in member.parts
        }
        files = tuple(HeldPart(n, str(save / file_name(part.file)), part.start, part) for n, part in members)
        there = [Holding(stamp, "durable", SHARED, files)]
        whole = without(there, damages_in(there, {generation}))
        peers = Peers(Credentials("", SHARED, ""), {})
        try:
            for order in rebuilds_of(stamp, [*mine, *whole], SHARED):
                with suppress(SiteError, OSError):  # too little is left: what is missing is told anyway
                    names = ",".join(order.members[index].node for index in order.lost)
                    made.append(replace(rebuild_members(order, peers, SHARED, folder), node=names))
        finally:
            peers.close()
    return made
