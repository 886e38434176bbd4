"""Inventories of many nodes, read at once: thousands of generations, and every node tells of whole sets."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpcrun.checkpoint.tier import InventoryEntry, SetMember, parse_inventory_entry, parse_set_members


class InventoryReader:
    """Parses holdings; the members of a set, of which each of its nodes tells, are read and kept once."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[Sequence[Any], tuple[SetMember, ...]]]] = {}

    def read(self, entries: Iterable[dict[str, Any]]) -> Iterator[InventoryEntry | str]:
        """Each holding, or what is wrong with it."""
        with gc_paused():
            for entry in entries:
                try:
                    yield parse_inventory_entry(entry, self._members)
                except (ValueError, AttributeError) as error:
                    yield str(error)

    def _members(self, values: Sequence[Any]) -> tuple[SetMember, ...]:
        first = values[0] if values else {}
        # The tail's hash of its first part is as good as the name of a generation.
        key = str(first["parts"][0][1]["tail_hash"]) if first.get("parts") else ""
        seen_members = self._known.setdefault(key, [])
        for seen, members in seen_members:
            if seen == values:
                return members
        seen_members.append((values, parse_set_members(values)))
        return seen_members[-1][1]


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
