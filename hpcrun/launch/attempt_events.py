"""What can happen to an attempt, as values; those that an agent sees travel in its messages."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any

from hpcrun.typed_json import Tagged

_MAX_DELAY_S = 2.0
"""What is told this late may have been under way; by more than this two clocks are not the same."""


@dataclass(frozen=True)
class RankStarted(Tagged):
    """A rank has recorded itself and takes signals."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class RankConnected(Tagged):
    """A rank is inside MPI; a command's rank has met the others as soon as it is up."""

    rank: int


@dataclass(frozen=True)
class WorldReady:
    """Every rank has met the others."""


@dataclass(frozen=True)
class RankEnded(Tagged):
    """The process of a rank is gone, for better or worse."""

    rank: int
    node: str
    pid: int | None
    """None for one that was gone before anyone saw it."""
    wait_status: int | None
    """As waitpid gives it; None where the kernel does not tell."""
    time: float
    ahead_s: float = 0.0
    """By how much the clock of its node is ahead of the supervisor's, where they are not the same."""

    def to_supervisor_clock(self, now: float) -> RankEnded:
        """The same by the supervisor's clock, which shows `now` as it hears of it."""
        ahead_s = self.time - now
        is_same = abs(ahead_s) <= _MAX_DELAY_S
        return self if is_same else replace(self, time=now, ahead_s=ahead_s)


@dataclass(frozen=True)
class RankFailed:
    """A rank has written down why it cannot go on; its process may still be there."""

    rank: int


@dataclass(frozen=True)
class RankProgress(Tagged):
    """A rank has told where it is."""

    rank: int
    node: str
    section: str
    """init, compile, step, eval, checkpoint, or a word of the program's own."""
    step: int | None
    longest_s: dict[str, float]
    """The longest time that each section has taken since the rank was last heard."""
    probes_s: list[float] = field(default_factory=list)
    """What a fixed piece of work took, each time that it was done since then."""


@dataclass(frozen=True)
class RankStopped(Tagged):
    """The process of a rank was stopped by a signal, or goes on after one."""

    rank: int
    node: str
    is_stopped: bool


@dataclass(frozen=True)
class NodeLost:
    """Nobody on a node answers for its ranks any more."""

    node: str
    why: str
    time: float


@dataclass(frozen=True)
class LauncherEnded:
    """What started the ranks is gone; its status says nothing about success."""

    wait_status: int
    time: float


@dataclass(frozen=True)
class AttemptFinished:
    """The ranks agreed that the attempt ended well, and there is a record of it."""

    result: dict[str, Any]


@dataclass(frozen=True)
class SignalReceived:
    """Somebody sent the supervisor a signal."""

    number: signal.Signals


@dataclass(frozen=True)
class Idle:
    """Nothing happened for a moment."""


NodeEvent = RankStarted | RankConnected | RankEnded | RankStopped | RankProgress
"""What is seen on the node where it happens."""
AttemptEvent = (
    NodeEvent | WorldReady | RankFailed | NodeLost | LauncherEnded | AttemptFinished | SignalReceived | Idle
)
