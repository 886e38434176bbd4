"""A sweep in arrays: none is larger than the cluster takes, and the throttle holds for all together."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrun.slurm.arrays import ArrayChunk, split_into_arrays


@pytest.mark.parametrize(
    ("elements", "size", "throttle", "chunks"),
    [
        (range(4), 10, None, [ArrayChunk((0, 1, 2, 3), 0)]),
        (range(4), 10, 2, [ArrayChunk((0, 1, 2, 3), 0, 2)]),
        (range(5), 2, None, [ArrayChunk((0, 1), 0), ArrayChunk((2, 3), 2), ArrayChunk((4,), 4)]),
        (range(5), 2, 5, [ArrayChunk((0, 1), 0, 2), ArrayChunk((2, 3), 2, 2), ArrayChunk((4,), 4, 1)]),
        # Fewer at a time than arrays: they take turns.
        (
            range(5),
            2,
            2,
            [ArrayChunk((0, 1), 0, 1), ArrayChunk((2, 3), 2, 1), ArrayChunk((4,), 4, 1, after=0)],
        ),
        ([7, 1, 25], 10, 1, [ArrayChunk((1, 7), 0, 1), ArrayChunk((25,), 20, 1, after=0)]),
    ],
)
def test_a_sweep_is_cut_up_and_keeps_its_throttle(
    elements: Any, size: int, throttle: int | None, chunks: list[ArrayChunk]
) -> None:
    assert split_into_arrays(elements, size, throttle) == chunks
