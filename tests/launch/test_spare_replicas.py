"""Which spare copies whose parts, the orders that it gets, and how a run goes on from what it has."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.tier import HeldPart, InventoryEntry
from hpcrun.launch.agents import worker_process as hosts
from hpcrun.launch.attempt_monitor import AttemptOutcome
from hpcrun.launch.checkpointing.spare_replicas import assign_replicas
from hpcrun.runs.describe import describe_spare_replicas
from hpcrun.specs.events.log import parse_event
from tests.launch.test_coordinator import NODES, PROGRAM, Site, held, parity, part, site, stamp

assert site  # the fixture


def replica(step: int, number: int, node: str = "spare") -> InventoryEntry:
    """A part that a spare has copied."""
    path = f"/arena/{node}/replica-{stamp(step).generation}-{number}.bin"
    return InventoryEntry(stamp(step), "memory", node, (HeldPart(number, path, 0, part(step, number)),))


def seal(site: Site, step: int) -> None:
    """All nodes have it in memory."""
    for node in NODES:
        site.say(node, kind="generation_sealed", stamp=asdict(stamp(step)))


def copies(site: Site, node: str = "spare") -> list[tuple[int, list[str]]]:
    """What a spare was told to copy: step and nodes."""
    return [(one["stamp"]["step"], one["nodes"]) for one in site.orders(node, "copy_parts")]


def answer(site: Site, nodes: str, **more: Any) -> None:
    """The spare is done with the last order that it got."""
    last = site.orders("spare", "copy_parts")[-1]
    told = {"id": last["id"], "generation": last["stamp"]["generation"], "nodes": list(nodes)}
    told |= {"size_bytes": 3_000_000_000, "seconds": 1.5}
    site.say(
        "spare",
        kind="parts_copied",
        step=last["stamp"]["step"],
        **{**told, "problems": {}, "no_room": [], **more},
    )


def test_a_spare_copies_what_all_nodes_have_and_of_what_waits_only_the_newest(site: Site) -> None:
    site.prepare()
    for node in NODES[:2]:
        site.say(node, kind="generation_sealed", stamp=asdict(stamp(5)))
    assert copies(site) == []
    site.say(NODES[2], kind="generation_sealed", stamp=asdict(stamp(5)))
    assert copies(site) == [(5, ["a", "b", "c"])]
    assert sum(one.startswith("spare spare: each save is copied") for one in site.notes) == 1
    seal(site, 10)
    seal(site, 15)
    assert len(copies(site)) == 1, "one at a time"
    answer(site, "abc", id=77)
    answer(site, "abc", generation="ab" * 16)
    assert len(copies(site)) == 1, "those were answers to something else"
    answer(site, "abc")
    assert [step for step, _ in copies(site)] == [5, 15]
    assert site.orders("a", "copy_parts") == []


def test_what_came_of_it_is_told_and_worth_a_line_when_it_is_about_other_nodes(site: Site) -> None:
    site.prepare()
    seal(site, 5)
    answer(site, "ab", no_room=["c"])
    seal(site, 10)
    answer(site, "ab")
    seal(site, 15)
    answer(site, "a", problems={"b": "b: is gone", "c": "c: is gone too"})
    seal(site, 20)
    answer(site, "a", problems={"b": "b: is still gone", "c": "c: too"})
    first, *others = site.named("spare_replica")
    assert (first["step"], first["node"], first["of"], first["no_room"]) == (5, "spare", ["a", "b"], ["c"])
    assert (first["generation"], first["size_bytes"], first["seconds"]) == (
        stamp(5).generation,
        3 * 10**9,
        1.5,
    )
    told = "spare spare holds what a, b had in memory at step 5 (2.794 GiB in 1.5 s); no room for c"
    assert str(parse_event(first)) == told
    assert [bool(str(parse_event(one))) for one in others] == [False, True, False]
    noted = [one for one in site.notes if "has no copy" in one]
    assert noted == ["spare: has no copy of step 15 of b, c: b: is gone"], "each node is named once"
    assert describe_spare_replicas(site.events) == ["spares: copies of step 20: a on spare"]


def test_copies_count_as_progress_where_they_cover_what_was_lost(site: Site) -> None:
    site.prepare()
    seal(site, 5)
    answer(site, "ac")
    seal(site, 10)
    assert site.coordinator.step(is_node_lost=True) == 0, "no node of the attempt is lost"
    site.nodes._gone.add("b")
    assert (site.coordinator.step(), site.coordinator.step(is_node_lost=True)) == (10, 0)
    site.nodes._gone = {"c"}
    assert site.coordinator.step(is_node_lost=True) == 5
    site.nodes._gone = {"c", "spare"}
    assert site.coordinator.step(is_node_lost=True) == 0, "the copies are gone too"


def test_without_parity_a_lost_node_costs_nothing_that_a_spare_has(site: Site) -> None:
    site.holds(*(held(20, n) for n in (0, 2)), *(replica(20, n) for n in (1, 2)), held(15, 0))
    site.nodes._gone.add("b")
    plan = site.prepare(2, ("a", "spare", "c"))
    assert plan is not None
    assert (plan.stamp, plan.tiers, plan.rebuilds) == (stamp(20), ("memory",), ())
    assert [one.node for one in plan.sources] == ["a", "spare", "c"], "c has its own still"
    (event,) = site.named("restore")
    assert (event["tiers"], event["rebuilt"], event["from_spares"]) == (["memory"], 0, 1)
    assert str(parse_event(event)) == ("resumes from step 20 (memory); 1 part from spares' memory")
    # Of its replicas the spare keeps what there is nowhere else, until that is of no use any more.
    (kept,) = site.orders("spare", "dismiss_replicas")
    assert (kept["generation"], kept["numbers"]) == (stamp(20).generation, [1])
    assert site.orders("a", "dismiss_replicas")[-1]["numbers"] == []

    def seal_again(step: int) -> None:
        for node in ("a", "spare", "c"):
            site.say(node, kind="generation_sealed", stamp=asdict(replace(stamp(step), attempt=2)))

    seal_again(25)
    assert len(site.orders("spare", "dismiss_replicas")) == 1
    seal_again(30)
    assert site.orders("spare", "dismiss_replicas")[-1]["numbers"] == []
    assert site.orders("spare", "copy_parts") == [], "it is no spare any more"
    site.coordinator.after(AttemptOutcome(site.run, 2, "failed", 5, "it fell", 31))


@pytest.mark.parametrize(
    "section", [{"replicate_to_spares": False}, {"memory": 0, "replicate_to_spares": None}]
)
def test_a_job_that_wants_none_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any]
) -> None:
    monkeypatch.setattr(hosts, "WORKER_COMMAND", (sys.executable, str(PROGRAM), str(tmp_path)))
    site = Site(tmp_path, **section)
    try:
        site.prepare()
        if site.coordinator.has_tiers:
            seal(site, 5)
            assert copies(site) == []
            assert site.named("checkpoint_stored") != []
        assert site.named("spare_replica") == []
    finally:
        site.nodes.close()


def test_a_spare_that_died_is_asked_again_for_the_next_save(site: Site) -> None:
    site.prepare()
    seal(site, 5)
    site.command("spare", kind="die")
    deadline = time.monotonic() + 20
    while not site.named("checkpoint_worker_died") or "spare" not in site.coordinator._workers.ready:
        assert time.monotonic() < deadline
        site.nodes.rest(0.05)
        site.coordinator.look()
    seal(site, 10)
    assert [step for step, _ in copies(site)] == [5, 10]


def test_a_spare_that_is_silent_is_told_of_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrun.launch.checkpointing.spare_replicas._SLOW_COPY_S", -1.0)
    site.prepare()
    for step in (5, 10, 15):
        seal(site, step)
    assert len(copies(site)) == 1
    noted = [one for one in site.notes if "no news of" in one]
    (text,) = noted
    assert text.startswith("spare: no news of its copies of step 5 for ")
    assert site.coordinator.step() == 15


def test_with_a_copy_nothing_has_to_be_made_again_by_parity(site: Site) -> None:
    site.holds(*(one(20, n) for n in (0, 2) for one in (held, parity)), replica(20, 1))
    site.nodes._gone.add("b")
    plan = site.prepare(2, ("a", "spare", "c"))
    assert plan is not None
    assert (plan.tiers, site.orders("spare", "rebuild_parts")) == (("memory",), [])
    assert site.named("restore")[0]["rebuilt"] == 0


def test_a_part_that_its_own_node_has_is_not_taken_from_a_copy(site: Site) -> None:
    site.holds(held(20, 0), held(20, 1), replica(20, 2, "c"), held(20, 2))
    plan = site.prepare(2)
    assert plan is not None
    assert [one.path for one in plan.sources] == ["/arena/a", "/arena/b", "/arena/c"]
    assert site.named("restore")[0]["from_spares"] == 0


def test_a_lost_spare_holds_up_nobody(site: Site) -> None:
    site.prepare()
    site.nodes._gone.add("spare")
    seal(site, 5)
    seal(site, 10)
    assert copies(site) == []
    assert site.coordinator.step() == 10


RACKS = {"leaf": {"a": "1", "b": "1", "c": "2", "d": "2", "s": "1", "t": "2", "far": None}}


def held_by(spares: str, nodes: str, domains: Any = RACKS) -> dict[str, str]:
    return {spare: "".join(of) for spare, of in assign_replicas(list(spares), list(nodes), domains).items()}


def test_spares_divide_the_nodes_their_own_rack_first_and_cover_none_twice_before_all_are_once() -> None:
    assert held_by("st", "abcd") == {"s": "abdc", "t": "cdba"}
    assert held_by("ts", "cadb") == {"t": "cdba", "s": "abdc"}
    assert held_by("s", "cadb") == {"s": "abcd"}
    assert held_by("", "ab") == {}
    assert held_by("st", "") == {"s": "", "t": ""}
    assert held_by("stu", "ab", {}) == {"s": "a", "t": "ba", "u": "b"}


@pytest.mark.parametrize(("spares", "nodes"), [(1, 1), (1, 7), (2, 5), (3, 8), (5, 3), (4, 100)])
def test_every_node_is_covered_once_and_then_once_more_by_another(spares: int, nodes: int) -> None:
    names = [f"n{number}" for number in range(nodes)]
    shares = assign_replicas([f"s{number}" for number in range(spares)], names, {})
    covered = [node for of in shares.values() for node in of]
    assert sorted(covered) == sorted(names * min(2, spares))
    assert all(len(set(of)) == len(of) for of in shares.values())
    once = [of[: -(-nodes // spares)] for of in shares.values()]
    assert {node for of in once for node in of} == set(names), "those first that nobody else has first"
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 2
