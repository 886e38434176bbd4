"""RunDir: the contract of names inside a run directory, and how a run is found again."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UsageError
from hpcrun.specs.profiles import profile_roots
from hpcrun.specs.records import read_json

_JOB = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,9})|\+[0-9]{1,6})?")
"""A job, an element of an array, or a component of a heterogeneous job."""
_STAMP = re.compile(r"-[0-9]{4}-[0-9]{6}-[0-9a-f]{6}")
"""What create_run puts behind a run's name."""


def runs_roots() -> list[Path]:
    """Where run directories live: HPCRUN_ROOT alone, where it is set; else the roots of all profiles.

    First the default profile's, which is ./runs where it names none.
    """
    if root := os.environ.get("HPCRUN_ROOT"):
        return [Path(root).absolute()]
    first, *others = profile_roots()
    return list(dict.fromkeys([first or Path("runs").absolute(), *filter(None, others)]))


def runs_root() -> Path:
    """Where a new run's directory is made: the first of runs_roots."""
    return runs_roots()[0]


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
    def unrestored(self) -> Path:
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
            (self.path / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        return self


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
        return RunDir(self.path.parents[1]) if self.path.parent.name == "elements" else None

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
    def agent_logs(self) -> Path:
        """What the agents of the nodes have complained about."""
        return self.path / "agents"

    @property
    def telemetry(self) -> Path:
        """What those beside the run (metrics, hooks) are told, remember and print; absent without them."""
        return self.path / "telemetry"

    def element(self, number: int) -> RunDir:
        """The run of one element of a sweep, counted from 0."""
        return RunDir(self.path / "elements" / str(number))

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
        """The faults that were rehearsed on it, a line each; written by whoever has asked for them."""
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
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []
        return [Attempt(self, number) for number in numbers]

    def coming_attempt(self) -> Attempt:
        """The attempt after the newest one, of which nothing is there yet."""
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 1)

    def next_attempt(self) -> Attempt:
        """The attempt after the newest one, with its directories made."""
        return self.coming_attempt().create()

    def read_exit(self) -> dict[str, Any] | None:
        """The exit record, or None while there is none."""
        record = read_json(self.exit)
        return record if isinstance(record, dict) else None


def create_run(name: str, root: Path | None = None) -> RunDir:
    """Make a new run directory with an id of its own; UsageError when the place cannot be written."""
    root = root or runs_root()
    stamp = time.strftime("%m%d-%H%M%S")
    path = root / f"{name}-{stamp}-{os.urandom(3).hex()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        (path / "checkpoints").mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"{root}: cannot make a run directory here: {error.strerror}; set HPCRUN_ROOT to a directory"
            " that you may write"
        ) from None
    return RunDir(path)


def all_runs(root: Path | None = None) -> Iterator[RunDir]:
    """Every run directory under the root (default: under all roots), oldest first."""
    found = []
    for place in [root] if root else runs_roots():
        # What other people keep under a shared root is none of ours.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            for path in place.iterdir():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    found.append(((path / "spec.yaml").stat().st_mtime, path))
    for _, path in sorted(found):
        yield RunDir(path)


def find_runs(words: Iterable[str]) -> list[RunDir]:
    """The same as find_run for several words, with one look at the root."""
    among = list(all_runs())
    return [find_run(word, among=among) for word in words]


def find_run(word: str, root: Path | None = None, *, among: Sequence[RunDir] | None = None) -> RunDir:
    """RUN on the command line: a run directory, a run's id, its name or its beginning, or a Slurm job's id.

    RUN/NUMBER and JOB_NUMBER are elements of a sweep. UsageError where this is no run, or several. `among`:
    all runs under the root, where they are known already.
    """
    if not word.strip():
        raise UsageError("an empty word names no run; `hpcrun list` shows the runs")
    # os.path's look-up says no where pathlib's raises: a name that is too long, a place closed to us.
    if os.path.isfile(f"{word}/spec.yaml"):  # noqa: PTH113
        return RunDir(Path(word).resolve())
    name, slash, number = word.partition("/")
    if slash and number.isdecimal() and name:
        return _element(find_run(name, root, among=among), int(number))
    runs = list(all_runs(root)) if among is None else among
    exact = [run for run in runs if run.id == word]
    if exact:
        return exact[0]
    if (job := _JOB.fullmatch(word)) and (found := _run_of_job(runs, int(job[1]), job[2])):
        return found
    # A name that is whole comes before longer ones that begin like it.
    named = [run for run in runs if _STAMP.fullmatch(run.id.removeprefix(word)) and run.id.startswith(word)]
    matches = named or [run for run in runs if run.id.startswith(word)]
    if len(matches) == 1:
        return matches[0]
    where = root or ", ".join(map(str, runs_roots()))
    if not matches:
        known = ", ".join(run.id for run in runs[-3:]) or "none"
        raise UsageError(f"{word}: no such run under {where} (newest: {known}); see `hpcrun list`")
    raise UsageError(
        f"{word}: names {len(matches)} runs: {', '.join(run.id for run in matches[-5:])}; say which"
    )


def _element(sweep: RunDir, number: int) -> RunDir:
    element = sweep.element(number)
    if element.path.is_dir():
        return element
    if not sweep.sweep.is_file():
        raise UsageError(f"{sweep.id}/{number}: {sweep.id} is no sweep, so it has no elements")
    listed = read_json(sweep.sweep)
    count = len(listed) if isinstance(listed, list) else 0
    if number < count:
        raise UsageError(f"{element.path}: this element's directory is gone; start the sweep again")
    raise UsageError(f"{sweep.id}/{number}: there is no such element; there are 0 to {count - 1}")


def _run_of_job(runs: Sequence[RunDir], job: int, index: str | None) -> RunDir | None:
    """The newest run that was submitted as this job, or the element that runs under this index of it."""
    for run in reversed(runs):
        offset = _offset_of_job(run, job)
        if offset is not None:
            return run if index is None else _element(run, int(index) + offset)
    return None


def _offset_of_job(run: RunDir, job: int) -> int | None:
    """Element of the sweep less index of the array, where the run was submitted as this job; else None."""
    # A damaged record is a matter of the run that it belongs to.
    with contextlib.suppress(UsageError, AttributeError, TypeError, ValueError):
        for one in reversed((read_json(run.job) or {}).get("submissions", [])):
            if one.get("job") == job:
                return int(one.get("offset", 0))
    return None
