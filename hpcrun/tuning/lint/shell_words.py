"""The commands of a shell script as words, found without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_ENDS = re.compile(r"[();&|]+|[{}]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_HOME = re.compile(r"~(?=[/\s;&|)]|$)")
_OPENERS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "time", "!", "exec", "command"})
_MOST_JOINED = 60
"""Lines that a quoted text may span."""


@dataclass(frozen=True)
class ShellCommand:
    """One simple command: its words without quotes, and what a here-document feeds it."""

    line: int
    words: list[str]
    last_line: int
    document: str | None = None
    document_line: int = 0


@dataclass
class ShellCommands:
    """The commands of a script in their order; #SBATCH lines are commands of that name."""

    found: list[ShellCommand] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    """Lines whose quotes never close."""


def parse_shell_commands(text: str) -> ShellCommands:
    """Every simple command of a script, and the lines that are none."""
    commands = ShellCommands()
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    at = 0
    while at < len(lines):
        start, line = at, lines[at]
        at += 1
        if line.startswith("#SBATCH"):
            commands.found.append(ShellCommand(start + 1, line.split(), start + 1))
            continue
        while line.endswith("\\") and at < len(lines) and not line.lstrip().startswith("#"):
            line = line[:-1] + lines[at]
            at += 1
        words = _split_words(line)
        while words is None and at < len(lines) and at - start < _MOST_JOINED:
            line += f"\n{lines[at]}"
            at += 1
            words = _split_words(line)
        if words is None:
            at = start + 1
            commands.unread.append(at)
            continue
        document, began = None, at
        here = _HERE.search(line)
        if here:
            end = next((number for number in range(at, len(lines)) if lines[number].strip() == here[2]), None)
            if end is not None:
                document, at = "\n".join(lines[began:end]), end + 1
        commands.found += _with_document(_simple_commands(words), (start + 1, at), document, began + 1)
    return commands


def strip_shell_comments(text: str) -> str:
    """The text without what follows a # outside of quotes; a ~ that the shell replaces becomes $HOME."""
    kept: list[str] = []
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            kept.append(text[at : at + 2])
            at += 2
            continue
        if char == "#" and not quote and (at == 0 or text[at - 1] in " \t\n;&|("):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        is_home = char == "~" and not quote and text[at - 1 : at] == "=" and _HOME.match(text, at)
        kept.append("$HOME" if is_home else char)
        at += 1
    return "".join(kept)


def _split_words(line: str) -> list[str] | None:
    """Words and operators; None where a quote is still open."""
    lexer = shlex.shlex(strip_shell_comments(line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return None


def _simple_commands(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    array: list[str] | None = None
    for word in words:
        if array is not None:
            if word.startswith(")"):
                command[-1] += shlex.join(array)
                array = None
            else:
                array.append(word)
        elif word == "(" and command and _ARRAY.fullmatch(command[-1]):
            array = []
        elif _ENDS.fullmatch(word):
            if command:
                yield command
            command = []
        elif word in _OPENERS and not command:
            continue
        else:
            command.append(word)
    if command:
        yield command


def _with_document(
    simple: Iterator[list[str]], lines: tuple[int, int], document: str | None, began: int
) -> Iterator[ShellCommand]:
    """A here-document goes to the command that asks for it, and on through a pipe to the next ones."""
    first, last = lines
    is_fed = False
    for words in simple:
        fed, fed_line = None, began
        if "<<<" in words[:-1]:
            fed, fed_line = words[words.index("<<<") + 1], first
            words = words[: words.index("<<<")]
        else:
            is_fed = is_fed or "<<" in words
            fed = document if is_fed else None
        yield ShellCommand(first, words, last, fed, fed_line)
