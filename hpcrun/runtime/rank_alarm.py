"""What a rank tells the others that wait for it when it gives up, and how a lost one is noticed."""

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
"""Between looks at whether the ranks beside us still run."""
COLLECTIVE_VERBS = ("save", "save(wait=True)", "load", "close", "Checkpointer()", "fence", "should_stop")
"""What ranks do together: seven at most, see `Control.union`."""


@dataclass(frozen=True)
class RankAlarm:
    """What a rank tells the others that wait for it: it will not come, and why."""

    rank: int
    node: str
    words: str
    turn: int
    """What it does not come to: an earlier one it has come through, and so can the others."""

    def error(self, verb: str) -> RanksDiedError:
        """What the others raise."""
        during = f"{verb}: " if verb else ""
        error = RanksDiedError(f"{during}rank {self.rank} on {self.node}: {self.words}")
        error.raised_by = "another"
        return error

    def render(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


def parse_rank_alarm(data: bytes) -> RankAlarm:
    """As another rank has sent it."""
    return RankAlarm(**json.loads(data))


def mark_raised_on_all(error: _E) -> _E:
    """Mark an error that every rank raises at this very place: nobody has to be told of it."""
    error.raised_by = "all"
    return error


class LocalRankMonitor:
    """The processes of the other ranks of this node: one that was killed cannot say so itself."""

    def __init__(self, told: Sequence[Sequence[Any]], rank: int, node: str) -> None:
        """`told`: of each rank its node, and what `mine` says there."""
        self._looked, self._ended_ranks = time.monotonic(), set[int]()
        self._running = {
            other: ProcessId(*one)
            for other, (where, one) in enumerate(told)
            # In a container of its own a rank is not seen here, whatever its node is called.
            if where == node and other != rank and one and process.is_alive(ProcessId(*one))
        }

    @staticmethod
    def mine(pid: int) -> list[int] | None:
        """This process, for others to look at."""
        found = process.identify_process(pid)
        return None if found is None else list(found)

    def ended(self) -> int | None:
        """A rank that does not run any more, and did not at the last look; looks now and then only."""
        now = time.monotonic()
        if now - self._looked < _LIVENESS_CHECK_S:
            return None
        # What a rank has done just before its end may be on its way when that is noticed.
        missed = self.find_ended_ranks()
        found = next(iter(sorted(missed & self._ended_ranks)), None)
        self._looked, self._ended_ranks = now, missed
        return found

    def find_ended_ranks(self) -> set[int]:
        """Ranks that do not run at this moment."""
        return {rank for rank, one in self._running.items() if not process.is_alive(one)}


def report_store_failure(method: _F) -> _F:
    """A method of a control that asks a store, which is gone when the process that has it is."""

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
