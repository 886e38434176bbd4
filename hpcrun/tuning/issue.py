"""What a check of an environment finds: how bad, which variable, what is wrong, and where it was set."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

IssueLevel = Literal["error", "warning", "note"]
_MOST_SHOWN = 60
_CLOSE = 0.75
_FEWEST_LETTERS = 3


class ValueIssue(NamedTuple):
    """Something about one value, before it is known where that value was set."""

    level: IssueLevel
    text: str
    instead: str | None = None
    """The whole value that the remedy in the text amounts to."""
    bare: str = ""
    """The text without that remedy, for where it would only make another fault."""


def make_error(text: str, remedy: str = "", instead: str | None = None) -> ValueIssue:
    """It does not do what it says, or breaks the job."""
    return ValueIssue("error", text + remedy, instead, text)


def make_warning(text: str, remedy: str = "", instead: str | None = None) -> ValueIssue:
    """It may cost speed or correctness."""
    return ValueIssue("warning", text + remedy, instead, text)


def make_note(text: str, remedy: str = "", instead: str | None = None) -> ValueIssue:
    """Worth knowing."""
    return ValueIssue("note", text + remedy, instead, text)


def closest_word(word: str, allowed: Sequence[str]) -> str | None:
    """The one of these that was surely meant: a slip of the pen, or a word cut short or drawn out."""
    by_upper = {one.upper(): one for one in allowed}
    close = difflib.get_close_matches(word.upper(), by_upper, n=1, cutoff=_CLOSE)
    if close:
        return by_upper[close[0]]
    longer = [one for one in by_upper if one.startswith(word.upper()) or word.upper().startswith(one)]
    return by_upper[longer[0]] if len(longer) == 1 and len(word) >= _FEWEST_LETTERS else None


def escape_unprintable(text: str) -> str:
    """Text that any terminal takes, on one line; what cannot be printed is escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def quote_value(value: str) -> str:
    """A value as a message quotes it: on one line, and short."""
    text = escape_unprintable(value)
    return f"'{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}…'}'"


@dataclass(frozen=True)
class LintIssue:
    """One line of lint's report: a fault with the variable that has it, and where that was set."""

    level: IssueLevel
    name: str
    """The variable; empty where it is about none."""
    text: str
    where: str = ""

    def __str__(self) -> str:
        words = " ".join(part for part in (self.where, self.name) if part)
        return f"{self.level:7}  {words}: {self.text}" if words else f"{self.level:7}  {self.text}"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"level": self.level, "name": self.name, "where": self.where, "text": self.text}
