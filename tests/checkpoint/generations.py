"""Small generations for tests: two ranks' parts in one file, made by the functions that a real save uses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.commit import begin_generation, commit_generation
from hpcrun.checkpoint.format import (
    PART_ALIGN,
    ChunkSpec,
    align_size,
    collect_tensors,
    compute_structure_digest,
    plan_part_layout,
    render_tensors,
)
from hpcrun.checkpoint.generation import read_part_tail
from hpcrun.checkpoint.part_writer import write_part
from hpcrun.specs.descent import descent_after
from hpcrun.specs.saves import SavedCheckpoint, resumable_checkpoints

SHAPES = {"model.a": (40, 16), "model.b": (7,), "model.scalar": (), "model.none": (0, 3)}


def pieces_of(rank: int, ranks: int) -> list[ChunkSpec]:
    """A rank's share: rows of what has rows, the rest with rank 0."""
    found = []
    for name, shape in SHAPES.items():
        if len(shape) and shape[0] >= ranks:
            rows = -(-shape[0] // ranks)
            begin_row, end = min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows)
            if end == begin_row:
                continue
            offsets = (begin_row, *(0 for _ in shape[1:]))
            found.append(ChunkSpec(name, "float32", shape, offsets, (end - begin_row, *shape[1:])))
        elif rank == 0:
            found.append(ChunkSpec(name, "float32", shape, (0,) * len(shape), shape))
    return found


def content_of(piece: ChunkSpec, seed: int) -> bytes:
    """What a test puts into a piece."""
    return random.Random(f"{seed} {piece}").randbytes(piece.size_bytes)


def save(
    checkpoints: Path,
    step: int,
    *,
    attempt: int = 1,
    files: int = 1,
    ranks: int = 2,
    shares: Sequence[list[ChunkSpec]] | None = None,
    descent: str | None = None,
) -> SavedCheckpoint:
    """A committed generation, its ranks spread over so many files; it has come from the newest one."""
    if descent is None:
        line = resumable_checkpoints(checkpoints)
        descent = descent_after(line[-1], attempt) if line else ""
    draft = begin_generation(checkpoints, step, attempt)
    parts, ends = [], dict.fromkeys(range(files), 0)
    shares = shares or [pieces_of(rank, ranks) for rank in range(ranks)]
    for rank, pieces in enumerate(shares):
        file = rank * files // len(shares)
        contents = (content_of(piece, step) for piece in pieces)
        path = draft.file(file)
        parts.append(write_part(path, draft.generation, rank, pieces, contents, file=file, start=ends[file]))
        ends[file] += align_size(plan_part_layout(rank, pieces).size_bytes, PART_ALIGN)
    tensors = collect_tensors(
        read_part_tail(draft.file(part.file), part, n, draft.generation) for n, part in enumerate(parts)
    )
    facts: dict[str, Any] = {
        "step": step,
        "position": 8 * step,
        "world_size": len(shares),
        "attempt": attempt,
    }
    return commit_generation(
        draft, parts, render_tensors(tensors), compute_structure_digest(tensors), **facts, descent=descent
    )
