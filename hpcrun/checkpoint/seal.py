"""Sealing: what a rank has copied into a slot of the arena becomes a part, where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcrun.checkpoint.format import (
    HEADER_BYTES,
    TAIL_FRAME,
    ChunkSpec,
    Part,
    PartLayout,
    align_size,
    iterate_frames,
    plan_part_layout,
)


@dataclass(frozen=True)
class SlotPlan:
    """What a rank puts into its slots, and where its part belongs in the run directory."""

    number: int
    """Of the part; the rank."""
    layout: PartLayout
    sizes: tuple[int, ...]
    """Raw bytes of each chunk."""
    file: int
    start: int


def plan_slot(number: int, pieces: Sequence[ChunkSpec], file: int, start: int) -> SlotPlan:
    """Once for each structure; it holds for every save of it."""
    return SlotPlan(
        number, plan_part_layout(number, pieces), tuple(piece.size_bytes for piece in pieces), file, start
    )


def seal_part(
    image: memoryview, generation: bytes, plan: SlotPlan, between: Callable[[], None] = lambda: None
) -> Part:
    """Turn raw bytes at their places into a part: headers, hashes, tail and end; nothing else is copied.

    What comes of it is what `write_part` writes, byte for byte. `between` is called after each chunk.
    """
    assert len(image) == plan.layout.size_bytes
    tail_hash = 0
    for frame in iterate_frames(generation, plan.number, plan.layout, _raw_chunks(image, plan)):
        begin = frame.at + HEADER_BYTES
        image[frame.at : begin] = frame.header
        end = begin + len(frame.content)
        if frame.kind == TAIL_FRAME:
            image[begin:end] = frame.content
            tail_hash = frame.digest
        if rest := align_size(end) - end:
            image[end : end + rest] = bytes(rest)
        between()
    layout = plan.layout
    return Part(
        plan.file, plan.start, layout.size_bytes, layout.tail_at, layout.tail_bytes, f"{tail_hash:016x}"
    )


def _raw_chunks(image: memoryview, plan: SlotPlan) -> Iterator[memoryview]:
    for at, size in zip(plan.layout.at, plan.sizes, strict=True):
        yield image[at + HEADER_BYTES : at + HEADER_BYTES + size]
