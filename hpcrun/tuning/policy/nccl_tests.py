"""What nccl-tests printed: times by collective and size, with the nodes, the ranks and the library.

Pure: text in, object out. The line of column names says what a row holds, so that all releases are read: with
`error` or `#wrong`, with or without redop and root, with the further columns of -I and -T.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcrun.tuning.log.line import strip_log_prefix
from hpcrun.tuning.log.nccl_log import parse_variable_line, parse_version_line
from hpcrun.tuning.registry.registry import Version, parse_version

_TITLE = re.compile(r"#\s*Collective test starting: (?P<program>\w+)")
_LIBRARY = re.compile(r"nccl-library=(?P<code>\d{4,6})\b")
_RANK = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)\s.*?\bon\s+(?P<host>[\w.-]+)\s+device\s+\d+"
    r"(?:\s+\[\S*\]\s+(?P<gpu>.+?)\s*$)?"
)
_OUTSIDE = re.compile(r"#\s*Out of bounds values\s*:\s*(?P<count>\d+)")
_HEADER_VALUES = re.compile(r"#\s*nThread\b.*\bvalidation:\s*(?P<count>\d+)")
"""0: results are not checked, even if a column says so."""
_ROW = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w+\s")
_TIMES = ("time", "cputime")
_WRONG = ("#wrong", "error")


class TimedCall(NamedTuple):
    """One kind of call that is timed."""

    collective: str
    """As the program is called, without _perf; empty where the output does not tell."""
    size_bytes: int
    in_place: bool


@dataclass(frozen=True)
class NcclTestTimings:
    """One run's output; what it does not say is None or empty."""

    times_us: Mapping[TimedCall, tuple[float, ...]] = field(default_factory=dict)
    """For every call, a time for each cycle (-N)."""
    busbw_GBps: Mapping[TimedCall, tuple[float, ...]] = field(default_factory=dict)
    wrong: tuple[TimedCall, ...] = ()
    """Calls that gave wrong values."""
    is_wrong: bool = False
    """Whether anything is: an old footer does not say which."""
    checked: frozenset[TimedCall] = frozenset()
    """Calls of which every row was compared with right results; none where that was off (-c 0)."""
    mixed: str = ""
    """Why rows of one size cannot be told apart; empty: they can."""
    nccl: Version | None = None
    nodes: tuple[str, ...] = ()
    ranks: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that NCCL says it has read, where its log stands between the rows."""
    gpu: str = ""
    """What all ranks' GPUs call themselves; empty where they differ or do not tell."""
    not_read: tuple[str, ...] = ()
    """Rows that look like times and could not be read."""

    @property
    def unchecked(self) -> bool:
        """Whether there is a time whose results nobody looked at."""
        return not self.times_us.keys() <= self.checked

    @property
    def ranks_per_node(self) -> int | None:
        """None where it is unknown, or not the same on all nodes."""
        if not self.ranks or not self.nodes or self.ranks % len(self.nodes):
            return None
        return self.ranks // len(self.nodes)

    def median_us(self, call: TimedCall) -> float:
        """One figure for a call: cycles of one run are no repetitions of their own."""
        return statistics.median(self.times_us[call])


def parse_nccl_tests(text: str) -> NcclTestTimings:
    """Everything that is recognised; a text without a row of nccl-tests gives an empty run."""
    reader = _NcclTestsReader()
    for line in text.splitlines():
        reader.read(strip_log_prefix(line))
    return reader.result()


def version_from_code(code: int) -> Version:
    """NCCL's own number of a release: 22809 is 2.28.9, and before 2.9 it had a digit less, 2804."""
    base = 1000 if code < 10_000 else 10_000
    return code // base, code % base // 100, code % 100


