"""What verbs print: results on standard output, as text or one JSON object; notes and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.cli.terminal import escape_control_characters, escape_to_one_line, unescaped_stream
from hpcrun.errors import UsageError
from hpcrun.files import write_output
from hpcrun.units import format_bytes

if TYPE_CHECKING:
    from hpcrun.finding import Finding

SCHEMA_VERSION = 2
"""One version for the JSON of all verbs."""
_REDRAW_S, _LOG_EVERY_S = 0.2, 30.0


def note(text: str) -> None:
    """Print a message for people on standard error, `hpcrun:` before each line."""
    # Where it cannot be printed, the exit code still tells.
    with contextlib.suppress(OSError):
        sys.stderr.write(
            "".join(f"hpcrun: {line}\n" for line in escape_control_characters(text).splitlines())
        )
        sys.stderr.flush()


def print_json(**values: Any) -> None:
    """Print one JSON object on a line, with the version of its schema."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}, default=str), flush=True)


def print_lines(lines: Iterable[object], otherwise: str = "") -> None:
    """Print each value on a line, or `otherwise` where there are none."""
    printed = False
    for line in lines:
        print(line, flush=True)
        printed = True
    if otherwise and not printed:
        print(otherwise)


def print_table(rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> None:
    """Print rows in aligned columns; cells stay on one line each."""
    table = [*([head] if head else []), *([escape_to_one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(**facts: Any) -> None:
    """Print names and values in two columns; None and empty values are left out."""
    given = {name: value for name, value in facts.items() if value not in (None, "")}
    width = max(7, *map(len, given))
    for name, value in given.items():
        # Further lines stand below the value, where none can pass for a fact of its own.
        text = str(value).replace("\n", "\n" + " " * (width + 2))
        print(f"{name:{width}}  {text}")


def print_findings(findings: Iterable[Finding], otherwise: str = "", *, width: int = 7) -> None:
    """Print severity, check, place and message of each finding on a line, or `otherwise` for none.

    The check is left out where it says no more than the subject does.
    """
    lines = [
        f"{finding.severity:{width}}  {'' if finding.check == 'variable' else finding.check + '  '}{finding}"
        for finding in findings
    ]
    print_lines(map(escape_to_one_line, lines), otherwise)


def write_file(path: Path, text: str, remedy: str, *, parents: bool = False) -> None:
    """Write a file that the user has named, with `parents` its directory; UsageError with a remedy."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; {remedy}") from None


def read_file(path: Path) -> str:
    """The text of a file that the user has named; UsageError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def show_transfer(label: str, *, log: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Give a function that takes bytes done and in all, and redraws one line on a terminal.

    Elsewhere nothing is shown; with `log` a line every half minute.
    """
    is_terminal = sys.stderr.isatty()
    every = _REDRAW_S if is_terminal else _LOG_EVERY_S
    shown_at = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown_at
        if (is_terminal or log) and time.monotonic() - shown_at > every:
            shown_at = time.monotonic()
            amount = f"{format_bytes(done)} of {format_bytes(total)} ({done / max(total, 1):.0%})"
            line = f"{escape_control_characters(label)}: {amount}"
            unescaped_stream(sys.stderr).write(f"\r\x1b[K{line}" if is_terminal else f"{line}\n")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if is_terminal:
            unescaped_stream(sys.stderr).write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def show_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes how many further bytes are done, and shows it as show_transfer does."""
    done = 0
    with show_transfer(label) as show:

        def add(size: int) -> None:
            nonlocal done
            done += size
            show(done, total)

        yield add
