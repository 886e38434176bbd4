"""The faults that one can rehearse, as values: what each takes, and all that is wrong with one asked for."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hpcrun.errors import SpecProblem, UsageError
from hpcrun.units import parse_memory, parse_time

_DAY_S = 86400.0
_DEFAULT_LEAVE = "1M"


class FaultKind(NamedTuple):
    """What a fault strikes, which keys it takes besides its victim, and which of them have no default."""

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
    """One fault, asked for; without rank and node the victim is chosen at random, by the seed."""

    do: str
    rank: int | None = None
    node: str | None = None
    seed: int | None = None
    signal: signal.Signals = signal.SIGKILL
    for_s: float | None = None
    """After this time it is undone; None where it is not."""
    share: float = 0.5
    """Of the time, which `slow` takes from the ranks."""
    where: str = ""
    """The directory that `fill-disk` fills, up to the last `leave_mib`."""
    leave_mib: int = 1
    force: bool = False

    @property
    def kind(self) -> FaultKind:
        """What it strikes."""
        return FAULT_KINDS[self.do]

    @property
    def is_random(self) -> bool:
        """Whether its victim is still to be chosen."""
        return self.kind.at != "run" and self.rank is None and self.node is None


def parse_fault(values: Mapping[str, Any]) -> tuple[InjectedFault | None, list[SpecProblem]]:
    """A fault from plain values (do, rank, random, signal, for, …), or all that is wrong with them."""
    do = values.get("do")
    if do not in FAULT_KINDS:
        found = "is missing" if do is None else f"{do!r} is no fault"
        return None, [SpecProblem("do", f"{found}; there are: {', '.join(FAULT_KINDS)}")]
    kind = FAULT_KINDS[do]
    given = {key: value for key, value in values.items() if value is not None and value is not False}
    allowed = {"do", *kind.takes, *(() if kind.at == "run" else (kind.at, "random", "seed"))}
    problems = [
        SpecProblem(
            key, f"is nothing that {do} takes; it takes: {', '.join(sorted(allowed - {'do'})) or 'nothing'}"
        )
        for key in given
        if key not in allowed
    ]
    problems += [SpecProblem(key, f"is missing, which {do} needs") for key in kind.needs if key not in given]
    problems += _check_victim(kind, given)
    read: dict[str, Any] = {}
    for key, value in given.items():
        if key in allowed and key in _FIELD_PARSERS:
            try:
                read.update(_FIELD_PARSERS[key](value))
            except UsageError as error:
                problems.append(SpecProblem(key, str(error).removeprefix(f"{key}: ")))
    return (None, problems) if problems else (InjectedFault(do, **read), [])


def _check_victim(kind: FaultKind, given: Mapping[str, Any]) -> list[SpecProblem]:
    if kind.at == "run":
        return []
    if (kind.at in given) == ("random" in given):
        one = "give only one of them" if kind.at in given else "say which, or take one at random"
        return [SpecProblem(kind.at, f"{one}: {kind.at} or random")]
    if "seed" in given and "random" not in given:
        return [SpecProblem("seed", "is for random; give both, or neither")]
    return []


def _parse_rank(value: Any) -> dict[str, Any]:
    if not _is_whole_number(value) or value < 0:
        raise UsageError(f"{value!r} is no rank; ranks count from 0")
    return {"rank": value}


def _parse_node(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} is no node's name")
    return {"node": value}


def _parse_seed(value: Any) -> dict[str, Any]:
    if not _is_whole_number(value):
        raise UsageError(f"{value!r} is no whole number")
    return {"seed": value}


def _parse_signal(value: Any) -> dict[str, Any]:
    name = f"SIG{str(value).upper().removeprefix('SIG')}"
    if name in ("SIGSTOP", "SIGCONT"):
        raise UsageError(f"for {name} there are stop-rank and resume-rank")
    try:
        return {"signal": signal.Signals[name]}
    except KeyError:
        raise UsageError(f"{value!r} is no signal; write a name such as KILL, TERM, SEGV or BUS") from None


def _parse_for(value: Any) -> dict[str, Any]:
    return {"for_s": parse_fault_seconds(value, "for")}


def parse_fault_seconds(value: Any, where: str) -> float:
    """Seconds of a time such as 30s; UsageError where it is none, or longer than a day."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {value!r} has no unit; write 30s or 5m")
    limit = parse_time(value, where)
    if math.isinf(limit.seconds) or limit.seconds > _DAY_S:
        raise UsageError(f"{where}: {value} is longer than a day; write 30s or 5m")
    return limit.seconds


def _parse_share(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise UsageError(f"{value!r} is no share; write a number between 0 and 1, such as 0.5")
    return {"share": float(value)}


def _parse_where(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value.startswith("/"):
        raise UsageError(f"{value!r} is no absolute path of a directory")
    return {"where": value}


def _parse_leave(value: Any) -> dict[str, Any]:
    return {"leave_mib": parse_memory(str(value), "leave")}


def _parse_force(value: Any) -> dict[str, Any]:
    return {"force": bool(value)}


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FIELD_PARSERS = {
    "rank": _parse_rank,
    "node": _parse_node,
    "seed": _parse_seed,
    "signal": _parse_signal,
    "for": _parse_for,
    "share": _parse_share,
    "where": _parse_where,
    "leave": _parse_leave,
    "force": _parse_force,
}
