"""What ranks leave in /dev/shm: killed ones cannot remove it themselves."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

from hpcrun.files import OwnedDirectory

_SHM = "/dev/shm"
# Only what MPI, UCX, NCCL, torch and Python make there: people keep data sets in /dev/shm too.
_SEGMENT = re.compile(r"(mpich_|ucx_|torch_|nccl-|psm_|gloo|vader_segment|sm_segment|sem\.mp-)[\w.+-]*\Z")
_CLOCK_SLACK_S = 1.0


def mapped_segments(pid: int | str = "self") -> set[str]:
    """The shared memory files that a process maps now; none when there is no such process."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    # address perms offset dev inode path; the path of a file that was removed ends in " (deleted)"
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if f" {_SHM}/" in line}
    return {path for path in paths if _is_segment(path)}


def mpi_segments() -> set[str]:
    """What MPICH keeps in /dev/shm at this moment, whoever started it."""
    return {str(path) for path in Path(_SHM).glob("mpich_shm_*")}


def unmapped_segments(paths: Iterable[str]) -> set[str]:
    """Those that no living process maps."""
    left = set(paths)
    if left:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                left -= mapped_segments(entry.name)
    return left


def stale_segments(folder: Path, older_s: float) -> dict[Path, int]:
    """Files of ours that MPI or torch made so long ago and no process maps any more, with their sizes."""
    segments = {}
    with contextlib.suppress(FileNotFoundError), OwnedDirectory.below(folder) as files:
        for name in filter(_SEGMENT.match, files.names()):
            if not files.is_own_file(name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = files.status_of(name)
                if time.time() - max(status.st_mtime, status.st_ctime) > older_s:
                    segments[str(files.path / name)] = status.st_size
    return {Path(path): segments[path] for path in unmapped_segments(segments)}


def remove_segments(paths: Iterable[str], *, since: float) -> list[str]:
    """Remove files that processes of ours left, if newer than `since` (wall clock) and mapped by nobody.

    Gives the paths that were removed.
    """
    ours = _own_segments(paths, since)
    return _unlink(unmapped_segments(ours), since=since) if ours else []


def unlink_mapped_segments() -> None:
    """Remove the names of what this process maps: it goes on with the memory, others find none."""
    _unlink(mapped_segments(), since=0.0)


def _unlink(paths: Iterable[str], *, since: float) -> list[str]:
    removed = []
    with contextlib.suppress(FileNotFoundError), OwnedDirectory.below(Path(_SHM)) as files:
        for path in sorted(paths):
            with contextlib.suppress(OSError):
                if _is_own_segment(files, path, since) and files.unlink(path.rpartition("/")[2]):
                    removed.append(path)
    return removed


def _own_segments(paths: Iterable[str], since: float) -> set[str]:
    with contextlib.suppress(FileNotFoundError), OwnedDirectory.below(Path(_SHM)) as files:
        return {path for path in paths if _is_own_segment(files, path, since)}
    return set()


def _is_own_segment(files: OwnedDirectory, path: str, since: float) -> bool:
    name = path.rpartition("/")[2]
    if not _is_segment(path) or not files.is_own_file(name):
        return False
    with contextlib.suppress(FileNotFoundError):
        return files.status_of(name).st_ctime >= since - _CLOCK_SLACK_S
    return False


def _is_segment(path: str) -> bool:
    parent, _, name = path.rpartition("/")
    return parent == _SHM and _SEGMENT.match(name) is not None
