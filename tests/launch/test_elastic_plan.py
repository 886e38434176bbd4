"""Fewer replicas where nodes are missing: who works on those that are left, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.elastic_plan import min_nodes, plan_for_nodes
from hpcrun.runs import run_state
from hpcrun.runs.describe import describe_run
from hpcrun.runs.event_text import format_events
from hpcrun.specs.records import read_json, read_json_lines
from hpcrun.submission.prepare import PreparedJob, prepare_job
from tests.launch.pretended import pretend, supervise
from tests.launch.supervised import PROGRAM, Recorder, Site


def prepared(site: Site, *overrides: str) -> PreparedJob:
    return prepare_job(site.job, ["retry={node: 5, crash: 1}", *overrides])


def run(site: Site, nodes: str, losses: Sequence[str], *overrides: str) -> AttemptOutcome:
    """Run on these nodes; with each attempt one of `losses` goes, the one after them is done.

    Of `a>b` node a is lost while b is back; where no node is lost, a rank is.
    """
    there, left = pretend(nodes.split()), list(losses)

    def lose() -> None:
        lost, _, back = left.pop(0).partition(">")
        there.pretended.come_back(back)
        there.pretended.lose(lost)

    observer = Recorder(on_ready=lambda: lose() if left else None)
    job = prepared(site, f"resources.nodes={len(there.pretended.names)}", *overrides)
    last = len(losses) + 1
    return supervise(there, job, observer, [str(PROGRAM), f"wait-until-{last}"])


def plans(outcome: AttemptOutcome) -> list[tuple[int, int, int, int | None]]:
    """Of every attempt the ranks placed, the replicas planned, the batch, and how many replicas are meant."""
    found = []
    for attempt in outcome.run.attempts():
        plan, placement = read_json(attempt.plan), read_json(attempt.placement)
        replicas = plan["dp_replicate"] * plan["dp_shard"]
        found.append((len(placement["ranks"]), replicas, plan["gbs"], plan["whole_dp"]))
    return found


def test_a_lost_node_costs_its_replica_and_the_batch_stays(site: Site) -> None:
    outcome = run(site, "a b c", ["b", "a"], "parallel.dp_shard=3", "elastic={}")
    assert outcome.status == "done", outcome.message
    assert plans(outcome) == [(3, 3, 3, None), (2, 2, 3, 3), (1, 1, 3, 3)]
    told = [line for line in read_json_lines(outcome.run.events) if line["event"] == "relaunch"]
    assert [(one["replicas"], one["replicas_before"], one["replicas_whole"]) for one in told] == [
        (2, 3, 3),
        (1, 2, 3),
    ]
    assert [one["spares_left"] for one in told] == [0, 0]
    lines = [entry.text for entry in format_events(outcome.run) if entry.what == "relaunch"]
    assert lines[0] == (
        "relaunch in the same allocation without b with 2 of 3 replicas (before: 3); 0 spares left"
    )
    state = run_state.read_run_state(outcome.run)
    assert (state.replicas, state.whole_replicas) == (1, 3)
    attempts = describe_run(outcome.run)[0]["attempts"]
    assert [one["replicas"] for one in attempts] == [None, {"there": 2, "whole": 3}, {"there": 1, "whole": 3}]


def test_the_nodes_of_a_broken_replica_become_spares(site: Site) -> None:
    overrides = ("parallel={pp: 2, dp_replicate: 2}", "elastic={}")
    outcome = run(site, "a b c d", ["c", "a"], *overrides)
    assert outcome.status == "done", outcome.message
    assert [plan[:2] for plan in plans(outcome)] == [(4, 2), (2, 1), (2, 1)]
    told = [line for line in read_json_lines(outcome.run.events) if line["event"] == "relaunch"]
    assert [one["spares_left"] for one in told] == [1, 0]


def test_it_grows_with_the_nodes_that_are_there(site: Site) -> None:
    outcome = run(site, "a b c d", ["b", "c", ">bc"], "parallel.dp_shard=4", "elastic={}")
    assert outcome.status == "done", outcome.message
    assert [plan[:2] for plan in plans(outcome)] == [(4, 4), (3, 3), (2, 2), (4, 4)]
    (told, *_) = [line for line in read_json_lines(outcome.run.events) if line["event"] == "relaunch"][::-1]
    assert (told["replicas"], told["replicas_before"], told["replicas_whole"]) == (4, 2, 4)
    lines = [entry.text for entry in format_events(outcome.run) if entry.what == "relaunch"]
    assert lines[-1] == "relaunch in the same allocation with 4 of 4 replicas (before: 2); 0 spares left"


def test_below_the_least_it_does_not_go_on_here(site: Site) -> None:
    outcome = run(site, "a b c", ["b", "c", "a"], "parallel.dp_shard=3", "elastic={min_replicas: 2}")
    assert outcome.status == "failed"
    assert "2 nodes are needed, and 1 are left" in outcome.message
    assert [plan[1] for plan in plans(outcome)] == [3, 2]


def test_without_the_section_a_run_is_whole_or_not_there(site: Site) -> None:
    outcome = run(site, "a b c", ["b", "a"], "parallel.dp_shard=2", "resources={nodes: 2, spares: 1}")
    assert outcome.status == "failed"
    assert "2 nodes are needed, and 1 are left" in outcome.message
    assert [plan[1:] for plan in plans(outcome)] == [(2, 2, None)] * 2


@pytest.mark.parametrize(
    ("layout", "per_node", "fits"),
    [
        # (nodes left, replicas, nodes taken)
        ("{dp_replicate: 4}", 1, [(5, 4, 4), (4, 4, 4), (3, 3, 3), (1, 1, 1), (0, None, None)]),
        ("{dp_replicate: 4}", 2, [(2, 4, 2), (1, 2, 1)]),
        ("{dp_replicate: 4, tp: 2, pp: 2}", 2, [(8, 4, 8), (7, 3, 6), (3, 1, 2), (1, None, None)]),
        ("{dp_replicate: 2, dp_shard: 3}", 2, [(3, 6, 3), (2, 3, 2), (1, 2, 1)]),
        ("{dp_replicate: 2, dp_shard: 3}", 3, [(2, 6, 2), (1, 3, 1)]),
        ("{dp_shard: 3, pp: 2}", 4, [(2, 3, 2), (1, 2, 1)]),
    ],
)
def test_so_many_nodes_hold_so_many_replicas(
    site: Site, layout: str, per_node: int, fits: list[tuple[int, int | None, int | None]]
) -> None:
    job = prepared(site, f"parallel={layout}", "elastic={}")
    for left, replicas, nodes in fits:
        if replicas is None:
            assert left < min_nodes(job, per_node)
            continue
        found = plan_for_nodes(job, per_node, left)
        assert found.plan is not None
        assert (found.plan.degrees.dp, found.nodes) == (replicas, nodes)
        assert left >= min_nodes(job, per_node)


def test_so_many_nodes_are_needed_at_least(site: Site) -> None:
    assert min_nodes(prepared(site, "parallel={dp_replicate: 4, pp: 2}", "elastic={min_replicas: 3}"), 2) == 3
    assert min_nodes(prepared(site, "parallel={dp_replicate: 4, pp: 2}"), 2) == 4
