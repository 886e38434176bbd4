"""Memory that processes have left which could not give it back: found by locks, which end with their holders.

A worker holds the folder of its node's arena, alone; a script that has started its worker itself also holds
the folder of the run, together with its like on this host, so that its memory outlives the worker's death.
The kernel lets go of a lock when its holder is gone, in whatever container or namespace that was.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable
from pathlib import Path

from hpcrun.checkpoint.flush.arena import RUN_RECORD_NAME, find_arena, find_user_folders
from hpcrun.files import OwnedDirectory, UntrustedFileError


def lock_run_memory(arena: Path) -> OwnedDirectory:
    """Keep the memory of a run from being cleaned up until this is closed, or the process has ended."""
    run = OwnedDirectory.at(arena.parent)
    fcntl.flock(run.fileno(), fcntl.LOCK_SH)
    return run


def has_live_worker(root: Path, run_id: str, node: str) -> bool:
    """Whether a worker lives in the arena of this node."""
    folder = find_arena(root, run_id, node)
    if folder is None:
        return False
    with contextlib.suppress(OSError, UntrustedFileError), OwnedDirectory.at(folder) as arena:
        return not _try_lock(arena)
    return False


def is_held_by_script(root: Path, run_id: str, node: str) -> bool:
    """Whether a script that lives uses the memory of this node's run."""
    folder = find_arena(root, run_id, node)
    if folder is None:
        return False
    with contextlib.suppress(OSError, UntrustedFileError), OwnedDirectory.at(folder.parent) as run:
        return not _try_lock(run)
    return False


def clean_up_stale_memory(root: Path, is_alive: Callable[[Path], bool]) -> dict[Path, int]:
    """Remove the arenas of runs that are over, by their directories; which folders, and their sizes.

    What belongs to others, or does not say which run it is of, is left alone, and so is what a worker serves
    or a script holds: those have no supervisor whose life could be seen.
    """
    found, tops = dict[Path, int](), []
    for top in find_user_folders(root):
        tops.append(top.path.name)
        for name in top.names():
            try:
                with contextlib.ExitStack() as locks:
                    folder = locks.enter_context(top.folder(name))
                    run = Path(json.loads(folder.read(RUN_RECORD_NAME)))
                    # The locks first: a run in use may be on a file system that hangs whoever looks at it.
                    if _is_in_use(top, name) or is_alive(run) or not _try_lock_run(folder, locks):
                        continue
                    size = folder.size_bytes()
                    # Still locked: whoever comes for it now waits, finds it gone, and makes it anew.
                    top.remove_tree(name)
            except (OSError, UntrustedFileError, ValueError, TypeError):
                continue
            found[top.path / name] = size
    with contextlib.suppress(OSError), OwnedDirectory.below(root) as base:
        for one in tops:
            base.remove_empty(one)
    return found


def _is_in_use(top: OwnedDirectory, name: str) -> bool:
    """Whether a worker serves, or a script holds, the memory of a run."""
    with contextlib.ExitStack() as locks:
        return not _try_lock_run(locks.enter_context(top.folder(name)), locks)


def _try_lock_run(run: OwnedDirectory, locks: contextlib.ExitStack) -> bool:
    """Lock the folder of a run and all arenas in it, if nobody else has."""
    if not _try_lock(run):
        return False
    for node in run.names():
        with contextlib.suppress(OSError, UntrustedFileError):
            if not _try_lock(locks.enter_context(run.folder(node))):
                return False
    return True


def _try_lock(folder: OwnedDirectory) -> bool:
    try:
        fcntl.flock(folder.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
