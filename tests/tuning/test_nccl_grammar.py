"""The grammars of NCCL_ALGO, NCCL_PROTO and device lists, held against plain rewritings of NCCL's loops."""

from __future__ import annotations

import random

import pytest

from hpcrun.tuning.registry.device_names import parse_device_list
from hpcrun.tuning.registry.nccl_grammar import (
    NCCL_ALGORITHMS,
    NCCL_FUNCTIONS,
    NCCL_PROTOCOLS,
    check_device_list,
    check_nccl_selection,
    known_nccl_choices,
    parse_nccl_selection,
)
from hpcrun.tuning.registry.registry import Version

OLD, NEW, NEWEST = (2, 20, 5), (2, 27, 5), (2, 32, 3)
Choice = dict[str, frozenset[str]]


def tokens(text: str, sign: str) -> list[str]:
    """As strtok_r cuts: empty pieces are never seen."""
    return [piece for piece in text.split(sign) if piece]


def as_c_reads_it(text: str, choices: tuple[str, ...]) -> Choice | None:
    """What the parser of 2.24 and later makes of a value; None where it gives up."""
    chosen: Choice = {}
    for part in tokens(text, ";"):
        fields = tokens(part, ":")
        prefix, elements = (fields[0], fields[1]) if len(fields) > 1 else (None, fields[0] if fields else "")
        if prefix is None and not text.startswith(part):
            return None
        inverted = elements.startswith("^")
        found = set()
        for word in tokens(elements[1:] if inverted else elements, ","):
            if word.lower() not in choices:
                return None
            found.add(word.lower())
        left = frozenset(choices) - found if inverted else frozenset(found)
        if prefix is None:
            chosen |= dict.fromkeys(NCCL_FUNCTIONS, left)
        elif prefix.lower() in NCCL_FUNCTIONS:
            chosen[prefix.lower()] = left
        else:
            return None
    return chosen


def random_selection(dice: random.Random, choices: tuple[str, ...]) -> str:
    def words() -> str:
        picked = [
            one if dice.random() < 0.7 else one.upper() for one in dice.choices(choices, k=dice.randint(1, 3))
        ]
        return dice.choice(["", "^"]) + ",".join(picked)

    parts = [words()] if dice.random() < 0.6 else []
    parts += [
        f"{function}:{words()}"
        for function in dice.sample(NCCL_FUNCTIONS, dice.randint(0 if parts else 1, 3))
    ]
    return ";".join(parts)


def damaged(text: str, dice: random.Random) -> str:
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(text) + 1)
        text = (
            text[:at] + dice.choice([*";:,^= x8\tR", "ring", "allreduce:"]) + text[at + dice.randint(0, 2) :]
        )
    return text


@pytest.mark.parametrize("name", ["NCCL_ALGO", "NCCL_PROTO"])
def test_what_is_well_formed_is_read_as_nccl_reads_it(name: str) -> None:
    dice = random.Random(1)
    choices = known_nccl_choices(name, NEW)
    for _ in range(2000):
        text = random_selection(dice, choices)
        found = parse_nccl_selection(name, text, NEW)
        assert found.is_valid, text
        assert dict(found.chosen) == as_c_reads_it(text, choices), text


@pytest.mark.parametrize("name", ["NCCL_ALGO", "NCCL_PROTO"])
def test_what_nccl_refuses_is_an_error_and_nothing_else_is_lost(name: str) -> None:
    dice = random.Random(2)
    choices = known_nccl_choices(name, NEW)
    refused = 0
    for _ in range(4000):
        text = damaged(random_selection(dice, choices), dice)
        found, expected = parse_nccl_selection(name, text, NEW), as_c_reads_it(text, choices)
        if expected is None:
            refused += 1
            assert not found.is_valid, text
        elif found.is_valid:
            assert dict(found.chosen) == expected, text
        else:  # what NCCL takes in part alone
            assert any("colon" in one.text for one in found.faults), (text, found.faults)
    assert refused > 1000


def test_any_text_gives_lines_and_no_exception() -> None:
    dice = random.Random(3)
    for _ in range(3000):
        text = "".join(dice.choices("ring,tree;:^=allreduce \t\n\0é\udc80LL128%", k=dice.randint(1, 40)))
        for version in (None, OLD, NEW, NEWEST):
            for name in ("NCCL_ALGO", "NCCL_PROTO"):
                assert all(one.text for one in check_nccl_selection(name, text, version))
            for ports in (True, False):
                assert all(one.text for one in check_device_list("NCCL_IB_HCA", text, version, ports=ports))


def levels(name: str, text: str, version: Version | None) -> list[str]:
    return [one.severity for one in check_nccl_selection(name, text, version)]


def told(name: str, text: str, version: Version | None) -> str:
    return "\n".join(one.message for one in check_nccl_selection(name, text, version))


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ((2, 12, 12), "ring tree collnet"),
        ((2, 16, 2), "ring tree collnetchain collnetdirect"),
        ((2, 17, 1), "ring tree collnetchain collnetdirect nvls"),
        ((2, 18, 1), "ring tree collnetchain collnetdirect nvls nvlstree"),
        ((2, 23, 4), "ring tree collnetchain collnetdirect nvls nvlstree pat"),
    ],
)
def test_names_by_release(release: Version, names: str) -> None:
    assert set(known_nccl_choices("NCCL_ALGO", release)) == set(names.split())
    assert set(known_nccl_choices("NCCL_PROTO", release)) == set(NCCL_PROTOCOLS)
    assert set(names.split()) <= set(NCCL_ALGORITHMS)


