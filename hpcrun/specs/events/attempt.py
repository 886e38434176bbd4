"""Events of one attempt: its ranks, from the launch to the exit."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.process import describe_status
from hpcrun.specs.events.event import (
    Event,
    Texts,
    WaitStatus,
    format_count,
    format_rank_ranges,
    shorten,
)
from hpcrun.typed_json import Count


@dataclass(frozen=True)
class LaunchEvent(Event):
    """The ranks of an attempt are started."""

    ranks: Count
    command: Texts
    job: int | None
    """The batch job; None without one."""

    def __str__(self) -> str:
        return f"launch of {format_count(self.ranks, 'rank')}"


@dataclass(frozen=True)
class RankStartedEvent(Event):
    """A rank has recorded itself and takes signals."""

    rank: Count
    node: str
    pid: int

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class RanksConnectedEvent(Event):
    """All ranks are connected to each other, so many seconds after the launch."""

    seconds: float

    def __str__(self) -> str:
        return f"ranks connected after {self.seconds:.1f} s"


@dataclass(frozen=True)
class RanksNotConnectedEvent(Event):
    """Ranks did not start or connect in time."""

    ranks: tuple[Count, ...]
    """Those that did not start."""
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class RankStoppedEvent(Event):
    """The process of a rank was stopped by a signal."""

    rank: Count
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node} was stopped by a signal"


@dataclass(frozen=True)
class RankContinuedEvent(Event):
    """The process of a rank continues after it was stopped."""

    rank: Count
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node} continued"


@dataclass(frozen=True)
class RankEndedEvent(Event):
    """The process of a rank has ended."""

    rank: Count
    node: str
    pid: int | None
    wait_status: WaitStatus | None
    """As waitpid gives it; None where the kernel does not tell."""

    def __str__(self) -> str:
        how = "ended" if self.wait_status is None else describe_status(self.wait_status)
        # Of a command's ranks each ends by itself, and only all of them together say that the run is done.
        early = "" if self.wait_status == 0 else " before the run was done"
        return f"rank {self.rank} on {self.node} {how}{early}"


@dataclass(frozen=True)
class RankFailedEvent(Event):
    """A rank has written down why it cannot go on."""

    rank: Count

    def __str__(self) -> str:
        return f"rank {self.rank} failed"


@dataclass(frozen=True)
class LauncherEndedEvent(Event):
    """What started the ranks has ended; its status says nothing about success."""

    wait_status: WaitStatus

    def __str__(self) -> str:
        return f"the launcher {describe_status(self.wait_status)}" if self.wait_status else ""


@dataclass(frozen=True)
class ResultEvent(Event):
    """The ranks agreed that the attempt ended well; result.json has the rest."""

    status: str
    step: Count | None

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class HangEvent(Event):
    """Ranks have made no progress for longer than they may."""

    ranks: tuple[Count, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class RankStacks:
    """Where some ranks stand."""

    ranks: tuple[Count, ...]
    nodes: Texts
    place: str

    def __str__(self) -> str:
        return f"rank{'s' * (len(self.ranks) > 1)} {format_rank_ranges(self.ranks)}: {self.place}"


@dataclass(frozen=True)
class StacksEvent(Event):
    """Where the ranks stood when they hung, the smallest group first."""

    groups: tuple[RankStacks, ...]

    def __str__(self) -> str:
        if not self.groups:
            return "no rank gave a stack"
        return shorten(f"stacks: {'; '.join(map(str, self.groups))}")


@dataclass(frozen=True)
class ProcessesEndedEvent(Event):
    """The processes of an attempt were ended."""

    stuck: Texts
    """Those that could not be ended."""

    def __str__(self) -> str:
        return f"could not be ended: {', '.join(self.stuck)}" if self.stuck else ""


@dataclass(frozen=True)
class ExitEvent(Event):
    """How an attempt ended."""

    status: str
    exit_code: int
    message: str

    def __str__(self) -> str:
        is_good = self.status in ("done", "saved") and self.message
        return self.message if is_good else f"{self.status}: {self.message}"
