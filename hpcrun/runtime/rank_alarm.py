"""Alarms between ranks: a rank that fails alerts the others, and a lost one is noticed."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from torch.distributed import DistError

from hpcrun import process
from hpcrun.errors import HpcrunError, RanksDiedError
from hpcrun.process import ProcessId

_F = TypeVar("_F", bound=Callable[..., Any])
_E = TypeVar("_E", bound=HpcrunError)
_LIVENESS_CHECK_S = 1.0
"""Between checks whether the other ranks of this node still run."""
COLLECTIVE_VERBS = ("save", "save(wait=True)", "load", "close", "Checkpointer()", "fence", "should_stop")
"""Collective calls: seven at most, see `Control.union`."""


@dataclass(frozen=True)
class RankAlarm:
    """A rank's message to the ranks that wait for it: it does not come, and why."""

    rank: int
    node: str
    words: str
    turn: int
    """The collective call that it does not complete; the ranks complete earlier ones."""

    def error(self, verb: str) -> RanksDiedError:
        """Return the error that the other ranks raise."""
        during = f"{verb}: " if verb else ""
        error = RanksDiedError(f"{during}rank {self.rank} on {self.node}: {self.words}")
        error.raised_by = "another"
        return error

    def render(self) -> bytes:
        """Return the message to send."""
        return json.dumps(asdict(self)).encode()


def parse_rank_alarm(data: bytes) -> RankAlarm:
    """Parse the message of another rank."""
    return RankAlarm(**json.loads(data))


def mark_raised_on_all(error: _E) -> _E:
    """Mark an error that every rank raises at this place, so that no alarm is sent."""
    error.raised_by = "all"
    return error


class LocalRankMonitor:
    """Watches the processes of the other ranks of this node, as a killed one sends no alarm."""

    def __init__(self, ranks: Sequence[Sequence[Any]], rank: int, node: str) -> None:
        """`told`: of each rank its node, and what `mine` says there."""
        self._looked, self._ended_ranks = time.monotonic(), set[int]()
        self._running = {
            other: ProcessId(*process_id)
            for other, (where, process_id) in enumerate(ranks)
            # A rank in a container of its own is not visible here.
            if where == node and other != rank and process_id and process.is_alive(ProcessId(*process_id))
        }

    @staticmethod
    def mine(pid: int) -> list[int] | None:
        """Return the identity of a process, for other ranks to watch."""
        process_id = process.identify_process(pid)
        return None if process_id is None else list(process_id)

    def ended(self) -> int | None:
        """Return a rank that was not running at the last two checks, or None; at most one a second."""
        now = time.monotonic()
        if now - self._looked < _LIVENESS_CHECK_S:
            return None
        # Messages that a rank sent just before its end may still be on their way.
        missed = self.find_ended_ranks()
        ended = next(iter(sorted(missed & self._ended_ranks)), None)
        self._looked, self._ended_ranks = now, missed
        return ended

    def find_ended_ranks(self) -> set[int]:
        """Return the ranks that are not running at this moment."""
        return {rank for rank, process_id in self._running.items() if not process.is_alive(process_id)}


def report_store_failure(method: _F) -> _F:
    """Decorate a method that uses a store: report that the store is gone, and which process has ended."""

    @functools.wraps(method)
    def call(self: Any, *words: Any, **options: Any) -> Any:
        try:
            return method(self, *words, **options)
        except DistError as error:
            ended = (
                sorted(self._local_rank_monitor.find_ended_ranks())
                if self._local_rank_monitor is not None
                else []
            )
            who = "".join(f"rank {rank} on {self.node}: its process has ended, " for rank in ended[:1])
            first = str(error).partition("\n")[0]
            during = f"{self.verb}: " if self.verb else ""
            raise RanksDiedError(f"{during}{who}the store of the ranks does not answer: {first}") from None

    return cast(_F, call)
