"""Checkpoint workers as processes keep parity for one another and rebuild the parts of a lost node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpcrun.checkpoint.part_check import verify_part
from hpcrun.checkpoint.restore.decide import decide_restore
from hpcrun.checkpoint.restore_plan import RestorePlan
from hpcrun.checkpoint.tier import InventoryEntry, parse_inventory_entry
from hpcrun.specs.rundir import RunDir
from tests.checkpoint.nodes import flip
from tests.checkpoint.workers import Host, Rank, ranks_of

SECRET = "5e" * 32
ADDRESS = "127.0.0.1"


class Neighbours:
    """Workers of one set, a process each."""

    def __init__(self, root: Path, names: str, parity: int) -> None:
        path = root / "some-run"
        (path / "checkpoints").mkdir(parents=True)
        self.root, self.run, self.parity = root, RunDir(path), parity
        self.hosts = {name: Host(root, self.run, name) for name in names}
        self.members: list[str] | None = list(names)
        self.ready: dict[str, dict[str, Any]] = {}

    def configure(self, attempt: int = 1, secret: str = SECRET) -> None:
        """As a supervisor does: once, and again when it is known where all listen."""
        for _ in range(2):
            peers = {name: (one["address"], one["port"]) for name, one in self.ready.items() if one["port"]}
            for name, host in self.hosts.items():
                is_member = self.members is not None and name in self.members
                host.say(
                    kind="configure_worker",
                    run=str(self.run.path),
                    node=name,
                    attempt=attempt,
                    spec={},
                    set=self.members if is_member else None,
                    parity=self.parity if is_member else 0,
                    peers=peers,
                    secret=secret,
                    address=ADDRESS,
                )
            self.ready = {name: host.wait("worker_ready") for name, host in self.hosts.items()}

    def ranks(self, each: int) -> list[Rank]:
        """So many ranks on each node, with slots."""
        world, found = each * len(self.hosts), list[Rank]()
        for number, host in enumerate(self.hosts.values()):
            own = range(number * each, (number + 1) * each)
            found += ranks_of(host, own, world, number)
        return found

    def lose(self, name: str) -> None:
        """A node, with all that was in its memory."""
        host = self.hosts.pop(name)
        host.kill()
        shutil.rmtree(host.arena)
        del self.ready[name]

    def holdings(self) -> list[InventoryEntry]:
        """All that is left."""
        return [parse_inventory_entry(one) for host in self.hosts.values() for one in host.holdings()]

    def plan(self) -> RestorePlan:
        """What the next attempt would go on from."""
        return decide_restore(self.holdings(), [], [], [], {}, list(self.hosts))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def rebuild_all(neighbours: Neighbours, plan: RestorePlan) -> list[InventoryEntry]:
    """Give the orders of a plan."""
    made = []
    for number, order in enumerate(plan.rebuilds):
        host = neighbours.hosts[order.node]
        host.say(kind="rebuild_parts", id=number, order=json.loads(json.dumps(asdict(order))))
        told = host.wait("parts_rebuilt", id=number)
        assert told["problem"] is None, told
        made.append(parse_inventory_entry(told["holding"]))
    return made


@pytest.fixture
def three(root: Path) -> Iterator[Neighbours]:
    made = Neighbours(root, "abc", 1)
    made.configure()
    yield made
    for host in made.hosts.values():
        host.kill()


def save_all(ranks: list[Rank], step: int, tiers: tuple[str, ...] = ("parity",), **more: Any) -> None:
    for rank in ranks:
        rank.save(step, tiers, **more)
    for rank in ranks:
        rank.wait("part_sealed")
        for tier in tiers:
            rank.wait("store_result", tier=tier)


def test_a_lost_node_s_parts_are_made_again_by_another(three: Neighbours) -> None:
    assert all(one["tiers"] == ["memory", "parity", "durable"] for one in three.ready.values())
    ranks = three.ranks(2)
    save_all(ranks, 2)
    save_all(ranks, 4, published=2)
    told = three.hosts["a"].wait("store_result")
    assert (told["problem"], told["facts"]["set"]) == (None, ["a", "b", "c"])
    (held,) = [one for one in three.holdings() if (one.tier, one.node, one.stamp.step) == ("memory", "b", 4)]
    lost = {one.number: one for one in held.parts}
    bytes_of = {n: Path(one.path).read_bytes()[: one.part.size_bytes] for n, one in lost.items()}
    three.lose("b")
    three.hosts["d"] = Host(three.root, three.run, "d")
    three.configure(attempt=2)
    plan = three.plan()
    assert plan.stamp is not None
    assert (plan.stamp.step, [one.node for one in plan.rebuilds]) == (4, ["d"])
    (made,) = rebuild_all(three, plan)
    assert {one.number for one in made.parts} == set(lost)
    for part in made.parts:
        verify_part(part, bytes.fromhex(plan.stamp.generation))
        assert Path(part.path).read_bytes()[part.at :][: part.part.size_bytes] == bytes_of[part.number]
    again = three.plan()
    assert again.rebuilds == ()
    assert [one.number for one in again.sources] == list(range(6))


def test_a_worker_that_died_comes_back_and_keeps_what_it_had(three: Neighbours) -> None:
    ranks = three.ranks(1)
    save_all(ranks, 2)
    three.hosts["b"].kill()
    three.hosts["b"] = Host(three.root, three.run, "b")
    three.configure()
    assert {(one.tier, one.node) for one in three.holdings()} == {
        (tier, node) for tier in ("memory", "parity") for node in "abc"
    }
    for rank in ranks:
        rank.close()
    save_all(three.ranks(1), 4)
    assert {one.stamp.step for one in three.holdings() if one.tier == "parity"} == {2, 4}


def test_the_same_attempt_goes_on_undisturbed_when_all_are_told_anew(three: Neighbours) -> None:
    ranks = three.ranks(1)
    for rank in ranks[:2]:
        rank.save(2, ["parity"])
        rank.wait("part_sealed")
    three.configure()
    ranks[2].save(2, ["parity"])
    for rank in ranks:
        rank.wait("store_result", tier="parity")


def test_without_one_of_its_members_a_set_has_nothing_and_says_who(three: Neighbours) -> None:
    ranks = three.ranks(1)
    three.lose("c")
    for rank in ranks[:2]:
        rank.save(2, ["parity", "durable"])
    for name in "ab":
        three.hosts[name].wait("generation_sealed")
    three.configure(attempt=2)
    for name in "ab":
        told = three.hosts[name].wait("store_result", tier="parity")
        assert told["problem"], told
    assert not [one for one in three.holdings() if one.tier == "parity"]


def test_where_no_secret_was_told_nobody_listens(root: Path) -> None:
    neighbours = Neighbours(root, "ab", 1)
    try:
        neighbours.configure(secret="")
        for name, one in neighbours.ready.items():
            assert (one["port"], one["address"]) == (0, "")
            assert "was told no address and secret" in neighbours.hosts[name].wait("worker_log")["text"]
    finally:
        for host in neighbours.hosts.values():
            host.kill()


def test_an_order_that_makes_no_sense_is_answered(three: Neighbours) -> None:
    host = three.hosts["a"]
    host.say(kind="rebuild_parts", id=7, order={"members": 3})
    assert host.wait("worker_error")["why"] == "rebuild_parts: order: stamp: is missing"
    host.say(kind="rebuild_parts", id=8)
    assert host.wait("worker_error")["why"] == "rebuild_parts: order: is missing"


def test_what_is_damaged_in_memory_is_found_when_it_is_doubted_and_made_again(three: Neighbours) -> None:
    ranks = three.ranks(2)
    save_all(ranks, 2)
    (held,) = [one for one in three.holdings() if (one.tier, one.node) == ("memory", "b")]
    bad, good = held.parts
    whole = Path(bad.path).read_bytes()[: bad.part.size_bytes]
    flip(bad.path, 200)
    assert held in three.holdings(), "nobody has looked"
    for host in three.hosts.values():
        host.say(kind="take_inventory", id=9, prove=[held.stamp.generation])
        told = [parse_inventory_entry(one) for one in host.wait("worker_inventory", id=9)["holdings"]]
        if host.node == "b":
            assert "damaged, and left out: " in host.wait("worker_log")["text"]
            assert [one.parts for one in told if one.tier == "memory"] == [(good,)]
    # From now on it is told to nobody, as if it were not there.
    plan = three.plan()
    assert plan.stamp == held.stamp
    (made,) = rebuild_all(three, plan)
    again = next(one for one in made.parts if one.number == bad.number)
    assert Path(again.path).read_bytes()[again.at : again.at + again.part.size_bytes] == whole
