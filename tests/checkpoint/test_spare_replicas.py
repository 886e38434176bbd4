"""Spares copy what other nodes have sealed, ahead of time: real workers, and an arena with faults at will."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from hpcrun.checkpoint.flush.arena import Arena, make_arena_folder
from hpcrun.checkpoint.flush.spare_replicas import SpareReplicaStore, is_spare_replica, list_spare_replicas
from hpcrun.checkpoint.format import PART_ALIGN, align_size
from hpcrun.checkpoint.parity.peers import PeerError
from hpcrun.checkpoint.part_check import verify_part
from hpcrun.checkpoint.policy.shm_capacity import ShmCapacity
from hpcrun.checkpoint.restore.outside_copies import find_local_inventory
from hpcrun.checkpoint.tier import CheckpointId, InventoryEntry, NodeShards
from hpcrun.checkpoint.worker_messages import CopyParts, PartsCopied
from hpcrun.errors import SiteError
from hpcrun.typed_json import render_typed
from tests.checkpoint.loads import load_of, stamp_of
from tests.checkpoint.nodes import flip
from tests.checkpoint.test_peer_service import Neighbours, save_all
from tests.checkpoint.workers import Host, Rank, ranks_of


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Neighbours]:
    """Three nodes with ranks, without parity, and a spare."""
    made = Neighbours(tmp_path, "abcs", 0)
    made.members = None
    made.configure()
    yield made
    for host in made.hosts.values():
        host.kill()


def ranks_on(four: Neighbours, names: str = "abc", each: int = 2) -> list[Rank]:
    found = list[Rank]()
    for number, name in enumerate(names):
        own = range(number * each, (number + 1) * each)
        found += ranks_of(four.hosts[name], own, each * len(names), number)
    return found


def order(host: Host, stamp: CheckpointId, nodes: str, number: int = 1) -> None:
    host.say(kind="copy_parts", id=number, stamp=asdict(stamp), nodes=list(nodes))


def copied(host: Host, stamp: CheckpointId, nodes: str, number: int = 1) -> dict[str, Any]:
    order(host, stamp, nodes, number)
    return host.wait("parts_copied", id=number)


def of_spare(four: Neighbours) -> list[InventoryEntry]:
    return [one for one in four.holdings() if one.node == "s"]


def test_what_a_lost_node_had_is_gone_on_from_out_of_a_spare_s_memory(four: Neighbours) -> None:
    ranks = ranks_on(four)
    save_all(ranks, 2, ())
    (lost,) = [one for one in four.holdings() if one.node == "b"]
    bytes_of = {one.number: Path(one.path).read_bytes()[: one.part.size_bytes] for one in lost.parts}
    told = copied(four.hosts["s"], lost.stamp, "bc")
    assert (told["nodes"], told["no_room"], told["problems"]) == (["b", "c"], [], {})
    assert told["size_bytes"] == sum(
        one.part.size_bytes for holding in of_spare(four) for one in holding.parts
    )
    (held,) = of_spare(four)
    assert (held.stamp, held.tier, [one.number for one in held.parts]) == (
        lost.stamp,
        "memory",
        [2, 3, 4, 5],
    )
    four.lose("b")
    four.configure(attempt=2)
    plan = four.plan()
    assert (plan.stamp, plan.tiers, plan.rebuilds) == (lost.stamp, ("memory",), ())
    for source in plan.sources:
        if source.number in bytes_of:
            assert source.node == "s"
            data = Path(source.path).read_bytes()
            assert data == bytes_of[source.number]
    # Ranks on other nodes read it as they read any part, and it can be seen without the worker.
    part = lost.parts[0]
    again = copied(four.hosts["a"], lost.stamp, "s")
    assert again["nodes"] == ["s"]
    seen = [one for one in find_local_inventory(four.run.run_id, None, four.root) if one.node == "s"]
    assert part.number in [one.number for holding in seen for one in holding.parts]


@contextmanager
def busy_source(tmp_path: Path) -> Iterator[tuple[Neighbours, list[Rank]]]:
    """A spare that has copied from b, and waits for a, which stores its next save."""
    four = Neighbours(tmp_path, "abcs", 1)
    four.members = list("abc")
    four.configure()
    try:
        ranks = ranks_on(four, each=1)
        save_all(ranks, 2)
        ranks[0].save(4, ("parity",), published=2)
        ranks[0].wait("part_sealed")
        order(four.hosts["s"], stamp_of(2, 3), "ba")
        deadline = time.monotonic() + 20
        while not of_spare(four) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield four, ranks
    finally:
        for host in four.hosts.values():
            host.kill()


def test_a_node_that_stores_a_save_is_not_read_from_until_it_has(tmp_path: Path) -> None:
    with busy_source(tmp_path) as (four, ranks):
        time.sleep(0.3)
        assert [one.number for holding in of_spare(four) for one in holding.parts] == [1]
        for rank in ranks[1:]:
            rank.save(4, ("parity",), published=2)
        for rank in ranks:
            rank.wait("store_result", tier="parity")
        assert four.hosts["s"].wait("parts_copied")["nodes"] == ["b", "a"]
        assert [one.number for holding in of_spare(four) for one in holding.parts] == [0, 1]


def test_a_save_right_after_another_is_found(four: Neighbours) -> None:
    ranks = ranks_on(four)
    save_all(ranks, 2, ())
    assert copied(four.hosts["s"], stamp_of(2, 6), "ab")["nodes"] == ["a", "b"]
    save_all(ranks, 4, (), published=2)
    assert copied(four.hosts["s"], stamp_of(4, 6), "ab", 2)["nodes"] == ["a", "b"]
    assert [one.stamp.step for one in of_spare(four)] == [4]


@pytest.mark.parametrize("what", ["the next attempt begins", "the slot is used again"])
def test_a_node_that_stores_a_save_is_waited_for_no_longer_than_it_makes_sense(
    tmp_path: Path, what: str
) -> None:
    with busy_source(tmp_path) as (four, ranks):
        if what == "the next attempt begins":
            four.hosts["s"].configure(attempt=2)
        else:
            assert ranks[0].claim(6)["kind"] == "slot_claimed"
        told = four.hosts["s"].wait("parts_copied")
        assert told["nodes"] == ["b"]
        gone = f"a: has no part of generation {stamp_of(2, 3).generation}"
        problems = {node: why.removesuffix(" any more") for node, why in told["problems"].items()}
        assert problems == ({} if what == "the next attempt begins" else {"a": gone})


def test_a_node_that_is_gone_or_damaged_costs_its_copy_alone(four: Neighbours) -> None:
    ranks = ranks_on(four)
    save_all(ranks, 2, ())
    (held,) = [one for one in four.holdings() if one.node == "b"]
    flip(held.parts[1].path, 200)
    four.lose("c")
    told = copied(four.hosts["s"], held.stamp, "bca")
    assert told["nodes"] == ["a"]
    assert "do not match their hash" in told["problems"]["b"] or "is not the chunk" in told["problems"]["b"]
    assert told["problems"]["c"].startswith("c (127.0.0.1:")
    (got,) = of_spare(four)
    assert [one.number for one in got.parts] == [0, 1, 2], "the part of b that is whole is of use too"
    for one in got.parts:
        verify_part(one, bytes.fromhex(held.stamp.generation))
    assert not list(four.hosts["s"].arena.glob("*.aside"))


def test_a_worker_that_died_finds_its_copies_and_clears_what_it_had_begun(four: Neighbours) -> None:
    save_all(ranks_on(four), 2, ())
    copied(four.hosts["s"], stamp_of(2, 6), "ab")
    before = of_spare(four)
    four.hosts["s"].kill()
    folder = four.hosts["s"].arena
    (folder / f"replica-{'ab' * 16}-7.bin").write_bytes(b"no record")
    (folder / f"replica-{'ab' * 16}-8.bin.aside").write_bytes(b"not whole")
    four.hosts["s"] = Host(four.root, four.run, "s")
    four.configure()
    assert of_spare(four) == before
    assert not list(folder.glob(f"replica-{'ab' * 16}*"))
    four.hosts["s"].say(kind="dismiss_replicas", generation=stamp_of(2, 6).generation, numbers=[3])
    assert [one.number for holding in of_spare(four) for one in holding.parts] == [3]
    four.hosts["s"].say(kind="release_generations", keep=[])
    assert of_spare(four) == []
    assert not list(folder.glob("replica-*"))


def test_an_order_that_makes_no_sense_is_told_to_the_host(four: Neighbours) -> None:
    bad = asdict(stamp_of(2, 6)) | {"generation": "../../x"}
    four.hosts["s"].say(kind="copy_parts", id=1, stamp=bad, nodes=["a"])
    assert "is not a generation" in four.hosts["s"].wait("worker_error")["why"]


class Others:
    """The other nodes, as a spare reads from them: each has a load a step; and what goes wrong."""

    def __init__(self) -> None:
        self.loads: dict[tuple[str, str], NodeShards] = {}
        self.before_read: Callable[[str, int], None] = lambda node, at: None
        self.after_read: Callable[[str], None] = lambda node: None
        self.calm: Iterator[bool] = iter(lambda: True, False)

    def have(self, step: int, nodes: str) -> CheckpointId:
        for number, node in enumerate(nodes):
            load = load_of(step, [number], len(nodes), number)
            self.loads[node, load.stamp.generation] = load
        return load.stamp

    def ask(self, node: str, request: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        if request["do"] == "calm":
            return {"is_calm": next(self.calm)}
        load = self._load(node, request)
        return {
            "stamp": asdict(load.stamp),
            "parts": [[one.number, asdict(one.part)] for one in load.parts],
        }

    def read(self, node: str, request: dict[str, Any], into: memoryview) -> None:
        self.before_read(node, request["at"])
        (part,) = self._load(node, request).parts
        into[:] = part.image[request["at"] : request["at"] + len(into)]
        self.after_read(node)

    def _load(self, node: str, request: dict[str, Any]) -> NodeShards:
        if (load := self.loads.get((node, request["generation"]))) is None:
            raise PeerError(f"{node}: has no part of generation {request['generation']}")
        return load


class Spare:
    """An arena on a machine with so much memory."""

    def __init__(self, root: Path, size_bytes: int = 1 << 30) -> None:
        self.folder, self.size_bytes = make_arena_folder(root, root / "r", "r", "s"), size_bytes
        self.said = SimpleQueue[PartsCopied]()
        self.others = Others()
        self.arena = Arena(self.folder, self.room)
        self.replicas = SpareReplicaStore(self.arena, self.said.put)

    def room(self, folder: Path) -> ShmCapacity:
        used = sum(align_size(path.stat().st_size, PART_ALIGN) for path in folder.glob("*.bin*"))
        return ShmCapacity(self.size_bytes - used, "so much there is")

    def copy(self, stamp: CheckpointId, nodes: str) -> dict[str, Any]:
        self.replicas.obey(CopyParts(stamp.step, stamp, tuple(nodes)), self.others, 0.0)
        told: dict[str, Any] = json.loads(render_typed(self.said.get(timeout=20)))
        return told

    def held(self) -> list[tuple[int, list[int]]]:
        found = self.replicas.holdings("s")
        assert found == list_spare_replicas(self.arena.files, "s")
        assert all(is_spare_replica(part.path) for one in found for part in one.parts)
        return [(one.stamp.step, [part.number for part in one.parts]) for one in found]


def size_of(stamp: CheckpointId, others: Others, nodes: str) -> int:
    """What the shares of nodes take."""
    loads = [others.loads[node, stamp.generation] for node in nodes]
    return sum(align_size(one.part.size_bytes, PART_ALIGN) for load in loads for one in load.parts)


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Spare]:
    made = Spare(tmp_path)
    yield made
    made.replicas.close()


def test_newer_copies_take_the_place_of_older_ones(spare: Spare) -> None:
    first, second = spare.others.have(2, "abc"), spare.others.have(4, "abc")
    assert spare.copy(first, "ab")["nodes"] == ["a", "b"]
    seen = list[Any]()
    spare.others.before_read = lambda node, at: seen.append(spare.held())
    assert spare.copy(second, "ab")["nodes"] == ["a", "b"]
    assert seen == [[(2, [0, 1])], [(2, [0, 1]), (4, [0])]], "the older are kept until the newer are there"
    assert spare.held() == [(4, [0, 1])]
    # What is there is not fetched again; where nothing is got, the older ones stay.
    seen.clear()
    assert spare.copy(second, "ab")["nodes"] == ["a", "b"]
    assert seen == []
    third = stamp_of(6, 3)
    assert spare.copy(third, "ab")["problems"].keys() == {"a", "b"}
    assert spare.held() == [(4, [0, 1])]


def test_copies_take_half_of_the_room_and_older_ones_give_way(spare: Spare) -> None:
    first, second = spare.others.have(2, "abcde"), spare.others.have(4, "abcde")
    spare.size_bytes = 2 * size_of(first, spare.others, "abc") + PART_ALIGN
    told = spare.copy(first, "abcd")
    assert (told["nodes"], told["no_room"]) == (["a", "b", "c"], ["d"])
    seen = list[Any]()
    spare.others.before_read = lambda node, at: seen.append(spare.held())
    told = spare.copy(second, "abcd")
    assert (told["nodes"], told["no_room"]) == (["a", "b", "c"], ["d"])
    assert [[step for step, numbers in one for _ in numbers] for one in seen] == [[2, 2], [2, 4], [4, 4]]
    spare.size_bytes = 0
    assert spare.copy(first, "ab")["no_room"] == ["a", "b"]


def test_slots_have_the_room_that_copies_had(spare: Spare) -> None:
    first = spare.others.have(2, "ab")
    spare.size_bytes = 2 * size_of(first, spare.others, "ab")
    assert spare.copy(first, "ab")["nodes"] == ["a", "b"]
    with pytest.raises(SiteError, match="there is room for"):
        spare.arena.reserve({0: spare.size_bytes - PART_ALIGN}, 1, lambda stamp: False)
    assert spare.held() == [(2, [0, 1])], "it may be the only copy"
    spare.arena.reserve({0: spare.size_bytes - PART_ALIGN}, 1, lambda stamp: stamp == first)
    assert spare.held() == []


def test_a_node_that_is_lost_half_way_leaves_nothing_behind(spare: Spare, monkeypatch: Any) -> None:
    monkeypatch.setattr("hpcrun.checkpoint.flush.spare_replicas._PIECE_BYTES", 1024)
    stamp = spare.others.have(2, "ab")

    def fall(node: str, at: int) -> None:
        if node == "a" and at:
            raise PeerError("a (10.0.0.1:1): ended the connection")

    spare.others.before_read = fall
    told = spare.copy(stamp, "ab")
    assert (told["nodes"], told["problems"]) == (["b"], {"a": "a (10.0.0.1:1): ended the connection"})
    assert sorted(path.name for path in spare.folder.iterdir()) == [
        f"replica-{stamp.generation}-1.bin",
        f"replica-{stamp.generation}-1.json",
    ]


def test_bytes_that_are_not_what_was_sealed_are_not_kept(spare: Spare) -> None:
    stamp = spare.others.have(2, "ab")
    (part,) = spare.others.loads["a", stamp.generation].parts
    part.image[300] ^= 1
    told = spare.copy(stamp, "ab")
    assert told["nodes"] == ["b"]
    assert "part 0: " in told["problems"]["a"]
    assert spare.held() == [(2, [1])]


def test_a_node_that_has_gone_on_meanwhile_says_so(spare: Spare) -> None:
    stamp = spare.others.have(2, "ab")

    def go_on(node: str) -> None:
        if node == "a":
            del spare.others.loads[node, stamp.generation]

    (part,) = spare.others.loads["a", stamp.generation].parts
    part.image[300] ^= 1
    spare.others.after_read = go_on
    told = spare.copy(stamp, "ab")
    assert told["problems"] == {"a": f"a: has no part of generation {stamp.generation}"}


def test_a_full_memory_costs_the_copy_alone(spare: Spare, monkeypatch: Any) -> None:
    def refuse(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    told = spare.copy(spare.others.have(2, "ab"), "ab")
    assert told["nodes"] == []
    assert "No space left" in told["problems"]["a"]
    assert list(spare.folder.iterdir()) == []


@pytest.mark.parametrize("how", ["end", "retain", "dismiss", "newer"])
def test_a_copying_that_nobody_needs_any_more_ends_at_once(spare: Spare, how: str) -> None:
    stamp, newer = spare.others.have(2, "ab"), spare.others.have(4, "ab")

    def meanwhile(node: str, at: int) -> None:
        spare.others.before_read = lambda node, at: None
        match how:
            case "end":
                spare.replicas.end()
            case "retain":
                spare.replicas.retain({newer.generation})
            case "dismiss":
                spare.replicas.dismiss(newer.generation, [])
            case "newer":
                spare.replicas.obey(CopyParts(9, newer, ("b",)), spare.others, 0.0)

    spare.others.before_read = meanwhile
    told = spare.copy(stamp, "ab")
    assert (told["nodes"], told["problems"]) == ([], {})
    if how == "newer":
        assert spare.said.get(timeout=20).nodes == ("b",)
    assert spare.held() == ([(4, [1])] if how == "newer" else [])
    assert not list(spare.folder.glob("*.aside"))


def test_a_node_that_never_rests_is_not_waited_for_for_ever(spare: Spare, monkeypatch: Any) -> None:
    monkeypatch.setattr("hpcrun.checkpoint.flush.spare_replicas._PEER_IDLE_TIMEOUT_S", -1.0)
    stamp = spare.others.have(2, "ab")
    spare.others.calm = iter([False, True])
    told = spare.copy(stamp, "ab")
    assert told["nodes"] == ["b"]
    assert "stores saves of its own" in told["problems"]["a"]
