"""An agent that has won the right to go on with a run starts the next supervisor on its node."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hpcrun import process
from hpcrun.errors import EXIT_RANKS_DIED, SiteError
from hpcrun.files import open_for_append
from hpcrun.launch.heartbeat import Heartbeat
from hpcrun.runs.lease import LEASE_RENEW_S, Leadership
from hpcrun.slurm.allocation import Allocation, batch_identity
from hpcrun.slurm.client import run_slurm_client
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir

_START_TIMEOUT_S = 120.0
"""From its start until the new supervisor listens; loading Python from a shared file system may take long."""
_EXIT_TIMEOUT_S = 60.0


class SuccessorProcess:
    """The next supervisor, as the agent that starts it sees it."""

    def __init__(self, run: RunDir, allocation: Allocation) -> None:
        self._run, self._allocation = run, allocation
        self._child: subprocess.Popen[bytes] | None = None
        self._heartbeat: Heartbeat | None = None
        self._began = 0.0
        self.has_ended_job = False

    @property
    def pid(self) -> int | None:
        """Its process, which is none of the ranks'."""
        return None if self._child is None else self._child.pid

    def may_claim(self) -> bool:
        """Whether there is a job to go on with: one that ends anyway has lost its supervisor for good."""
        return self._allocation.disposition() in ("running", "unknown")

    def ensure_started(self, epoch: int, met: int) -> bool:
        """Start the supervisor of this epoch, and keep its lease until `met` shows that it is up."""
        if self._heartbeat is None:
            leadership = Leadership(self._run, epoch)
            self._heartbeat = Heartbeat(LEASE_RENEW_S, leadership.renew)
            self._start(epoch)
        self._heartbeat.beat()
        assert self._child is not None
        is_late = time.monotonic() - self._began > _START_TIMEOUT_S
        if met < epoch and not is_late and self._child.poll() is None:
            return False
        self._heartbeat.stop()
        self._heartbeat = None
        if met < epoch:
            self._give_up()
        return True

    def _start(self, epoch: int) -> None:
        log_line(f"the supervisor did not answer any more; starting the next one, epoch {epoch}")
        self._began = time.monotonic()
        log = self._run.agent_logs / f"takeover-{epoch}.log"
        with open_for_append(log) as output:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcrun", "_takeover", str(self._run.path), str(epoch)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            process.protect_from_reaper(self._child)

    def _give_up(self) -> None:
        """The new supervisor did not come up: the job goes back into the queue, or ends with a record of it.

        Without that the rest of the allocation would stay, as a ghost, until its time limit.
        """
        assert self._child is not None
        process.kill_child(self._child)
        self._child.wait()
        record = read_json(self._run.exit)
        self.has_ended_job = True
        if isinstance(record, dict):  # it has told by itself why it could not go on
            run_slurm_client(["scancel", self._allocation.id], timeout_s=60)
            return
        told = f"the supervisor did not answer any more; the agent of {os.uname().nodename} has"
        try:
            self._allocation.requeue()
        except SiteError as error:
            message = f"{told} ended the job: {error}"
            ended = {"status": "failed", "exit_code": EXIT_RANKS_DIED, "message": message, "attempt": None}
            ended |= {"step": None, "slurm_state": "CANCELLED", **batch_identity(os.environ)}
            write_json(self._run.exit, ended | {"ended": time.time()})
            run_slurm_client(["scancel", self._allocation.id], timeout_s=60)
            log_line(message)
            return
        log_line(f"{told} queued the job again")

    def await_exit(self) -> None:
        """Stay until it has ended: with us, Slurm would end it."""
        if self._child is not None:
            try:
                self._child.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log_line(f"the supervisor here (pid {self._child.pid}) has not ended")