def test_one_value_by_release() -> None:
    # flat list with a word that is not known: silence, then the end of the job
    assert "passed over in silence" in told("NCCL_ALGO", "ring,treee", OLD)
    assert "ends the job; did you mean tree?" in told("NCCL_ALGO", "ring,treee", NEW)
    # a collective without an algorithm: falls back, then fails
    assert "fall back to ring" in told("NCCL_ALGO", "tree", OLD)
    assert levels("NCCL_ALGO", "tree", OLD) == ["note"]
    assert "leaves broadcast, reduce, allgather, reducescatter without" in told("NCCL_ALGO", "tree", NEW)
    assert levels("NCCL_ALGO", "ring,tree", NEW) == []
    # functions by name
    assert "read from 2.24 on; 2.20.5 passes all of it over" in told("NCCL_ALGO", "allreduce:tree", OLD)
    assert levels("NCCL_ALGO", "allreduce:tree", NEW) == []
    assert levels("NCCL_ALGO", "allreduce:tree", NEWEST) == []
    assert levels("NCCL_ALGO", "ring,tree;allreduce:tree", NEWEST) == []
    # MSCCL's value on a stock library
    assert "'MSCCL' is not known and ends the job" in told("NCCL_ALGO", "MSCCL,RING,TREE", NEW)
    assert "known from 2.5 to before 2.14" in told("NCCL_ALGO", "ring,collnet", NEW)
    assert "known from 2.23 on" in told("NCCL_ALGO", "ring,pat", OLD)
    assert "blank" in told("NCCL_ALGO", "ring, tree", NEW)


def test_ll128_is_never_forced_without_a_word() -> None:
    assert "corrupts data" in told("NCCL_PROTO", "LL128", NEW)
    assert "corrupts data" in told("NCCL_PROTO", "simple;allreduce:LL,LL128", NEW)
    for release in (OLD, NEW, NEWEST):
        assert "since ^ turns on all that it does not list" in told("NCCL_PROTO", "^LL", release)
    assert levels("NCCL_PROTO", "^LL128", NEW) == []
    assert levels("NCCL_PROTO", "^LL128,LL", NEW) == []
    assert levels("NCCL_PROTO", "Simple,LL", NEW) == []


def as_c_matches(text: str, name: str) -> bool:
    excludes = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    refs = [item.split(":")[0] for item in text.removeprefix("=").split(",") if item.split(":")[0]]
    if not refs:
        return True
    matched = any(name == ref if exact else name[: len(ref)] == ref for ref in refs)
    return matched != excludes


def test_devices_match_as_nccl_matches_them() -> None:
    dice = random.Random(4)
    names = [f"mlx5_{n}" for n in range(22)] + ["eth0", "eth1", "eth10", "bond0", "bond0.2093", "ib0"]
    for _ in range(2000):
        text = dice.choice(["", "^", "=", "^="]) + ",".join(dice.choices([*names, "mlx5", "", "eth"], k=3))
        if dice.random() < 0.3:
            text += ":1"
        for name in names:
            assert parse_device_list(text).takes(name) is as_c_matches(text, name), (text, name)


def device_text(text: str, version: Version | None = NEW, ports: bool = True) -> str:
    """What is told, without the quotes around values."""
    return "\n".join(
        one.message for one in check_device_list("NCCL_IB_HCA", text, version, ports=ports)
    ).replace("'", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mlx5_1", "mlx5_1 also takes mlx5_10 to mlx5_19: names match by how they begin; write =mlx5_1"),
        ("^mlx5_1,mlx5_2", "mlx5_1 also leaves out mlx5_10 to mlx5_19"),
        ("=^mlx5_1", "write ^=mlx5_1"),
        ("=mlx5_0,=mlx5_1", "=mlx5_1 matches nothing: the sign stands once"),
        ("=mlx5_0, mlx5_1", " mlx5_1 matches nothing: blanks"),
        ("=mlx5_0,mlx5_1,mlx5_0", "mlx5_0: stands twice"),
        ("=", "names no device"),
        ("=mlx5_0:a", "a is no port"),
        ("=mlx5_0:1:0", "rail and plane are read from 2.30 on"),
        ("=mlx5_0:1:0:0:0", "too many fields"),
        ("=" + ",".join(f"d{n}" for n in range(33)), "33 devices; NCCL takes 32"),
    ],
)
def test_traps_of_adapters(text: str, words: str) -> None:
    assert words in device_text(text)


@pytest.mark.parametrize("text", ["=mlx5_0,mlx5_1", "mlx5", "^=mlx5_7", "=mlx5_0:1,mlx5_1:1", "ibp"])
def test_good_lists_of_adapters(text: str) -> None:
    assert device_text(text) == ""


def test_rails_and_planes() -> None:
    assert device_text("=mlx5_0:1:0:0,mlx5_1::0:1", (2, 30, 7)) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bond0", "bond0 also takes bond0.100: names match by how they begin; write =bond0"),
        ("bond1", "bond1 also takes bond10 and bond1.100"),
        ("=lo", "lo leads to no other host"),
        ("docker0", "docker0 leads to no other host"),
        ("virbr0", "leads to no other host"),
        ("=eth0:1", "an interface has no port"),
        ("averylonginterface", "longer than 15"),
    ],
)
def test_traps_of_interfaces(text: str, words: str) -> None:
    assert words in device_text(text, ports=False)


@pytest.mark.parametrize("text", ["=eth0", "^docker,lo", "ib", "^=docker0", "=bond0.2093"])
def test_good_lists_of_interfaces(text: str) -> None:
    assert device_text(text, ports=False) == ""
