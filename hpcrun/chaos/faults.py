"""The faults that can be injected, as values: what each takes, and all that is wrong with one asked for."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hpcrun.errors import SpecProblem, UsageError
from hpcrun.units import parse_memory, parse_time

_DAY_S = 86400.0


class FaultKind(NamedTuple):
    """What a fault hits, which keys it takes besides its target, and which of them have no default."""

    at: Literal["rank", "node", "run"]
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


FAULT_KINDS = {
    "kill-rank": FaultKind("rank", ("signal",)),
    "stop-rank": FaultKind("rank", ("for",)),
    "resume-rank": FaultKind("rank"),
    "kill-agent": FaultKind("node"),
    "vanish": FaultKind("node", ("force",)),
    "slow": FaultKind("node", ("share", "for"), ("for",)),
    "fill-disk": FaultKind("node", ("where", "leave", "for", "force"), ("where", "for")),
    "kill-supervisor": FaultKind("run"),
}


@dataclass(frozen=True)
class InjectedFault:
    """One fault that was asked for; without rank and node the seed chooses its target."""

    do: str
    rank: int | None = None
    node: str | None = None
    seed: int | None = None
    signal: int = signal.SIGKILL
    for_s: float | None = None
    """After this time it is undone; None: it is not undone."""
    share: float = 0.5
    """The share of time that `slow` takes from the ranks."""
    where: str = ""
    """The directory that `fill-disk` fills, up to the last `leave_mib`."""
    leave_mib: int = 1
    force: bool = False

    @property
    def kind(self) -> FaultKind:
        """What it hits, and the keys that it takes."""
        return FAULT_KINDS[self.do]

    @property
    def is_random(self) -> bool:
        """Whether its target is still to be chosen."""
        return self.kind.at != "run" and self.rank is None and self.node is None


def parse_fault(values: Mapping[str, Any]) -> tuple[InjectedFault | None, list[SpecProblem]]:
    """Parse a fault from plain values (do, rank, random, signal, for, …), or list all that is wrong."""
    do = values.get("do")
    if do not in FAULT_KINDS:
        problem = "is missing" if do is None else f"{do!r} is not a fault"
        return None, [SpecProblem("do", f"{problem}; there are: {', '.join(FAULT_KINDS)}")]
    kind = FAULT_KINDS[do]
    given = {key: value for key, value in values.items() if value is not None and value is not False}
    allowed = {"do", *kind.takes, *(() if kind.at == "run" else (kind.at, "random", "seed"))}
    names = ", ".join(sorted(allowed - {"do"})) or "nothing"
    problems = [
        SpecProblem(key, f"is not a key of {do}; its keys are: {names}")
        for key in given
        if key not in allowed
    ]
    problems += [SpecProblem(key, f"is missing; {do} needs it") for key in kind.needs if key not in given]
    problems += _check_target(kind, given)
    fields: dict[str, Any] = {}
    for key in given:
        if key not in allowed or key not in _FIELD_PARSERS:
            continue
        name, parse = _FIELD_PARSERS[key]
        try:
            fields[name] = parse(given[key])
        except UsageError as error:
            problems.append(SpecProblem(key, str(error).removeprefix(f"{key}: ")))
    return (None, problems) if problems else (InjectedFault(do, **fields), [])


def _check_target(kind: FaultKind, given: Mapping[str, Any]) -> list[SpecProblem]:
    if kind.at == "run":
        return []
    if (kind.at in given) == ("random" in given):
        advice = "give only one of them" if kind.at in given else "name one, or take one at random"
        return [SpecProblem(kind.at, f"{advice}: {kind.at} or random")]
    if "seed" in given and "random" not in given:
        return [SpecProblem("seed", "is for random; give both, or neither")]
    return []


def parse_fault_seconds(value: Any, where: str) -> float:
    """Parse a time such as 30s into seconds; UsageError if it is none, or longer than a day."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {value!r} has no unit; write 30s or 5m")
    limit = parse_time(value, where)
    if math.isinf(limit.seconds) or limit.seconds > _DAY_S:
        raise UsageError(f"{where}: {value} is longer than a day; write 30s or 5m")
    return limit.seconds


def _parse_signal(value: Any) -> int:
    name = f"SIG{str(value).upper().removeprefix('SIG')}"
    if name in ("SIGSTOP", "SIGCONT"):
        raise UsageError(f"for {name} there are stop-rank and resume-rank")
    try:
        return signal.Signals[name]
    except KeyError:
        raise UsageError(f"{value!r} is not a signal; write a name such as KILL, TERM, SEGV or BUS") from None


def _value_parser(is_allowed: Callable[[Any], bool], problem: str) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if isinstance(value, bool) or not is_allowed(value):
            raise UsageError(f"{value!r} {problem}")
        return value

    return parse


_FIELD_PARSERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "rank": (
        "rank",
        _value_parser(
            lambda value: isinstance(value, int) and value >= 0, "is not a rank; ranks count from 0"
        ),
    ),
    "node": (
        "node",
        _value_parser(lambda value: isinstance(value, str) and value != "", "is not a node's name"),
    ),
    "seed": ("seed", _value_parser(lambda value: isinstance(value, int), "is not a whole number")),
    "signal": ("signal", _parse_signal),
    "for": ("for_s", lambda value: parse_fault_seconds(value, "for")),
    "share": (
        "share",
        _value_parser(
            lambda value: isinstance(value, int | float) and 0 < value < 1,
            "is not a share; write a number between 0 and 1, such as 0.5",
        ),
    ),
    "where": (
        "where",
        _value_parser(
            lambda value: isinstance(value, str) and value.startswith("/"),
            "is not an absolute path of a directory",
        ),
    ),
    "leave": ("leave_mib", lambda value: parse_memory(str(value), "leave")),
    "force": ("force", bool),
}
"""The field of each key, and what parses its value."""


@dataclass(frozen=True)
class SupervisorProcess:
    """The supervisor of a run, as its record names it."""

    host: str
    pid: int
    start_ticks: int
    slurm_job: int | None = None


@dataclass(frozen=True)
class InjectionOrder:
    """The order to the process on the target's node, as JSON on its command line."""

    fault: InjectedFault
    attempt: int
    ranks: tuple[int, ...]
    supervisor: SupervisorProcess


@dataclass(frozen=True)
class InjectionReport:
    """One line that this process prints: the fault is injected, removed, or refused."""

    kind: Literal["injected", "filled", "removed", "refused"]
    text: str
    time: float
    monotonic: float
    pids: tuple[int, ...] = ()
    exit_code: int = 0
    is_gone: bool = False
    """Of a refusal: the target is not there, or not yet."""
