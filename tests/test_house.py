"""House rules that the linters do not know: sizes, names, and what the project's own files promise."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcrun.cli.main import VERBS
from tests.tiers import HERE, TIERS

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "hpcrun").rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 500, 60
SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}
REFUSED = {
    "beside": "sidecar",
    "blame": "fault nodes",
    "comeback": "local recovery",
    "course": "attempt monitor",
    "crew": "agent pool",
    "desk": "request handler",
    "doctors": "fleet doctor",
    "elsewhere": "requeue exclusion",
    "faraway": "object restore",
    "guest": "spare replica",
    "guests": "spare replicas",
    "happening": "attempt event",
    "happenings": "attempt events",
    "heard": "heartbeat",
    "heir": "successor process",
    "inbox": "signal queue",
    "keeper": "coordinator",
    "meanwhile": "run while pumping",
    "neighbour": "peer",
    "neighbourhood": "peer service",
    "outlet": "exporter",
    "poison": "suspect saves",
    "pulse": "heartbeat",
    "rehearsal": "chaos",
    "roster": "node pool",
    "scraps": "intact parts",
    "shelf": "part server",
    "station": "tier",
    "stations": "tiers",
    "strike": "injection",
    "surroundings": "environment",
    "tally": "counters",
    "told": "the name of the value",
    "undurable": "durability",
    "vault": "checkpointing",
    "vigil": "lease monitor",
}
"""Words that nobody guesses and nobody can search for, and the field's word for what they stood for."""


def test_modules_and_functions_stay_small_enough_to_read() -> None:
    assert MODULES
    long = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        name, lines = path.relative_to(ROOT), len(source.splitlines())
        if lines > MOST_LINES:
            long.append(f"{name}: {lines} lines, at most {MOST_LINES}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    long.append(
                        f"{name}:{node.lineno} {node.name}: {lines} lines, at most {MOST_FUNCTION_LINES}"
                    )
    assert not long, "\n".join(long)


def test_modules_are_named_after_what_they_hold() -> None:
    assert not [path for path in MODULES if path.stem in SAY_NOTHING or path.parent.name in SAY_NOTHING]


def test_names_are_the_field_s_words() -> None:
    wrong = []
    for path in MODULES:
        module = str(path.relative_to(ROOT / "hpcrun").with_suffix(""))
        names = {*path.relative_to(ROOT / "hpcrun").with_suffix("").parts}
        names |= {
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        for name in names:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            wrong += [f"{module}: {name}: {REFUSED[word]}" for word in sorted(words & REFUSED.keys())]
    assert not wrong, "\n".join(wrong)


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_every_package_is_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = config["options"]["packages"].split()
    folders = {path.parent.relative_to(ROOT) for path in MODULES}
    assert sorted(listed) == sorted({*(".".join(folder.parts) for folder in folders), "hpcrun.templates"})
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_a_room_s_tests_stand_where_the_room_does(path: Path) -> None:
    folder = path.parent.relative_to(ROOT / "tests")
    assert (ROOT / "hpcrun" / folder).is_dir() or folder.parts[0] in ("lab", "security")


DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "Makefile"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "templates").rglob("*.yaml")),
]
COMMAND = re.compile(r"(?:^[#$\s]*|`|-m )hpcrun ([a-z_]+)([^`#|&\n]*)", re.MULTILINE)


def options_of(verb: str, rest: list[str]) -> set[str]:
    """The options of the command that a line names; KeyError when there is no such command."""
    command: Any = typer.main.get_command(importlib.import_module(f"hpcrun.cli.{VERBS[verb].module}").app)
    commands = getattr(command, "commands", None)
    if commands is not None:
        command = commands[verb] if verb in commands else commands[rest[0]]
    return {"--help", *(name for parameter in command.params for name in parameter.opts)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_a_document_shows_exists(document: Path) -> None:
    wrong = []
    for match in COMMAND.finditer(document.read_text(encoding="utf-8")):
        words = match[2].partition(" -- ")[0].split()
        try:
            known = options_of(match[1], words)
        except (KeyError, IndexError):
            wrong.append(match[0])
            continue
        used = {word.partition("=")[0] for word in words if word.startswith("-")}
        wrong += [f"{match[0]}: {option}" for option in used - known]
    assert not wrong, "\n".join(wrong)


def test_every_make_target_that_the_readme_shows_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = re.findall(r"(?:^[$\s]*|`)make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert set(shown) <= targets


def test_the_places_that_have_markers_exist() -> None:
    """A test file that was renamed must not fall out of its tier."""
    assert not {place for places in TIERS.values() for place in places.split() if not (HERE / place).exists()}
