"""Mounted file systems, as the kernel lists them in /proc/self/mountinfo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")


class MountEntry(NamedTuple):
    """A mounted file system."""

    kind: str
    """As the kernel names it: lustre, ext4, nfs4, …; empty where unknown."""
    point: Path
    source: str

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.kind or 'a file system of unknown kind'} at {self.point}"


def parse_mounts(text: str) -> list[MountEntry]:
    """Parse the lines of /proc/self/mountinfo, in order."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) > 4 and len(rest) > 1:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            mounts.append(MountEntry(rest[0], Path(point), rest[1]))
    return mounts


def find_mount(path: Path, mountinfo: Path = MOUNTINFO) -> MountEntry:
    """Find the file system that holds a path, which need not exist."""
    place = path.resolve()
    best = MountEntry("", place, "")
    try:
        mounts = parse_mounts(mountinfo.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return best
    depth = -1
    for mount in mounts:
        # Of several on one directory the last hides the others.
        if place.is_relative_to(mount.point) and len(mount.point.parts) >= depth:
            best, depth = mount, len(mount.point.parts)
    return best
