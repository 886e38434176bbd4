"""What a terminal gets to see: names and messages from elsewhere are shown, and never obeyed.

A run's name, a node's, a message of another user's or a line of Slurm's may hold sequences that move the
cursor, write the clipboard or turn text around. Whatever is printed while a verb runs goes through here, to a
pipe as well: what is behind it is mostly a terminal, too.
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
"""Control characters of one and of two bytes, what turns text around, and halves of characters."""
_COLOUR_SEQUENCE = re.compile(r"\x1b\[[0-9;:]{0,64}m")


def escape_control_characters(text: str) -> str:
    """The same text with everything that a terminal would obey written out, such as \\x1b."""
    return _CONTROL_CHARACTERS.sub(_escape_match, text)


def escape_to_one_line(text: str) -> str:
    """The same, line breaks too: for a cell of a table, which is to stay one."""
    return escape_control_characters(text).replace("\r", "\\r").replace("\n", "\\n")


def escape_log_text(text: str) -> str:
    """What a program has printed: its colours and returns stay, as they do no more than that."""
    pieces: list[str] = []
    at = 0
    for found in _COLOUR_SEQUENCE.finditer(text):
        pieces += [_escape_log_line(text[at : found.start()]), found[0]]
        at = found.end()
    return "".join([*pieces, _escape_log_line(text[at:])])


def _escape_log_line(text: str) -> str:
    return "\r".join(map(escape_control_characters, text.split("\r")))


def write_log(text: str) -> None:
    """Print what a program has printed, and end the colours that it has left on."""
    stream, shown = unescaped_stream(sys.stdout), escape_log_text(text)
    colours = _COLOUR_SEQUENCE.findall(shown)
    stream.write(shown + ("\x1b[0m" if colours and colours[-1] not in ("\x1b[0m", "\x1b[m") else ""))
    stream.flush()


def unescaped_stream(stream: TextIO) -> TextIO:
    """The stream behind: for our own drawing, of which no word comes from elsewhere."""
    return stream.behind if isinstance(stream, _EscapingStream) else stream


@contextmanager
def escaping_streams() -> Iterator[None]:
    """Let standard output and error take text alone, for as long as the block lasts."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (one if one is None else _EscapingStream(one) for one in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _EscapingStream:
    """A text stream to which nothing is written that a terminal obeys."""

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


def _escape_match(found: re.Match[str]) -> str:
    number = ord(found[0])
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name that is no UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
