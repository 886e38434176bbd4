"""job.json: where a run comes from: who made it, of which code, and the jobs that it was submitted as."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from hpcrun.errors import UsageError
from hpcrun.specs.identity import (
    IDENTITY_KEYS,
    RUN_SCHEMA_VERSION,
    RunIdentity,
    parse_run_identity,
    read_run_identity,
)
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir


@dataclass(frozen=True)
class SubmissionRecord:
    """One job that a run was handed over as: to Slurm, or to a process of this machine."""

    time: float
    """Wall clock."""
    job: int | None = None
    """Slurm's id, of the whole array where it is one; None for a local process."""
    cluster: str = ""
    """As sbatch named it, where it did; for -M."""
    array: str | None = None
    """What --array said, such as 0-39%8; of a sweep that runs here, its elements in the same way."""
    offset: int = 0
    """Element of the sweep = index in the array + offset."""
    host: str | None = None
    pid: int | None = None
    start_ticks: int | None = None
    attempts: dict[str, int] = field(default_factory=dict)
    """The newest attempt of each element (of a single run under "") that was there before; without zeros.

    What this job does has higher numbers: that, and no host's clock, tells it from what was before.
    """

    def attempts_before(self, run: RunDir) -> int:
        """How many attempts of a run, or of an element, were there when it was handed over."""
        return recorded_attempts(self.attempts, run)


@dataclass(frozen=True)
class Provenance:
    """The record itself; `submissions` grows, oldest first, and is empty for a run that `train` made."""

    kind: Literal["train", "command", "sweep", "function"]
    name: str
    ranks: int
    steps: int | None
    created: float
    user: str
    host: str
    directory: str
    argv: list[str]
    hpcrun: str
    python: str
    commit: str | None = None
    """The git commit of the working directory; code.diff holds what differed from it."""
    is_dirty: bool = False
    cluster: str | None = None
    """The profile's name."""
    template: str | None = None
    """The path of the sbatch template."""
    submissions: list[SubmissionRecord] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    """The caller's variables, such as SBATCH_ACCOUNT, that have said what the job left open."""
    identity: RunIdentity | None = None
    """None where it is of before there were identities, or is not written down yet."""

    def submitted(self, *submissions: SubmissionRecord) -> Provenance:
        """The same with further submissions."""
        return replace(self, submissions=[*self.submissions, *submissions])


def recorded_attempts(attempts: Any, run: RunDir) -> int:
    """What attempts_of has counted of a run or an element; 0 where that makes no sense."""
    key = run.path.name if run.sweep_of_element else ""
    number = attempts.get(key) if isinstance(attempts, dict) else 0
    return number if isinstance(number, int) else 0


def count_attempts(run: RunDir, elements: Iterable[int] = ()) -> dict[str, int]:
    """For Submission.attempts: how many attempts a run, or each of these elements of it, has now."""
    places = {str(number): run.element(number) for number in elements} or {"": run}
    counted = {name: run_dir.attempts() for name, run_dir in places.items()}
    return {name: attempts[-1].number for name, attempts in counted.items() if attempts}


_TEXTS = ("kind", "name", "user", "host", "directory", "hpcrun", "python")
_TEXTS_OR_NONE = ("commit", "cluster", "template")


def _is_sound(record: Provenance) -> bool:
    """Whether its values are of the kinds that they are declared as; submissions are looked at on use."""
    values = vars(record)
    numbers = (record.ranks, record.created, 0 if record.steps is None else record.steps)
    return (
        all(isinstance(values[name], str) for name in _TEXTS)
        and all(values[name] is None or isinstance(values[name], str) for name in _TEXTS_OR_NONE)
        and all(isinstance(value, int | float) for value in numbers)
        and isinstance(record.argv, list)
        and all(isinstance(word, str) for word in record.argv)
        and isinstance(record.inputs, dict)
        and all(isinstance(value, str) for value in record.inputs.values())
    )


def write_provenance(run: RunDir, record: Provenance) -> None:
    """Put the record in its place; a record without an identity leaves the run the one it has."""
    values = asdict(replace(record, identity=None))
    del values["identity"]
    identity = record.identity or read_run_identity(run.path)
    version = {"schema_version": RUN_SCHEMA_VERSION}
    write_json(run.job, version | (asdict(identity) if identity else {}) | values)


def read_provenance(run: RunDir) -> Provenance | None:
    """The record of a run, or None without one; UsageError when it is damaged."""
    found = read_json(run.job)
    # A run that has just been made, or that others' launchers started, has an identity alone.
    if found is None or (isinstance(found, dict) and found.keys() <= {*IDENTITY_KEYS}):
        return None
    names = {declared.name for declared in fields(Provenance)} - {"identity"}
    try:
        values: dict[str, Any] = {key: value for key, value in found.items() if key in names}
        values["submissions"] = [
            SubmissionRecord(**submission) for submission in values.get("submissions", [])
        ]
        values["identity"] = parse_run_identity(found)
        record = Provenance(**values)
    except (TypeError, AttributeError):
        raise UsageError(f"{run.job}: is not a record of this version of hpcrun; start a new run") from None
    except UsageError as error:
        raise UsageError(f"{run.job}: is damaged: {error}") from None
    if not _is_sound(record):
        raise UsageError(f"{run.job}: is damaged: a value is not of the kind that it has to be")
    return record
