"""The way of a save through the tiers: order, what fails on it, what is left behind, what is kept."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.flush.arena import Arena, make_arena_folder
from hpcrun.checkpoint.flush.pipeline import FlushPipeline
from hpcrun.checkpoint.flush.rank_requests import RankRequestHandler
from hpcrun.checkpoint.flush.throttle import Throttle
from hpcrun.checkpoint.policy.shm_capacity import ShmCapacity
from hpcrun.checkpoint.tier import CheckpointId, HeldPart, InventoryEntry, NodeShards, Tier, TierName
from hpcrun.checkpoint.worker_messages import RANK_REQUESTS
from hpcrun.errors import SiteError
from hpcrun.typed_json import render_typed
from tests.checkpoint.generations import content_of
from tests.checkpoint.loads import fill, plans_of, stamp_of


class Slow:
    """A tier that stores when it is told to, and remembers everything."""

    def __init__(self, name: TierName) -> None:
        self.name = name
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.stored: list[NodeShards] = []
        self.abandoned: list[tuple[int, list[int], str]] = []
        self.problem: str | None = None

    def store(self, load: NodeShards) -> dict[str, Any]:
        self.begun.append(load.stamp.step)
        assert self.gate.wait(20)
        if self.problem:
            raise SiteError(self.problem)
        self.stored.append(load)
        return {}

    def memory_bytes(self, block_bytes: int) -> int:
        return block_bytes if self.name == "parity" else 0

    def abandon(self, stamp: CheckpointId, numbers: Sequence[int], why: str) -> None:
        self.abandoned.append((stamp.step, list(numbers), why))

    def holdings(self) -> list[InventoryEntry]:
        if self.name in ("durable", "object"):
            return []
        parts = [
            tuple(HeldPart(part.number, "", 0, part.part) for part in load.parts) for load in self.stored
        ]
        return [
            InventoryEntry(load.stamp, self.name, "n", held)
            for load, held in zip(self.stored, parts, strict=True)
        ]

    def retain(self, generations: Collection[str]) -> None:
        if self.name != "durable":  # which goes by what the job says
            self.stored = [load for load in self.stored if load.stamp.generation in generations]


def keep_in(messages: list[dict[str, Any]]) -> Callable[[Any], None]:
    """Keeps messages as the other end sees them."""
    return lambda message: messages.append(json.loads(render_typed(message)))


class Node:
    """A worker without its process: two ranks, a request handler and a pipeline."""

    def __init__(self, tmp_path: Path, slots: int = 2) -> None:
        self.tiers: dict[TierName, Slow] = {name: Slow(name) for name in ("local", "parity", "durable")}
        self.host: list[dict[str, Any]] = []
        self.heard: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        self.sends = {rank: keep_in(messages) for rank, messages in self.heard.items()}
        self.handler = RankRequestHandler(keep_in(self.host))
        arena = Arena(make_arena_folder(tmp_path, tmp_path / "r", "r", "n"))
        self.pipeline = FlushPipeline(arena, self.handler, lambda: None)
        self.checkpoints, self.hurry = tmp_path / "checkpoints", threading.Event()
        self.configure(1)
        self.plans = plans_of((0, 1), 2, 0)
        for rank, (pieces, plan) in enumerate(self.plans):
            told = [list(piece) for piece in pieces]
            self.ask(rank, kind="plan_slot", key=1, pieces=told, file=plan.file, start=plan.start)
            self.ask(rank, kind="reserve_slots", size_bytes=plan.layout.size_bytes, slots=slots, ranks=[0, 1])

    def configure(self, attempt: int) -> None:
        tiers: dict[TierName, Tier] = dict(self.tiers.items())
        self.hurry = threading.Event() if attempt > 1 else self.hurry
        self.pipeline.configure(tiers, {"object": "no such store"}, self.checkpoints, self.hurry)
        self.handler.open(self.pipeline, attempt)

    def ask(self, rank: int, **message: Any) -> None:
        self.handler.hear(
            RANK_REQUESTS.parse(json.loads(json.dumps({"rank": rank} | message))), self.sends[rank]
        )

    def claim(self, rank: int, step: int, published: int | None = None) -> dict[str, Any]:
        before = None if published is None else stamp_of(published, 2).generation
        self.ask(rank, kind="claim_slot", generation=stamp_of(step, 2).generation, published=before)
        return self.heard[rank][-1]

    def fill(self, rank: int, step: int, tiers: Sequence[str], slot: int) -> None:
        pieces, plan = self.plans[rank]
        image = self.pipeline.arena.slots[rank][slot].image(plan.layout.size_bytes)
        fill(image, plan, [content_of(piece, step) for piece in pieces])
        self.ask(
            rank, kind="slot_filled", slot=slot, key=1, stamp=asdict(stamp_of(step, 2)), tiers=list(tiers)
        )

    def save(self, step: int, tiers: Sequence[str], published: int | None = None) -> None:
        for rank in (0, 1):
            claimed = self.claim(rank, step, published)
            assert claimed["kind"] == "slot_claimed", claimed
            self.fill(rank, step, tiers, claimed["slot"])

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            self.pipeline.settle()
            time.sleep(0.001)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.host if one["kind"] == kind]

    def until_stored(self, count: int) -> list[tuple[int, str, str | None]]:
        self.until(lambda: len(self.told("store_result")) == count)
        return [(one["stamp"]["step"], one["tier"], one["problem"]) for one in self.told("store_result")]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for tier in node.tiers.values():
        tier.gate.set()
    node.pipeline.close()


def test_the_worker_spares_training_until_somebody_waits(node: Node) -> None:
    now = 0.0

    def look() -> float:  # an hour has passed at every look
        nonlocal now
        now += 3600
        return now

    node.pipeline.throttle = Throttle(look)
    node.pipeline.throttle.flush_duty = 0.25
    node.pipeline.throttle.begin_save()
    now += 1e9  # saves are far between
    for number, step in enumerate((2, 4)):
        node.ask(0, kind="hasten_flush")  # for nothing that is on its way
        node.save(step, ["durable"])
        time.sleep(0.05)
        node.pipeline.settle()
        assert len(node.told("generation_sealed")) == number
        node.ask(1, kind="hasten_flush")
        assert node.until_stored(number + 1)[-1] == (step, "durable", None)
        assert node.told("store_result")[-1]["facts"]["rested_s"] > 0
        now += 1e9
        node.until(
            lambda: not any(slot.in_flight for slots in node.pipeline.arena.slots.values() for slot in slots)
        )


def test_tier_after_tier_and_save_after_save(node: Node) -> None:
    node.save(2, ["durable", "parity", "local"])
    node.save(4, ["durable"])
    assert node.until_stored(4) == [
        (2, "local", None),
        (2, "parity", None),
        (2, "durable", None),
        (4, "durable", None),
    ]
    (load, _) = node.tiers["durable"].stored
    assert [one.number for one in load.parts] == [0, 1]
    assert [one["stamp"]["step"] for one in node.told("generation_sealed")] == [2, 4]
    for rank in (0, 1):
        kinds = [one["kind"] for one in node.heard[rank]]
        assert kinds.count("part_sealed") == 2
        assert kinds.count("store_result") == 4


def test_one_tier_that_fails_does_not_stop_the_next(node: Node) -> None:
    node.tiers["parity"].problem = "a peer does not answer"
    node.save(2, ["local", "parity", "durable", "object"])
    assert node.until_stored(4) == [
        (2, "local", None),
        (2, "parity", "a peer does not answer"),
        (2, "durable", None),
        (2, "object", "no such store"),
    ]
    failed = [one for one in node.heard[1] if one["kind"] == "save_failed"]
    assert [(one["tier"], one["why"]) for one in failed] == [
        ("parity", "a peer does not answer"),
        ("object", "no such store"),
    ]


def test_a_slot_stays_as_it_is_while_it_is_on_its_way(node: Node) -> None:
    node.tiers["durable"].gate.clear()
    node.save(2, ["durable"])
    node.save(4, ["durable"], published=2)
    node.until(lambda: len(node.told("generation_sealed")) == 2)
    busy = node.claim(0, 6, published=4)
    assert busy["kind"] == "slots_busy"
    assert busy["why"].count("is on its way to the next tier") == 2
    node.tiers["durable"].gate.set()
    node.until_stored(2)
    node.until(lambda: not any(slot.in_flight for slot in node.pipeline.arena.every()))
    assert node.claim(0, 6, published=4)["kind"] == "slot_claimed"


def test_the_oldest_is_left_behind_once_for_a_save_that_found_no_slot(node: Node) -> None:
    local, parity, durable = node.tiers.values()
    local.gate.clear()
    node.save(2, ["local", "durable"])
    node.save(4, ["local", "parity", "durable"], published=2)
    node.until(lambda: local.begun == [2])
    node.ask(0, kind="degrade_saves")
    assert node.claim(0, 6, published=4)["kind"] == "slots_busy"
    assert node.claim(1, 6, published=4)["kind"] == "slots_busy"
    node.ask(0, kind="degrade_saves")
    parity.gate.clear()
    local.gate.set()
    node.until(lambda: parity.begun == [4])
    node.until_stored(3)
    node.until(lambda: sum(slot.in_flight for slot in node.pipeline.arena.every()) == 2)
    node.ask(1, kind="degrade_saves")
    parity.gate.set()
    assert node.until_stored(5) == [
        (2, "local", None),
        (2, "durable", "left behind: a newer save was due"),
        (4, "local", None),
        (4, "parity", None),
        (4, "durable", None),
    ]
    assert durable.abandoned == [(2, [0, 1], "left behind: a newer save was due")]


def test_a_generation_that_one_rank_has_no_part_of_goes_nowhere(node: Node) -> None:
    assert node.claim(0, 2)["kind"] == "slot_claimed"
    assert node.claim(1, 2)["kind"] == "slot_claimed"
    node.fill(0, 2, ["durable"], 0)
    node.handler.leave(1, node.sends[1])
    node.until(lambda: bool(node.tiers["durable"].abandoned))
    assert node.tiers["durable"].abandoned == [(2, [0, 1], "rank 1 is gone")]
    node.until(lambda: not any(slot.in_flight for slot in node.pipeline.arena.every()))
    assert node.heard[0][-1]["kind"] in ("save_failed", "part_sealed")
    assert node.tiers["durable"].stored == []
    node.ask(1, kind="plan_slot", key=1, pieces=[list(p) for p in node.plans[1][0]], file=0, start=0)
    assert node.claim(1, 2)["kind"] == "slot_claimed"
    node.fill(1, 2, ["durable"], 0)
    assert "another rank of this node" in node.heard[1][-1]["why"]


def test_each_node_keeps_the_published_state_and_what_is_newer(node: Node) -> None:
    local = node.tiers["local"]
    for step, published in ((2, None), (4, 2), (6, 2), (8, 2), (10, 8)):
        node.save(step, ["local"], published)
        node.until(lambda step=step: len(node.told("store_result")) == step // 2)  # type: ignore[misc]
        node.until(lambda: not any(slot.in_flight for slot in node.pipeline.arena.every()))
    assert [load.stamp.step for load in local.stored] == [8, 10]


def test_the_next_attempt_does_not_wait_for_the_last(node: Node) -> None:
    durable = node.tiers["durable"]
    durable.gate.clear()
    node.save(2, ["durable", "object"])
    node.until(lambda: durable.begun == [2])
    hurry = node.hurry
    node.configure(2)
    assert hurry.is_set()
    durable.gate.set()
    assert node.until_stored(2) == [(2, "durable", None), (2, "object", "no such store")]


def test_the_end_comes_after_what_has_begun(node: Node) -> None:
    local = node.tiers["local"]
    local.gate.clear()
    node.save(2, ["local", "durable"])
    node.until(lambda: local.begun == [2])
    threading.Timer(0.05, local.gate.set).start()
    node.pipeline.close()
    assert [(one["tier"], one["problem"]) for one in node.told("store_result")] == [
        ("local", None),
        ("durable", "the worker ends"),
    ]


def test_ranks_that_disagree_about_who_they_are_wait_until_they_agree(tmp_path: Path) -> None:
    node = Node(tmp_path)
    kinds = [one["kind"] for one in node.heard[0]]
    node.ask(0, kind="reserve_slots", size_bytes=4096, slots=2, ranks=[0])
    assert [one["kind"] for one in node.heard[0]][len(kinds) :] == ["slots_reserved"]
    node.ask(1, kind="reserve_slots", size_bytes=4096, slots=2, ranks=[0])
    assert "beside ranks [0]" in node.heard[1][-1]["why"]
    node.pipeline.close()


@pytest.mark.parametrize(("room", "count"), [(3 << 20, 2), ((3 << 20) - 1, 1)])
def test_slots_leave_the_room_that_a_station_takes_of_the_memory(
    room: int, count: int, tmp_path: Path
) -> None:
    node = Node(tmp_path)
    node.pipeline.arena.room = lambda _: ShmCapacity(room, "of a test")
    for rank in (0, 1):
        node.ask(rank, kind="reserve_slots", size_bytes=1 << 19, slots=2, ranks=[0, 1])
    assert len(node.heard[0][-1]["slots"]) == count
    node.pipeline.close()


def test_what_is_let_go_of_is_gone_when_the_worker_ends_meanwhile(tmp_path: Path) -> None:
    node = Node(tmp_path)
    local, durable = node.tiers["local"], node.tiers["durable"]
    node.save(2, ["local"])
    assert len(node.until_stored(1)) == 1
    durable.gate.clear()
    node.save(4, ["durable"], published=2)
    node.until(lambda: durable.begun == [4])
    node.pipeline.release(set())
    threading.Timer(0.05, durable.gate.set).start()
    node.pipeline.close()
    assert local.stored == []


def test_a_worker_may_end_while_a_part_is_being_sealed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.save(2, ["local"])
    node.pipeline.close()
    # What was begun comes to its end, and nothing is half done.
    assert node.tiers["local"].begun in ([], [2])
    assert all(slot.state in ("filled", "sealed") for slot in node.pipeline.arena.every() if slot.generation)


def test_what_did_not_get_to_the_run_directory_is_not_waited_for_to_be_copied(node: Node) -> None:
    durable, objects = node.tiers["durable"], Slow("object")
    node.tiers["object"] = objects
    node.configure(1)
    durable.problem = "no space left"
    node.save(1, ["durable", "object"])
    told = node.until_stored(2)
    assert [tier for _, tier, problem in told if problem] == ["durable", "object"]
    assert objects.begun == []
    durable.problem = None
    node.save(2, ["durable", "object"])
    node.until_stored(4)
    assert objects.begun == [2]


def test_a_slow_object_store_keeps_no_save_waiting(node: Node) -> None:
    objects = Slow("object")
    objects.gate.clear()
    node.tiers["object"] = objects
    node.configure(1)
    for step in (1, 2, 3, 4):
        node.save(step, ["durable", "object"], published=step - 1 or None)
        node.until(lambda: node.tiers["durable"].begun == list(range(1, step + 1)))  # noqa: B023
        node.until(lambda: not node.pipeline._transfers)
    assert objects.begun == [1]
    objects.gate.set()
    node.until(lambda: not node.pipeline._copies)
    told = [
        (one["stamp"]["step"], one["problem"]) for one in node.told("store_result") if one["tier"] == "object"
    ]
    left = "left out: a newer copy is due"
    assert told == [(1, None), (2, left), (3, left), (4, None)]
    # What it was given is no memory that is filled anew meanwhile.
    assert {len(part.image) for load in objects.stored for part in load.parts} == {0}
