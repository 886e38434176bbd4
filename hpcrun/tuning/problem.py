"""What a check of an environment finds: how bad, which variable, what is wrong, and where it was set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Level = Literal["error", "warning", "note"]
_MOST_SHOWN = 60


class Fault(NamedTuple):
    """Something about one value, before it is known where that value was set."""

    level: Level
    text: str


def error(text: str) -> Fault:
    """It does not do what it says, or breaks the job."""
    return Fault("error", text)


def warning(text: str) -> Fault:
    """It may cost speed or correctness."""
    return Fault("warning", text)


def note(text: str) -> Fault:
    """Worth knowing."""
    return Fault("note", text)


def plain(text: str) -> str:
    """Text that any terminal takes, on one line; what cannot be printed is escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def show(value: str) -> str:
    """A value as a message quotes it: on one line, and short."""
    text = plain(value)
    return f"'{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}…'}'"


@dataclass(frozen=True)
class Complaint:
    """One line of lint's report: a fault with the variable that has it, and where that was set."""

    level: Level
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
