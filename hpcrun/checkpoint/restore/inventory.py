"""Inventories of many nodes, read at once: thousands of generations, and every node tells of whole sets."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpcrun.checkpoint.levels import InventoryEntry, SetMember, parse_inventory_entry, parse_set_members


class InventoryReader:
    """Parses holdings; the members of a set, of which each of its nodes tells, are read and kept once."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[Sequence[Any], tuple[SetMember, ...]]]] = {}

    def read(self, told: Iterable[dict[str, Any]]) -> Iterator[InventoryEntry | str]:
        """Each holding, or what is wrong with it."""
        with gc_paused():
            for one in told:
                try:
                    yield parse_inventory_entry(one, self._members)
                except (ValueError, AttributeError) as error:
                    yield str(error)

    def _members(self, told: Sequence[Any]) -> tuple[SetMember, ...]:
        first = told[0] if told else {}
        # The tail's hash of its first part is as good as the name of a generation.
        key = str(first["parts"][0][1]["tail_hash"]) if first.get("parts") else ""
        known = self._known.setdefault(key, [])
        for seen, members in known:
            if seen == told:
                return members
        known.append((told, parse_set_members(told)))
        return known[-1][1]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Many small objects, none of them garbage: looking for some takes longer than to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
