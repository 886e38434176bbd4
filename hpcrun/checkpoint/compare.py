"""Two generations, tensor by tensor: what differs, and by how much."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrun.checkpoint.format import TensorEntry
from hpcrun.checkpoint.generation import GenerationReader

_UNMEASURED_DTYPES = {"float8_e4m3fn", "float8_e5m2"}
"""Types that numpy does not know; their bytes can be told apart, but not subtracted."""


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of one generation differs from that of another."""

    name: str
    what: str
    """`only in the first`, `only in the second`, `shape`, `type` or `values`."""
    largest: float | None = None
    """The largest difference of two elements; None where it is unknown."""
    count: int | None = None
    """How many elements differ."""


def compare_generations(
    first: GenerationReader, second: GenerationReader, progress: Callable[[int], None] = lambda _size: None
) -> Iterator[TensorDifference]:
    """Every tensor that is not the same in both, in order of names; DamagedError where one cannot be read.

    Holds one tensor of each in memory. Without numpy the sizes of differences stay unknown.
    """
    ours, theirs = first.manifest.tensors, second.manifest.tensors
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            yield TensorDifference(name, f"only in the {'first' if name in ours else 'second'}")
        elif ours[name].shape != theirs[name].shape:
            yield TensorDifference(name, "shape")
        elif ours[name].dtype != theirs[name].dtype:
            yield TensorDifference(name, "type")
        else:
            a, b = _read_tensor(first, ours[name]), _read_tensor(second, theirs[name])
            progress(len(a))
            if a != b:
                yield _measure_difference(name, ours[name].dtype, a, b)


def _read_tensor(generation: GenerationReader, tensor: TensorEntry) -> bytearray:
    """The raw bytes of a whole tensor, proved, put together from its chunks."""
    whole = bytearray(tensor.size_bytes)
    for piece, place in tensor.chunks:
        content = memoryview(bytearray(piece.size_bytes))
        generation.read(piece, place, content)
        item = piece.size_bytes // max(1, _count_elements(piece.sizes))
        _copy_slice(whole, content, tensor.shape, piece.offsets, piece.sizes, item)
    return whole


def _copy_slice(
    whole: bytearray,
    content: memoryview,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    item_bytes: int,
) -> None:
    """Copy a box into its tensor, in runs that lie in order in both."""
    dims = len(shape)
    while dims and sizes[dims - 1] == shape[dims - 1]:
        dims -= 1  # whole rows: they are one run
    run = _count_elements(sizes[max(0, dims - 1) :]) * item_bytes
    strides = [_count_elements(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]
    outer = sizes[: max(0, dims - 1)]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number in range(_count_elements(outer)):
        at, rest = base, number
        for dim in reversed(range(len(outer))):
            rest, index = divmod(rest, outer[dim])
            at += index * strides[dim]
        whole[at : at + run] = content[number * run : (number + 1) * run]


def _count_elements(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _measure_difference(name: str, dtype: str, a: bytearray, b: bytearray) -> TensorDifference:
    if dtype in _UNMEASURED_DTYPES or importlib.util.find_spec("numpy") is None:
        return TensorDifference(name, "values")
    import numpy as np

    x, y = _decode_values(a, dtype), _decode_values(b, dtype)
    # Two that are no number are the same, and infinities of one sign too.
    differ = ~((x == y) | ((x != x) & (y != y)))
    if not differ.any():
        return TensorDifference(name, "values", 0.0, 0)
    wide: Any = np.complex128 if dtype.startswith("complex") else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x[differ].astype(wide) - y[differ].astype(wide))
    return TensorDifference(name, "values", float(apart.max()), int(differ.sum()))


def _decode_values(data: bytearray, dtype: str) -> Any:
    """The bytes as an array of numpy's."""
    import numpy as np

    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype))
