"""Nodes keep parity for one another: all of a set or none, and what a lost one had can be made again."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrun.checkpoint.format import DamagedError
from hpcrun.checkpoint.parity.erasure import encode_stripe
from hpcrun.checkpoint.parity.rebuild import rebuild_members
from hpcrun.checkpoint.restore.decide import decide_restore
from hpcrun.checkpoint.restore_plan import RebuildOrder
from hpcrun.checkpoint.tier import InventoryEntry, NodeShards
from hpcrun.errors import SiteError
from tests.checkpoint.nodes import Node, Nodes, flip, with_stamp

Make = Callable[..., Nodes]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Nodes] = []

    def make(count: int, parity: int, patience_s: float = 20.0) -> Nodes:
        made.append(Nodes(tmp_path, count, parity, patience_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def order_of(nodes: Nodes, dead: tuple[int, ...], load: NodeShards) -> RebuildOrder:
    """What a restore would have rebuilt when these nodes are dead."""
    left = nodes.holdings(load.stamp.generation, dead)
    living = [node.name for number, node in enumerate(nodes.every) if number not in dead]
    plan = decide_restore(left, [], [], [], {}, living)
    assert plan.stamp == load.stamp
    (order,) = plan.rebuilds
    return order


def check(made: InventoryEntry, loads: list[NodeShards]) -> None:
    """It is what was sealed, byte for byte."""
    sealed = {part.number: part for load in loads for part in load.parts}
    assert [one.number for one in made.parts] == sorted(sealed)
    for held in made.parts:
        with Path(held.path).open("rb") as file:
            file.seek(held.at)
            assert file.read(held.part.size_bytes) == bytes(sealed[held.number].image)


def again(nodes: Nodes, dead: tuple[int, ...], loads: list[NodeShards], where: Node) -> InventoryEntry:
    """Rebuild what dead nodes had from what is left."""
    assert where.peers is not None
    order = order_of(nodes, dead, loads[0])
    made = rebuild_members(order, where.peers, where.name, where.folder)
    check(made, [loads[number] for number in dead])
    return made


@pytest.mark.parametrize(
    ("ranks", "parity"),
    [((1, 1), 1), ((2, 1, 3), 1), ((1, 2, 1), 2), ((2, 2, 2, 1), 2), ((1, 3, 1, 2, 1), 2)],
)
def test_any_loss_that_is_promised_is_made_good(make: Make, ranks: tuple[int, ...], parity: int) -> None:
    nodes = make(len(ranks), parity)
    loads = nodes.loads(3, ranks)
    for told in nodes.store(loads):
        assert told.result()["parity"] == parity
    for dead in itertools.combinations(range(len(ranks)), parity):
        where = next(node for number, node in enumerate(nodes.every) if number not in dead)
        made = again(nodes, dead, loads, where)
        found = [part for one in where.held() for part in one.parts if one.tier == "parity"]
        assert sorted(found, key=lambda part: part.number) == list(made.parts), "known to the next worker"
        for path in where.folder.glob("rebuilt-*"):
            path.unlink()


def test_what_is_held_is_told_by_every_member_alike(make: Make) -> None:
    nodes = make(3, 1)
    loads = nodes.loads(3, (1, 2, 1))
    for told in nodes.store(loads):
        told.result()
    told_by = [node.tier.holdings()[0] for node in nodes.every if node.tier]
    assert [one.parity.index for one in told_by if one.parity] == [0, 1, 2]
    members = {one.parity.members for one in told_by if one.parity}
    assert len(members) == 1
    assert [[number for number, _ in member.parts] for member in members.pop()] == [[0], [1, 2], [3]]
    assert {path.name.split("-")[0] for node in nodes.every for path in node.folder.iterdir()} == {
        "slot",
        "parity",
    }, "nothing is left of the work"


def test_a_member_may_be_late(make: Make) -> None:
    nodes = make(3, 2)
    loads = nodes.loads(3, (1, 1, 1))
    early = nodes.store([*loads[:2], None])
    assert not any(one.done() for one in early)
    late = nodes.store([None, None, loads[2]])
    for told in (*early, *late):
        told.result()
    again(nodes, (1, 2), loads, nodes.every[0])


def test_a_member_that_does_not_come_is_named_and_nothing_is_left(make: Make) -> None:
    nodes = make(3, 1, patience_s=0.3)
    loads = nodes.loads(3, (1, 1, 1))
    for told in nodes.store([*loads[:2], None]):
        with pytest.raises(SiteError, match=r"n2: has not come to step 3|n[01]: n2: has not come to step 3"):
            told.result()
    assert not nodes.every[0].tier.holdings()  # type: ignore[union-attr]
    assert not list(nodes.every[0].folder.glob("parity-*"))


def test_a_member_that_is_dead_is_named(make: Make) -> None:
    nodes = make(3, 1, patience_s=0.5)
    loads = nodes.loads(3, (1, 1, 1))
    nodes.every[2].die()
    for told in nodes.store([*loads[:2], None]):
        with pytest.raises(SiteError, match=r"n2"):
            told.result()


def test_one_without_space_fails_and_so_do_the_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = make(3, 2)
    allocate = os.posix_fallocate

    def full(descriptor: int, at: int, size: int) -> None:
        if "/n1/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    stored = nodes.store(nodes.loads(3, (1, 1, 1)))
    with pytest.raises(OSError, match="No space left on device"):
        stored[1].result()
    for told in (stored[0], stored[2]):
        with pytest.raises(SiteError, match=r"n1: .*No space left on device"):
            told.result()
    assert not nodes.holdings(nodes.every[0].memory[0].stamp.generation)[3:]
    assert not [path for node in nodes.every for path in node.folder.glob("parity-*")]
    monkeypatch.undo()
    for told in nodes.store(nodes.loads(4, (1, 1, 1))):
        told.result()


def test_a_member_that_is_killed_while_others_encode_fails_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(3, 1, patience_s=0.5)
    first, gone = threading.Lock(), list[int]()

    def slow(*arguments: object) -> None:
        with first:
            if not gone:
                gone.append(2)
                nodes.every[2].die()
        encode_stripe(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("hpcrun.checkpoint.parity.parity_tier.encode_stripe", slow)
    for told in nodes.store(nodes.loads(3, (1, 1, 1))):
        with pytest.raises(SiteError):
            told.result()
    assert not [path for node in nodes.every[:2] for path in node.folder.glob("parity-*")]


def test_a_state_that_a_member_has_left_out_is_not_waited_for(make: Make) -> None:
    nodes = make(3, 1)
    old, new = nodes.loads(3, (1, 1, 1)), nodes.loads(4, (1, 1, 1))
    waiting = nodes.store([*old[:2], None])
    assert nodes.every[2].tier is not None
    nodes.every[2].tier.abandon(old[2].stamp, [2], "a newer save was due")
    for told in waiting:
        with pytest.raises(SiteError, match=r"n2: leaves out part 2 of step 3: a newer save was due"):
            told.result()
    for told in nodes.store(new):
        told.result()
    with pytest.raises(SiteError, match="has gone on to a newer state than that of step 2"):
        nodes.store([nodes.loads(2, (1, 1, 1))[0], None, None])[0].result()


def test_members_that_mean_different_states_do_not_mix_them(make: Make) -> None:
    nodes = make(2, 1, patience_s=0.5)
    loads = nodes.loads(3, (1, 1))
    for told in nodes.store([loads[0], with_stamp(loads[1], position=7)]):
        with pytest.raises(SiteError, match=r"is another state"):
            told.result()


def test_a_member_whose_worker_was_started_anew_after_it_was_done_counts(make: Make, tmp_path: Path) -> None:
    nodes = make(2, 1)
    loads = nodes.loads(3, (1, 1))
    for told in nodes.store(loads):
        told.result()
    node = nodes.every[1]
    node.join(nodes.every, 1)
    assert node.tier is not None
    assert nodes.every[0].peers is not None
    stamp = nodes.every[0].memory[0].stamp
    request = {"do": "standing", "stamp": vars(stamp), "wanted": "done", "wait_s": 0.0}
    told_again = nodes.every[0].peers.ask("n1", request)
    assert (told_again["standing"], told_again["parts"][0][0]) == ("done", 1)


def test_retain_lets_go_of_the_others(make: Make) -> None:
    nodes = make(2, 1)
    for step in (3, 4):
        for told in nodes.store(nodes.loads(step, (1, 1))):
            told.result()
    tier = nodes.every[0].tier
    assert tier is not None
    old, new = tier.holdings()
    again(nodes, (1,), nodes.loads(3, (1, 1)), nodes.every[0])
    tier.retain([new.stamp.generation])
    assert tier.holdings() == [new]
    assert sorted(path.name for path in nodes.every[0].folder.glob("*-*")) == sorted(
        [f"parity-{new.stamp.generation}.bin", f"parity-{new.stamp.generation}.json", *_slots(nodes.every[0])]
    )
    assert old.stamp.step == 3


def _slots(node: Node) -> list[str]:
    return [path.name for path in node.folder.glob("slot-*")]


def test_leftovers_of_a_killed_worker_are_no_parity(make: Make, tmp_path: Path) -> None:
    nodes = make(2, 1)
    folder = nodes.every[0].folder
    for name in ("parity-00.bin.aside", "parity-00.outgoing.aside", "parity-01.bin"):
        (folder / name).write_bytes(b"half")
    (folder / "parity-02.bin").write_bytes(b"half")
    (folder / "parity-02.json").write_text("{}")
    nodes.every[0].join(nodes.every, 1)
    assert nodes.every[0].tier is not None
    assert nodes.every[0].tier.holdings() == []
    assert sorted(path.name for path in folder.iterdir()) == ["parity-02.bin", "parity-02.json"]


def stored(nodes: Nodes, ranks: tuple[int, ...]) -> list[NodeShards]:
    loads = nodes.loads(3, ranks)
    for told in nodes.store(loads):
        told.result()
    return loads


def test_damaged_parity_gives_no_part(make: Make) -> None:
    nodes = make(3, 1)
    loads = stored(nodes, (1, 1, 1))
    path = next(nodes.every[0].folder.glob("parity-*.bin"))
    flip(path, 100, 1000)
    with pytest.raises(
        DamagedError, match=r"n2: cannot be made again: .*part 2: .*; n0: parity block 0 in .* its hash"
    ):
        again(nodes, (2,), loads, nodes.every[1])
    assert not list(nodes.every[1].folder.glob("rebuilt-*"))


def test_damaged_parity_is_left_out_where_there_is_more(make: Make) -> None:
    nodes = make(4, 2)
    loads = stored(nodes, (1, 1, 1, 1))
    for lost in range(1, 4):
        for node in nodes.every:
            if node is not nodes.every[lost]:
                flip(next(node.folder.glob("parity-*.bin")), 100, 1000)
                try:
                    again(nodes, (lost,), loads, nodes.every[0])
                finally:
                    flip(next(node.folder.glob("parity-*.bin")), 100, 1000)
                for path in nodes.every[0].folder.glob("rebuilt-*"):
                    path.unlink()


def test_a_damaged_part_of_another_is_left_out_where_there_is_more(make: Make) -> None:
    nodes = make(4, 2)
    loads = stored(nodes, (1, 1, 1, 1))
    flip(nodes.every[2].memory[0].parts[0].path, 700, 500)
    again(nodes, (1,), loads, nodes.every[0])


def test_a_source_that_dies_meanwhile_is_done_without(make: Make) -> None:
    nodes = make(4, 2)
    loads = stored(nodes, (1, 1, 1, 1))
    order = order_of(nodes, (1,), loads[0])
    nodes.every[2].die()
    here = nodes.every[0]
    assert here.peers is not None
    check(rebuild_members(order, here.peers, here.name, here.folder), [loads[1]])
    nodes.every[3].die()
    with pytest.raises(SiteError, match=r"n1: cannot be made again: 1 pieces of stripe .*n[23] \("):
        rebuild_members(order, here.peers, here.name, here.folder)


def test_a_replacement_that_was_in_no_set_can_make_the_lost_part(make: Make, tmp_path: Path) -> None:
    nodes = make(3, 1)
    loads = stored(nodes, (1, 2, 1))
    spare = Node(tmp_path, "spare")
    spare.join([*nodes.every, spare], 1)
    nodes.every.append(spare)
    made = again(nodes, (1,), loads, spare)
    assert (made.node, made.tier, made in spare.held()) == ("spare", "parity", True)


def test_who_does_not_know_the_secret_gets_no_parity(make: Make, tmp_path: Path) -> None:
    nodes = make(2, 1, patience_s=0.3)
    stranger = Node(tmp_path, "stranger", secret="guess")
    stranger.join([*nodes.every, stranger], 1, patience_s=0.3)
    assert stranger.tier is not None
    with pytest.raises(SiteError, match=r"n[01] \(127.0.0.1:\d+\)"):
        stranger.tier.store(stranger.seal(nodes.loads(3, (1, 1))[0]))
    stranger.die()


def test_many_states_one_after_the_other(make: Make) -> None:
    nodes = make(3, 1)
    with ThreadPoolExecutor(3) as pool:

        def run(number: int) -> int:
            node = nodes.every[number]
            assert node.tier is not None
            for step in range(1, 21):
                load = node.seal(nodes.loads(step, (1, 1, 1))[number])
                node.tier.store(load)
                node.tier.retain([load.stamp.generation])
            return len(node.tier.holdings())

        assert list(pool.map(run, range(3))) == [1, 1, 1]
