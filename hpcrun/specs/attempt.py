"""Attempt: the contract of names inside the directory of one attempt of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.files import make_directories

if TYPE_CHECKING:
    from hpcrun.specs.rundir import RunDir


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
