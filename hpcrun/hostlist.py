"""Slurm's host lists, `n[01-03,05],gpu-a1`: expanded as Slurm does it; ClusterShell folds and sorts them.

ClusterShell refuses ranges that outgrow their padding; Slurm prints them: cn001 to cn1000 is cn[001-1000].
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from hpcrun.errors import UsageError

MAX_HOSTS = 65_536
"""As many as Slurm itself allows in one bracket; a list that unfolds to more is a slip of the keyboard."""

_NO_HOSTS = {"", "(null)", "none", "none assigned", "n/a", "null"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_HOST_TERM = re.compile(rf"(?:[A-Za-z0-9._-]|\[{_RANGE}(?:,{_RANGE})*\])+", re.ASCII)
_BRACKET = re.compile(r"\[([0-9,-]+)\]")


def expand_hosts(text: str, where: str = "nodes") -> tuple[str, ...]:
    """The hosts of a list, each once and in the order in which `scontrol show hostnames` gives them.

    What Slurm prints for no hosts, such as `(null)` and `None assigned`, is an empty tuple.
    """
    if text.strip().lower() in _NO_HOSTS:
        return ()
    hosts: dict[str, None] = {}
    for term in _terms(text):
        if _NAME.fullmatch(term):
            hosts[term] = None
            continue
        _check_term(term, where, len(hosts))
        hosts.update(dict.fromkeys(_expand_term(term)))
    return tuple(hosts)


def _expand_term(term: str) -> Iterator[str]:
    """The names of a term that was checked; the first number of a range says how wide all are at least."""
    texts = _BRACKET.split(term)
    choices = [list(_numbers(text)) if at % 2 else [text] for at, text in enumerate(texts)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


def fold_hosts(hosts: Iterable[str], *, suffixes: bool = True) -> str:
    """The shortest list of these hosts, in order; `suffixes=False` avoids `n[1-2]-ib`, new in Slurm 23.11."""
    folded = str(_nodeset(_join_checked(hosts), "nodes"))
    if suffixes:
        return folded
    whole = (
        term if term.endswith("]") or "[" not in term else ",".join(expand_hosts(term))
        for term in _terms(folded)
    )
    return ",".join(whole)


def sort_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """These hosts by name and number, each once: node8 before node66."""
    return tuple(_nodeset(_join_checked(hosts), "nodes"))


def _join_checked(hosts: Iterable[str]) -> str:
    names = list(hosts)
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"nodes: {name!r} is not a host name")
    return ",".join(names)


def _terms(text: str) -> Iterator[str]:
    """The list cut at the commas outside brackets; empty terms, as in `,c005`, are dropped."""
    depth, term = 0, ""
    for character in text.strip() + ",":
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            if term.strip():
                yield term.strip()
            term = ""
        else:
            term += character
    if term.strip(", "):
        yield term.strip(", ")


def _check_term(term: str, where: str, already: int) -> None:
    """Refuse what ClusterShell would take for a group, an operator, or an endless list."""
    if "{" in term:
        raise UsageError(
            f"{where}: {term!r} names a switch or block; let `scontrol show hostnames` expand it"
        )
    if not _HOST_TERM.fullmatch(term) or term[0] in "-.":
        raise UsageError(
            f"{where}: {term!r} is not a host list; write names such as n01,n[03-08],rack2-n[01-04]"
        )
    count = already + math.prod(_count_hosts(ranges, term, where) for ranges in _BRACKET.findall(term))
    if count > MAX_HOSTS:
        raise UsageError(f"{where}: {term!r} stands for {count} hosts; at most {MAX_HOSTS} are taken")


def _count_hosts(ranges: str, term: str, where: str) -> int:
    count = 0
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        size = int(last or first) - int(first) + 1
        if size < 1:
            raise UsageError(f"{where}: {term!r} counts down from {first} to {last}; write [{last}-{first}]")
        count += size
    return count


def _nodeset(text: str, where: str) -> Any:
    # Loading it costs 43 ms, which most commands need not pay.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # type: ignore[import-untyped]

    try:
        return NodeSet(text, resolver=RESOLVER_NOGROUP)
    except NodeSetException as error:
        raise UsageError(f"{where}: {text!r} is not a host list: {error}") from None
