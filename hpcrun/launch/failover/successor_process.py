"""Starts the next supervisor on the node of the agent that has claimed the epoch."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hpcrun import process
from hpcrun.errors import EXIT_RANKS_DIED, SiteError
from hpcrun.files import open_for_append
from hpcrun.launch.failover.heartbeat import Heartbeat
from hpcrun.runs.lease import LEASE_RENEW_S, Leadership
from hpcrun.slurm.allocation import Allocation, batch_identity
from hpcrun.slurm.client import run_slurm_client
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir

_START_TIMEOUT_S = 120.0
"""Time for the new supervisor to listen; loading Python from a shared file system may be slow."""
_EXIT_TIMEOUT_S = 60.0


class SuccessorProcess:
    """The next supervisor as a child process of an agent."""

    def __init__(self, run: RunDir, allocation: Allocation) -> None:
        self._run, self._allocation = run, allocation
        self._child: subprocess.Popen[bytes] | None = None
        self._heartbeat: Heartbeat | None = None
        self._began = 0.0
        self.has_ended_job = False

    @property
    def pid(self) -> int | None:
        """Its pid, to tell it from the ranks' processes."""
        return None if self._child is None else self._child.pid

    def may_claim(self) -> bool:
        """Whether the job still runs: a job that is ending needs no new supervisor."""
        return self._allocation.disposition() in ("running", "unknown")

    def ensure_started(self, epoch: int, connected_epoch: int) -> bool:
        """Start the supervisor of this epoch; renew its lease until the agent has connected to it."""
        if self._heartbeat is None:
            leadership = Leadership(self._run, epoch)
            self._heartbeat = Heartbeat(LEASE_RENEW_S, leadership.renew)
            self._start(epoch)
        self._heartbeat.beat()
        assert self._child is not None
        is_late = time.monotonic() - self._began > _START_TIMEOUT_S
        if connected_epoch < epoch and not is_late and self._child.poll() is None:
            return False
        self._heartbeat.stop()
        self._heartbeat = None
        if connected_epoch < epoch:
            self._give_up()
        return True

    def _start(self, epoch: int) -> None:
        log_line(f"the supervisor stopped answering; starting the next one, epoch {epoch}")
        self._began = time.monotonic()
        log = self._run.agent_logs / f"failover-{epoch}.log"
        with open_for_append(log) as output:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcrun", "_failover", str(self._run.path), str(epoch)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            process.protect_from_reaper(self._child)

    def _give_up(self) -> None:
        """The new supervisor did not start: requeue the job, or end it and record that.

        Otherwise the rest of the allocation would idle until its time limit.
        """
        assert self._child is not None
        process.kill_child(self._child)
        self._child.wait()
        record = read_json(self._run.exit)
        self.has_ended_job = True
        if isinstance(record, dict):  # it has recorded why it could not continue
            run_slurm_client(["scancel", self._allocation.id], timeout_s=60)
            return
        prefix = f"the supervisor stopped answering; the agent of {os.uname().nodename} has"
        try:
            self._allocation.requeue()
        except SiteError as error:
            message = f"{prefix} ended the job: {error}"
            ended = {"status": "failed", "exit_code": EXIT_RANKS_DIED, "message": message, "attempt": None}
            ended |= {"step": None, "slurm_state": "CANCELLED", **batch_identity(os.environ)}
            write_json(self._run.exit, ended | {"ended": time.time()})
            run_slurm_client(["scancel", self._allocation.id], timeout_s=60)
            log_line(message)
            return
        log_line(f"{prefix} requeued the job")

    def await_exit(self) -> None:
        """Wait for its end: Slurm would end it together with this process."""
        if self._child is not None:
            try:
                self._child.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log_line(f"the supervisor here (pid {self._child.pid}) has not ended")
