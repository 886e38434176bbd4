"""YAML in and out: types, duplicates, places, hostile input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrun.errors import SpecError, UsageError
from hpcrun.specs.yaml import MAX_YAML_DEPTH, load_yaml, parse_yaml, parse_yaml_value, render_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("4:00", "4:00"),
        ("1:30:00", "1:30:00"),
        ("012", "012"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2024-01-02", "2024-01-02"),
        ("=", "="),
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1.0e-05", 1e-5),
        (".inf", float("inf")),
        ("-.Inf", float("-inf")),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("[1, no]", [1, "no"]),
    ],
)
def test_a_value_has_the_core_type_in_a_file_and_on_the_command_line(text: str, value: Any) -> None:
    in_file = parse_yaml(f"key: {text}", "f").values["key"]
    on_command_line = parse_yaml_value(text, "key", "command line")
    for found in (in_file, on_command_line):
        assert found == value
        assert type(found) is type(value)


def test_what_is_no_yaml_on_the_command_line_is_text() -> None:
    assert parse_yaml_value("[a", "key", "command line") == "[a"
    assert parse_yaml_value("@home", "key", "command line") == "@home"


def test_every_duplicate_key_is_named_with_both_lines() -> None:
    text = "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n"
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "job.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        "job.yaml:5 b.c: stands twice, first on line 3; remove one",
        "job.yaml:6 a: stands twice, first on line 1; remove one",
    ]


def test_every_key_and_item_has_a_place_and_an_absent_one_that_of_its_parent() -> None:
    document = parse_yaml("# about\na:\n  b: 1\n  list:\n  - x\n  - y\nflow: {c: 1}\n", "f")
    assert document.where("a.b") == "f:3"
    assert document.where("a.list.1") == "f:6"
    assert document.where("flow.c") == "f:7"
    assert document.where("a.absent.deeper") == "f:2"
    assert document.where("absent") == "f"


def test_an_aliased_mapping_is_copied() -> None:
    values = parse_yaml("a: &x {k: 1}\nb: *x\n", "f").values
    assert values == {"a": {"k": 1}, "b": {"k": 1}}
    assert values["a"] is not values["b"]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefg"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: is empty"),
        ("# nothing\n", "f: is empty"),
        ("- a\n", "f: is a list"),
        ("word", "f: is a single value"),
        ("a: [1, 2\nb: 3", "f:2: is not valid YAML"),
        ("a: 1\n--- \nb: 2", "f:2: is not valid YAML"),
        ("a: 1\n\tb: 2", "f:2: is not valid YAML"),
        ("a: \x00", "f: is not valid YAML"),
        ('a: "\\UFFFFFFFF"', "f: is not valid YAML"),
        ('a: "\\uD800"', "f:1 a: holds a character"),
        ("a: *b", "f:1: is not valid YAML"),
        (
            "a: !!python/object/apply:os.system [ls]\nb: !!python/name:os.system x",
            "f:2 b: 'x' is not a plain",
        ),
        ("a: !!int x", "f:1 a: 'x' is not a plain value of type int"),
        ("a: " + "9" * 5000, "f:1 a: '999"),
        ("? [a, b]\n: 1", "f:1: a key must be a plain word"),
        ('"": 1', "f:1: a key must be a plain word"),
        ('"a\\nb": 1', "f:1: a key must be a plain word"),
        ("a: &a\n  b: *a\n", "f:1 a.b.b.b"),
        ("a: " + "[" * 100 + "]" * 100, f"f:1 a{'.0' * MAX_YAML_DEPTH}: nested deeper than 20"),
        ("a: " + "[" * 5000, "f: is not valid YAML: nested deeper"),
        (BOMB, "more than 20000 values"),
    ],
)
def test_bad_documents_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "f")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: no such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        load_yaml(tmp_path / "latin.yaml")


VALUES = {
    "text": [
        "no",
        "012",
        "4:00",
        "3e-4",
        "null",
        "~",
        "",
        " x ",
        "a: b",
        "# c",
        "'",
        '"',
        "1.0",
        "é ü 漢",
        "-",
    ],
    "more": [
        "a\nb",
        "a\n",
        "\ttab",
        "\x85",
        "\u2028",
        "\ufeff",
        "%x",
        "@x",
        "!x",
        "&x",
        "*x",
        "x" * 300,
        "a b " * 90,
    ],
    "numbers": [0, -1, 10**30, 1e-05, 0.1, 1e22, 1e300, 5e-324, 3.0, -0.0, float("inf"), float("-inf")],
    "others": [True, False, None, [], {}, [[1], {"k": "v"}]],
    "no": {"yes": "on", "key with space": "x", "1": "one"},
}


def test_rendered_values_read_back_to_the_same_values_and_types() -> None:
    shared = [1]
    values = VALUES | {"first": shared, "second": shared}
    text = render_yaml(values)
    assert repr(parse_yaml(text, "f").values) == repr(values)
    assert "&" not in text.replace("'&x'", "")


def test_text_that_other_readers_would_take_for_something_else_is_quoted() -> None:
    words = {"a": "no", "b": "012", "c": "4:00", "d": "3e-4", "e": "2024-01-02", "f": "1_000"}
    assert yaml.safe_load(render_yaml(words)) == words
