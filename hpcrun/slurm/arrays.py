"""Arrays of jobs: a sweep cut up so that Slurm takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_ARRAY_SIZE = 1001
"""Slurm's own default of MaxArraySize, which bounds the index."""


class ArrayChunk(NamedTuple):
    """A part of a sweep that is one array; its indices are the elements less `offset`."""

    elements: tuple[int, ...]
    offset: int
    throttle: int | None = None
    after: int | None = None
    """The index of the chunk that has to end first, so that no more than the throttle run at one time."""


def split_into_arrays(
    elements: Sequence[int], array_size: int, throttle: int | None = None
) -> list[ArrayChunk]:
    """Elements as arrays with indices below `array_size`; their limits at one time add up to `throttle`."""
    parts: dict[int, list[int]] = {}
    for element in sorted(elements):
        parts.setdefault(element // array_size * array_size, []).append(element)
    lanes = min(throttle or len(parts), len(parts))
    chunks = []
    for place, (offset, part) in enumerate(parts.items()):
        lane = place % lanes
        limit = None if throttle is None else throttle // lanes + (lane < throttle % lanes)
        chunks.append(ArrayChunk(tuple(part), offset, limit, place - lanes if place >= lanes else None))
    return chunks
