"""Control: how ranks find each other and agree; MPI where there is one, torch's TCPStore elsewhere.

Messages are small JSON values. Nothing here moves tensors, and nothing here burns a core while it waits.
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
from typing import TYPE_CHECKING, Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from hpcrun.errors import SiteError, UsageError
from hpcrun.runtime.rank_alarm import (
    COLLECTIVE_VERBS,
    LocalRankMonitor,
    RankAlarm,
    mark_raised_on_all,
)

if TYPE_CHECKING:
    pass

NAP_S = (0.0001, 0.0004)
"""Shortest and longest sleep between polls; a collective takes several, on one rank after the other."""
REPORT_WAIT_AFTER_S = 30.0
"""Of waiting for other ranks; then after twice as long, and so on."""
_VERB_AT, _VERB_BITS = 56, 3


class Control(ABC):
    """The ranks of one attempt, as seen from one of them."""

    rank: int
    size: int
    node: str
    local_rank: int
    local_size: int
    one_node: bool
    """All ranks stand on one node."""
    nodes: tuple[str, ...]
    """The nodes, in the order of their first ranks."""
    verb = ""
    """What all ranks are doing together; empty: nothing."""
    is_unproved = False
    """Nobody has told yet whether they do."""
    turn = 0
    """How many things all ranks have begun together, since they last started over."""
    _local_rank_monitor: LocalRankMonitor | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.node = socket.gethostname()
        self._told: list[RankAlarm] = []

    def _find_neighbours(self) -> None:
        told = self.allgather([self.node, LocalRankMonitor.mine(os.getpid())])
        self._local_rank_monitor = LocalRankMonitor(told, self.rank, self.node)
        nodes = [node for node, _ in told]
        mine = [rank for rank, node in enumerate(nodes) if node == self.node]
        self.local_rank, self.local_size = mine.index(self.rank), len(mine)
        self.one_node = len(mine) == self.size
        self.nodes = tuple(dict.fromkeys(nodes))

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""

    @abstractmethod
    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """Send this rank's flags on their way; what comes back waits for the union (bitwise or) of all."""

    def agree(self, flags: int) -> int:
        """The union of every rank's flags, the same on every rank."""
        return self.start_agreeing(flags)()

    def union(self, bits: int) -> int:
        """As `agree`, of up to 56 bits; it takes longer where there is no MPI."""
        if not self.is_unproved:
            return self._union(bits)
        self.is_unproved = False
        code, most = COLLECTIVE_VERBS.index(self.verb) + 1, (1 << _VERB_BITS) - 1
        # With its complement beside it, no two verbs make the union that one of them makes alone.
        told = self._union(bits | (code | (most & ~code) << _VERB_BITS) << _VERB_AT)
        verbs = told >> _VERB_AT
        if verbs & verbs >> _VERB_BITS & most:
            every = enumerate(self.allgather([self.verb, self.node]))
            words = ", ".join(f"rank {rank} on {node} {verb}" for rank, (verb, node) in [*every][:8])
            raise mark_raised_on_all(
                UsageError(f"ranks do not call the same: {words}; all ranks call each method alike")
            )
        return told & (1 << _VERB_AT) - 1

    def _union(self, bits: int) -> int:
        return functools.reduce(operator.or_, self.allgather(bits), 0)

    def _check_same_verb(self) -> None:
        """Before any other kind of message: ranks that do different things would exchange different kinds."""
        if self.is_unproved:
            self.union(0)

    def broadcast_alarm(self, alarm: RankAlarm) -> None:  # noqa: B027 - one that is alone has nobody to tell
        """Tell all who wait for this rank that it does not come; waits for nobody, and raises nothing."""

    def renew(self) -> None:  # noqa: B027 - one that is alone is always at the same place
        """After an alarm, on every rank: what was under way is left, and all begin at the same place."""

    def reset_after_alarm(self) -> None:
        """After an alarm, on every rank."""
        self.turn = 0
        self._told.clear()
        self.renew()

    def heard(self) -> RankAlarm | None:
        """The next thing that another rank has told since the last renewal, if one gave up."""
        return None

    def _due(self) -> RankAlarm | None:
        """What ends the thing that all do now. Of a later one this rank hears when it comes to that."""
        if (alarm := self.heard()) is not None:
            self._told.append(alarm)
        return next((one for one in self._told if one.turn <= self.turn), None)

    def _listen(self) -> None:
        """While waiting for others: raise what one of them has told, or that one of this node has ended."""
        alarm = self._due()
        if alarm is None and self._local_rank_monitor is not None:
            rank = self._local_rank_monitor.ended()
            # It may have said why before it went.
            alarm = self._due() if rank is not None else None
            if rank is not None and alarm is None:
                words = "its process has ended without a word: was it killed?"
                alarm = RankAlarm(rank, self.node, words, self.turn)
                self.broadcast_alarm(alarm)
        if alarm is not None:
            raise alarm.error(self.verb)

    def _report_slow(self, seconds: float) -> None:
        if self.verb and self.local_rank == 0:
            who = f"rank {self.rank} on {self.node}"
            sys.stderr.write(f"hpcrun: {self.verb}: {who} has waited {seconds:.0f} s for other ranks\n")
            sys.stderr.flush()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree(0)

    def everywhere(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and give its value to all; its failure is raised on every rank."""
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
        """The place among the ranks that share memory with this one, as the library sees it; or unknown."""
        return None

    @abstractmethod
    def store(self) -> Store:
        """The store through which torch's process groups meet."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """Take every rank down with an exit code; does not return where MPI can do it."""


class LoneControl(Control):
    """Control of one process that is alone: it agrees with itself."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._find_neighbours()

    def allgather(self, value: Any) -> list[Any]:
        """The value, as it would arrive elsewhere."""
        return [json.loads(json.dumps(value))]

    def broadcast(self, value: Any) -> Any:
        """The value, as it would arrive elsewhere."""
        return json.loads(json.dumps(value))

    def start_agreeing(self, flags: int) -> Callable[[], int]:
        """The flags."""
        return lambda: flags

    def store(self) -> Store:
        """A store in memory."""
        return HashStore()

    def abort(self, code: int) -> None:
        """Leave."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
