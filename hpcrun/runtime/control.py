"""How ranks find each other and agree: over MPI where there is one, over torch's TCPStore elsewhere.

Messages are small JSON values. Nothing here moves tensors, and waiting does not keep a core busy.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime.rank_alarm import (
    COLLECTIVE_VERBS,
    LocalRankMonitor,
    RankAlarm,
    mark_raised_on_all,
)
from hpcrun.runtime.stderr_notes import write_stderr_line

NAP_S = (0.0001, 0.0004)
"""Shortest and longest sleep between polls; a collective takes several, one rank after the other."""
REPORT_WAIT_AFTER_S = 30.0
"""Until waiting for other ranks is reported; then again after twice as long, and so on."""
_VERB_AT, _VERB_BITS = 56, 3


class Control(ABC):
    """The ranks of one attempt, as seen from one of them."""

    rank: int
    size: int
    node: str
    local_rank: int
    local_size: int
    one_node: bool
    """Whether all ranks are on one node."""
    nodes: tuple[str, ...]
    """The nodes, in the order of their first ranks."""
    verb = ""
    """The collective call that all ranks are in; empty for none."""
    is_unverified = False
    """Whether the ranks have yet to confirm that they are in the same call."""
    turn = 0
    """How many collective calls the ranks have begun since they last started over."""
    _local_rank_monitor: LocalRankMonitor | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.node = socket.gethostname()
        self._alarms: list[RankAlarm] = []

    def _find_neighbours(self) -> None:
        ranks = self.allgather([self.node, LocalRankMonitor.mine(os.getpid())])
        self._local_rank_monitor = LocalRankMonitor(ranks, self.rank, self.node)
        nodes = [node for node, _ in ranks]
        mine = [rank for rank, node in enumerate(nodes) if node == self.node]
        self.local_rank, self.local_size = mine.index(self.rank), len(mine)
        self.one_node = len(mine) == self.size
        self.nodes = tuple(dict.fromkeys(nodes))

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""

    @abstractmethod
    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags; the function returned waits for the union (bitwise or) of all ranks'."""

    def agree(self, flags: int) -> int:
        """Return the union of all ranks' flags, on every rank."""
        return self.start_agreeing(flags)()

    def union(self, bits: int) -> int:
        """Return the union of up to 56 bits of all ranks; slower than `agree` where there is no MPI."""
        if not self.is_unverified:
            return self._union(bits)
        self.is_unverified = False
        code, most = COLLECTIVE_VERBS.index(self.verb) + 1, (1 << _VERB_BITS) - 1
        # With the complement included, no two verbs make the union that one of them makes alone.
        union = self._union(bits | (code | (most & ~code) << _VERB_BITS) << _VERB_AT)
        verbs = union >> _VERB_AT
        if verbs & verbs >> _VERB_BITS & most:
            every = enumerate(self.allgather([self.verb, self.node]))
            words = ", ".join(f"rank {rank} on {node} {verb}" for rank, (verb, node) in [*every][:8])
            raise mark_raised_on_all(
                UsageError(f"ranks do not call the same: {words}; all ranks call each method alike")
            )
        return union & (1 << _VERB_AT) - 1

    def _union(self, bits: int) -> int:
        return functools.reduce(operator.or_, self.allgather(bits), 0)

    def _check_same_verb(self) -> None:
        """Call before any other kind of message: ranks in different calls exchange different kinds."""
        if self.is_unverified:
            self.union(0)

    def broadcast_alarm(self, alarm: RankAlarm) -> None:  # noqa: B027 - a lone process has nobody to tell
        """Tell the ranks that wait for this one that it does not come; never waits or raises."""

    def renew(self) -> None:  # noqa: B027 - a lone process has no exchange to abandon
        """Abandon all exchanges under way, on every rank after an alarm, and start over together."""

    def reset_after_alarm(self) -> None:
        """Start over after an alarm; every rank calls it."""
        self.turn = 0
        self._alarms.clear()
        self.renew()

    def next_alarm(self) -> RankAlarm | None:
        """Return the next alarm of another rank since the last renewal, or None."""
        return None

    def _due_alarm(self) -> RankAlarm | None:
        """Return the alarm that ends the current call; one for a later call waits until then."""
        if (alarm := self.next_alarm()) is not None:
            self._alarms.append(alarm)
        return next((alarm for alarm in self._alarms if alarm.turn <= self.turn), None)

    def _listen(self) -> None:
        """Raise, while waiting for others, the alarm of one, or that a rank of this node has ended."""
        alarm = self._due_alarm()
        if alarm is None and self._local_rank_monitor is not None:
            rank = self._local_rank_monitor.ended()
            # Its own alarm, sent before it ended, says why.
            alarm = self._due_alarm() if rank is not None else None
            if rank is not None and alarm is None:
                words = "its process has ended without a word: was it killed?"
                alarm = RankAlarm(rank, self.node, words, self.turn)
                self.broadcast_alarm(alarm)
        if alarm is not None:
            raise alarm.error(self.verb)

    def _report_slow(self, seconds: float) -> None:
        if self.verb and self.local_rank == 0:
            who = f"rank {self.rank} on {self.node}"
            write_stderr_line(f"{self.verb}: {who} has waited {seconds:.0f} s for other ranks")

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.agree(0)

    def everywhere(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and return its value on all ranks, or raise its error on all."""
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome["value"] = action()
            except UsageError as error:
                outcome["usage"] = str(error)
            except (SiteError, OSError) as error:
                outcome["site"] = str(error)
        outcome = self.broadcast(outcome)
        if "usage" in outcome:
            raise mark_raised_on_all(UsageError(outcome["usage"]))
        if "site" in outcome:
            raise mark_raised_on_all(SiteError(outcome["site"]))
        return outcome["value"]

    def shared_rank(self) -> int | None:
        """Return the place among the ranks that share memory, as the library sees it; None if unknown."""
        return None

    @abstractmethod
    def store(self) -> Store:
        """Return the store through which torch's process groups meet."""

    def abort(self, code: int) -> None:
        """End this process with an exit code; MPI ends all ranks, and other launchers notice and do so."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class LoneControl(Control):
    """The control of a single process."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._find_neighbours()

    def allgather(self, value: Any) -> list[Any]:
        """Return the value as it would arrive elsewhere."""
        return [self.broadcast(value)]

    def broadcast(self, value: Any) -> Any:
        """Return the value as it would arrive elsewhere."""
        return json.loads(json.dumps(value))

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Return a function that returns the flags."""
        return lambda: flags

    def store(self) -> Store:
        """Return a store in memory."""
        return HashStore()
