"""Who saves into a directory now: a record there that its one writer keeps changing.

    checkpoints/writer.json     host, process, user, and a count that grows every few seconds

On its own host a writer is judged by its process. On another one it is dead when the count stands still for
a while by the clock of whoever looks: no other host's clock is trusted, nor locks, which not every shared
file system has. The record belongs to one directory, so that a copy of it (cp -r) has no writer; and what a
scheduler or supervisor has started again is not a second writer, for the first one is gone by its word.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcrun.errors import SiteError, UsageError
from hpcrun.files import UntrustedFileError, read_regular, temporary_name
from hpcrun.local_identity import user_name
from hpcrun.specs.identity import DirectoryLocation, locate_directory

WRITER_RECORD_NAME = "writer.json"
HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, _RECORD_POLL_S = 2.0, 20.0, 0.5
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class WriterRecord:
    """A process that saves."""

    token: str
    host: str
    boot: str
    """Of the host and of the namespace of process numbers: elsewhere a number says nothing."""
    pid: int
    started: str
    user: str
    life: str
    """What starts it again when it has ended, such as a Slurm job; empty where nobody is known to."""
    turn: int
    """Which of these starts it is."""
    place: DirectoryLocation
    beats: int = 0

    @classmethod
    def here(cls, checkpoints: Path, life: tuple[str, int]) -> WriterRecord:
        """This process."""
        pid = os.getpid()
        record: dict[str, Any] = {"pid": pid, "started": _process_start(pid) or "", "user": user_name()}
        where: dict[str, Any] = {
            "host": os.uname().nodename,
            "boot": _boot_id(),
            "place": locate_directory(checkpoints),
        }
        return cls(secrets.token_hex(16), **record, **where, life=life[0], turn=life[1])

    @property
    def who(self) -> str:
        """For people."""
        return f"process {self.pid} of {self.user} on {self.host}"


def find_restart_identity(environ: Mapping[str, str], run: tuple[str, int] | None) -> tuple[str, int]:
    """What starts this process again when it has ended, and how often it has: a run of ours, or Slurm."""
    if run is not None:
        return f"run {run[0]}", run[1]
    job, count = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    return (f"slurm {job}", int(count)) if job and count.isdecimal() else ("", 0)


class WriterLease:
    """The right to save into a directory, kept by a thread until it is released."""

    def __init__(self, checkpoints: Path, life: tuple[str, int] = ("", 0)) -> None:
        """Take it; UsageError with who and where if somebody has it, OSError where it cannot be written."""
        self._path = checkpoints / WRITER_RECORD_NAME
        self._own = WriterRecord.here(checkpoints, life)
        self.lost_to = ""
        """Who has taken it over, where somebody has: this process may save no more."""
        self._end = threading.Event()
        self._take()
        self._thread = threading.Thread(target=self._keep, name="hpcrun-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """SiteError where the lease was lost."""
        if self.lost_to:
            raise SiteError(
                f"{self._path.parent}: {self.lost_to} saves there now: this process was silent for too long,"
                " or another Checkpointer of its own has followed; it saves no more"
            )

    def release(self) -> None:
        """Nobody saves there any more."""
        if os.getpid() != self._own.pid:  # a child has come out of the same code, and not the lease
            return
        self._end.set()
        self._thread.join()
        with contextlib.suppress(OSError, UsageError):
            if not self.lost_to and _writer_token(_read_writer_record(self._path)) == self._own.token:
                self._path.unlink(missing_ok=True)

    def _take(self) -> None:
        seen = _read_writer_record(self._path)
        if isinstance(seen, WriterRecord) and not self._may_follow(seen):
            raise UsageError(
                f"{self._path.parent}: {seen.who} is saving there; end that one first, or give a directory of"
                " its own to each"
            )
        if seen is not None:
            # Whoever comes at the same time finds another record, or none, and looks again.
            if _read_writer_record(self._path) != seen:
                return self._take()
            self._path.unlink(missing_ok=True)
        aside = self._path.with_name(temporary_name(WRITER_RECORD_NAME))
        _write_writer_record(aside, self._own)
        try:
            os.link(aside, self._path)
        except FileExistsError:
            return self._take()
        except PermissionError:  # a file system without links
            aside.rename(self._path)
        finally:
            aside.unlink(missing_ok=True)
        time.sleep(0.05)
        if _writer_token(_read_writer_record(self._path)) != self._own.token:
            return self._take()
        return None

    def _may_follow(self, other: WriterRecord) -> bool:
        """Whether the writer of a record is gone, or gives way."""
        own = self._own
        here = own.place
        if other.place.path != here.path and not other.place.is_same_inode(here):
            return True  # it writes to the directory that this is a copy of
        if other.life and other.life == own.life and other.turn < own.turn:
            return True
        if (other.host, other.boot) == (own.host, own.boot):
            is_me = other.pid == own.pid and other.started == own.started
            return is_me or _process_start(other.pid) != other.started
        return not self._changes(other)

    def _changes(self, other: WriterRecord) -> bool:
        """Whether somebody still writes a record: looked at for as long as it takes to be sure."""
        until = time.monotonic() + HEARTBEAT_TIMEOUT_S
        while time.monotonic() < until:
            time.sleep(_RECORD_POLL_S)
            now = _read_writer_record(self._path)
            if now != other:
                return isinstance(now, WriterRecord)
        return False

    def _keep(self) -> None:
        while not self._end.wait(HEARTBEAT_S) and not self._is_lost():
            self._own = replace(self._own, beats=self._own.beats + 1)
            # A disk that is full now is not a reason to end: the next beat may get through.
            with contextlib.suppress(OSError):
                aside = self._path.with_name(temporary_name(WRITER_RECORD_NAME))
                try:
                    _write_writer_record(aside, self._own)
                    if not self._end.is_set():
                        aside.replace(self._path)
                finally:
                    aside.unlink(missing_ok=True)

    def _is_lost(self) -> bool:
        """Whether the record is another one now; what cannot be read now may be at the next beat."""
        with contextlib.suppress(OSError, UsageError):
            seen = _read_writer_record(self._path)
            if _writer_token(seen) != self._own.token:
                self.lost_to = seen.who if isinstance(seen, WriterRecord) else "who has removed its record"
        return bool(self.lost_to)


def find_live_writer(checkpoints: Path) -> str | None:
    """Who is saving there now, as far as can be told at once; None where nobody is."""
    seen = _read_writer_record(checkpoints / WRITER_RECORD_NAME)
    if not isinstance(seen, WriterRecord):
        return None
    here = locate_directory(checkpoints)
    if seen.place.path != here.path and not seen.place.is_same_inode(here):
        return None
    is_here = (seen.host, seen.boot) == (os.uname().nodename, _boot_id())
    return None if is_here and _process_start(seen.pid) != seen.started else seen.who


def _writer_token(seen: WriterRecord | str | None) -> str:
    return seen.token if isinstance(seen, WriterRecord) else ""


def _read_writer_record(path: Path) -> WriterRecord | str | None:
    """The record; what stands there instead, or None where nothing does."""
    try:
        text = read_regular(path, _MOST_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFileError as error:
        raise UsageError(str(error)) from None
    try:
        record = json.loads(text)
        return WriterRecord(**{**record, "place": DirectoryLocation(**record["place"])})
    except (ValueError, TypeError, KeyError):
        return text


def _write_writer_record(path: Path, record: WriterRecord) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _process_start(pid: int) -> str | None:
    """When a process started, in ticks since its host did; None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""
