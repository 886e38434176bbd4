"""The supervisor's lease on a run, and what an agent does that is left without a supervisor."""

from __future__ import annotations

import contextlib
import os
import time

from hpcrun import process
from hpcrun.errors import EXIT_RANKS_DIED, SiteError
from hpcrun.launch.allocation import find_allocation
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import RunDir

RENEW_S = 2.0
"""How often a supervisor says in the run directory that it is there."""
LEADERLESS_S = 40.0
"""An agent that has heard nothing for so long, and seen no renewal for half of it, has no supervisor."""


class Lease:
    """A file that the supervisor keeps changing; whoever looks at it trusts no clock but its own."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.path / "lease"
        self._renewed = 0.0
        self._count = 0
        self._seen = ""
        self._seen_at = time.monotonic()

    def renew(self) -> None:
        """Change the file, if it is time to; a file system that stalls or is full does not stop the run."""
        if time.monotonic() - self._renewed < RENEW_S:
            return
        self._renewed, self._count = time.monotonic(), self._count + 1
        with contextlib.suppress(OSError):
            self._path.write_text(f"{os.uname().nodename} {os.getpid()} {self._count}\n")

    def still_s(self) -> float:
        """For how long, by our own clock, the file has not changed while we looked."""
        with contextlib.suppress(OSError):
            seen = self._path.read_text()
            if seen != self._seen:
                self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at


def take_over(run: RunDir) -> str:
    """End a job that has lost its supervisor: one of its agents queues it again, and says what it did.

    Without that the rest of the allocation would stay, as a ghost, until its time limit.
    """
    allocation = find_allocation(os.environ)
    if allocation is None or not allocation.is_batch:
        return "the supervisor is gone"
    claim = run.path / f"takeover-{allocation.id}-{allocation.restarts}"
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return "the supervisor is gone; another agent sees to it"
    host = os.uname().nodename
    told = f"the supervisor did not answer any more; the agent of {host} has"
    try:
        allocation.requeue()
    except SiteError as error:
        message = f"{told} ended the job: {error}"
        record = {"status": "failed", "exit_code": EXIT_RANKS_DIED, "message": message, "attempt": None}
        write_json(run.exit, record | {"step": None, "ended": time.time()})
        process.run(["scancel", allocation.id], timeout_s=60)
        return message
    return f"{told} queued the job again"
