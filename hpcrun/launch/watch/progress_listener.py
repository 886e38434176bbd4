"""The node's end of the progress socket: hears its ranks, and knows which process each one is."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass

from hpcrun.launch.attempt_events import RankProgress
from hpcrun.launch.watch.progress import MAX_PROGRESS_BYTES, ProgressMessage
from hpcrun.messages.lines import parse_json_line
from hpcrun.messages.listeners import accept_own_user
from hpcrun.process import ProcessHandle, identify_process
from hpcrun.typed_json import WrongValue, parse_typed

_BACKLOG = 1024
_MAX_MESSAGES = 4096
"""Messages that are read from one rank at a time."""


@dataclass
class _ProgressConnection:
    """A process that has connected."""

    connection: socket.socket
    handle: ProcessHandle
    rank: int | None = None
    dumps: bool = False
    has_ended: bool = False


class ProgressListener:
    """Hears the ranks of this node; what strangers and other users send is not taken."""

    def __init__(self, name: str, ranks: Collection[int]) -> None:
        self._expected = frozenset(ranks)
        self._node = os.uname().nodename
        self._speakers: list[_ProgressConnection] = []
        self._socket: socket.socket | None = None
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        opened.setblocking(False)
        try:
            opened.bind(f"\0{name}")
            opened.listen(_BACKLOG)
        except OSError:  # somebody has the name: the ranks are watched as processes alone
            opened.close()
        else:
            self._socket = opened

    def hear(self) -> list[RankProgress]:
        """The newest of every rank since the last call; how long sections took is gathered from all."""
        self._accept()
        newest: dict[int, RankProgress] = {}
        for speaker in [candidate for candidate in self._speakers if not candidate.has_ended]:
            for progress in self._read(speaker):
                newest[progress.rank] = (
                    progress
                    if progress.rank not in newest
                    else _merge_progress(newest[progress.rank], progress)
                )
        self._let_go()
        return list(newest.values())

    def dumpable(self) -> dict[int, ProcessHandle]:
        """The processes of ranks that write their stacks on a signal."""
        return {
            speaker.rank: speaker.handle
            for speaker in self._speakers
            if speaker.rank is not None and speaker.dumps
        }

    def close(self) -> None:
        """Hear nobody any more."""
        for speaker in self._speakers:
            speaker.connection.close()
            speaker.handle.close()
        self._speakers = []
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _accept(self) -> None:
        if self._socket is None:
            return
        for connection, pid in accept_own_user(self._socket):
            who = identify_process(pid)
            if who is None:
                connection.close()
            else:
                self._speakers.append(_ProgressConnection(connection, ProcessHandle(who)))

    def _read(self, speaker: _ProgressConnection) -> list[RankProgress]:
        reports = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_MESSAGES):
                try:
                    data = speaker.connection.recv(MAX_PROGRESS_BYTES)
                except ConnectionError:
                    data = b""
                if not data:
                    speaker.has_ended = True
                    break
                progress = self._parse(speaker, data)
                if progress is not None:
                    reports.append(progress)
        return reports

    def _let_go(self) -> None:
        """Of those that have hung up; a rank that still runs can be made to write its stacks."""
        for speaker in [speaker for speaker in self._speakers if speaker.has_ended]:
            if speaker.rank is None or not speaker.dumps or not speaker.handle.is_alive():
                speaker.connection.close()
                speaker.handle.close()
                self._speakers.remove(speaker)

    def _parse(self, speaker: _ProgressConnection, data: bytes) -> RankProgress | None:
        """The message, where it is one of a rank that belongs here."""
        try:
            message = parse_typed(ProgressMessage, parse_json_line(data))
        except WrongValue:
            return None
        if message.rank not in self._expected:
            return None
        speaker.rank, speaker.dumps = message.rank, message.can_dump
        probes = [] if message.probe_s is None else [message.probe_s]
        return RankProgress(
            message.rank, self._node, message.section, message.step, message.longest_s, probes
        )


def _merge_progress(first: RankProgress, second: RankProgress) -> RankProgress:
    """Where the second says the rank is, with the times of both."""
    longest = {
        name: max(first.longest_s.get(name, 0.0), second.longest_s.get(name, 0.0))
        for name in first.longest_s.keys() | second.longest_s.keys()
    }
    probes = first.probes_s + second.probes_s
    return RankProgress(second.rank, second.node, second.section, second.step, longest, probes)
