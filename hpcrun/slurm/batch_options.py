"""The options in a batch script's #SBATCH lines, as sbatch reads them: the last of two of one name counts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus",
    "J": "job-name", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "o": "output",
    "p": "partition", "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_ALONE = {
    "H": "hold",
    "I": "immediate",
    "k": "no-kill",
    "O": "overcommit",
    "Q": "quiet",
    "s": "oversubscribe",
}
"""Those that need no value."""
SIZE_OPTIONS = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "ntasks-per-socket",
    "ntasks-per-core",
    "ntasks-per-gpu",
)
"""How many ranks there are and where."""
FIXED_OPTIONS = (
    *SIZE_OPTIONS,
    "array",
    "time",
    "time-min",
    "nodefile",
    "clusters",
    "dependency",
    "wait",
    "wait-all-nodes",
)
"""Options that a run relies on: they have the job's value, or are absent."""
_EQUIVALENT_OPTIONS = (
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("gres", "gpus", "gpus-per-node", "gpus-per-task"),
)
"""Options that replace each other."""
_LINE = re.compile(r"#SBATCH\s+(.*)")


class BatchOption(NamedTuple):
    """One option as it is written."""

    line: str
    name: str
    """Its long name without dashes."""
    value: str
    """Empty where it has none."""

    def __str__(self) -> str:
        return f"--{self.name}" + (f"={self.value}" if self.value else "")


def parse_batch_options(lines: Iterable[str]) -> list[BatchOption]:
    """Every option of the #SBATCH lines in their order, short ones and several on a line too."""
    options: list[BatchOption] = []
    for line in lines:
        match = _LINE.match(line)
        if match:
            options += _parse_option_line(line, match[1])
    return options


def _parse_option_line(line: str, text: str) -> Iterator[BatchOption]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    at = 0
    while at < len(words):
        word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
        at += 1
        is_value = bool(following) and not following.startswith("-")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and is_value:
                value, at = following, at + 1
            yield BatchOption(line, _complete_option_name(name), value)
        elif word.startswith("-") and word[1:2] in _SHORT:
            value = word[2:].removeprefix("=")
            if not value and is_value:
                value, at = following, at + 1
            yield BatchOption(line, _SHORT[word[1]], value)
        elif word.startswith("-") and word[1:2] in _ALONE:
            yield BatchOption(line, _ALONE[word[1]], word[2:])


def _complete_option_name(name: str) -> str:
    """sbatch takes the beginning of a name where only one begins so."""
    longer = [option for option in FIXED_OPTIONS if option.startswith(name)]
    return longer[0] if len(name) > 3 and name not in FIXED_OPTIONS and len(longer) == 1 else name


def effective_options(options: Iterable[BatchOption]) -> dict[str, BatchOption]:
    """The option of each name that counts."""
    return {option.name: option for option in options}


def overridden_options(
    options: Iterable[BatchOption], requested: dict[str, str]
) -> Iterator[tuple[str, BatchOption]]:
    """Yield each request of a job (name to value, empty for none) that another option overrides, with that
    option."""
    last = effective_options(options)
    for name, value in requested.items():
        if name in FIXED_OPTIONS:
            continue
        shown = f"--{name}" + (f"={value}" if value else "")
        if name in last and last[name].value != value:
            yield shown, last[name]
        for side in _EQUIVALENT_OPTIONS:
            others = (other for other in side if name in side and other != name and other not in requested)
            yield from ((shown, last[other]) for other in others if other in last)
