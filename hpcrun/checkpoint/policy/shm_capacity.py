"""How much more fits into shared memory here: by the file system, the cgroups and the machine.

Shared memory counts as memory of the cgroup that touches it first; Slurm's --mem is such a limit. A cgroup is
also under the limits of those above it. Pages of files that are only cached give way, and do not count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrun.units import format_bytes

_MARGIN = 16
"""One part in this many of a limit stays free: training itself grows."""
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups shows about 2**63 if there is no limit."""


@dataclass(frozen=True)
class ShmCapacity:
    """What is free, and what sets that bound."""

    size_bytes: int
    bound: str

    def __str__(self) -> str:
        return f"{format_bytes(self.size_bytes)} ({self.bound})"


def measure_shm_capacity(folder: Path, root: Path = Path("/")) -> ShmCapacity:
    """Measure how much fits into a folder of shared memory, for this process; `root` for a captured tree."""
    status = os.statvfs(folder)
    rooms = [ShmCapacity(status.f_bavail * status.f_frsize, f"free in {folder}"), *_cgroup_capacities(root)]
    if (available := _read_table(root / "proc/meminfo").get("MemAvailable:")) is not None:
        rooms.append(ShmCapacity(available * 1024, "memory available on this node"))
    return min(rooms, key=lambda room: room.size_bytes)


def _cgroup_capacities(root: Path) -> Iterator[ShmCapacity]:
    """What each cgroup of this process, and each above it, has left."""
    for line in _read_text_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        else:
            continue
        place = Path(path.lstrip("/"))
        for inner in (place, *place.parents):
            # Limits above a container's own root are not visible from inside.
            limit, used = (_read_limit(top / inner / name) for name in names)
            if limit is None or used is None or limit >= _NO_LIMIT:
                continue
            statistics = _read_table(top / inner / "memory.stat")
            cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
            left = limit - limit // _MARGIN - max(0, used - cached)
            yield ShmCapacity(
                max(0, left), f"memory left in cgroup {top / inner}, limit {format_bytes(limit)}"
            )


def _read_text_or_empty(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _read_limit(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    text = _read_text_or_empty(path).strip()
    return int(text) if text.isdecimal() else None


def _read_table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read_text_or_empty(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
