"""The parity tier: the nodes of an erasure set make parity of one another's parts, all of them or none.

Every member offers its block and its place in the round; each fetches what it is to encode from the others,
so that no node needs more memory than a few windows. A member goes through

    open       its block can be read
    encoded    the parities of its stripe are made, and those for others can be fetched
    done       all parity that it is to keep lies whole in its arena

and the tier has the generation when all are done. A member that has failed says so, and says it for good:
it was never done, so that nobody has taken the generation for safe, and the others let go of theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from xxhash import xxh3_64

from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.parity.blocks import (
    list_parity_entries,
    map_block_range,
    parity_file_name,
    record_file_name,
    remove_parity_files,
    remove_unfinished_parity,
    write_inventory_entry,
)
from hpcrun.checkpoint.parity.erasure import (
    WINDOW_BYTES,
    BlockRead,
    StripeGeometry,
    encode_stripe,
    erasure_code_for,
    parity_memory_bytes,
)
from hpcrun.checkpoint.parity.files import AtomicFile, read_file_at
from hpcrun.checkpoint.parity.peers import PeerClient, PeerError, PeerReply, PeerServer, check_byte_range
from hpcrun.checkpoint.tier import (
    CheckpointId,
    HeldParity,
    InventoryEntry,
    NodeShards,
    SetMember,
    TierName,
)
from hpcrun.errors import HpcrunError, SiteError
from hpcrun.files import OwnedDirectory, UntrustedFileError

RoundState = Literal["unknown", "open", "encoded", "done", "failed"]
_STATE_ORDER: tuple[RoundState, ...] = ("unknown", "open", "encoded", "done")
MEMBER_TIMEOUT_S = 60.0
"""So much later than this node another may come to a generation."""
_POLL_S = 1.0
_MAX_REMEMBERED_ROUNDS = 8
"""Rounds that others may still ask about."""

T = TypeVar("T")


class _MemberFailedError(SiteError):
    """A member has said that it will not have this generation."""


@dataclass
class _ParityRound:
    """One generation, as this node stands to it."""

    stamp: CheckpointId
    member: SetMember
    standing: RoundState = "open"
    why: str = ""
    images: dict[int, memoryview] = field(default_factory=dict)
    """Of the parts, for as long as others may read them."""
    outgoing: Path | None = None
    """Parities that others keep, one after the other."""

    def read(self, at: int, into: memoryview) -> None:
        """Bytes of our block."""
        images = self.images
        if self.standing == "failed" or not images:
            raise SiteError(self.why or "its parts are no longer kept for the others")
        into[:] = bytes(len(into))
        for span in map_block_range(self.member, at, len(into)):
            into[span.begin : span.begin + span.size] = images[span.number][span.at : span.at + span.size]


class ParityTier:
    """Keeps parity for the other nodes of this node's erasure set, and has them keep ours."""

    name: TierName = "parity"

    def __init__(
        self,
        folder: Path,
        node: str,
        members: Sequence[str],
        parity: int,
        peers: PeerClient,
        server: PeerServer,
        *,
        hurry: threading.Event | None = None,
        patience_s: float = MEMBER_TIMEOUT_S,
    ) -> None:
        """`members`: the nodes of the set in order, this one among them; `folder`: this node's arena.

        `hurry` is set when nobody is to be waited for any more. SiteError: a library is missing.
        """
        erasure_code_for(len(members) - parity, parity)
        self._node, self._members, self._parity = node, tuple(members), parity
        try:
            self._files = OwnedDirectory.at(folder)
        except UntrustedFileError as error:
            raise SiteError(str(error)) from None
        self._index = self._members.index(node)
        self._peers, self._patience_s = peers, patience_s
        self._rounds: dict[str, _ParityRound] = {}
        self._changed = threading.Condition()
        self._hurry = hurry or threading.Event()
        remove_unfinished_parity(self._files)
        server.on("standing", self._serve_standing)
        server.on("block", self._serve_block)
        server.on("outgoing", self._serve_outgoing)

    def memory_bytes(self, block_bytes: int) -> int:
        """What its files take in this node's memory at most, where all members write about so much."""
        return parity_memory_bytes(block_bytes, len(self._members), self._parity)

    def store(self, load: NodeShards) -> dict[str, Any]:
        """Make parity with the other members; SiteError or OSError: the tier does not have it."""
        begin = time.monotonic()
        parity_round = self._open(load)
        try:
            with ThreadPoolExecutor(len(self._members), thread_name_prefix="parity") as pool:
                return self._run_round(
                    parity_round,
                    _TaskGroup(pool, lambda: parity_round.standing == "failed" or self._hurry.is_set()),
                    begin,
                )
        except (HpcrunError, OSError) as error:
            self._fail(parity_round, str(error), isinstance(error, _MemberFailedError))
            raise
        finally:
            parity_round.images = {}
            if parity_round.outgoing is not None:
                self._files.unlink(parity_round.outgoing.name)

    def holdings(self) -> list[InventoryEntry]:
        """Parity that lies whole here, and parts of lost nodes that were made again here."""
        return list_parity_entries(self._files)

    def retain(self, generations: Collection[str]) -> None:
        """Let go of all but these generations, and of the one that is being made."""
        with self._changed:
            now = {
                parity_round.stamp.generation for parity_round in self._rounds.values() if parity_round.images
            }
        remove_parity_files(self._files, set(generations) | now)

    def abandon(self, stamp: CheckpointId, numbers: Sequence[int], why: str) -> None:
        """This node will not store these parts of a generation: the others need not wait for it."""
        was_done = self._find_finished_member(stamp) is not None
        with self._changed:
            if stamp.generation not in self._rounds and not was_done:
                parts = ", ".join(map(str, numbers))
                message = f"{self._node}: leaves out part {parts} of step {stamp.step}: {why}"
                self._remember(_ParityRound(stamp, SetMember(self._node, ()), "failed", message))

    def _run_round(self, parity_round: _ParityRound, together: _TaskGroup, begin: float) -> dict[str, Any]:
        answers = self._await_all(parity_round, "open", together, self._patience_s)
        members = tuple(answers[node] for node in self._members)
        geometry = StripeGeometry(tuple(member.size_bytes for member in members), self._parity)
        name = parity_file_name(parity_round.stamp.generation)
        with AtomicFile(self._files, name, self._parity * geometry.chunk_bytes) as kept:
            hashes = [xxh3_64() for _ in range(self._parity)]

            def keep(number: int, at: int, data: memoryview) -> None:
                kept.write(number * geometry.chunk_bytes + at, data)
                hashes[number].update(data)

            self._encode(parity_round, geometry, together, keep)
            if self._parity > 1:
                self._advance(parity_round, "encoded")
                self._await_all(
                    parity_round, "encoded", together, self._patience_s + 2 * (time.monotonic() - begin)
                )
                self._collect(parity_round, geometry, together, keep)
            kept.put_in_place()
        held = HeldParity(
            str(kept.path), members, self._parity, self._index, tuple(digest.hexdigest() for digest in hashes)
        )
        try:
            write_inventory_entry(
                self._files, name, InventoryEntry(parity_round.stamp, "parity", self._node, parity=held)
            )
            self._advance(parity_round, "done")
            self._await_all(parity_round, "done", together, self._patience_s + 2 * (time.monotonic() - begin))
        except _MemberFailedError:
            self._files.unlink(record_file_name(name))
            self._files.unlink(name)
            raise
        except OSError:
            if parity_round.standing != "done":
                self._files.unlink(name)
            raise
        return {
            "set": list(self._members),
            "parity": self._parity,
            "stored_bytes": self._parity * geometry.chunk_bytes,
        }

    def _encode(
        self,
        parity_round: _ParityRound,
        geometry: StripeGeometry,
        together: _TaskGroup,
        keep: Callable[[int, int, memoryview], None],
    ) -> None:
        """Make all parities of our stripe: ours is the first, the nodes that keep the others fetch them."""

        def fetch(reads: Sequence[BlockRead]) -> Callable[[], None]:
            return together.begin([partial(self._fetch_block, parity_round, each) for each in reads])

        if self._parity == 1:
            encode_stripe(geometry, self._index, fetch, keep)
            return
        name = f"parity-{parity_round.stamp.generation}.outgoing.aside"
        with AtomicFile(self._files, name, (self._parity - 1) * geometry.chunk_bytes) as outgoing:

            def put(number: int, at: int, data: memoryview) -> None:
                if number == 0:
                    keep(0, at, data)
                else:
                    outgoing.write((number - 1) * geometry.chunk_bytes + at, data)

            encode_stripe(geometry, self._index, fetch, put)
            outgoing.put_in_place()
            parity_round.outgoing = outgoing.path

    def _fetch_block(self, parity_round: _ParityRound, read: BlockRead) -> None:
        request = {"do": "block", "generation": parity_round.stamp.generation, "at": read.at}
        self._peers.read(self._members[read.member], request, read.into)

    def _collect(
        self,
        parity_round: _ParityRound,
        geometry: StripeGeometry,
        together: _TaskGroup,
        keep: Callable[[int, int, memoryview], None],
    ) -> None:
        """Fetch the parities of others' stripes that are ours to keep, from several at once."""

        def collect(number: int) -> None:
            node = self._members[geometry.kept(self._index, number)]
            buffer = memoryview(bytearray(min(WINDOW_BYTES, geometry.chunk_bytes)))
            for at in range(0, geometry.chunk_bytes, WINDOW_BYTES):
                into = buffer[: geometry.chunk_bytes - at]
                request = {
                    "do": "outgoing",
                    "generation": parity_round.stamp.generation,
                    "number": number,
                    "at": at,
                }
                self._peers.read(node, request, into)
                keep(number, at, into)

        together.begin([partial(collect, number) for number in range(1, self._parity)])()

    def _open(self, load: NodeShards) -> _ParityRound:
        stamp = load.stamp
        member = SetMember(self._node, tuple((part.number, part.part) for part in load.parts))
        parity_round = _ParityRound(stamp, member, images={part.number: part.image for part in load.parts})
        with self._changed:
            before = self._rounds.get(stamp.generation)
            if before is not None and before.standing == "failed":
                raise SiteError(before.why)
            self._remember(parity_round)
            # Older states will not come here any more; who still waits for one need not.
            self._changed.notify_all()
        return parity_round

    def _remember(self, parity_round: _ParityRound) -> None:
        self._rounds[parity_round.stamp.generation] = parity_round
        for generation in list(self._rounds)[:-_MAX_REMEMBERED_ROUNDS]:
            del self._rounds[generation]
        self._changed.notify_all()

    def _advance(self, parity_round: _ParityRound, standing: RoundState) -> None:
        with self._changed:
            parity_round.standing = standing
            self._changed.notify_all()

    def _fail(self, parity_round: _ParityRound, why: str, is_sure: bool) -> None:
        """Say so to the others; who was done is no more only where another never was."""
        with self._changed:
            if parity_round.standing != "done" or is_sure:
                parity_round.standing, parity_round.why = (
                    "failed",
                    why if self._node in why else f"{self._node}: {why}",
                )
            self._changed.notify_all()

    def _await_all(
        self, parity_round: _ParityRound, state: RoundState, together: _TaskGroup, patience_s: float
    ) -> dict[str, SetMember]:
        """What each member has put in, when all stand there; SiteError: one has failed, or is late."""
        deadline = time.monotonic() + patience_s
        others = [node for node in self._members if node != self._node]
        waits = {
            node: together.submit(partial(self._await_one, parity_round, node, state, deadline, together))
            for node in others
        }
        together.all(list(waits.values()))
        return {self._node: parity_round.member} | {node: wait.result() for node, wait in waits.items()}

    def _await_one(
        self, parity_round: _ParityRound, node: str, state: RoundState, deadline: float, together: _TaskGroup
    ) -> SetMember:
        request = {"do": "standing", "stamp": asdict(parity_round.stamp), "wanted": state}
        problem = f"{node}: has not come to step {parity_round.stamp.step}"
        while not together.is_over():
            left = deadline - time.monotonic()
            if left <= 0:
                raise SiteError(problem)
            wait_s = min(_POLL_S, left)
            try:
                answer = self._peers.ask(node, request | {"wait_s": wait_s}, wait_s)
            except PeerError as error:
                # It may come back: its worker is started anew when it dies.
                problem = str(error)
                together.pause(min(_POLL_S, max(0.0, left)))
                continue
            standing = answer.get("standing")
            if standing == "failed":
                raise _MemberFailedError(str(answer.get("why")))
            if standing == "unknown" and state != "open":
                raise _MemberFailedError(
                    f"{node}: its worker was started anew, and does not have step {parity_round.stamp.step}"
                )
            if standing in _STATE_ORDER and _STATE_ORDER.index(standing) >= _STATE_ORDER.index(state):
                try:
                    return SetMember(node, tuple((number, Part(**part)) for number, part in answer["parts"]))
                except (KeyError, TypeError, ValueError) as error:
                    raise SiteError(f"{node}: tells of parts that are none: {error}") from None
        raise SiteError(
            f"{self._node}: the attempt is over" if self._hurry.is_set() else "another member has failed"
        )

    def _serve_standing(self, request: dict[str, Any]) -> PeerReply:
        stamp, state = CheckpointId(**request["stamp"]), request["wanted"]
        place = _STATE_ORDER.index(state)

        def stands() -> _ParityRound | None:
            parity_round = self._rounds.get(stamp.generation)
            if parity_round is not None and parity_round.stamp != stamp:
                raise ValueError(f"generation {stamp.generation} is another state here")
            return (
                parity_round
                if parity_round
                and (parity_round.standing == "failed" or _STATE_ORDER.index(parity_round.standing) >= place)
                else None
            )

        with self._changed:
            self._changed.wait_for(
                lambda: stands() or self._is_past(stamp), min(float(request["wait_s"]), 10.0)
            )
            parity_round, is_past = self._rounds.get(stamp.generation), self._is_past(stamp)
            if parity_round is not None:
                return _state_reply(parity_round.standing, parity_round.why, parity_round.member)
        if (member := self._find_finished_member(stamp)) is not None:
            return _state_reply("done", "", member)
        if is_past:
            why = f"{self._node}: has gone on to a newer state than that of step {stamp.step}"
            return _state_reply("failed", why)
        return _state_reply("unknown", "")

    def _is_past(self, stamp: CheckpointId) -> bool:
        """Whether a newer state has come here already; tiers take them in order."""
        return stamp.generation not in self._rounds and any(
            (parity_round.stamp.attempt, parity_round.stamp.step) > (stamp.attempt, stamp.step)
            for parity_round in self._rounds.values()
        )

    def _find_finished_member(self, stamp: CheckpointId) -> SetMember | None:
        """What this node has put into a generation that an earlier worker of it has come to the end of."""
        for holding in self.holdings():
            if holding.stamp == stamp and holding.parity is not None:
                return holding.parity.members[holding.parity.index]
        return None

    def _serve_block(self, request: dict[str, Any]) -> PeerReply:
        parity_round = self._round(request)
        at, size = int(request["at"]), int(request["size"])
        check_byte_range(at, size, parity_round.member.size_bytes)
        return PeerReply({}, size, lambda offset, into: parity_round.read(at + offset, into))

    def _serve_outgoing(self, request: dict[str, Any]) -> PeerReply:
        parity_round = self._round(request)
        path, number = parity_round.outgoing, int(request["number"])
        if path is None or not 1 <= number < self._parity:
            raise SiteError(f"has no parity {number} for others yet")
        each = path.stat().st_size // (self._parity - 1)
        at, size = int(request["at"]), int(request["size"])
        check_byte_range(at, size, each)
        return PeerReply(
            {}, size, lambda offset, into: read_file_at(path, (number - 1) * each + at + offset, into)
        )

    def _round(self, request: dict[str, Any]) -> _ParityRound:
        with self._changed:
            parity_round = self._rounds.get(str(request["generation"]))
        if parity_round is not None and parity_round.standing == "failed":
            raise SiteError(parity_round.why)
        if parity_round is None or not parity_round.images:
            raise SiteError(f"is not storing generation {request['generation']}")
        return parity_round


def _state_reply(standing: RoundState, why: str, member: SetMember | None = None) -> PeerReply:
    parts = [[number, asdict(part)] for number, part in member.parts] if member is not None else []
    return PeerReply({"standing": standing, "why": why, "parts": parts})


class _TaskGroup:
    """Things that several threads do for one round; when one of them fails, the others soon end too."""

    def __init__(self, pool: ThreadPoolExecutor, is_failed: Callable[[], bool]) -> None:
        self._pool, self._is_failed = pool, is_failed
        self._over = threading.Event()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._pool.submit(work)

    def begin(self, works: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """Start them; what is given back waits for all. SiteError: it is over."""
        if self.is_over():
            raise SiteError("given up, as the attempt is over or another member has failed")
        futures = [self._pool.submit(work) for work in works]
        return lambda: self.all(futures)

    def all(self, futures: Sequence[Future[Any]]) -> None:
        """Wait for all; the first that failed is raised."""
        try:
            for future in as_completed(futures):
                future.result()
        except (HpcrunError, OSError):
            self._over.set()
            raise

    def is_over(self) -> bool:
        return self._over.is_set() or self._is_failed()

    def pause(self, seconds: float) -> None:
        self._over.wait(seconds)
