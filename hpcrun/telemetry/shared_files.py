"""Files of runs in directories that others read and may write: Prometheus's targets, the node_exporter's.

Only files of ours are written over or removed. Where another user has taken a run's name, a random one beside
it is used. What runs that are over have left there a day ago goes.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.files import OwnedDirectory, read_filesystem_clock
from hpcrun.runs.run_lock import is_supervisor_alive_here
from hpcrun.specs.run_lookup import runs_roots
from hpcrun.specs.rundir import RunDir

_STALE_S = 86400.0
_IDENTITY = r"-([0-9a-f]{8})"
_RANDOM = r"(?:\.[0-9a-f]{16})?"


class SharedFile:
    """The file of one run in such a directory."""

    def __init__(self, run: RunDir, folder: str, suffix: str, say: Callable[[str], None]) -> None:
        """`say` is told where the file has not its usual name."""
        self.folder, self._suffix, self._say = Path(folder), suffix, say
        self._stem = f"hpcrun-{run.shared_name.replace('/', '-')}"
        self._is_told = False

    def write(self, text: str) -> None:
        """Show this; OSError where it cannot be written."""
        try:
            with OwnedDirectory.below(self.folder) as files:
                files.write_whole(self._name(files), text.encode(), 0o644)
        except OSError as error:
            usual = self.folder / f"{self._stem}{self._suffix}"
            raise OSError(error.errno, error.strerror, str(usual)) from None

    def remove(self) -> None:
        """Show nothing any more; OSError where that fails."""
        with contextlib.suppress(FileNotFoundError), OwnedDirectory.below(self.folder) as files:
            for name in self._own(files):
                files.unlink(name)

    def _own(self, files: OwnedDirectory) -> Iterator[str]:
        pattern = re.compile(re.escape(self._stem) + _RANDOM + re.escape(self._suffix))
        names = [f"{self._stem}{self._suffix}"]
        with contextlib.suppress(OSError):  # some may be written into, but not listed
            names = files.names()
        return (name for name in names if pattern.fullmatch(name) and files.is_own_file(name))

    def _name(self, files: OwnedDirectory) -> str:
        usual = f"{self._stem}{self._suffix}"
        if not files.has(usual) or files.is_own_file(usual):
            return usual
        name = next(self._own(files), f"{self._stem}.{secrets.token_hex(8)}{self._suffix}")
        if not self._is_told:
            self._is_told = True
            self._say(
                f"{self.folder / usual}: is not a file of yours; {self.folder / name} is used instead;"
                " have it removed"
            )
        return name


def remove_stale_files(folder: Path, suffix: str, own: RunDir) -> None:
    """Remove what runs of ours that are over have left in a directory a day ago and more."""
    pattern = re.compile(r"hpcrun-(.+?)" + _IDENTITY + _RANDOM + re.escape(suffix))
    with contextlib.suppress(OSError), OwnedDirectory.below(folder) as files:
        now = read_filesystem_clock(folder)
        for name in files.names():
            match = pattern.fullmatch(name)
            with contextlib.suppress(OSError):
                if match is None or not files.is_own_file(name):
                    continue
                age = now - files.status_of(name).st_mtime
                runs = _find_runs_by_file_name(match[1], own)
                if age > _STALE_S and not any(_may_be_active(run, match[2]) for run in runs):
                    files.unlink(name)


def _find_runs_by_file_name(name: str, own: RunDir) -> Iterator[RunDir]:
    """The runs whose file may have this name, wherever runs of this user are made."""
    sweep, _, number = name.rpartition("-")
    for root in dict.fromkeys([(own.sweep_of_element or own).path.parent, *runs_roots()]):
        yield RunDir(root / name)
        if number.isdecimal():
            yield RunDir(root / sweep).element(int(number))


def _may_be_active(run: RunDir, identity: str) -> bool:
    """Whether a run is of this identity, has not ended, and gave a sign of life within a day; or in doubt."""
    try:
        if not run.path.is_dir() or run.exit.exists() or not run.run_id.startswith(identity):
            return False
        signs = (run.lease, run.events, run.metrics, run.sidecar_state("exporter"))
        moments = [path.stat().st_mtime for path in signs if path.exists()]
        return read_filesystem_clock(run.path) - max(
            moments, default=0.0
        ) < _STALE_S or is_supervisor_alive_here(run)
    except (OSError, UsageError):
        return True
