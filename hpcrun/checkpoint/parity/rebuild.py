"""Making the parts of lost nodes again, on whichever node is to have them, from what the others still hold.

What comes of it is proved like any part before it counts: a source that is damaged without knowing it is
found out by that, and left out, as long as enough others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64

from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.parity.blocks import (
    compute_part_offsets,
    map_block_range,
    rebuilt_file_name,
    write_inventory_entry,
)
from hpcrun.checkpoint.parity.erasure import (
    WINDOW_BYTES,
    BlockRead,
    NotEnoughBlocksError,
    StripeGeometry,
    rebuild_block,
)
from hpcrun.checkpoint.parity.files import AtomicFile, read_file_at
from hpcrun.checkpoint.parity.peers import PeerClient, PeerError
from hpcrun.checkpoint.part_check import verify_part
from hpcrun.checkpoint.restore_plan import SHARED_NODE, RebuildOrder
from hpcrun.checkpoint.tier import NODE_TIERS, HeldPart, InventoryEntry, SetMember
from hpcrun.files import OwnedDirectory


class _BlockSource(NamedTuple):
    """A piece that can be read: a member's block, or one of its parity blocks."""

    member: int
    parity: int | None


class _SourceLostError(Exception):
    """A source cannot be read after all."""

    def __init__(self, source: _BlockSource, why: str) -> None:
        super().__init__(why)
        self.source = source


def rebuild_members(order: RebuildOrder, peers: PeerClient, here: str, folder: Path) -> InventoryEntry:
    """Make the parts of the lost members again, in files of this node's arena: what this node holds now.

    SiteError: too little is left, or a node has failed meanwhile; DamagedError: what is left does not make up
    what was there.
    """
    parts: list[HeldPart] = []
    for index in order.lost:
        if order.members[index].parts:
            parts += _BlockRebuilder(order, index, peers, here, folder).best()
    return InventoryEntry(order.stamp, "parity", here, tuple(sorted(parts, key=lambda part: part.number)))


class _BlockRebuilder:
    """The making of one member's block."""

    def __init__(self, order: RebuildOrder, index: int, peers: PeerClient, here: str, folder: Path) -> None:
        self._order, self._index, self._member = order, index, order.members[index]
        self._peers, self._here = peers, here
        self._files, self._name = OwnedDirectory.at(folder), rebuilt_file_name(order.stamp.generation, index)
        self._geometry = StripeGeometry(tuple(member.size_bytes for member in order.members), order.parity)
        self._survivors = {survivor.index: survivor for survivor in order.survivors}
        self._parts = {part.number: part for survivor in order.survivors for part in survivor.parts}
        self._used: dict[_BlockSource, None] = {}

    def best(self) -> tuple[HeldPart, ...]:
        """The member's parts, made from whichever sources prove good."""
        try:
            return self.make(frozenset())
        except DamagedError as error:
            first = error
        # One of the sources is not what it should be: those first that are known not to be, then each.
        bad = {source: why for source in list(self._used) if (why := self._check_parity_hash(source))}
        for source in [*bad, *(used for used in self._used if used not in bad)]:
            try:
                return self.make(frozenset({source}))
            except (NotEnoughBlocksError, DamagedError):
                continue
        message = "; ".join([f"{self._member.node}: cannot be made again: {first}", *bad.values()])
        raise DamagedError(message)

    def _check_parity_hash(self, source: _BlockSource) -> str:
        """What a source's own hash says against it; only parity has one for the whole."""
        if source.parity is None:
            return ""
        survivor, size, digest = self._survivors[source.member], self._geometry.chunk_bytes, xxh3_64()
        buffer = memoryview(bytearray(min(WINDOW_BYTES, size)))
        try:
            for at in range(0, size, WINDOW_BYTES):
                self._fetch(BlockRead(source.member, source.parity, at, buffer[: size - at]))
                digest.update(buffer[: size - at])
        except _SourceLostError as gone:
            return str(gone)
        if digest.hexdigest() == survivor.hashes[source.parity]:
            return ""
        return f"{survivor.node}: parity block {source.parity} in {survivor.path} does not match its hash"

    def make(self, without: frozenset[_BlockSource]) -> tuple[HeldPart, ...]:
        """Make and prove it; sources that turn out to be gone are done without as well."""
        whys: list[str] = []
        while True:
            try:
                return self._make(without)
            except _SourceLostError as gone:
                without |= {gone.source}
                whys.append(str(gone))
            except NotEnoughBlocksError as lack:
                raise NotEnoughBlocksError(
                    "; ".join([f"{self._member.node}: cannot be made again: {lack}", *whys])
                ) from None

    def _make(self, without: frozenset[_BlockSource]) -> tuple[HeldPart, ...]:
        geometry, member = self._geometry, self._member
        whole = [index for index in self._survivors if _BlockSource(index, None) not in without]
        kept = {
            index: [number for number in range(geometry.parity) if _BlockSource(index, number) not in without]
            for index in self._survivors
        }
        with (
            ThreadPoolExecutor(geometry.data, thread_name_prefix="rebuild") as pool,
            AtomicFile(self._files, self._name, member.size_bytes) as file,
        ):

            def fetch(reads: Sequence[BlockRead]) -> Callable[[], None]:
                return partial(_await_futures, [pool.submit(self._fetch, read) for read in reads])

            def put(chunk: int, at: int, data: memoryview) -> None:
                file.write(chunk * geometry.chunk_bytes + at, data)

            rebuild_block(geometry, self._index, whole, kept, fetch, put)
            for part in _member_parts(member, str(file.aside)):
                verify_part(part, bytes.fromhex(self._order.stamp.generation))
            file.put_in_place()
        made = _member_parts(member, str(file.path))
        write_inventory_entry(
            self._files, self._name, InventoryEntry(self._order.stamp, "parity", self._here, made)
        )
        return made

    def _fetch(self, read: BlockRead) -> None:
        source = _BlockSource(read.member, read.parity)
        self._used[source] = None
        try:
            if read.parity is not None:
                survivor = self._survivors[read.member]
                begin = read.parity * self._geometry.chunk_bytes + read.at
                request = {"do": "parity", "number": read.parity, "at": read.at}
                self._read(survivor.node, survivor.path, begin, request, read.into)
                return
            read.into[:] = bytes(len(read.into))
            for span in map_block_range(self._order.members[read.member], read.at, len(read.into)):
                part = self._parts[span.number]
                request = {"do": "part", "number": span.number, "at": span.at}
                into = read.into[span.begin : span.begin + span.size]
                shared = part.tier not in NODE_TIERS
                self._read(part.node, part.path, part.at + span.at, request, into, shared=shared)
        except (PeerError, OSError) as error:
            raise _SourceLostError(source, str(error)) from None

    def _read(
        self,
        node: str,
        path: str,
        begin: int,
        request: dict[str, object],
        into: memoryview,
        *,
        shared: bool = False,
    ) -> None:
        """From a file that is seen here, or from another node."""
        if node in (self._here, SHARED_NODE):
            read_file_at(path, begin, into, shared=shared)
        else:
            self._peers.read(node, request | {"generation": self._order.stamp.generation}, into)


def _await_futures(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


def _member_parts(member: SetMember, path: str) -> tuple[HeldPart, ...]:
    at = compute_part_offsets(member)
    return tuple(HeldPart(number, path, at[number], part) for number, part in member.parts)
