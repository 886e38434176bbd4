"""Which nodes a supervisor counts on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from hpcrun.launch.agents.nodes import NodeStates
from hpcrun.launch.attempt_events import NodeLost
from hpcrun.launch.node_pool import NodePool
from hpcrun.launch.run_context import RunContext
from hpcrun.slurm.allocation import Allocation
from hpcrun.specs.events.supervisor import RelaunchEvent
from hpcrun.specs.load import parse_job
from hpcrun.specs.run_lookup import create_run
from hpcrun.submission.prepare import PreparedJob

NAMES = ("a", "b", "c", "d")


@dataclass
class Some:
    """Nodes by their names."""

    alive: tuple[str, ...] = NAMES
    lost: list[NodeLost] = field(default_factory=list)


def roster(nodes: int) -> NodePool:
    spec = parse_job(f"name: r\ncommand: [x]\nresources: {{nodes: {nodes}}}\n", "job.yaml").spec
    return NodePool(PreparedJob(spec, None), RunContext(Allocation(1, NAMES, "1", is_batch=False)))


def some(*alive: str, lost: str = "") -> NodeStates:
    gone = [NodeLost(name, "unplugged", time.time()) for name in lost]
    return cast(NodeStates, Some(alive or NAMES, gone))


def test_a_suspect_is_replaced_as_long_as_there_are_spares() -> None:
    three = roster(3)
    assert three.avoid(["b", "c", "x"], some()) == ["b"]
    assert three.left(some()) == ["a", "c", "d"]
    assert three.avoid(["c"], some()) == []
    assert three.shortage(some()) is None
    three.refuse(["d"])
    assert three.shortage(some()) == "3 nodes are needed, and 2 are left"


def test_a_lost_node_counts_again_once_it_answers_and_a_refused_one_does_not() -> None:
    two = roster(2)
    two.lose(["a"])
    two.refuse(["b"])
    last = create_run("r").next_attempt()
    assert two.relaunch_event(some("b", "c", "d", lost="a"), last) == RelaunchEvent(("a", "b"), 0)
    assert two.relaunch_event(some(lost="a"), last) == RelaunchEvent(("b",), 1)


def test_a_node_that_came_back_has_ranks_only_where_it_is_needed() -> None:
    two = roster(2)
    two.lose(["a"])
    assert two.out(some()) == {"a"}
    two.refuse(["b"])
    assert two.out(some()) == {"a", "b"}
    assert two.out(some("a", "b", "c")) == {"b"}


def test_what_was_lost_and_told_is_not_told_again() -> None:
    two = roster(2)
    nodes = some("c", "d", lost="ab")
    assert [one.node for one in two.unreported_losses(nodes)] == ["a", "b"]
    two.lose(["a"])
    assert [one.node for one in two.unreported_losses(nodes)] == ["b"]
