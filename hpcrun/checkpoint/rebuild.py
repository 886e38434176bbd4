"""Making the parts of a lost node again, on whichever node is to have them, from what the others still hold.

What comes of it is proved like any part before it counts: a source that is damaged without knowing it is
found out by that, and left out, as long as enough others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hpcrun.checkpoint.blocks import geometry_of, places, rebuilt_path, spans, write_holding
from hpcrun.checkpoint.erasure import Geometry, Lack, Wanted, rebuild
from hpcrun.checkpoint.files import AsideFile, read_at
from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.levels import LEVELS, HeldParity, HeldPart, Holding, Member, Stamp
from hpcrun.checkpoint.peers import PeerError, Peers
from hpcrun.checkpoint.prove import prove_part
from hpcrun.errors import SiteError


class _Source(NamedTuple):
    """A piece that can be read: a member's block, or one of its parity blocks."""

    member: int
    parity: int | None


class _GoneError(Exception):
    """A source cannot be read after all."""

    def __init__(self, source: _Source, why: str) -> None:
        super().__init__(why)
        self.source = source


@dataclass(frozen=True)
class _Left:
    """What is left of a set of a generation."""

    stamp: Stamp
    members: tuple[Member, ...]
    parity: dict[int, tuple[str, HeldParity]]
    """By member: the node that has its parity blocks now."""
    parts: dict[int, tuple[str, HeldPart]]
    """By number: a node that has the part."""
    geometry: Geometry


def rebuild_member(lost: str, holdings: Sequence[Holding], peers: Peers, here: str, folder: Path) -> Holding:
    """Make the parts again that node `lost` had put into its set, in a file of this node's arena.

    `holdings` are those of one generation that are left on any node. SiteError: too few of them, or a node
    has failed meanwhile; DamagedError: what is left does not make up what was there.
    """
    left = _take_stock(lost, holdings)
    index = [member.node for member in left.members].index(lost)
    again = _Again(left, index, peers, here, folder)
    try:
        return again.make(frozenset())
    except DamagedError as error:
        first = error
    # One of the sources is not what it should be, and does not know: try without each of them.
    for source in list(again.used):
        try:
            return again.make(frozenset({source}))
        except (Lack, DamagedError):
            continue
    raise DamagedError(f"{lost}: cannot be made again, as what is left of its set is damaged: {first}")


def _take_stock(lost: str, holdings: Sequence[Holding]) -> _Left:
    """What can be used; SiteError where the holdings do not speak of one set with this node."""
    with_parity = [one for one in holdings if one.parity and lost in [m.node for m in one.parity.members]]
    if not with_parity:
        raise SiteError(f"{lost}: no node that is left holds parity of a set in which it was")
    first = with_parity[0].parity
    assert first is not None
    stamp = with_parity[0].stamp
    if any(one.stamp != stamp for one in holdings):
        raise SiteError(f"{lost}: these are holdings of several generations; name those of one")
    parity = {
        one.parity.index: (one.node, one.parity)
        for one in with_parity
        if one.parity and (one.parity.members, one.parity.parity) == (first.members, first.parity)
    }
    wanted = {number: part for member in first.members for number, part in member.parts}
    parts: dict[int, tuple[str, HeldPart]] = {}
    for holding in sorted(holdings, key=lambda one: LEVELS.index(one.level)):
        for held in holding.parts:
            if wanted.get(held.number) == held.part:
                parts.setdefault(held.number, (holding.node, held))
    return _Left(stamp, first.members, parity, parts, geometry_of(first))


class _Again:
    """The making of one member's block."""

    def __init__(self, left: _Left, index: int, peers: Peers, here: str, folder: Path) -> None:
        self._left, self._index, self._peers, self._here = left, index, peers, here
        self._path = rebuilt_path(folder, left.stamp.generation, index)
        self.used: dict[_Source, None] = {}

    def make(self, without: frozenset[_Source]) -> Holding:
        """Make and prove it; sources that turn out to be gone are done without as well."""
        whys: list[str] = []
        while True:
            try:
                return self._make(without)
            except _GoneError as gone:
                without |= {gone.source}
                whys.append(str(gone))
            except Lack as lack:
                node = self._left.members[self._index].node
                raise Lack("; ".join([f"{node}: cannot be made again: {lack}", *whys])) from None

    def _make(self, without: frozenset[_Source]) -> Holding:
        left, member = self._left, self._left.members[self._index]
        whole = [
            number
            for number, one in enumerate(left.members)
            if number != self._index
            and _Source(number, None) not in without
            and all(part in left.parts for part, _ in one.parts)
        ]
        kept = {
            number: [p for p in range(left.geometry.parity) if _Source(number, p) not in without]
            for number in left.parity
        }
        size = left.geometry.chunk_bytes
        with (
            ThreadPoolExecutor(left.geometry.data, thread_name_prefix="rebuild") as pool,
            AsideFile(self._path, member.size_bytes) as file,
        ):

            def fetch(wanted: Sequence[Wanted]) -> Callable[[], None]:
                futures = [pool.submit(partial(self._fetch, one)) for one in wanted]
                return partial(_wait, futures)

            def put(chunk: int, at: int, data: memoryview) -> None:
                file.write(chunk * size + at, data)

            rebuild(left.geometry, self._index, whole, kept, fetch, put)
            held = _parts_in(member, str(file.aside))
            for one in held:
                prove_part(one, bytes.fromhex(left.stamp.generation))
            file.put_in_place()
        made = Holding(left.stamp, "parity", self._here, _parts_in(member, str(self._path)))
        write_holding(self._path, made)
        return made

    def _fetch(self, wanted: Wanted) -> None:
        source = _Source(wanted.member, wanted.parity)
        self.used[source] = None
        try:
            if wanted.parity is not None:
                node, held = self._left.parity[wanted.member]
                begin = wanted.parity * self._left.geometry.chunk_bytes + wanted.at
                request = {"do": "parity", "number": wanted.parity, "at": wanted.at}
                self._read(node, held.path, begin, request, wanted.into)
                return
            wanted.into[:] = bytes(len(wanted.into))
            for span in spans(self._left.members[wanted.member], wanted.at, len(wanted.into)):
                node, part = self._left.parts[span.number]
                request = {"do": "part", "number": span.number, "at": span.at}
                into = wanted.into[span.begin : span.begin + span.size]
                self._read(node, part.path, part.at + span.at, request, into)
        except (PeerError, OSError) as error:
            raise _GoneError(source, str(error)) from None

    def _read(self, node: str, path: str, begin: int, request: dict[str, object], into: memoryview) -> None:
        """From this node's own file, or from another node."""
        if node == self._here:
            read_at(path, begin, into)
        else:
            self._peers.read(node, request | {"generation": self._left.stamp.generation}, into)


def _wait(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


def _parts_in(member: Member, path: str) -> tuple[HeldPart, ...]:
    at = places(member)
    return tuple(HeldPart(number, path, at[number], part) for number, part in member.parts)
