"""Findings about variables, and how their messages quote values and suggest words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hpcrun.finding import Finding

_MOST_SHOWN = 60
_CLOSE = 0.75
_FEWEST_LETTERS = 3


def make_error(name: str, text: str, remedy: str = "", proposal: str | None = None) -> Finding:
    """The variable has no effect as it is set, or it breaks the job."""
    return Finding("error", "variable", name, text, remedy, proposal=proposal)


def make_warning(name: str, text: str, remedy: str = "", proposal: str | None = None) -> Finding:
    """It may cost speed or correctness."""
    return Finding("warning", "variable", name, text, remedy, proposal=proposal)


def make_note(name: str, text: str, remedy: str = "", proposal: str | None = None) -> Finding:
    """Worth knowing."""
    return Finding("note", "variable", name, text, remedy, proposal=proposal)


def closest_word(word: str, allowed: Sequence[str]) -> str | None:
    """The allowed word that was most likely meant: a misspelling, or a word cut short or drawn out."""
    by_upper = {allowed_word.upper(): allowed_word for allowed_word in allowed}
    close = difflib.get_close_matches(word.upper(), by_upper, n=1, cutoff=_CLOSE)
    if close:
        return by_upper[close[0]]
    longer = [
        candidate
        for candidate in by_upper
        if candidate.startswith(word.upper()) or word.upper().startswith(candidate)
    ]
    return by_upper[longer[0]] if len(longer) == 1 and len(word) >= _FEWEST_LETTERS else None


def escape_unprintable(text: str) -> str:
    """Text that any terminal takes, on one line; what cannot be printed is escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def quote_value(value: str) -> str:
    """A value as a message quotes it: on one line, and short."""
    text = escape_unprintable(value)
    return f"'{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}…'}'"
