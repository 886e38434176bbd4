"""Memory of runs that are over: whoever was killed could not give it back."""

from __future__ import annotations

from pathlib import Path

from hpcrun.checkpoint.flush.arena import SHM
from hpcrun.checkpoint.flush.stale_memory import clean_up_stale_memory
from hpcrun.errors import UsageError
from hpcrun.files import read_filesystem_clock
from hpcrun.runs.lease import has_active_leader
from hpcrun.runs.run_lock import is_supervisor_alive_here
from hpcrun.specs.rundir import RunDir
from hpcrun.units import format_bytes

_STALE_S = 600.0
"""A lease that has stood still for so long, by the clock of its file system, is nobody's; a run that left no
record of its end may be gone on with by then."""


def clean_up_memory(own: RunDir, root: Path = SHM) -> list[str]:
    """Remove what runs of this user that are over have left on this node; a line for each of them."""

    def is_alive(path: Path) -> bool:
        return path == own.path or may_have_leader(RunDir(path))

    return [
        f"{folder}: removed {format_bytes(size_bytes)} that a run has left in memory; it is over"
        for folder, size_bytes in clean_up_stale_memory(root, is_alive).items()
    ]


def may_have_leader(run: RunDir) -> bool:
    """Whether somebody may still be leading a run, or about to go on with it; in doubt it is so."""
    try:
        if run.exit.exists() or not run.path.is_dir():
            return False
        signs = [path.stat().st_mtime for path in (run.lease, run.events, run.metrics) if path.exists()]
        if read_filesystem_clock(run.path) - max(signs, default=0.0) < _STALE_S or is_supervisor_alive_here(
            run
        ):
            return True
        # The stamps may be of another clock than ours after all: some file systems take the writer's.
        return has_active_leader(run)
    except (OSError, UsageError):
        return True
