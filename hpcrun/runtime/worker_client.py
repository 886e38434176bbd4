"""What a rank and the checkpoint worker of its node say to each other: lines of JSON over a Unix socket."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any, Protocol

from hpcrun.errors import SiteError
from hpcrun.messages.lines import parse_json_line

_ANSWER_KINDS = {"reserved", "refused", "planned", "claimed", "busy", "error"}
"""What comes because it was asked for; all else is news."""
_ANSWER_S, _RESERVE_S = 60.0, 600.0
"""Memory is filled when it is reserved, which takes a while."""
_HEARTBEAT_EVERY_S, WORKER_STUCK_S = 2.0, 30.0
"""A worker that has been quiet is asked for a sign of life, and given up when none comes."""
_MAX_LINE_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")


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
        self._read = bytearray()
        self._news: list[dict[str, Any]] = []
        self._heard, self._heartbeat_requested = time.monotonic(), 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _connect(self._socket, path)
            told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError as error:
            self._socket.close()
            raise WorkerGoneError(f"{path}: no checkpoint worker listens: {error.strerror}") from None
        if (uid := _CREDENTIALS.unpack(told)[1]) != os.getuid():
            self._socket.close()
            raise WorkerGoneError(f"{path}: the worker there is user {uid}'s; remove that socket")
        try:
            self._await_first_answer(sign_s)
        except WorkerGoneError:
            self._socket.close()
            raise

    def reserve(
        self, size_bytes: int, slots: int, local_ranks: list[int], part_count: int
    ) -> tuple[list[Path], list[str]]:
        """Memory for parts of this size, and the levels below it; SiteError where the node has no memory."""
        words: dict[str, Any] = {"size_bytes": size_bytes, "slots": slots, "ranks": local_ranks}
        answer = self._ask("reserve", _RESERVE_S, **words, part_count=part_count)
        if answer["kind"] != "reserved":
            raise SiteError(f"no memory for saves on this node: {_refusal_reason(answer)}")
        return [Path(one) for one in answer["slots"]], list(answer["levels"])

    def plan(self, key: int, pieces: list[Any], file: int, start: int) -> None:
        """Tell what a filled slot will hold, and where that belongs in the run directory."""
        answer = self._ask("plan", _ANSWER_S, key=key, pieces=pieces, file=file, start=start)
        if answer["kind"] != "planned":
            raise SiteError(f"the checkpoint worker refuses a plan: {_refusal_reason(answer)}")

    def claim(
        self, generation: str, step: int, published: str | None, answer_s: float | None = None
    ) -> int | str:
        """The slot for a generation; a text where none is free for now."""
        answer = self._ask(
            "claim", answer_s or _ANSWER_S, generation=generation, step=step, published=published
        )
        if answer["kind"] == "busy":
            return _refusal_reason(answer)
        if answer["kind"] != "claimed":
            raise SiteError(f"the checkpoint worker gives no slot: {_refusal_reason(answer)}")
        return int(answer["slot"])

    def filled(self, slot: int, key: int, stamp: dict[str, Any], levels: list[str]) -> None:
        """A slot holds all bytes of this rank's part of a generation."""
        self._send("filled", slot=slot, key=key, stamp=stamp, levels=levels)

    def lost(self, stamp: dict[str, Any], why: str) -> None:
        """A slot that was claimed will not be filled, and this rank has no part of that generation."""
        self._send("lost", stamp=stamp, why=why)

    def degrade(self) -> None:
        """Let older generations go no further than they have come."""
        self._send("degrade")

    def hasten(self) -> None:
        """Somebody waits for what was filled: the worker need not spare training now."""
        self._send("hasten")

    def _await_first_answer(self, sign_s: float) -> None:
        """Hear whether the worker lives: one that is stopped is connected to all the same."""
        self._send("ping")
        before = self._heard
        self._receive(sign_s)
        if self._heard == before:
            raise WorkerGoneError(f"{self._path}: the checkpoint worker gives no sign of life")

    def prod(self) -> None:
        """Ask for a sign of life, now and then; WorkerGoneError where none has come for too long."""
        now = time.monotonic()
        if self._heartbeat_requested < self._heard:
            if now - self._heard > _HEARTBEAT_EVERY_S:
                self._heartbeat_requested = now
                self._send("ping")
        elif now - self._heartbeat_requested > WORKER_STUCK_S:
            raise WorkerGoneError(
                f"{self._path}: the checkpoint worker gives no sign of life for {WORKER_STUCK_S:g} s"
            )

    def news(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """What the worker has told unasked since the last time; WorkerGoneError when it is gone."""
        if not self._news:
            self._receive(wait_s)
        else:
            self._receive(0.0)
        told, self._news = self._news, []
        return told

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _ask(self, verb: str, wait_s: float, **words: Any) -> dict[str, Any]:
        self._send(verb, **words)
        deadline = time.monotonic() + wait_s
        while True:
            answer = self._receive(max(0.0, deadline - time.monotonic()), for_answer=True)
            if answer is not None:
                return answer
            if time.monotonic() >= deadline:
                raise WorkerGoneError(f"{self._path}: the checkpoint worker gave no answer in {wait_s:g} s")

    def _send(self, verb: str, **words: Any) -> None:
        line = json.dumps({"do": verb, "rank": self._rank, **words}, separators=(",", ":")) + "\n"
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.sendall(line.encode())
        except OSError as error:
            raise WorkerGoneError(
                f"{self._path}: the checkpoint worker has ended ({error.strerror or error})"
            ) from None

    def _receive(self, wait_s: float, *, for_answer: bool = False) -> dict[str, Any] | None:
        """Take in what is there, waiting for the first of it; an answer, where one is waited for."""
        while True:
            ready, _, _ = select.select([self._socket], [], [], wait_s)
            if not ready:
                return None
            try:
                data = self._socket.recv(_MAX_LINE_BYTES)
            except OSError:
                data = b""
            if not data:
                raise WorkerGoneError(f"{self._path}: the checkpoint worker has ended")
            self._heard = time.monotonic()
            self._read += data
            *lines, rest = self._read.split(b"\n")
            self._read = bytearray(rest)
            found: dict[str, Any] | None = None
            for line in lines:
                told = parse_json_line(bytes(line))
                if told is None:
                    continue
                if told.get("kind") in _ANSWER_KINDS:
                    found = told
                else:
                    self._news.append(told)
            if for_answer:
                return found
            wait_s = 0.0


def _refusal_reason(answer: dict[str, Any]) -> str:
    return str(answer.get("why") or answer.get("text") or "it does not say why")


def _connect(ours: socket.socket, path: Path) -> None:
    """Connect through a descriptor of the directory: the name of a socket may have 107 bytes only."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ours.settimeout(_ANSWER_S)
        ours.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
