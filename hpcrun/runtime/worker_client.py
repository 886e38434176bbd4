"""What a rank and the checkpoint worker of its node say to each other: lines of JSON over a Unix socket."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpcrun.checkpoint import worker_messages as wire
from hpcrun.checkpoint.tier import CheckpointId, TierName
from hpcrun.errors import SiteError
from hpcrun.messages.lines import MessageStream, VersionMismatchError, connect_unix_socket
from hpcrun.messages.listeners import peer_user
from hpcrun.typed_json import WrongValue

_ANSWER_S, _RESERVE_S = 60.0, 600.0
"""Memory is filled when it is reserved, which takes a while."""
_HEARTBEAT_EVERY_S, WORKER_STUCK_S = 2.0, 30.0
"""A worker that has been quiet is asked for a sign of life, and given up when none comes."""
_A = TypeVar("_A", bound=wire.RankAnswer)


class WorkerGoneError(SiteError):
    """Nobody answers at the socket of the checkpoint worker, or not any more."""


class WorkerEndpoint(Protocol):
    """Where the checkpoint worker of this node listens, whoever has started it."""

    patience_s: float
    """How long one may take to be there."""

    def socket(self) -> Path:
        """The path of its socket; a worker of our own that has ended is started again."""

    def close(self) -> None:
        """Nobody here needs it any more."""


class RankWorkerClient:
    """One rank's connection to its checkpoint worker; one thread's at a time."""

    def __init__(self, path: Path, rank: int, sign_s: float = WORKER_STUCK_S) -> None:
        """WorkerGoneError where no worker of this user listens, or one that gives no sign of life."""
        self._path, self._rank = path, rank
        self._news: list[wire.RankNews] = []
        self._answers: list[wire.RankAnswer] = []
        self._heard, self._heartbeat_requested = time.monotonic(), 0.0
        try:
            self._socket = connect_unix_socket(path.parent, path.name, _ANSWER_S)
        except OSError as error:
            raise WorkerGoneError(f"{path}: no checkpoint worker listens: {error.strerror}") from None
        try:
            if (uid := peer_user(self._socket)) != os.getuid():
                raise WorkerGoneError(f"{path}: the worker there is user {uid}'s; remove that socket")
            number = self._socket.fileno()
            self._stream = MessageStream(
                number, number, wire.RANK_MESSAGES, ours=f"rank {rank}", theirs="the checkpoint worker"
            )
            self._await_first_answer(sign_s)
        except SiteError:
            self._socket.close()
            raise

    def reserve(
        self, size_bytes: int, slots: int, local_ranks: list[int]
    ) -> tuple[list[Path], list[TierName]]:
        """Memory for parts of this size, and the tiers below it; SiteError where the node has no memory."""
        answer = self._ask(wire.ReserveSlots(self._rank, size_bytes, slots, tuple(local_ranks)), _RESERVE_S)
        reserved = _expect(wire.SlotsReserved, answer, "no memory for saves on this node")
        return [Path(path) for path in reserved.slots], list(reserved.tiers)

    def plan(self, key: int, pieces: Sequence[Any], file: int, start: int) -> None:
        """Tell what a filled slot will hold, and where that belongs in the run directory."""
        answer = self._ask(wire.PlanSlot(self._rank, key, tuple(pieces), file, start), _ANSWER_S)
        _expect(wire.SlotPlanned, answer, "the checkpoint worker refuses a plan")

    def claim(self, generation: str, published: str | None, answer_s: float | None = None) -> int | str:
        """The slot for a generation; a text where none is free for now."""
        answer = self._ask(wire.ClaimSlot(self._rank, generation, published), answer_s or _ANSWER_S)
        if isinstance(answer, wire.SlotsBusy):
            return answer.why
        return _expect(wire.SlotClaimed, answer, "the checkpoint worker gives no slot").slot

    def filled(self, slot: int, key: int, stamp: CheckpointId, tiers: list[TierName]) -> None:
        """A slot holds all bytes of this rank's part of a generation."""
        self._send(wire.SlotFilled(self._rank, slot, key, stamp, tuple(tiers)))

    def lost(self, stamp: CheckpointId, why: str) -> None:
        """A slot that was claimed will not be filled, and this rank has no part of that generation."""
        self._send(wire.SlotLost(self._rank, stamp, why))

    def degrade(self) -> None:
        """Let older generations go no further than they have come."""
        self._send(wire.DegradeSaves(self._rank))

    def hasten(self) -> None:
        """Somebody waits for what was filled: the worker need not spare training now."""
        self._send(wire.HastenFlush(self._rank))

    def _await_first_answer(self, sign_s: float) -> None:
        """Hear whether the worker lives: one that is stopped is connected to all the same."""
        self._send(wire.PingFromRank(self._rank))
        before, deadline = self._heard, time.monotonic() + sign_s
        while self._heard == before and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        if self._heard == before:
            raise WorkerGoneError(f"{self._path}: the checkpoint worker gives no sign of life")

    def prod(self) -> None:
        """Ask for a sign of life, now and then; WorkerGoneError where none has come for too long."""
        now = time.monotonic()
        if self._heartbeat_requested < self._heard:
            if now - self._heard > _HEARTBEAT_EVERY_S:
                self._heartbeat_requested = now
                self._send(wire.PingFromRank(self._rank))
        elif now - self._heartbeat_requested > WORKER_STUCK_S:
            raise WorkerGoneError(
                f"{self._path}: the checkpoint worker gives no sign of life for {WORKER_STUCK_S:g} s"
            )

    def news(self, wait_s: float = 0.0) -> list[wire.RankNews]:
        """What the worker has told unasked since the last time; WorkerGoneError when it is gone."""
        self._receive(0.0 if self._news else wait_s)
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _ask(self, request: wire.AnyRankRequest, wait_s: float) -> wire.RankAnswer:
        self._answers.clear()
        self._send(request)
        deadline = time.monotonic() + wait_s
        while True:
            self._receive(max(0.0, deadline - time.monotonic()))
            if self._answers:
                return self._answers[-1]
            if time.monotonic() >= deadline:
                raise WorkerGoneError(f"{self._path}: the checkpoint worker gave no answer in {wait_s:g} s")

    def _send(self, request: wire.AnyRankRequest) -> None:
        self._stream.send(request)
        self._stream.flush_all(_ANSWER_S)
        if self._stream.is_broken or self._stream.has_pending_output:
            raise WorkerGoneError(f"{self._path}: the checkpoint worker has ended")

    def _receive(self, wait_s: float) -> None:
        """Take in what is there, waiting for the first of it."""
        if not select.select([self._socket], [], [], wait_s)[0]:
            return
        try:
            messages = self._stream.receive()
        except VersionMismatchError as error:
            raise WorkerGoneError(f"{self._path}: {error}") from error
        if messages:
            self._heard = time.monotonic()
        for message in messages:
            if isinstance(message, wire.RankAnswer):
                self._answers.append(message)
            elif not isinstance(message, WrongValue):
                self._news.append(message)
        if self._stream.is_closed and not messages:
            why = f": {self._stream.why}" if self._stream.why else ""
            raise WorkerGoneError(f"{self._path}: the checkpoint worker has ended{why}")


def _expect(kind: type[_A], answer: wire.RankAnswer, problem: str) -> _A:
    """The answer that was asked for; SiteError with the worker's reason where it is another."""
    if isinstance(answer, kind):
        return answer
    why = answer.why if isinstance(answer, wire.RequestRefused | wire.SlotsBusy) else "it does not say why"
    raise SiteError(f"{problem}: {why}")
