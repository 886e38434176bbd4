"""What the system said when a save could not be written: which file, which file system, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hpcrun.mounts import find_mount

_REMEDIES = {
    errno.ENOSPC: "free space or inodes there, or keep fewer saves",
    errno.EDQUOT: "your quota there is used up: delete files or ask for more",
    errno.EROFS: "it is mounted read-only: give a directory elsewhere, or have it mounted for writing",
    errno.EACCES: "you may not write there: ask its owner, or give a directory of your own",
    errno.EPERM: "you may not write there: ask its owner, or give a directory of your own",
    errno.EIO: "the disk or its server failed: ask the administrators, and save elsewhere until then",
    errno.ESTALE: "the server has lost the file: try again, or mount it anew",
    errno.EFBIG: "raise the limit for the size of files (ulimit -f), or let more nodes share the save",
    errno.EMFILE: "raise the limit for open files (ulimit -n)",
    errno.ENAMETOOLONG: "give a directory with a shorter path",
}


def explain_os_error(error: OSError, place: Path) -> str:
    """An error of the system in one line: `place` is what was written where the error names no file."""
    if error.errno is None:
        return str(error)
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else place
    name = errno.errorcode.get(error.errno, str(error.errno))
    try:
        mount = find_mount(path)
    except (OSError, ValueError):
        mount = None
    where = f" on {mount.point} ({mount.kind or 'unknown file system'})" if mount else ""
    remedy = _REMEDIES.get(error.errno)
    return f"{path}: {os.strerror(error.errno)} ({name}){where}" + (f"; {remedy}" if remedy else "")
