"""Whose run it is: what decides whether a verb may act on a run directory."""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.errors import UsageError, warn_once
from hpcrun.files import is_private
from hpcrun.local_identity import owner_name

if TYPE_CHECKING:
    from hpcrun.specs.rundir import RunDir


def is_private_directory(path: Path) -> bool:
    """Whether this is a directory, and no link to one, that is ours and that nobody else can write."""
    try:
        status = path.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(status.st_mode) and is_private(status)


def require_own_run(run: RunDir, *, is_named_by_path: bool = False) -> None:
    """UsageError unless the run is ours; root may also act on another user's that it has named by a path."""
    sweep = run.sweep_of_element
    for path in [run.path] if sweep is None else [sweep.path, run.path.parent, run.path]:
        if not is_private_directory(path):
            _raise_not_own(path, is_named_by_path=is_named_by_path)


def _raise_not_own(path: Path, *, is_named_by_path: bool) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"{path}: cannot be looked at: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path}: is not a directory but a link or a file; name the run directory itself")
    if status.st_uid != os.geteuid() and not (os.geteuid() == 0 and is_named_by_path):
        by_path = "; as root name it by its path" if os.geteuid() == 0 else ""
        raise UsageError(
            f"{path}: belongs to {owner_name(status.st_uid)}, not to you, so it can only be read{by_path}"
        )
    if status.st_mode & 0o022:
        raise UsageError(
            f"{path}: other users can write it (mode {stat.S_IMODE(status.st_mode):o}), so it can only be"
            f" read; run: chmod go-w {shlex.quote(str(path))}"
        )


def warn_if_root_is_writable(root: Path) -> None:
    """Say once where others can rename the runs below a root, and put theirs in the place of ours."""
    with suppress(OSError):
        mode = root.stat().st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            warn_once(
                f"{root}: other users can write it (mode {stat.S_IMODE(mode):o}), so they can rename or"
                f" replace the runs in it; have its owner run: chmod +t {shlex.quote(str(root))}"
            )
