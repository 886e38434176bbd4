"""What ranks must not leave behind, on a machine where other tests run ranks at the same time."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrun.shm_segments import unmapped_segments

PATIENCE_S = 60.0


def shared_segments() -> set[str]:
    """What MPI or torch has in /dev/shm at this moment, whoever started it."""
    return {str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(("mpich_", "torch_"))}


def check_no_new_segments(before: set[str]) -> None:
    """Fail on new segments that no process maps; those of ranks that end elsewhere go after a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := unmapped_segments(shared_segments() - before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()
