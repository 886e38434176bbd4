"""The faults that one can rehearse, as values: what each takes, and all that is wrong with one asked for."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hpcrun.errors import Problem, UsageError
from hpcrun.units import parse_memory, parse_time

_DAY_S = 86400.0
_LEAVE = "1M"


class Kind(NamedTuple):
    """What a fault strikes, which keys it takes besides its victim, and which of them have no default."""

    at: Literal["rank", "node", "run"]
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


KINDS = {
    "kill-rank": Kind("rank", ("signal",)),
    "stop-rank": Kind("rank", ("for",)),
    "resume-rank": Kind("rank"),
    "kill-agent": Kind("node"),
    "vanish": Kind("node", ("force",)),
    "slow": Kind("node", ("share", "for"), ("for",)),
    "fill-disk": Kind("node", ("where", "leave", "for", "force"), ("where", "for")),
    "kill-supervisor": Kind("run"),
}


@dataclass(frozen=True)
class Fault:
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
    def kind(self) -> Kind:
        """What it strikes."""
        return KINDS[self.do]

    @property
    def is_random(self) -> bool:
        """Whether its victim is still to be chosen."""
        return self.kind.at != "run" and self.rank is None and self.node is None


def read_fault(values: Mapping[str, Any]) -> tuple[Fault | None, list[Problem]]:
    """A fault from plain values (do, rank, random, signal, for, …), or all that is wrong with them."""
    do = values.get("do")
    if do not in KINDS:
        found = "is missing" if do is None else f"{do!r} is no fault"
        return None, [Problem("do", f"{found}; there are: {', '.join(KINDS)}")]
    kind = KINDS[do]
    given = {key: value for key, value in values.items() if value is not None and value is not False}
    allowed = {"do", *kind.takes, *(() if kind.at == "run" else (kind.at, "random", "seed"))}
    problems = [
        Problem(
            key, f"is nothing that {do} takes; it takes: {', '.join(sorted(allowed - {'do'})) or 'nothing'}"
        )
        for key in given
        if key not in allowed
    ]
    problems += [Problem(key, f"is missing, which {do} needs") for key in kind.needs if key not in given]
    problems += _victim(kind, given)
    read: dict[str, Any] = {}
    for key, value in given.items():
        if key in allowed and key in _READERS:
            try:
                read.update(_READERS[key](value))
            except UsageError as error:
                problems.append(Problem(key, str(error).removeprefix(f"{key}: ")))
    return (None, problems) if problems else (Fault(do, **read), [])


def _victim(kind: Kind, given: Mapping[str, Any]) -> list[Problem]:
    if kind.at == "run":
        return []
    if (kind.at in given) == ("random" in given):
        one = "give only one of them" if kind.at in given else "say which, or take one at random"
        return [Problem(kind.at, f"{one}: {kind.at} or random")]
    if "seed" in given and "random" not in given:
        return [Problem("seed", "is for random; give both, or neither")]
    return []


def _rank(value: Any) -> dict[str, Any]:
    if not _is_whole(value) or value < 0:
        raise UsageError(f"{value!r} is no rank; ranks count from 0")
    return {"rank": value}


def _node(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} is no node's name")
    return {"node": value}


def _seed(value: Any) -> dict[str, Any]:
    if not _is_whole(value):
        raise UsageError(f"{value!r} is no whole number")
    return {"seed": value}


def _signal(value: Any) -> dict[str, Any]:
    name = f"SIG{str(value).upper().removeprefix('SIG')}"
    if name in ("SIGSTOP", "SIGCONT"):
        raise UsageError(f"for {name} there are stop-rank and resume-rank")
    try:
        return {"signal": signal.Signals[name]}
    except KeyError:
        raise UsageError(f"{value!r} is no signal; write a name such as KILL, TERM, SEGV or BUS") from None


def _for(value: Any) -> dict[str, Any]:
    return {"for_s": read_seconds(value, "for")}


def read_seconds(value: Any, where: str) -> float:
    """Seconds of a time such as 30s; UsageError where it is none, or longer than a day."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {value!r} has no unit; write 30s or 5m")
    limit = parse_time(value, where)
    if math.isinf(limit.seconds) or limit.seconds > _DAY_S:
        raise UsageError(f"{where}: {value} is longer than a day; write 30s or 5m")
    return limit.seconds


def _share(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise UsageError(f"{value!r} is no share; write a number between 0 and 1, such as 0.5")
    return {"share": float(value)}


def _where(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value.startswith("/"):
        raise UsageError(f"{value!r} is no absolute path of a directory")
    return {"where": value}


def _leave(value: Any) -> dict[str, Any]:
    return {"leave_mib": parse_memory(str(value), "leave")}


def _force(value: Any) -> dict[str, Any]:
    return {"force": bool(value)}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_READERS = {
    "rank": _rank,
    "node": _node,
    "seed": _seed,
    "signal": _signal,
    "for": _for,
    "share": _share,
    "where": _where,
    "leave": _leave,
    "force": _force,
}
