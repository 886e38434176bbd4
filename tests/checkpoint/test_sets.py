"""Erasure sets: what fails together is in different sets, and what that is worth is said aloud."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest

from hpcrun.checkpoint.parity.sets import ErasureSets, choose_erasure_sets
from hpcrun.errors import UsageError

Racks = dict[str, str | None]


def racks(*sizes: int) -> Racks:
    """Nodes n0, n1, … in racks of these sizes."""
    numbers = itertools.count()
    return {f"n{next(numbers)}": f"r{rack}" for rack, size in enumerate(sizes) for _ in range(size)}


def is_survived(chosen: ErasureSets, lost: set[str]) -> bool:
    """By the definition of a stripe, of each set alone: any so many of it, and not one more."""
    return all(
        len(lost & set(nodes)) <= parity for nodes, parity in zip(chosen.sets, chosen.parity, strict=True)
    )


@pytest.mark.parametrize(
    ("sizes", "set_size", "wanted"),
    [
        ((4, 4), 8, [2, 2, 2, 2]),
        ((2, 2, 2, 2), 4, [4, 4]),
        ((3, 1, 1, 1), 8, [2, 2, 2]),
        ((3, 2, 2), 8, [3, 2, 2]),
        ((1, 1, 1), 2, [3]),
        ((5, 4, 3, 2, 1), 4, [3, 3, 3, 3, 3]),
    ],
)
def test_no_set_has_two_nodes_of_a_rack_and_sizes_are_even(
    sizes: tuple[int, ...], set_size: int, wanted: list[int]
) -> None:
    leaf = racks(*sizes)
    chosen = choose_erasure_sets(list(leaf), {"leaf": leaf}, scheme="xor", set_size=set_size, survive="leaf")
    assert sorted(map(len, chosen.sets), reverse=True) == wanted
    assert sorted(itertools.chain(*chosen.sets)) == sorted(leaf)
    assert all(max(Counter(leaf[node] for node in nodes).values()) == 1 for nodes in chosen.sets)


def test_nodes_that_do_not_come_rack_by_rack_are_put_so_first() -> None:
    leaf = racks(2, 2)
    chosen = choose_erasure_sets(["n0", "n2", "n1", "n3"], {"leaf": leaf}, scheme="xor", survive="leaf")
    assert [len(nodes) for nodes in chosen.sets] == [2, 2]
    assert {frozenset(map(str, (leaf[node] for node in nodes))) for nodes in chosen.sets} == {
        frozenset({"r0", "r1"})
    }


def test_a_rack_with_more_than_half_of_the_nodes_takes_reed_solomon() -> None:
    leaf = racks(4, 2)
    chosen = choose_erasure_sets(list(leaf), {"leaf": leaf}, survive="leaf")
    assert (chosen.scheme, chosen.parity, [len(one) for one in chosen.sets]) == ("partner", (2, 2), [3, 3])
    assert chosen.survives({"n0", "n1", "n2", "n3"})
    with pytest.raises(
        UsageError, match=r"leaf r0 has 4 of 6 nodes, and a set can lose 1 node; .*scheme: rs"
    ):
        choose_erasure_sets(list(leaf), {"leaf": leaf}, scheme="xor", survive="leaf")
    without = choose_erasure_sets(list(leaf), {"leaf": leaf}, with_rs=False)
    assert (without.domain, without.parity) == ("node", (1,))


def test_the_default_is_the_highest_level_that_can_be_lost_and_is_said_aloud() -> None:
    leaf = racks(2, 2, 2, 2)
    spine: Racks = dict.fromkeys(leaf, "s0")
    chosen = choose_erasure_sets(list(leaf), {"leaf": leaf, "spine": spine}, set_size=4)
    assert (chosen.domain, chosen.scheme) == ("leaf", "xor")
    assert (
        "leaf is the highest level of which this placement can lose any one, as no spine" in chosen.statement
    )
    assert "any one leaf; any one node; up to 2 nodes at once" in chosen.statement
    assert "spine s0" in chosen.statement.splitlines()[2]
    apart = choose_erasure_sets(list(leaf), {"leaf": leaf, "spine": {n: f"s{int(n[1]) // 4}" for n in leaf}})
    assert apart.domain == "spine", "four nodes under each of two spines make four pairs"


def test_what_is_not_known_is_not_promised() -> None:
    leaf = racks(2, 2) | {"n3": None}
    chosen = choose_erasure_sets(list(leaf), {"leaf": leaf})
    assert chosen.domain == "node"
    assert "the leaf of n3 is not known, so nothing is promised of any leaf" in chosen.statement
    assert "any one leaf" not in chosen.statement
    with pytest.raises(UsageError, match=r"the leaf of n3 is not known; describe the fabric"):
        choose_erasure_sets(list(leaf), {"leaf": leaf}, survive="leaf")


@pytest.mark.parametrize(
    ("count", "options", "said"),
    [
        (4, {"survive": "pod"}, r"pod is not a level of this fabric; use one of node, leaf"),
        (1, {"survive": "node"}, r"one node alone; take more nodes"),
        (4, {"survive": "node", "scheme": "none"}, r"scheme: none; set scheme: auto"),
    ],
)
def test_a_level_that_cannot_be_survived_is_refused(count: int, options: dict[str, str], said: str) -> None:
    leaf = racks(count)
    with pytest.raises(UsageError, match=rf"^checkpoint\.parity\.survive: .*{said}") as refused:
        choose_erasure_sets(list(leaf), {"leaf": leaf}, **options)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_one_node_and_scheme_none_have_no_parity() -> None:
    one = choose_erasure_sets(["n0"], {})
    assert (one.sets, one.scheme, one.of("n0")) == ((), "none", None)
    assert "there is one node" in one.statement
    assert "scheme is none" in choose_erasure_sets(["n0", "n1"], {}, scheme="none").statement
    assert not one.survives({"n0"})
    assert one.survives({"elsewhere"})


def test_a_scheme_that_the_number_of_nodes_changes_says_so() -> None:
    two = choose_erasure_sets(["n0", "n1"], {}, scheme="rs")
    assert (two.scheme, two.parity) == ("partner", (1,))
    assert "rs was asked for" in two.statement
    five = choose_erasure_sets([f"n{n}" for n in range(5)], {}, scheme="partner")
    assert (five.scheme, sorted(map(len, five.sets))) == ("xor", [2, 3])


NUMBERS = {"one": 1, "two": 2}


@pytest.mark.parametrize("seed", range(120))
def test_the_statement_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 10)
    nodes = [f"n{n}" for n in range(count)]
    leaf: Racks = {node: f"r{draw.randrange(draw.randint(1, count))}" for node in nodes}
    spine: Racks = {node: f"s{int(str(leaf[node])[1:]) % 2}" for node in nodes}
    levels = {"leaf": leaf, "spine": spine}
    scheme = draw.choice(["auto", "partner", "xor", "rs"])
    chosen = choose_erasure_sets(nodes, levels, scheme=scheme, set_size=draw.randint(2, 8))  # type: ignore[arg-type]
    lost = [set(some) for size in range(count + 1) for some in itertools.combinations(nodes, size)]
    truth = {frozenset(some): is_survived(chosen, some) for some in lost}
    assert all(chosen.survives(some) == truth[frozenset(some)] for some in lost)
    _, survived, dead, *_ = chosen.statement.splitlines()

    def most(groups: list[set[str]]) -> int:
        return max(
            size
            for size in range(len(groups) + 1)
            if all(truth[frozenset(set().union(*some))] for some in itertools.combinations(groups, size))
        )

    for level, units in levels.items():
        names = sorted({str(unit) for unit in units.values()})
        groups = [{node for node in nodes if units[node] == name} for name in names]
        word = {"leaf": "lea(?:f|ves)", "spine": "spines?"}[level]
        told = re.search(rf"any (\w+) {word}(?:;|$)", survived)
        assert (int(NUMBERS.get(told[1], 0) or told[1]) if told else 0) == most(groups), chosen.statement
        listed = re.search(rf"; {word} ([^;]*)", dead)
        fatal = [name for name, group in zip(names, groups, strict=True) if not truth[frozenset(group)]]
        assert (re.findall(r"[rs]\d+", listed[1]) if listed else []) == [
            name for name in dict.fromkeys(map(str, units.values())) if name in fatal
        ][:4]
    told = re.search(r"any (\w+) nodes?(?:;|$)", survived)
    assert told
    assert int(NUMBERS.get(told[1], 0) or told[1]) == most([{node} for node in nodes])
    at_once = re.search(r"up to (\d+) nodes at once", survived)
    largest = max(len(some) for some, lives in truth.items() if lives)
    assert (int(at_once[1]) if at_once else most([{node} for node in nodes])) == largest
    assert chosen.domain == "node" or most(
        [
            {node for node in nodes if levels[str(chosen.domain)][node] == u}
            for u in set(levels[str(chosen.domain)].values())
        ]
    )
