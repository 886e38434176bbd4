"""Dataclasses from JSON values: every declared type, and one line that names the field."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from hpcrun.typed_json import (
    Count,
    Seconds,
    Tagged,
    TaggedUnion,
    WrongValue,
    dump_typed,
    parse_typed,
    render_typed,
)


@dataclass(frozen=True)
class Inner:
    rank: int
    place: tuple[str, int]


@dataclass(frozen=True)
class Outer:
    name: str
    seconds: float
    kind: Literal["save", "stop"]
    ranks: tuple[int, ...] = ()
    inner: Inner | None = None
    others: list[Inner] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    is_last: bool = False
    count: Count = 0
    wait_s: Seconds | None = None
    anything: Any = None


WHOLE = {
    "name": "x",
    "seconds": 2,
    "kind": "save",
    "ranks": [0, 1],
    "inner": {"rank": 3, "place": ["n01", 80]},
    "others": [{"rank": 4, "place": ["n02", 81]}],
    "texts": {"n01": ["a", "b"]},
    "is_last": True,
    "anything": {"deep": [1]},
}


def test_a_record_comes_back_as_it_was_written() -> None:
    record = parse_typed(Outer, WHOLE)
    assert record.inner == Inner(3, ("n01", 80))
    assert (record.ranks, record.seconds) == ((0, 1), 2.0)
    assert parse_typed(Outer, json.loads(json.dumps(dump_typed(record)))) == record


def test_defaults_stand_in_for_what_is_left_out() -> None:
    assert parse_typed(Outer, {"name": "x", "seconds": 0.5, "kind": "stop"}) == Outer("x", 0.5, "stop")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": 3}, "name: expected a text, not 3"),
        ({"seconds": "2"}, "seconds: expected a number, not '2'"),
        ({"seconds": float("nan")}, "seconds: expected a number, not nan"),
        ({"seconds": 10**400}, "seconds: expected a number, not 1"),
        ({"seconds": True}, "seconds: expected a number, not True"),
        ({"kind": "go"}, "kind: expected one of save, stop, not 'go'"),
        ({"ranks": [0, True]}, "ranks: expected an integer, not True"),
        ({"ranks": [1 << 63]}, "ranks: expected an integer, not 9223372036854775808"),
        ({"ranks": "01"}, "ranks: expected a list, not '01'"),
        ({"inner": {"rank": 3}}, "inner: place: is missing"),
        ({"inner": {"rank": 3, "place": ["n01"]}}, "inner: place: expected a list of 2, not ['n01']"),
        ({"inner": 7}, "inner: expected an object, not 7"),
        ({"others": [None]}, "others: expected an object, not None"),
        ({"texts": []}, "texts: expected an object, not []"),
        ({"texts": {"n01": "a"}}, "texts: expected a list, not 'a'"),
        ({"texts": {1: []}}, "texts: expected names that are texts, not 1"),
        ({"is_last": 1}, "is_last: expected true or false, not 1"),
        ({"count": -1}, "count: expected a number from 0 to 9.0072e+15, not -1"),
        ({"count": 1 << 53}, "count: expected a number from 0 to 9.0072e+15, not 9007199254740992"),
        ({"count": 1.0}, "count: expected an integer, not 1.0"),
        ({"wait_s": -0.5}, "wait_s: expected a number from 0 to 1e+11, not -0.5"),
        ({"wait_s": 2e11}, "wait_s: expected a number from 0 to 1e+11, not 2"),
        ({"more": 1}, "more: is not a field; the fields are name, seconds, kind"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(WrongValue) as raised:
        parse_typed(Outer, WHOLE | change)
    assert str(raised.value).startswith(says)


def test_a_missing_field_and_another_kind_of_value_are_named() -> None:
    with pytest.raises(WrongValue, match=r"^seconds: is missing$"):
        parse_typed(Outer, {"name": "x", "kind": "save"})
    with pytest.raises(WrongValue, match=r"^expected an object, not \[\]$"):
        parse_typed(Outer, [])


def test_a_newer_writer_s_fields_may_be_ignored() -> None:
    assert parse_typed(Outer, WHOLE | {"newer": 1}, allow_extra=True) == parse_typed(Outer, WHOLE)


def test_a_newer_writer_s_fields_may_be_kept() -> None:
    extra: dict[str, Any] = {}
    assert parse_typed(Outer, WHOLE | {"newer": [1]}, extra=extra) == parse_typed(Outer, WHOLE)
    assert extra == {"newer": [1]}


@dataclass(frozen=True)
class Checked:
    low: int
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise WrongValue("low: is above high")


def test_a_class_s_own_check_is_run() -> None:
    assert parse_typed(Checked, {"low": 3}) == Checked(3, 9)
    with pytest.raises(WrongValue, match="low: is above high"):
        parse_typed(Checked, {"low": 10})


def test_a_type_that_no_json_value_has_is_a_mistake_of_ours() -> None:
    @dataclass(frozen=True)
    class Wrong:
        names: set[str]

    with pytest.raises((TypeError, NameError)):
        parse_typed(Wrong, {"names": []})


@dataclass(frozen=True)
class ShipSailed(Tagged):
    name: str


@dataclass(frozen=True)
class ShipSank(Tagged):
    name: str
    place: Inner | None = None


@dataclass(frozen=True)
class Letter:
    news: ShipSailed | ShipSank
    before: tuple[ShipSailed | ShipSank, ...] = ()


def test_of_a_union_the_class_that_the_json_names_is_made() -> None:
    letter = Letter(ShipSank("a", Inner(1, ("n", 2))), (ShipSailed("a"), ShipSank("b")))
    text = render_typed(letter)
    assert json.loads(text)["before"][0] == {"kind": "ship_sailed", "name": "a"}
    assert parse_typed(Letter, json.loads(text)) == letter
    kinds = TaggedUnion[ShipSailed | ShipSank](ShipSailed | ShipSank)
    assert kinds.parse({"kind": "ship_sailed", "name": "a"}) == ShipSailed("a")
    wrong: list[tuple[object, str]] = [
        ({"name": "a"}, "kind: expected one of ship_sailed, ship_sank, not None"),
        ({"kind": "ship_sank", "name": 3}, "ship_sank: name: expected a text, not 3"),
        ({"kind": "ship_sailed", "name": "a", "place": None}, "ship_sailed: place: is not a field"),
        ([], "expected an object"),
    ]
    for value, problem in wrong:
        with pytest.raises(WrongValue, match=problem):
            kinds.parse(value)
    with pytest.raises(TypeError):
        render_typed({"a": {1, 2}})
