"""Inventories of many nodes, read at once: thousands of generations, and every node tells of whole sets."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpcrun.checkpoint.levels import Holding, Member, parse_holding, parse_members


class HoldingReader:
    """Parses holdings; the members of a set, of which each of its nodes tells, are read and kept once."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[Sequence[Any], tuple[Member, ...]]]] = {}

    def read(self, told: Iterable[dict[str, Any]]) -> Iterator[Holding | str]:
        """Each holding, or what is wrong with it."""
        with no_collection():
            for one in told:
                try:
                    yield parse_holding(one, self._members)
                except (ValueError, AttributeError) as error:
                    yield str(error)

    def _members(self, told: Sequence[Any]) -> tuple[Member, ...]:
        first = told[0] if told else {}
        # The tail's hash of its first part is as good as the name of a generation.
        key = str(first["parts"][0][1]["tail_hash"]) if first.get("parts") else ""
        known = self._known.setdefault(key, [])
        for seen, members in known:
            if seen == told:
                return members
        known.append((told, parse_members(told)))
        return known[-1][1]


@contextmanager
def no_collection() -> Iterator[None]:
    """Many small objects, none of them garbage: looking for some takes longer than to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
