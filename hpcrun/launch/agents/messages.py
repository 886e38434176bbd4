"""What a supervisor and its agents say to each other, one class a kind; anything else ends that connection.

Both have proved that they are of the run. A message that makes no sense all the same, for example of memory
gone bad, must not take down more than the connection that it came over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcrun.checkpoint.worker_messages import WorkerMessage, WorkerOrder
from hpcrun.health.preflight import PreflightReport, PreflightRequest
from hpcrun.launch.attempt_events import NodeEvent
from hpcrun.launch.rendezvous import (
    ConnectionTestReport,
    ConnectionTestStep,
    RendezvousAnswer,
    RendezvousRequest,
)
from hpcrun.typed_json import Tagged, TaggedUnion


@dataclass(frozen=True)
class AgentHello(Tagged):
    """The first message to a supervisor that the agent had not met."""

    node: str
    pid: int
    address: tuple[str, str]
    """SLURM_TOPOLOGY_ADDR and its pattern; empty where Slurm gives none."""
    is_restarted: bool
    """It was started in place of one that was lost."""
    inventory: dict[str, Any] | None
    """What is inside the node, see parse_node_inventory."""


@dataclass(frozen=True)
class AgentLeft(Tagged):
    """The agent has cleared up, and ends."""


@dataclass(frozen=True)
class WatchingRanks(Tagged):
    """The agent looks out for the ranks of an attempt: they may be started."""

    attempt: int


@dataclass(frozen=True)
class StacksDumped(Tagged):
    """What was seen of each rank from outside; their stacks are in their files."""

    attempt: int | None
    ranks: dict[str, dict[str, str]]


@dataclass(frozen=True)
class RanksCleared(Tagged):
    """Nothing of the attempt is left but these processes, which could not be ended."""

    attempt: int | None
    stuck: tuple[int, ...]


@dataclass(frozen=True)
class ForwardedMessage(Tagged):
    """What the checkpoint worker of the node tells."""

    message: WorkerMessage


@dataclass(frozen=True)
class NodeReport(Tagged):
    """What has happened to a rank of an attempt."""

    attempt: int | None
    event: NodeEvent


AgentMessage = (
    AgentHello
    | AgentLeft
    | WatchingRanks
    | PreflightReport
    | StacksDumped
    | RendezvousAnswer
    | ConnectionTestReport
    | RanksCleared
    | ForwardedMessage
    | NodeReport
)
AGENT_MESSAGES = TaggedUnion[AgentMessage](AgentMessage)


@dataclass(frozen=True)
class LeaveRun(Tagged):
    """Clear up, and end."""


@dataclass(frozen=True)
class WarmUp(Tagged):
    """Load once what ranks load."""

    attempt: int


@dataclass(frozen=True)
class WatchRanks(Tagged):
    """Look out for these ranks of an attempt, which are about to be started."""

    attempt: int
    ranks: tuple[int, ...]
    progress_socket: str
    """Its name, through which they will report their progress."""


@dataclass(frozen=True)
class AttemptOrder(Tagged):
    """An order about an attempt: what comes too late for it is ignored; None: whichever there is."""

    attempt: int | None


@dataclass(frozen=True)
class StartProcess(AttemptOrder):
    """Start a process of the launcher's, whose descendants the ranks are."""

    argv: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class SignalRanks(AttemptOrder):
    """Send a signal to one rank, or to all that are up."""

    number: int
    rank: int | None


@dataclass(frozen=True)
class DumpStacks(AttemptOrder):
    """Have every rank write its stacks."""

    timeout_s: float


@dataclass(frozen=True)
class KillRanks(AttemptOrder):
    """End the ranks at once."""


@dataclass(frozen=True)
class ClearRanks(Tagged):
    """End all that is left of an attempt, the spared processes apart."""

    attempt: int | None
    spared: tuple[int, ...]


@dataclass(frozen=True)
class ForwardedOrder(Tagged):
    """An order to the checkpoint worker of the node; the first one starts it."""

    order: WorkerOrder


AgentOrder = (
    LeaveRun
    | WarmUp
    | PreflightRequest
    | RendezvousRequest
    | ConnectionTestStep
    | WatchRanks
    | StartProcess
    | SignalRanks
    | DumpStacks
    | KillRanks
    | ClearRanks
    | ForwardedOrder
)
AGENT_ORDERS = TaggedUnion[AgentOrder](AgentOrder)
