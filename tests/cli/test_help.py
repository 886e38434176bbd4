"""Every help text: it fits 80 columns, is whole, documents every option, and is plain English."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer

from hpcrun.cli.main import VERBS, main

WIDTH = 80
REFUSED = (
    "of one's own",
    "such as are",
    "nobody",
    "somebody",
    "whoever",
    "whatever",
    "told",
    "tells of",
    "be said",
    "goes on",
    "go on",
    "as it were",
    "beside",
    "rehearse",
    "story",
    "looked at",
    "that is to say",
)
"""Turns that a reader stumbles over; none belongs in a help text."""
NOUN_FIRST = re.compile(r"^(The|A|An|What|Whether|Which|How|Where|Who|Everything|Of|Also)\b")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and group by its words; internal verbs are no part of it."""
    for verb, place in VERBS.items():
        command: Any = typer.main.get_command(import_module(f"hpcrun.cli.{place.module}").app)
        yield from walk(verb, getattr(command, "commands", {}).get(verb, command))


def walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{words} {name}", inner)


COMMANDS = dict(commands())


def shown_help(words: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERMINAL_WIDTH", str(WIDTH))
    with command.make_context(f"hpcrun {words}", [], resilient_parsing=True) as context:
        return str(command.get_help(context))


def test_the_walk_finds_the_verbs() -> None:
    assert len(COMMANDS) > 50
    assert {"train", "ckpt import", "chaos kill-rank", "tune policy add", "fabric drain-request"} <= set(
        COMMANDS
    )


@pytest.mark.parametrize("words", COMMANDS)
def test_help_fits_and_is_whole(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown_help(words, COMMANDS[words], monkeypatch)
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    listed = text.partition("\nCommands:\n")[2]
    assert [line for line in listed.splitlines() if line.endswith(("...", "…"))] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_and_option_has_a_help_text(words: str) -> None:
    command = COMMANDS[words]
    assert command.help
    undocumented = [
        option.name
        for option in command.params
        if not getattr(option, "hidden", False) and not getattr(option, "help", None)
    ]
    assert undocumented == []


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_plain_english(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[words]
    text = " ".join(shown_help(words, command, monkeypatch).split())
    assert [turn for turn in REFUSED if re.search(rf"\b{re.escape(turn)}\b", text, re.IGNORECASE)] == []
    assert not NOUN_FIRST.match(command.help), "a help text begins with a verb"


def test_the_list_of_verbs_fits_and_begins_with_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    text = "\n".join(lines)
    assert [turn for turn in REFUSED if re.search(rf"\b{re.escape(turn)}\b", text, re.IGNORECASE)] == []
    assert [name for name, verb in VERBS.items() if NOUN_FIRST.match(verb.help.capitalize())] == []
