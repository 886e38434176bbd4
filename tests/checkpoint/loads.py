"""Loads for tests: parts of two ranks a node, sealed in memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcrun.checkpoint.format import HEADER_BYTES, PART_ALIGN, ChunkSpec, align_size, plan_part_layout
from hpcrun.checkpoint.seal import SlotPlan, plan_slot, seal_part
from hpcrun.checkpoint.tier import CheckpointId, NodeShards, SealedPart
from tests.checkpoint.generations import content_of, pieces_of


def stamp_of(step: int, world_size: int, attempt: int = 1) -> CheckpointId:
    """The same on all nodes."""
    return CheckpointId(f"{step:016x}{attempt:016x}", step, 8 * step, world_size, attempt)


def fill(image: memoryview, plan: SlotPlan, contents: Sequence[bytes]) -> None:
    """What a rank does with a slot."""
    for at, content in zip(plan.layout.at, contents, strict=True):
        image[at + HEADER_BYTES : at + HEADER_BYTES + len(content)] = content


def plans_of(ranks: Sequence[int], world_size: int, file: int) -> list[tuple[list[ChunkSpec], SlotPlan]]:
    """The ranks of one node, one after the other in a data file."""
    found, start = [], 0
    for rank in ranks:
        pieces = pieces_of(rank, world_size)
        found.append((pieces, plan_slot(rank, pieces, file, start)))
        start += align_size(plan_part_layout(rank, pieces).size_bytes, PART_ALIGN)
    return found


def load_of(step: int, ranks: Sequence[int], world_size: int, file: int, attempt: int = 1) -> NodeShards:
    """What the ranks of a node have sealed of a step."""
    stamp, parts = stamp_of(step, world_size, attempt), []
    for pieces, plan in plans_of(ranks, world_size, file):
        image = memoryview(bytearray(b"\xa5" * plan.layout.size_bytes))
        fill(image, plan, [content_of(piece, step) for piece in pieces])
        part = seal_part(image, bytes.fromhex(stamp.generation), plan)
        parts.append(SealedPart(plan.number, part, image, ""))
    return NodeShards(stamp, tuple(parts))


def with_attempt(load: NodeShards, attempt: int) -> NodeShards:
    """The same parts under another attempt's number."""
    return replace(load, stamp=replace(load.stamp, attempt=attempt))