class _NcclTestsReader:
    """Reads line by line."""

    def __init__(self) -> None:
        self._collective = ""
        self._columns: list[str] = []
        self._times: dict[TimedCall, list[float]] = {}
        self._busbw: dict[TimedCall, list[float]] = {}
        self._wrong: dict[TimedCall, None] = {}
        self._kinds: dict[tuple[str, int], set[tuple[str, ...]]] = {}
        self._looked_at: Counter[tuple[bool, bool]] = Counter()
        self._passed_over: set[TimedCall] = set()
        self._by_footer: set[TimedCall] = set()
        self._validates = True
        self._outside: int | None = None
        self._nccl: Version | None = None
        self._hosts: dict[int, str] = {}
        self._env: dict[str, str] = {}
        self._gpus: set[str] = set()
        self._not_read: list[str] = []

    def read(self, line: str) -> None:
        """Read one line of the output."""
        if (parsed := parse_version_line(line)) and parsed[0] == "NCCL":
            self._nccl = parse_version(parsed[1], "nccl-tests")
        elif match := _LIBRARY.search(line):
            self._nccl = self._nccl or version_from_code(int(match["code"]))
        elif match := _TITLE.match(line):
            self._collective = re.sub(r"_perf(_mpi)?$", "", match["program"])
        elif match := _RANK.match(line):
            self._hosts[int(match["rank"])] = match["host"].partition(".")[0]
            self._gpus.add(match["gpu"] or "")
        elif match := _OUTSIDE.match(line):
            self._outside = (self._outside or 0) + int(match["count"])
            self._by_footer.clear()
        elif match := _HEADER_VALUES.match(line):
            self._validates = int(match["count"]) > 0
        elif parsed := parse_variable_line(line):
            self._env[parsed[0]] = parsed[1]
        elif line.startswith("#"):
            words = line.removeprefix("#").split()
            if words[:2] == ["size", "count"] and any(name in words for name in _TIMES):
                self._columns = words
        elif _ROW.match(line) and not (self._columns and self._row(line.split())):
            self._not_read.append(line.strip())

    def _row(self, words: Sequence[str]) -> bool:
        """Whether it has been read."""
        if len(words) < len(self._columns):
            return False
        size = int(words[0])
        starts = [at for at, name in enumerate(self._columns) if name in _TIMES]
        self._kinds.setdefault((self._collective, size), set()).add(tuple(words[2 : starts[0]]))
        for in_place, start in enumerate(starts[:2]):
            end = starts[in_place + 1] if in_place + 1 < len(starts) else len(self._columns)
            half = dict(zip(self._columns[start:end], words[start:end], strict=True))
            if size and not self._half(TimedCall(self._collective, size, bool(in_place)), half):
                return False
        return True

    def _half(self, call: TimedCall, half: Mapping[str, str]) -> bool:
        time_us = _number(next((half[name] for name in _TIMES if name in half), ""))
        busbw = _number(half.get("busbw", ""))
        if time_us is None:
            return False
        if not time_us:
            return True
        errors = next((half[name] for name in _WRONG if name in half), "N/A")
        is_checked = _number(errors) is not None and self._validates
        self._looked_at[call.in_place, is_checked] += 1
        if not is_checked:
            self._passed_over.add(call)
        elif "#wrong" not in half:
            # How large an error may be is known to the footer alone: a run that ended before it says nothing.
            self._by_footer.add(call)
        if "#wrong" in half and (_number(errors) or 0) > 0:
            self._wrong[call] = None
        self._times.setdefault(call, []).append(time_us)
        self._busbw.setdefault(call, []).append(busbw or 0.0)
        return True

    def result(self) -> NcclTestTimings:
        """What was read."""
        looked, calls = self._looked_at, list(self._times)
        if looked[False, True] and not looked[True, True]:
            # What is checked out of place alone, as alltoall, is not done in place: those times mean nothing.
            calls = [call for call in calls if not call.in_place]
        return NcclTestTimings(
            {call: tuple(self._times[call]) for call in calls},
            {call: tuple(self._busbw[call]) for call in calls},
            tuple(call for call in self._wrong if call in calls),
            bool(self._wrong) or bool(self._outside),
            frozenset(calls) - self._passed_over - self._by_footer,
            next(self._mixtures(), ""),
            self._nccl,
            tuple(dict.fromkeys(self._hosts.values())),
            len(self._hosts) or None,
            self._env,
            next(iter(self._gpus)) if len(self._gpus) == 1 else "",
            tuple(self._not_read),
        )

    def _mixtures(self) -> Iterator[str]:
        for (_, size), kinds in self._kinds.items():
            if len(kinds) > 1:
                yield f"{size} bytes stand there with several types or operations; run it with one of each"


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
