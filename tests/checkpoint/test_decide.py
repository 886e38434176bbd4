"""The decision what a run goes on from, against brute force and case by case."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.format import Part
from hpcrun.checkpoint.part_check import exclude_damaged_parts
from hpcrun.checkpoint.restore.decide import (
    ObjectCandidate,
    checkpoint_id_of,
    decide_restore,
    describe_plan_tiers,
)
from hpcrun.checkpoint.restore_plan import SHARED_NODE, RebuildOrder, parse_restore_plan
from hpcrun.checkpoint.tier import (
    CheckpointId,
    HeldParity,
    HeldPart,
    InventoryEntry,
    SetMember,
    TierName,
    parse_inventory_entry,
)
from hpcrun.specs.descent import lineage_order, select_lineage
from hpcrun.specs.saves import SavedCheckpoint, UnreadableCheckpoint
from hpcrun.typed_json import parse_typed, render_typed

NODES = ("a", "b", "c", "d")
RUN = Path("checkpoints")
OWN = {"a": [0, 1], "b": [2, 3]}
"""Nodes of two ranks each."""


def stamp(step: int, world_size: int = 4, attempt: int = 1) -> CheckpointId:
    """Each attempt has gone on from step 10 of the one before."""
    descent = " ".join(f"{number}@10" for number in range(1, attempt))
    return CheckpointId(f"{step:030x}{attempt:02x}", step, 8 * step, world_size, attempt, descent)


def part_of(owner: CheckpointId, number: int, salt: str = "") -> Part:
    return Part(number, 0, 4096, 3000, 900, f"{owner.generation[:14]}{number:02x}{salt}")


def holding(
    owner: CheckpointId, node: str, numbers: Sequence[int], tier: TierName = "memory"
) -> InventoryEntry:
    parts = tuple(HeldPart(n, f"/arena/{node}/{n}", 0, part_of(owner, n)) for n in numbers)
    return InventoryEntry(owner, tier, node, parts)


def one_each(owner: CheckpointId, nodes: Sequence[str] = NODES) -> list[InventoryEntry]:
    return [holding(owner, node, [number]) for number, node in enumerate(nodes)]


def with_parity(owner: CheckpointId, nodes: Sequence[str] = NODES, parity: int = 1) -> list[InventoryEntry]:
    """What nodes hold that are one erasure set, a part each."""
    members = tuple(SetMember(node, ((n, part_of(owner, n)),)) for n, node in enumerate(nodes))
    blocks = [
        InventoryEntry(
            owner, "parity", node, (), HeldParity(f"/arena/{node}/p", members, parity, n, ("0" * 16,))
        )
        for n, node in enumerate(nodes)
    ]
    return [*one_each(owner, nodes), *blocks]


def saved(step: int, attempt: int = 1) -> SavedCheckpoint:
    one = stamp(step, attempt=attempt)
    path = RUN / f"step-{step:08d}"
    known: dict[str, Any] = {"generation": one.generation, "descent": one.descent}
    return SavedCheckpoint(path, step, 8 * step, 4, attempt, **known)


def test_the_newest_in_memory_comes_before_an_older_save() -> None:
    plan = decide_restore(one_each(stamp(20)), [saved(10)], [], [], {}, NODES)
    assert plan.stamp == stamp(20)
    assert plan.tiers == ("memory",)
    assert [(one.number, one.node, one.path) for one in plan.sources] == [
        (n, node, f"/arena/{node}/{n}") for n, node in enumerate(NODES)
    ]
    assert (plan.save, plan.lost_steps, plan.passed_over) == (None, 0, ())


def test_of_one_step_the_nearest_is_taken() -> None:
    memory, disks = one_each(stamp(20)), [replace(one, tier="local") for one in one_each(stamp(20))]
    assert decide_restore([*disks, *memory], [saved(20)], [], [], {}, NODES).tiers == ("memory",)
    assert decide_restore([*disks, *memory[1:]], [saved(20)], [], [], {}, NODES).tiers == ("memory", "local")
    copy = ObjectCandidate(stamp(20), "s3://b/20")
    assert decide_restore(memory[1:], [saved(20)], [], [copy], {}, NODES).save == str(saved(20).path)
    plan = decide_restore(memory[1:], [saved(10)], [], [copy], {}, NODES)
    assert (plan.tiers, plan.copy) == (("object",), "s3://b/20")
    assert describe_plan_tiers(plan) == "the object store"


def test_a_missing_part_leads_to_the_generation_before_and_that_is_said() -> None:
    plan = decide_restore([*one_each(stamp(20))[1:], *one_each(stamp(15))], [saved(10)], [], [], {}, NODES)
    assert plan.stamp == stamp(15)
    assert plan.lost_steps == 5
    (why,) = plan.passed_over
    assert why == (
        f"step 20, generation {stamp(20).generation}: part 0 of 4 is on no node that answers, and there is"
        " no parity for it"
    )


def test_parts_of_two_generations_never_make_one() -> None:
    first, second = stamp(20, attempt=1), stamp(20, attempt=2)
    mixed = [*one_each(first)[:2], *one_each(second)[2:]]
    plan = decide_restore(mixed, [saved(10)], [], [], {}, NODES)
    assert plan.save == str(saved(10).path)
    assert len(plan.passed_over) == 1, "the first attempt's was left, and is not looked at"
    # The same generation, but a part of it twice with other bytes.
    other = replace(holding(first, "a", [3]).parts[0], part=part_of(first, 3, "x"))
    plan = decide_restore(
        [*one_each(first), InventoryEntry(first, "memory", "a", (other,))], [saved(10)], [], [], {}, NODES
    )
    assert plan.save == str(saved(10).path)
    assert "part 3 on d is not the one on a" in plan.passed_over[0]
    # A stamp that differs in anything is another one.
    odd = [replace(one, stamp=replace(first, position=1)) for one in one_each(first)[:1]]
    assert decide_restore([*odd, *one_each(first)[1:]], [saved(10)], [], [], {}, NODES).save is not None


def test_nodes_that_changed_their_names_are_found_by_what_they_hold() -> None:
    moved = [replace(one, node=name) for one, name in zip(with_parity(stamp(20)), "dcbadcba", strict=True)]
    plan = decide_restore(moved, [saved(10)], [], [], {}, NODES)
    assert {one.number: one.node for one in plan.sources} == {0: "d", 1: "c", 2: "b", 3: "a"}
    assert plan.rebuilds == ()


def test_a_part_that_was_left_out_as_damaged_comes_from_parity_or_the_save_of_its_generation() -> None:
    members = tuple(
        SetMember(node, tuple((n, part_of(stamp(20), n)) for n in own)) for node, own in OWN.items()
    )
    blocks = [
        InventoryEntry(
            stamp(20), "parity", node, (), HeldParity(f"/arena/{node}/p", members, 1, n, ("0" * 16,))
        )
        for n, node in enumerate(OWN)
    ]
    parts = [holding(stamp(20), node, own) for node, own in OWN.items()]
    whole = [*parts, *blocks]
    first = decide_restore(whole, [saved(20)], [], [], {}, list(OWN))
    assert (first.tiers, first.rebuilds) == (("memory",), ())
    bad = parts[1].parts[0]
    left = exclude_damaged_parts(whole, {(bad.path, stamp(20).generation, bad.number): "a byte"})
    plan = decide_restore(left, [saved(10)], [], [], {}, list(OWN))
    assert (plan.stamp, plan.passed_over) == (stamp(20), ())
    (order,) = plan.rebuilds
    assert order.lost == (1,)
    assert {one.number for one in plan.sources} == {0, 1, 3}
    # Without parity the same generation may lie whole elsewhere; only that part of it is bad.
    plan = decide_restore(
        exclude_damaged_parts(parts, {(bad.path, stamp(20).generation, bad.number): "a byte"}),
        [saved(20)],
        [],
        [],
        {},
        list(OWN),
    )
    assert plan.save == str(saved(20).path)


def test_a_replaced_node_gets_its_part_from_parity() -> None:
    left = [one for one in with_parity(stamp(20)) if one.node != "b"]
    plan = decide_restore(left, [saved(10)], [], [], {}, ("a", "c", "d", "new"))
    assert plan.stamp == stamp(20)
    assert plan.tiers == ("memory", "parity")
    (order,) = plan.rebuilds
    assert (order.node, order.lost) == ("new", (1,))
    assert [(one.index, one.node, one.path) for one in order.survivors] == [
        (0, "a", "/arena/a/p"),
        (2, "c", "/arena/c/p"),
        (3, "d", "/arena/d/p"),
    ]
    assert [one.number for one in plan.sources] == [0, 2, 3]
    # When it has been done, what was rebuilt is a part like any other.
    rebuilt = holding(stamp(20), "new", [1], "parity")
    again = decide_restore([*left, rebuilt], [saved(10)], [], [], {}, ("a", "c", "d", "new"))
    assert (again.rebuilds, again.tiers) == ((), ("memory", "parity"))
    assert [one.node for one in again.sources] == ["a", "new", "c", "d"]


def test_more_losses_than_parity_are_too_many() -> None:
    left = [one for one in with_parity(stamp(20)) if one.node not in ("b", "c")]
    plan = decide_restore(left, [saved(10)], [], [], {}, ("a", "d"))
    assert plan.save == str(saved(10).path)
    assert plan.passed_over[0].endswith(
        "parts 1, 2 of 4 are on no node that answers; of the set that it was in b,c are not whole, and"
        " parity makes up for 1"
    )
    double = [one for one in with_parity(stamp(20), parity=2) if one.node not in ("b", "c")]
    plan = decide_restore(double, [saved(10)], [], [], {}, ("a", "d"))
    assert [order.lost for order in plan.rebuilds] == [(1, 2)]


def test_a_node_that_does_not_answer_has_nothing() -> None:
    assert decide_restore(one_each(stamp(20)), [saved(10)], [], [], {}, NODES[1:]).save is not None


def test_parts_of_a_damaged_save_make_up_for_a_lost_node() -> None:
    asked: list[tuple[int, list[int]]] = []

    def search(owner: CheckpointId, missing: Collection[int]) -> InventoryEntry:
        asked.append((owner.step, sorted(missing)))
        return holding(owner, SHARED_NODE, [0], "durable")

    near = one_each(stamp(20))
    broken = UnreadableCheckpoint(RUN / "step-00000020", "its record is torn")
    plan = decide_restore(near[1:], [saved(10)], [broken], [], {}, NODES, find_intact_parts=search)
    assert (plan.stamp, plan.tiers, plan.lost_steps) == (stamp(20), ("memory", "durable"), 0)
    assert [one.node for one in plan.sources] == [SHARED_NODE, "b", "c", "d"]
    assert asked == [(20, [0])]
    # Nobody is asked where all is there, where the save seems whole, or where that is not what is wrong.
    assert decide_restore(near, [saved(20)], [], [], {}, NODES, find_intact_parts=search).tiers == ("memory",)
    plan = decide_restore(near[1:], [saved(20)], [], [], {}, NODES, find_intact_parts=search)
    assert (plan.save, plan.is_mendable) == (str(saved(20).path), True)
    assert not decide_restore([], [saved(20)], [], [], {}, NODES, find_intact_parts=search).is_mendable
    other = replace(holding(stamp(20), "b", [3]).parts[0], part=part_of(stamp(20), 3, "x"))
    torn = [*near[1:], InventoryEntry(stamp(20), "memory", "b", (other,))]
    plan = decide_restore(torn, [saved(10)], [], [], {}, NODES, find_intact_parts=search)
    assert plan.save == str(saved(10).path)
    assert len(asked) == 1
    # With parity a part of two that are missing is enough.
    kept = [one for one in with_parity(stamp(20)) if one.node != "b" and (one.node != "a" or one.parity)]
    plan = decide_restore(kept, [saved(10)], [], [], {}, NODES, find_intact_parts=search)
    assert (plan.stamp, plan.tiers) == (stamp(20), ("memory", "parity", "durable"))
    # What it offers is held to the same rules.
    odd = HeldPart(0, "data-00000.bin", 0, part_of(stamp(20), 0, "x"))

    def other_bytes(owner: CheckpointId, missing: Collection[int]) -> InventoryEntry:
        return InventoryEntry(owner, "durable", SHARED_NODE, (odd,))

    plan = decide_restore(
        with_parity(stamp(20))[2:], [saved(10)], [], [], {}, NODES, find_intact_parts=other_bytes
    )
    assert plan.stamp == stamp(10)
    assert "part 0 on data-00000.bin is not the one that parity was made of" in plan.passed_over[0]


def test_what_failed_twice_is_passed_over() -> None:
    near, older = one_each(stamp(20)), saved(10)
    once = {stamp(20).generation: 1}
    assert decide_restore(near, [older], [], [], once, NODES).stamp == stamp(20)
    plan = decide_restore(near, [saved(20), older], [], [], {stamp(20).generation: 2}, NODES)
    assert plan.save == str(older.path)
    assert plan.poisoned == (stamp(20).generation,)
    assert "could not be resumed from" in plan.passed_over[0]
    # What proved damaged in memory may be whole in the run directory.
    plan = decide_restore(near, [saved(20), older], [], [], {f"near:{stamp(20).generation}": 2}, NODES)
    assert plan.save == str(saved(20).path)
    plan = decide_restore(near, [older], [], [], {f"near:{stamp(20).generation}": 2}, NODES)
    assert plan.save == str(older.path)
    none = decide_restore(near, [], [], [], {stamp(20).generation: 2}, NODES)
    assert none.stamp is None


def test_damaged_saves_are_passed_over_and_only_the_newest_are_looked_at() -> None:
    asked = []

    def check(one: SavedCheckpoint) -> str | None:
        asked.append(one.step)
        return "it is short" if one.step == 30 else None

    broken = [UnreadableCheckpoint(RUN / "step-00000040", "its record is torn")]
    plan = decide_restore([], [saved(10), saved(20), saved(30)], broken, [], {}, NODES, check)
    assert (plan.save, plan.lost_steps) == (str(saved(20).path), 20)
    assert asked == [30, 20]
    assert plan.passed_over == (
        "checkpoints/step-00000040: is damaged: its record is torn",
        "checkpoints/step-00000030: is damaged: it is short",
    )


def test_nothing_at_all() -> None:
    plan = decide_restore([], [], [], [], {}, NODES)
    assert (plan.stamp, plan.lost_steps, plan.passed_over) == (None, 0, ())


def test_a_plan_travels_as_json_and_shows_when_it_was_changed() -> None:
    left = [one for one in with_parity(stamp(20)) if one.node != "b"]
    for plan in (
        decide_restore(left, [saved(30)], [], [], {saved(30).generation: 2}, ("a", "c", "d", "new")),
        decide_restore([], [saved(30)], [], [], {}, NODES),
        decide_restore([], [], [], [], {}, NODES),
    ):
        told = json.loads(json.dumps(plan.as_json()))
        assert parse_restore_plan(told) == plan
        assert parse_restore_plan(told).digest == plan.digest
        with pytest.raises(ValueError, match="does not match its digest"):
            parse_restore_plan(told | {"lost_steps": 77})
    order = decide_restore(left, [], [], [], {}, ("a", "c", "d")).rebuilds[0]
    assert parse_typed(RebuildOrder, json.loads(render_typed(order))) == order
    with pytest.raises(ValueError, match="not a restore plan: digest is missing"):
        parse_restore_plan({})


def is_whole(owner: CheckpointId, holdings: Sequence[InventoryEntry], nodes: Sequence[str]) -> bool:
    """By trying everything: parts that are there, then sets again and again until nothing more comes."""
    live = [one for one in holdings if one.node in nodes and one.stamp == owner]
    have = {held.number for one in live for held in one.parts}
    blocks: dict[tuple[SetMember, ...], set[int]] = {}
    parity: dict[tuple[SetMember, ...], int] = {}
    for one in live:
        if one.parity is not None:
            blocks.setdefault(one.parity.members, set()).add(one.parity.index)
            parity[one.parity.members] = one.parity.parity
    recovered = set(have)
    for members, there in blocks.items():
        gone = 0
        for index, member in enumerate(members):
            if index not in there or any(number not in have for number, _ in member.parts):
                gone += 1
        if gone <= parity[members] and gone < len(members):
            recovered |= {number for member in members for number, _ in member.parts}
    return recovered >= set(range(owner.world_size))


def some_inventory(
    rng: random.Random,
) -> tuple[list[InventoryEntry], list[SavedCheckpoint], Mapping[str, int], list[str]]:
    nodes = list("abcdef"[: rng.randint(1, 6)])
    holdings: list[InventoryEntry] = []
    for step in rng.sample(range(1, 6), rng.randint(1, 4)):
        for attempt in range(1, rng.randint(1, 2) + 1):
            ranks = len(nodes) * rng.randint(1, 2)
            owner = stamp(step, ranks, attempt)
            on = [list(range(ranks))[i :: len(nodes)] for i in range(len(nodes))]
            homes = rng.sample(nodes, len(nodes))
            parts = [holding(owner, home, numbers) for home, numbers in zip(homes, on, strict=True)]
            kept = [one for one in parts if rng.random() < 0.8]
            disks = [replace(one, tier="local") for one in parts if rng.random() < 0.1]
            size, parity = rng.randint(1, len(nodes)), rng.randint(1, 2)
            members = [
                SetMember(home, tuple((n, part_of(owner, n)) for n in numbers))
                for home, numbers in zip(homes, on, strict=True)
            ]
            blocks = [
                InventoryEntry(
                    owner,
                    "parity",
                    homes[first + i],
                    (),
                    HeldParity("p", tuple(members[first : first + size]), parity, i, ()),
                )
                for first in range(0, len(nodes), size)
                for i in range(len(members[first : first + size]))
                if rng.random() < 0.9
            ]
            holdings += chain(kept, disks, blocks)
    rng.shuffle(holdings)
    saves = [saved(step) for step in range(6) if rng.random() < 0.2]
    poison = {one.stamp.generation: rng.randint(1, 3) for one in holdings if rng.random() < 0.05}
    living = [node for node in nodes if rng.random() < 0.8]
    return holdings, saves, poison, living


@pytest.mark.parametrize("seed", range(400))
def test_the_newest_whole_one_is_found_as_brute_force_finds_it(seed: int) -> None:
    holdings, saves, poison, living = some_inventory(random.Random(seed))
    told = [parse_inventory_entry(json.loads(json.dumps(one.as_json()))) for one in holdings]
    chance = random.Random(seed)
    shared = {
        owner: holding(
            owner, SHARED_NODE, [n for n in range(owner.world_size) if chance.random() < 0.3], "durable"
        )
        for owner in dict.fromkeys(one.stamp for one in holdings)
    }

    def search(owner: CheckpointId, missing: Collection[int]) -> InventoryEntry | None:
        parts = tuple(one for one in shared[owner].parts if one.number in missing)
        return replace(shared[owner], tier="durable", parts=parts) if parts else None

    plan = decide_restore(told, saves, [], [], poison, living, find_intact_parts=search)
    bad = {generation for generation, count in poison.items() if count >= 2}
    live = [one for one in holdings if one.node in living]
    there = [*holdings, *(shared[one.stamp] for one in live)]
    whole = {one.stamp for one in live if is_whole(one.stamp, there, [*living, SHARED_NODE])}
    line = {
        lineage_order(one)
        for one in select_lineage([*(one.stamp for one in live), *map(checkpoint_id_of, saves)])
    }
    near = {lineage_order(one) for one in whole if one.generation not in bad} & line
    at_hand = {one.stamp for one in live if is_whole(one.stamp, holdings, living)}
    stored = {lineage_order(one) for one in saves if one.generation not in bad} & line
    expected = max(near | stored, default=None)
    assert (lineage_order(plan.stamp) if plan.stamp else None) == expected
    if plan.stamp is None:
        return
    assert plan.stamp.generation not in bad
    # A save that seems whole comes before what would have to be put together.
    if plan.save is not None:
        place = lineage_order(plan.stamp)
        assert place in stored
        assert (
            not {one for one in whole if lineage_order(one) == place and one.generation not in bad} & at_hand
        )
        assert plan.is_mendable == any(one.stamp.generation == plan.stamp.generation for one in live)
    if plan.save is None:
        assert plan.stamp in whole
        numbers = [one.number for one in plan.sources]
        numbers += [n for order in plan.rebuilds for i in order.lost for n, _ in order.members[i].parts]
        assert set(numbers) == set(range(plan.stamp.world_size))
        usable = {*living, SHARED_NODE} if "durable" in plan.tiers else set(living)
        assert all(one.node in usable and one.part == part_of(plan.stamp, one.number) for one in plan.sources)
        assert all(order.node in living for order in plan.rebuilds)
        assert all(len(order.lost) <= order.parity for order in plan.rebuilds)
