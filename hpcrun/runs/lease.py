"""Who leads a run: epochs that are given once, a lease that its supervisor renews, and who may come after it.

Three rules guarantee a single active supervisor. An epoch is a file that only one process can make. A
supervisor that finds a newer epoch than its own stops. A newer one is not made while the lease moves: an
agent needs both, silence on its connection and a lease that stands still by its own clock, and looks once
more when it has written something itself, so that a stalled file system is no reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.runs.run_lock import RunOwnedError
from hpcrun.specs.events.event import Event
from hpcrun.specs.events.log import EventWriter
from hpcrun.specs.io_retry import retry_while_full
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir

LEASE_RENEW_S = 1.0
"""How often a supervisor says in the run directory that it is there."""
LEADER_TIMEOUT_S = 8.0
"""An agent that hears nothing for so long ends its ranks; where the lease stood as long, it may take over."""
_LEASE_WATCH_S, _POLL_S = 2.5 * LEASE_RENEW_S, 0.25
"""A lease that stands for so long has nobody, or somebody whose file system stalls, and who will look."""
_RECHECK_S = 3.0
"""A supervisor that has not looked for a newer epoch for so long looks before it acts."""


class FencedError(RunOwnedError):
    """Another supervisor has taken over: this one may do nothing more."""


@dataclass(frozen=True)
class LeaderRecord:
    """What a supervisor publishes for its agents: where it listens, and the secret to be known there."""

    epoch: int
    address: str
    port: int
    secret: str
    host: str

    def publish(self, run: RunDir) -> None:
        """Write it, whole, for us alone to read."""
        write_json(run.leader, vars(self))


def read_leader(run: RunDir) -> LeaderRecord | None:
    """The newest supervisor that listens, or None while there is none."""
    record = read_json(run.leader)
    try:
        return LeaderRecord(**record)
    except TypeError:  # none, or of another version
        return None


def newest_epoch(run: RunDir) -> int:
    """The newest epoch that was given, by the files and by the lease; 0 before the first."""
    folder = run.epochs
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names alone, at once
    # A client's cache may hide a new name for a while, but not what a file holds that is opened anew.
    lease = read_lease(run).get("epoch")
    return max([lease if isinstance(lease, int) else 0, *(int(name) for name in names if name.isdigit())])


def claim_epoch(run: RunDir, epoch: int) -> bool:
    """Make an epoch ours; False where another has been quicker."""
    folder = run.epochs
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(folder / str(epoch), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    os.write(descriptor, f"{os.uname().nodename} {os.getpid()} {time.time()}\n".encode())
    os.close(descriptor)
    return True


def epoch_owner(run: RunDir, epoch: int) -> tuple[str, int] | None:
    """The host and the process that have made an epoch."""
    try:
        host, pid = (run.epochs / str(epoch)).read_text().split()[:2]
        return host, int(pid)
    except (OSError, ValueError):
        return None


def epoch_claim_time(run: RunDir, epoch: int) -> float | None:
    """When (wall clock of its maker) an epoch was made: that is when the leader before it was given up."""
    try:
        return float((run.epochs / str(epoch)).read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None


def write_lease_probe(run: RunDir, node: str) -> None:
    """Write something, to see that the file system takes it."""
    folder = run.epochs
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"bid-{node}"
    path.write_text(f"{time.time()}\n")
    path.unlink()


def read_lease(run: RunDir) -> dict[str, Any]:
    """The lease as it stands; empty where there is none, or a part of one."""
    with contextlib.suppress(OSError, ValueError):
        lease = json.loads(run.lease.read_text())
        if isinstance(lease, dict):
            return lease
    return {}


def has_active_leader(run: RunDir) -> bool:
    """Whether somebody leads the run at this moment: a lease that moves shows it, whatever the clocks say."""
    signs = set[str]()
    until = time.monotonic() + _LEASE_WATCH_S
    while run.lease.exists() and time.monotonic() < until:
        # One that is being written may look empty.
        if lease := read_lease(run):
            signs.add(str(lease))
        if len(signs) > 1:
            return True
        time.sleep(_POLL_S)
    return False


class Leadership:
    """That this process leads the run, for as long as nobody has a newer epoch."""

    def __init__(self, run: RunDir, epoch: int | None = None) -> None:
        self._run = run
        self.epoch = epoch or self._next()
        self._count = 0
        self.is_fenced = self.is_paused = False
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self.renew()

    def _next(self) -> int:
        while not claim_epoch(self._run, epoch := newest_epoch(self._run) + 1):
            pass
        return epoch

    def renew(self) -> None:
        """Change the lease, unless somebody else leads; a full file system does not stop the run."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._look()
            if not (self.is_fenced or self.is_paused):
                self._count += 1
                holder = {"epoch": self.epoch, "host": os.uname().nodename, "pid": os.getpid()}
                text = json.dumps(holder | {"count": self._count})
                self._run.lease.write_text(f"{text}\n")
        except OSError:
            return
        finally:
            self._lock.release()

    def _look(self) -> None:
        if newest_epoch(self._run) > self.epoch:
            self.is_fenced = True
        self._looked = time.monotonic()

    def check(self) -> None:
        """FencedError where another leads; whoever has not looked for a while looks first."""
        if time.monotonic() - self._looked > _RECHECK_S:
            with contextlib.suppress(OSError):
                self._look()
        if self.is_fenced:
            raise FencedError(f"{self._run.id}: another supervisor has taken over; this one stands back")

    def verify(self) -> None:
        """The same, and look in any case: before something that cannot be taken back."""
        with contextlib.suppress(OSError):
            self._look()
        self.check()


class LeaderEventWriter(EventWriter):
    """The event log of a run that may change hands: a supervisor that was fenced writes nothing."""

    def __init__(self, path: Path, verify: Callable[[], None]) -> None:
        self._verify = verify
        verify()
        retry_while_full(lambda: super(LeaderEventWriter, self).__init__(path))

    def append(self, event: Event, attempt: int) -> None:
        """Write one event; FencedError where another leads."""
        self._verify()
        retry_while_full(lambda: super(LeaderEventWriter, self).append(event, attempt))


def leader_fingerprint(run: RunDir) -> str:
    """What stands in the run directory of its leader: as long as it stays the same, nobody leads."""
    return f"{newest_epoch(run)} {json.dumps(read_lease(run))}"
