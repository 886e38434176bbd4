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
    """A rank has written its record and handles signals."""

    rank: Count
    node: str
    pid: int

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class RanksConnectedEvent(Event):
    """All ranks are connected to each other; `seconds` since the launch."""

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
    """From waitpid; None when unknown."""

    def __str__(self) -> str:
        how = "ended" if self.wait_status is None else describe_status(self.wait_status)
        # The ranks of a command end one by one; the run is done once all of them have.
        early = "" if self.wait_status == 0 else " before the run was done"
        return f"rank {self.rank} on {self.node} {how}{early}"


@dataclass(frozen=True)
class RankFailedEvent(Event):
    """A rank has recorded why it failed."""

    rank: Count

    def __str__(self) -> str:
        return f"rank {self.rank} failed"


@dataclass(frozen=True)
class LauncherEndedEvent(Event):
    """The process that started the ranks has ended; its status does not tell whether they succeeded."""

    wait_status: WaitStatus

    def __str__(self) -> str:
        return f"the launcher {describe_status(self.wait_status)}" if self.wait_status else ""


@dataclass(frozen=True)
class ResultEvent(Event):
    """The ranks agreed that the attempt succeeded; result.json has the details."""

    status: str
    step: Count | None

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class HangEvent(Event):
    """Ranks have made no progress within the time limit."""

    ranks: tuple[Count, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class RankStacks:
    """The innermost frame that some ranks share."""

    ranks: tuple[Count, ...]
    nodes: Texts
    place: str

    def __str__(self) -> str:
        return f"rank{'s' * (len(self.ranks) > 1)} {format_rank_ranges(self.ranks)}: {self.place}"


@dataclass(frozen=True)
class StacksEvent(Event):
    """Stacks of the ranks when they hung, the smallest group first."""

    groups: tuple[RankStacks, ...]

    def __str__(self) -> str:
        if not self.groups:
            return "no rank wrote a stack"
        return shorten(f"stacks: {'; '.join(map(str, self.groups))}")


@dataclass(frozen=True)
class ProcessesEndedEvent(Event):
    """The processes of an attempt were killed."""

    stuck: Texts
    """Those that survived SIGKILL."""

    def __str__(self) -> str:
        return f"could not kill: {', '.join(self.stuck)}" if self.stuck else ""


@dataclass(frozen=True)
class ExitEvent(Event):
    """How an attempt ended."""

    status: str
    exit_code: int
    message: str

    def __str__(self) -> str:
        is_good = self.status in ("done", "saved") and self.message
        return self.message if is_good else f"{self.status}: {self.message}"
