"""What ranks must not leave behind, on a machine where other tests run ranks at the same time."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrun.shm_segments import stale_segments

SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 60.0


def unused_segments() -> set[Path]:
    """What MPI or torch made in /dev/shm and no process maps."""
    return {*stale_segments(SHARED_MEMORY, older_s=-60)}


def check_no_new_segments(before: set[Path]) -> None:
    """Wait until all unused segments are old ones: those of ranks that end elsewhere go a moment later."""
    deadline = time.monotonic() + PATIENCE_S
    while unused_segments() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert unused_segments() <= before
