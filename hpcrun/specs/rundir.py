"""RunDir and Attempt: the contract of names inside a run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.files import make_directories
from hpcrun.specs.identity import (
    RunIdentity,
    directory_digest,
    read_run_identity,
    write_run_identity,
)
from hpcrun.specs.records import read_json

NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
"""Of an attempt, or an element of a sweep."""
_identities: dict[Path, tuple[str, tuple[str, ...]]] = {}
"""Read once: a supervisor knows who it is also where its directory cannot be read any more."""


@dataclass(frozen=True)
class RunDir:
    """One run: everything that outlives a process stands here."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id, which exists before any job does; of an element, SWEEP/NUMBER."""
        sweep = self.sweep_of_element
        return f"{sweep.id}/{self.path.name}" if sweep else self.path.name

    @property
    def sweep_of_element(self) -> RunDir | None:
        """The sweep that this run is an element of; None for a run of its own."""
        is_element = self.path.parent.name == "elements" and NUMBER.fullmatch(self.path.name)
        return RunDir(self.path.parents[1]) if is_element else None

    @property
    def run_id(self) -> str:
        """The identity of the run, which its processes, memory, saves and objects are marked with.

        A directory that has none yet is known by its path.
        """
        return self.run_ids[0]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Its identity, and those of the runs that it was copied from: saves of all of them are its own."""
        if (sweep := self.sweep_of_element) is not None:
            return tuple(f"{run_id}/{self.path.name}" for run_id in sweep.run_ids)
        if self.path not in _identities:
            identity = read_run_identity(self.path)
            if identity is None:
                return (directory_digest(self.path),)
            self.assume(identity.run_id, identity.copied_from)
        run_id, copied_from = _identities[self.path]
        return run_id, *copied_from

    def assume(self, run_id: str, copied_from: Sequence[str] = ()) -> None:
        """In this process the run is known by this identity, which is not in job.json yet."""
        _identities[self.path] = run_id, tuple(copied_from)

    @property
    def shared_name(self) -> str:
        """The id and the beginning of the identity, for places that several roots share."""
        return f"{self.id}-{self.run_id[:8]}"

    def identify(self, identity: RunIdentity, **values: Any) -> None:
        """Give the run an identity; `values` is what else job.json says."""
        write_run_identity(self.path, identity, **values)
        self.assume(identity.run_id, identity.copied_from)

    @property
    def spec(self) -> Path:
        """The resolved job, defaults included."""
        return self.path / "spec.yaml"

    @property
    def job(self) -> Path:
        """Where it comes from: who made it, of which code, as which jobs; see specs.provenance."""
        return self.path / "job.json"

    @property
    def after(self) -> Path:
        """The runs that must have ended well before it starts; see specs.predecessors."""
        return self.path / "after.json"

    @property
    def script(self) -> Path:
        """The batch script, as it was submitted."""
        return self.path / "job.sbatch"

    @property
    def cluster(self) -> Path:
        """The cluster's profile, as it was when the run was submitted."""
        return self.path / "cluster.yaml"

    @property
    def code_diff(self) -> Path:
        """What the code differed by from its commit."""
        return self.path / "code.diff"

    @property
    def submitit(self) -> Path:
        """submitit's own folder: pickles, and what the batch shell printed."""
        return self.path / "submitit"

    @property
    def sweep(self) -> Path:
        """The overrides of every element, in a sweep."""
        return self.path / "sweep.json"

    @property
    def call(self) -> Path:
        """The function and its arguments, in a run of a function."""
        return self.path / "call.pkl"

    @property
    def saved_call(self) -> Path:
        """What the function's own `checkpoint` has left: the call that the next attempt makes instead."""
        return self.path / "call-saved.pkl"

    @property
    def agent_logs(self) -> Path:
        """What the agents of the nodes have complained about."""
        return self.path / "agents"

    @property
    def telemetry(self) -> Path:
        """What those beside the run (metrics, hooks) are told, remember and print; absent without them."""
        return self.path / "telemetry"

    def sidecar_state(self, name: str) -> Path:
        """What a telemetry process resumes from."""
        return self.telemetry / f"{name}.json"

    def sidecar_log(self, name: str) -> Path:
        """The log of a telemetry process."""
        return self.telemetry / f"{name}.log"

    @property
    def heartbeat_ages(self) -> Path:
        """How long ago the supervisor heard from the agent of each node."""
        return self.telemetry / "heard.json"

    @property
    def prometheus_targets(self) -> Path:
        """Where the exporter listens, in the format of Prometheus's file_sd."""
        return self.telemetry / "targets.json"

    @property
    def tensorboard(self) -> Path:
        """Event files for TensorBoard, unless the job names another place for them."""
        return self.path / "tensorboard"

    @property
    def submission_lock(self) -> Path:
        """Locked while the run is submitted."""
        return self.path / "submission.lock"

    @property
    def elements(self) -> Path:
        """The runs of a sweep's elements, a directory each."""
        return self.path / "elements"

    def element(self, number: int) -> RunDir:
        """The run of one element of a sweep, counted from 0."""
        return RunDir(self.elements / str(number))

    @property
    def lock(self) -> Path:
        """Locked by the supervisor for as long as it lives."""
        return self.path / "lock"

    @property
    def lease(self) -> Path:
        """Changed by the supervisor every second, for as long as it leads the run."""
        return self.path / "lease"

    @property
    def epochs(self) -> Path:
        """A file for each supervisor that has led the run, made by it alone."""
        return self.path / "epochs"

    @property
    def leader(self) -> Path:
        """Where the supervisor listens, and the secret that its agents show."""
        return self.path / "leader.json"

    @property
    def wish(self) -> Path:
        """When somebody has asked it to save and stop; for a supervisor that comes after another."""
        return self.path / "stop.json"

    @property
    def exit(self) -> Path:
        """How the run ended; absent while it goes on."""
        return self.path / "exit.json"

    @property
    def events(self) -> Path:
        """What the supervisor saw and did, a line an event."""
        return self.path / "events.jsonl"

    @property
    def chaos(self) -> Path:
        """The faults injected into the run, one per line; written by the process that requested them."""
        return self.path / "chaos.jsonl"

    @property
    def metrics(self) -> Path:
        """A line a step, written by rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Saved states."""
        return self.path / "checkpoints"

    @property
    def poison(self) -> Path:
        """How often attempts have failed that went on from each generation."""
        return self.checkpoints / "poison.json"

    def attempt(self, number: int) -> Attempt:
        """One attempt by its number, counted from 1."""
        return Attempt(self, number)

    def attempts(self) -> list[Attempt]:
        """All attempts so far, oldest first."""
        folder = self.path / "attempts"
        try:
            names = os.listdir(folder)  # noqa: PTH208 - names alone
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [Attempt(self, number) for number in sorted(int(n) for n in names if NUMBER.fullmatch(n))]

    def upcoming_attempt(self) -> Attempt:
        """The attempt after the newest one, of which nothing is there yet."""
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 1)

    def next_attempt(self) -> Attempt:
        """The attempt after the newest one, with its directories made."""
        return self.upcoming_attempt().create()

    def read_exit(self) -> dict[str, Any] | None:
        """The exit record, or None while there is none."""
        record = read_json(self.exit)
        return record if isinstance(record, dict) else None


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt of a run."""

    run: RunDir
    number: int

    @property
    def path(self) -> Path:
        """The attempt's directory."""
        return self.run.path / "attempts" / str(self.number)

    @property
    def plan(self) -> Path:
        """The parallel layout of this attempt."""
        return self.path / "plan.json"

    @property
    def supervisor(self) -> Path:
        """Who watches this attempt: host, pid, Slurm job."""
        return self.path / "supervisor.json"

    @property
    def placement(self) -> Path:
        """Which node each rank stands on."""
        return self.path / "placement.json"

    @property
    def settings(self) -> Path:
        """The communication settings of the ranks, with their reasons."""
        return self.path / "settings.json"

    @property
    def hosts(self) -> Path:
        """The node of each rank, a line a rank, for launchers."""
        return self.path / "hosts"

    @property
    def node_table(self) -> Path:
        """A line a value: node or `rank:N`, variable, value there, value elsewhere; rank.sh reads it too."""
        return self.path / "settings.tsv"

    @property
    def rank_file(self) -> Path:
        """The node of each rank, in the form of Open MPI's rank files."""
        return self.path / "ranks.txt"

    @property
    def rank_script(self) -> Path:
        """Starts a rank of a command of the user's own."""
        return self.path / "rank.sh"

    @property
    def profile(self) -> Path:
        """Traces of the profiler, where the job asks for them."""
        return self.path / "profile"

    @property
    def outcome(self) -> Path:
        """How this attempt ended, and whether the job was queued again for it."""
        return self.path / "outcome.json"

    @property
    def restore(self) -> Path:
        """What the ranks of this attempt go on from; absent where they find it in the run directory."""
        return self.path / "restore.json"

    @property
    def peers(self) -> Path:
        """How ranks reach what other nodes hold in memory, and the secret for it."""
        return self.path / "peers.json"

    @property
    def restore_failure(self) -> Path:
        """Written by rank 0 where that generation has proved not to be whole after all."""
        return self.path / "unrestored.json"

    @property
    def launcher_log(self) -> Path:
        """What mpiexec itself printed."""
        return self.path / "logs" / "launcher.log"

    @property
    def result(self) -> Path:
        """Written by rank 0 after every rank has agreed that the attempt ended well."""
        return self.path / "result.json"

    def log(self, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.path / "logs" / f"rank-{rank}.log"

    def rank_record(self, rank: int) -> Path:
        """Who a rank is: pid, node, what it leaves in /dev/shm."""
        return self.path / "ranks" / f"rank-{rank}.json"

    def exit_record(self, rank: int) -> Path:
        """How a command ended on a rank, by its own account."""
        return self.path / "ranks" / f"rank-{rank}.exit.json"

    def call_result(self, rank: int) -> Path:
        """Of a function: what it returned on a rank, or its traceback."""
        return self.path / "ranks" / f"rank-{rank}.result.pkl"

    def error_record(self, rank: int) -> Path:
        """Why a rank gave up, in its own words."""
        return self.path / "ranks" / f"rank-{rank}.error.json"

    @property
    def stacks(self) -> Path:
        """Where ranks write their stacks when they hang, a file a rank."""
        return self.path / "stacks"

    def stack(self, rank: int) -> Path:
        """The stacks of one rank."""
        return self.stacks / f"rank-{rank}.txt"

    def create(self) -> Attempt:
        """Make the directories."""
        for name in ("logs", "ranks", "stacks"):
            make_directories(self.path / name, 0o700)
        return self
