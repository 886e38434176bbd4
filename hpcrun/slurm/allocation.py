"""The Slurm allocation of this process: its nodes, its end, its steps, and its requeue."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrun.errors import SiteError, UsageError
from hpcrun.hostlist import expand_hosts, fold_hosts
from hpcrun.slurm.client import run_slurm_client
from hpcrun.slurm.jobs import SQUEUE_FORMAT, parse_scontrol_jobs, parse_squeue
from hpcrun.slurm.nodes import parse_scontrol_nodes
from hpcrun.specs.rundir import RunDir

_QUERY_TIMEOUT_S = 20
_REQUEUE_TIMEOUT_S = 60
_TRIES, _PAUSE_S = 3, 0.3
_SLACK_S = 5.0
MAX_SEPARATE_STEPS = 64
"""Up to this many nodes each agent gets its own step, which nothing on another node can end.

Each step costs an srun on the batch host: some 10 MB and a thread or two. More nodes share one step.
"""
JobDisposition = Literal["running", "queued again", "cancelled", "time limit", "unknown"]
_ALREADY_REQUEUED = re.compile(
    r"pending execution|already pending|requeued|Job/step already completing", re.I
)
_STEP_OPTIONS = re.compile(
    r"SLURM_(HOSTFILE|DISTRIBUTION|NNODES|JOB_NUM_NODES|NTASKS\w*|NPROCS|TASKS_PER_NODE|CPU_BIND\w*|MEM_BIND\w*"
    r"|CPUS_PER_TASK|TRES_PER_TASK|GPUS\w*|MEM_PER_\w+|THREADS_PER_CORE|OVERLAP|EXACT|WHOLE|NO_KILL"
    r"|KILL_BAD_EXIT|UNBUFFEREDIO|MPI_TYPE|WAIT)\Z"
    r"|SRUN_"
)


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm's, seen from inside."""

    job: int
    nodes: tuple[str, ...]
    id: str
    """As scontrol takes it: in an array that of the element, 12_3."""
    is_batch: bool
    """Whether we are what the batch script has started, and not a shell inside salloc."""
    restarts: int = 0

    def seconds_left(self) -> float | None:
        """Until the time limit; None where Slurm does not say."""
        try:
            answer = run_slurm_client(
                ["squeue", "-h", "-j", self.id, "-o", SQUEUE_FORMAT], timeout_s=_QUERY_TIMEOUT_S
            )
        except SiteError:
            return None
        for record in parse_squeue(answer.stdout):
            if record.limit_s is not None and record.elapsed_s is not None:
                return record.limit_s - record.elapsed_s
        return None

    def disposition(self) -> JobDisposition:
        """What Slurm means to do with the job now: a TERM alone does not say."""
        try:
            answer = run_slurm_client(["scontrol", "show", "job", self.id], timeout_s=_QUERY_TIMEOUT_S)
        except SiteError:
            return "unknown"
        record = next(iter(parse_scontrol_jobs(answer.stdout)), None)
        if record is None:
            return "unknown"
        if record.state.phase == "pending" or (record.restarts or 0) > self.restarts:
            return "queued again"
        if not record.state.final and "COMPLETING" not in (record.state.name, *record.state.flags):
            return "running"
        late = record.limit_s is not None and (record.elapsed_s or 0.0) >= record.limit_s - _SLACK_S
        return "time limit" if late else "cancelled"

    def draining_nodes(self) -> dict[str, str] | None:
        """The nodes of the job that an admin has drained, and the reason; None if Slurm does not answer.

        Slurm lets their jobs run on, but a new attempt should avoid these nodes.
        """
        words = ["scontrol", "-o", "show", "node", fold_hosts(self.nodes, suffixes=False)]
        try:
            records = parse_scontrol_nodes(run_slurm_client(words, timeout_s=_QUERY_TIMEOUT_S).stdout)
        except (SiteError, UsageError):
            return None
        if not records:
            return None
        return {
            node.name: f"draining{f' ({node.reason})' if node.reason else ''}"
            for node in records
            if "DRAIN" in (node.state.name, *node.state.flags)
        }

    def requeue(self) -> None:
        """Requeue the job under its own id; SiteError with Slurm's message if it refuses."""
        done = run_slurm_client(["scontrol", "requeue", self.id], timeout_s=_REQUEUE_TIMEOUT_S)
        words = " ".join((done.stderr or done.stdout).split())
        if done.exit_code == 0 or _ALREADY_REQUEUED.search(words):
            return
        # A preemption may have been quicker, and the TERM of a requeue ends our scontrol as well: one requeue
        # is what was wanted, and whether there is one only Slurm can say.
        if self.disposition() != "queued again":
            raise SiteError(f"`scontrol requeue {self.id}`: {words}")

    def update(self, assignment: str) -> str:
        """Change the job as `scontrol update` does, such as Requeue=1; return Slurm's error, or an empty
        text."""
        problem = ""
        for _ in range(_TRIES):
            # After a requeue its TERM may end the command before it has done anything.
            try:
                words = ["scontrol", "update", f"JobId={self.id}", assignment]
                done = run_slurm_client(words, timeout_s=_QUERY_TIMEOUT_S)
            except SiteError as error:
                problem = str(error)
            else:
                if done.exit_code == 0:
                    return ""
                problem = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.exit_code}"
            time.sleep(_PAUSE_S)
        return problem

    def agent_steps(
        self, run: RunDir, nodes: Sequence[str], most: int = MAX_SEPARATE_STEPS
    ) -> dict[tuple[str, ...], list[str]]:
        """Return the commands that start the agents of these nodes, as steps that outlive the ranks.

        One step a node, or one step for all if there are more than `most`.
        """
        groups = [(node,) for node in nodes] if len(nodes) <= most else [tuple(nodes)]
        return {group: self._agent_step(run, group) for group in groups}

    def _agent_step(self, run: RunDir, nodes: Sequence[str]) -> list[str]:
        count = len(nodes)
        step = [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--overlap",
            "--no-kill",
            "--kill-on-bad-exit=0",
        ]
        step += ["--wait=0", "--ntasks-per-node=1"] if count > 1 else []
        step += ["--mpi=none", "--mem=0", "--cpu-bind=none", "--unbuffered"]
        agent = [sys.executable, "-P", "-m", "hpcrun", "_agent", str(run.path)]
        return [*step, f"--nodelist={fold_hosts(nodes, suffixes=False)}", *agent]


