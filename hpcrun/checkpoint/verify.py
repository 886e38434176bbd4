"""Proving a whole generation, several parts at a time: hashing and reading leave the other threads free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from hpcrun.checkpoint.format import ChunkLocation, ChunkSpec, DamagedError
from hpcrun.checkpoint.generation import GenerationReader
from hpcrun.specs.saves import SavedCheckpoint

_MAX_JOBS = 16
"""More readers than this do not make one file system quicker, and each holds a chunk in memory."""


@dataclass(frozen=True)
class VerifyResult:
    """What reading every byte of a checkpoint, or of a copy of it, has shown."""

    step: int | None
    """None where its record cannot be read."""
    path: str
    state: Literal["whole", "damaged"]
    damages: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: int | None, path: object, damages: Sequence[str]) -> VerifyResult:
        """Whole without damages."""
        return cls(step, str(path), "damaged" if damages else "whole", tuple(damages))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


def verify_checkpoint(
    saved: SavedCheckpoint, jobs: int | None, progress: Callable[[int], None] = lambda _size: None
) -> VerifyResult:
    """Read a checkpoint from the first to the last byte; `jobs` parts at a time, default by processors."""
    try:
        with GenerationReader(saved) as generation:
            damages = find_generation_damages(generation, jobs or default_verify_jobs(), progress)
    except (DamagedError, OSError) as error:
        damages = [str(error)]
    return VerifyResult.of(saved.step, saved.path, damages)


def default_verify_jobs() -> int:
    """How many parts are read at a time where nobody asks for a number."""
    return min(_MAX_JOBS, len(os.sched_getaffinity(0)))


def find_generation_damages(
    generation: GenerationReader, jobs: int, progress: Callable[[int], None] = lambda _size: None
) -> list[str]:
    """Everything that is wrong with a generation, in order of its parts."""
    lock = threading.Lock()

    def told(size: int) -> None:
        with lock:
            progress(size)

    def look(part: tuple[int, list[tuple[ChunkSpec, ChunkLocation]]]) -> list[str]:
        return list(generation.damages_of_part(*part, told))

    parts = list(enumerate(generation.chunks_by_part()))
    if min(jobs, len(parts)) <= 1:
        return [damage for part in parts for damage in look(part)]
    with ThreadPoolExecutor(jobs) as threads:
        damages = threads.map(look, parts)
        return [damage for damages_of_part in damages for damage in damages_of_part]
