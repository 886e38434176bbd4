"""Boxes of a tensor: whether some of them make up the whole, and cutting large ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class TensorSlice(NamedTuple):
    """A rectangular piece of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def find_coverage_problem(shape: tuple[int, ...], boxes: Sequence[TensorSlice]) -> str | None:
    """What is wrong with boxes that should cover a tensor exactly; None when nothing is."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape) and min(shape, default=0) >= 0:
        return None  # as most tensors are stored
    whole, total = math.prod(shape), 0
    for box in boxes:
        fits = len(box.offsets) == len(box.sizes) == len(shape) and all(
            min(offset, size) >= 0 and offset + size <= length
            for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not fits:
            return f"a box at {list(box.offsets)} of {list(box.sizes)} is not inside of {list(shape)}"
        total += math.prod(box.sizes)
    if total != whole:
        return f"they hold {total} of its {whole} elements"
    return _find_overlap(shape, [box for box in boxes if math.prod(box.sizes)])


def split_slice(sizes: tuple[int, ...], item_bytes: int, most_bytes: int) -> Iterator[TensorSlice]:
    """A box as boxes of at most so many bytes each (or one row), every one contiguous in C order."""
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or math.prod(sizes) * item_bytes <= most_bytes:
        yield TensorSlice((0,) * len(sizes), sizes)
        return
    row = math.prod(sizes[dim + 1 :]) * item_bytes
    rows = max(1, most_bytes // row)
    for begin in range(0, sizes[dim], rows):
        count = min(rows, sizes[dim] - begin)
        place = (*(0,) * dim, begin, *(0,) * (len(sizes) - dim - 1))
        inner = (*sizes[:dim], count, *sizes[dim + 1 :])
        if count > 1 or row <= most_bytes:
            yield TensorSlice(place, inner)
            continue
        for box in split_slice(inner, item_bytes, most_bytes):
            yield TensorSlice(tuple(a + b for a, b in zip(place, box.offsets, strict=True)), box.sizes)


def _find_overlap(shape: tuple[int, ...], boxes: list[TensorSlice]) -> str | None:
    """Two boxes that share an element, found by sweeping along the dimension with the most cuts."""
    if len(boxes) < 2:
        return None
    if not shape:
        return "its one element is there more than once"
    sweep = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    active: list[TensorSlice] = []
    for box in sorted(boxes, key=lambda box: box.offsets[sweep]):
        begin = box.offsets[sweep]
        active = [
            active_slice
            for active_slice in active
            if active_slice.offsets[sweep] + active_slice.sizes[sweep] > begin
        ]
        for active_slice in active:
            if all(
                a < b + t and b < a + s
                for a, s, b, t in zip(
                    active_slice.offsets, active_slice.sizes, box.offsets, box.sizes, strict=True
                )
            ):
                return f"boxes at {list(active_slice.offsets)} and {list(box.offsets)} overlap"
        active.append(box)
    return None
