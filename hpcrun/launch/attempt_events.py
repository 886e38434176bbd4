"""What can happen to an attempt, as values; those that an agent sees travel as lines of JSON."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field, replace
from typing import Any

_MAX_DELAY_S = 2.0
"""What is told this late may have been under way; by more than this two clocks are not the same."""


@dataclass(frozen=True)
class RankStarted:
    """A rank has recorded itself and takes signals."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class RankConnected:
    """A rank is inside MPI; a command's rank has met the others as soon as it is up."""

    rank: int


@dataclass(frozen=True)
class WorldReady:
    """Every rank has met the others."""


@dataclass(frozen=True)
class RankEnded:
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
class RankProgress:
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
class RankStopped:
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

_NODE_EVENTS: dict[str, type[NodeEvent]] = {
    "up": RankStarted,
    "met": RankConnected,
    "ended": RankEnded,
    "stopped": RankStopped,
    "progress": RankProgress,
}


def encode_node_event(happening: NodeEvent) -> str:
    """One line of JSON without its end."""
    kind = next(name for name, event_class in _NODE_EVENTS.items() if isinstance(happening, event_class))
    return json.dumps({"kind": kind, **asdict(happening)})


def decode_node_event(message: dict[str, Any]) -> NodeEvent | None:
    """The happening in a message, or None where it is of another kind."""
    values = dict(message)
    kind = _NODE_EVENTS.get(values.pop("kind", ""))
    return None if kind is None else kind(**values)
