"""The registry of variables: it knows every name of the library, and nothing in it contradicts itself."""

from __future__ import annotations

import random
import re
import string
from pathlib import Path

import pytest
import yaml

from hpcrun.errors import UsageError
from hpcrun.specs.yaml import parse_yaml
from hpcrun.tuning.lint.environment import VariableAssignment
from hpcrun.tuning.lint.lint import check_assignment
from hpcrun.tuning.registry import registry as registry_module
from hpcrun.tuning.registry.registry import (
    CommVariable,
    Version,
    format_version,
    parse_version,
    value_in_release,
    variable_registry,
)
from hpcrun.tuning.registry.values import VALUE_KINDS, check_value

NAMES = Path(__file__).parents[1] / "data" / "nccl-2.32.3-strings.txt"


def test_the_file_has_no_key_twice_and_means_the_same_to_every_reader() -> None:
    path = Path(registry_module.__file__).with_name("registry.yaml")
    strict = parse_yaml(path.read_text(encoding="utf-8"), path.name).values
    assert set(strict) == {
        "library",
        "variables",
        "undocumented",
        "symbols",
        "lookalikes",
        "families",
        "others",
    }
    slow = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert registry_module._parse_registry(slow) == variable_registry()


def test_every_name_in_the_newest_library_is_known_and_classified() -> None:
    names = NAMES.read_text(encoding="utf-8").split()
    assert len(names) == 394
    known = variable_registry()
    assert [name for name in names if name not in known.variables and name not in known.symbols] == []
    assert [name for name in names if name in known.variables and name in known.symbols] == []
    assert format_version(known.library) in NAMES.name


def test_what_the_library_lacks_is_removed_deprecated_or_still_to_come() -> None:
    names = set(NAMES.read_text(encoding="utf-8").split())
    gone = [
        one for one in variable_registry().variables.values() if one.owner == "nccl" and one.name not in names
    ]
    assert [one.name for one in gone if not (one.removed or one.deprecated or one.after)] == []
    assert [
        one.name for one in variable_registry().variables.values() if one.removed and one.name in names
    ] == []


@pytest.mark.parametrize("known", variable_registry().variables.values(), ids=lambda one: one.name)
def test_each_entry_is_sound(known: CommVariable) -> None:
    assert known.kind in {"system", "job", "tuning", "debug", "leave", "undocumented"}
    assert known.ranks in {"same", "node", "rank"}
    assert known.effect
    assert known.source in {"docs", "source", "library"} or known.source.startswith("documentation of ")
    for history in (known.values, known.default):
        assert list(history) == sorted(history)
    assert known.values
    assert not known.instead or known.instead in variable_registry().variables
    assert not (known.since and known.removed) or known.since < known.removed
    for _, rule in known.values:
        kind, _, rest = rule.partition(" ")
        assert kind in VALUE_KINDS
        if kind in ("int", "bytes", "auto", "float"):
            assert re.fullmatch(r"(-?\d+\.\.(-?\d+)?)?", rest)
    # A default that is a plain value passes its own rule in the release that it holds in.
    for version, default in known.default:
        held = value_in_release(known.values, version if version != (0,) else None)
        if re.fullmatch(r"-?\d+|[A-Z_]+", default) and held:
            assert [
                one for one in check_value(known.name, default, held, None) if one.severity == "error"
            ] == []


def test_look_alikes_are_no_variables_and_lead_to_one() -> None:
    known = variable_registry()
    for name, one in known.lookalikes.items():
        assert name not in known.variables
        assert not one.instead or one.instead in known.variables
    assert all(name.endswith("_") for name in known.families)


def test_defaults_by_release() -> None:
    timeout = variable_registry().variables["NCCL_IB_TIMEOUT"].default
    found = [
        value_in_release(timeout, parse_version(release))
        for release in ("2.10.3", "2.14.3", "2.22.3", "2.23.4")
    ]
    assert found == ["14", "18", "18", "20"]
    assert value_in_release(timeout, None) == "20"
    assert value_in_release(timeout, (2, 14)) == "18"
    split = variable_registry().variables["NCCL_IB_SPLIT_DATA_ON_QPS"].default
    assert [value_in_release(split, release) for release in ((2, 19, 3), (2, 20, 3))] == ["1", "0"]


@pytest.mark.parametrize(
    ("name", "release", "words"),
    [
        ("NCCL_TREE_THRESHOLD", (2, 4, 8), ""),
        ("NCCL_TREE_THRESHOLD", (2, 5), "is not read from 2.5 on"),
        ("NCCL_IB_PKEY_VALUE", (2, 30, 7), "is read from 2.31 on"),
        ("NCCL_IB_PKEY_VALUE", (2, 31), ""),
        ("NCCL_PSK", (2, 32, 3), "is not yet read in 2.32.3"),
        ("NCCL_PSK", (2, 33), ""),
        ("NCCL_PSK", None, ""),
    ],
)
def test_which_release_reads_what(name: str, release: Version | None, words: str) -> None:
    assert variable_registry().variables[name].absence(release) == words


@pytest.mark.parametrize("text", ["2.27.5", "v2.27.5-1", "2.27", "2.27.5+cuda12.9"])
def test_releases_are_read(text: str) -> None:
    assert parse_version(text)[:2] == (2, 27)


@pytest.mark.parametrize("text", ["", "2", "latest", "2.27.x", "２.27", "2..7", "2.27.5.1.9", "1e9.1"])
def test_what_is_no_release_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is not a release of NCCL; write it as"):
        parse_version(text)


def slip(name: str, dice: random.Random) -> str:
    """A name with one letter lost, doubled, changed, or two of them swapped."""
    at_ = dice.randrange(len("NCCL_"), len(name))
    match dice.randrange(4):
        case 0:
            return name[:at_] + name[at_ + 1 :]
        case 1:
            return name[:at_] + name[at_] + name[at_:]
        case 2:
            return name[:at_] + dice.choice(string.ascii_uppercase) + name[at_ + 1 :]
        case _:
            at_ = min(at_, len(name) - 2)
            return name[:at_] + name[at_ + 1] + name[at_] + name[at_ + 2 :]


def test_a_misspelt_name_is_always_caught_and_mostly_understood() -> None:
    dice = random.Random(7)
    known = variable_registry()
    names = sorted(name for name in known.variables if name.startswith("NCCL_") and len(name) > 10)
    caught = understood = 0
    for name in names * 3:
        wrong = slip(name, dice)
        if wrong in known.variables or wrong in known.lookalikes or wrong in known.symbols:
            continue
        caught += 1
        faults = list(check_assignment(VariableAssignment(wrong, "1", "shell", "shell"), (2, 27, 5)))
        assert [one.severity for one in faults] == ["error"], wrong
        understood += faults[0].text.endswith(f"did you mean {name}?")
    assert caught > 700
    assert understood / caught > 0.93
