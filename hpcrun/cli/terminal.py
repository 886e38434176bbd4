"""Escaping of terminal output: control sequences in names and messages from elsewhere have no effect.

A run's name, a node's, a message of another user's or a line of Slurm's may hold sequences that move the
cursor, write the clipboard or reverse text. All output of a verb is escaped here, also into a pipe, behind
which there is mostly a terminal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff]|\r(?!\n)"
)
"""Control characters of one and of two bytes, characters that reverse text, and surrogates."""
_COLOUR_SEQUENCE = re.compile(r"\x1b\[[0-9;:]{0,64}m")


def escape_control_characters(text: str) -> str:
    """The text with control characters written out, such as \\x1b."""
    return _CONTROL_CHARACTERS.sub(_escape_match, text)


def escape_to_one_line(text: str) -> str:
    """The same with line breaks written out, for a cell of a table."""
    return escape_control_characters(text).replace("\r", "\\r").replace("\n", "\\n")


def escape_log_text(text: str) -> str:
    """The output of a program with control characters written out, except colours and carriage returns."""
    pieces: list[str] = []
    at = 0
    for match in _COLOUR_SEQUENCE.finditer(text):
        pieces += [_escape_log_line(text[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*pieces, _escape_log_line(text[at:])])


def _escape_log_line(text: str) -> str:
    return "\r".join(map(escape_control_characters, text.split("\r")))


def write_log(text: str) -> None:
    """Print the output of a program, and reset the colours that it left on."""
    stream, shown = unescaped_stream(sys.stdout), escape_log_text(text)
    colours = _COLOUR_SEQUENCE.findall(shown)
    stream.write(shown + ("\x1b[0m" if colours and colours[-1] not in ("\x1b[0m", "\x1b[m") else ""))
    stream.flush()


def unescaped_stream(stream: TextIO) -> TextIO:
    """The stream without escaping, for text that is entirely our own."""
    return stream.behind if isinstance(stream, _EscapingStream) else stream


@contextmanager
def escaping_streams() -> Iterator[None]:
    """Escape standard output and error inside the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _EscapingStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _EscapingStream:
    """A text stream that escapes control characters."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        """Write text, control characters written out."""
        self.behind.write(escape_control_characters(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def _escape_match(match: re.Match[str]) -> str:
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name that is no UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