def batch_identity(environ: Mapping[str, str]) -> dict[str, int]:
    """For the exit record: the job number that sbatch gave, and which start of the job this is; or nothing.

    A reader compares these, and not the time, to tell this job and start from others.
    """
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    is_batch = environ.get("SUBMITIT_EXECUTOR") == "slurm" and job.isascii() and job.isdigit()
    restart = int(restarts) if restarts.isascii() and restarts.isdigit() else 0
    return {"slurm_job": int(job), "restarts": restart} if is_batch else {}


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that this environment is of, or None outside of one."""
    job, listed = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
    if not job.isascii() or not job.isdigit() or not listed:
        return None
    try:
        nodes = expand_hosts(listed, "SLURM_JOB_NODELIST")
    except UsageError as error:
        raise SiteError(str(error)) from None
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return Allocation(
        job=int(job),
        nodes=nodes,
        id=f"{array}_{element}" if array and element else job,
        is_batch=environ.get("SUBMITIT_EXECUTOR") == "slurm",
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def node_step(node: str, *options: str) -> list[str]:
    """Return an srun command that runs one task on one node next to the job's ranks, without taking
    resources."""
    words = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--no-kill", "--mpi=none", "--mem=0"]
    return [*words, "--cpu-bind=none", f"--nodelist={node}", *options]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for such an srun: options of the job must not become the step's."""
    return {name: value for name, value in environ.items() if not _STEP_OPTIONS.match(name)}
