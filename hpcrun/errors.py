"""What can go wrong, sorted by what the person has to do; each class carries its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_SITE = 3
EXIT_NOT_A_NUMBER = 4
EXIT_RANKS_DIED = 5
EXIT_SAVED = 75
EXIT_DO_NOT_RESTART = 93
EXIT_INTERRUPTED = 130


class HpcrunError(Exception):
    """Base of every error that is shown to the user as one line, without a traceback."""

    exit_code = EXIT_CHECK_FAILED
    raised_by: Literal["one", "all", "another"] = "one"
    """Of ranks that do something together: whether each raises it alike, or another rank's is told here."""


class UsageError(HpcrunError):
    """The command line or a file that it names is wrong; the message says what is allowed."""

    exit_code = EXIT_USAGE


class SiteError(HpcrunError):
    """The machine lacks something: a command, a library, a device, a writable directory."""

    exit_code = EXIT_SITE


class NotANumberError(HpcrunError):
    """The loss became NaN or infinite."""

    exit_code = EXIT_NOT_A_NUMBER


class RanksDiedError(HpcrunError):
    """At least one rank ended without having finished."""

    exit_code = EXIT_RANKS_DIED


class FunctionError(HpcrunError):
    """A function that was submitted gave no result; the message holds its traceback, where it raised."""


@dataclass(frozen=True)
class SpecProblem:
    """One mistake in a spec: where it stands, which key, and what is allowed there."""

    key: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        place = " ".join(part for part in (self.where, self.key) if part)
        return f"{place}: {self.text}" if place else self.text


class SpecError(UsageError):
    """All the mistakes of one spec at once, each with file, line and key."""

    def __init__(self, problems: Sequence[SpecProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """A line on standard error, once a process."""
    if text not in _warned and sys.stderr is not None:
        _warned.add(text)
        with suppress(OSError, ValueError):
            sys.stderr.write(f"hpcrun: {text}\n")
            sys.stderr.flush()
