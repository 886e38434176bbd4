"""after.json: the runs that must have ended well before a run starts; absent where it waits for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcrun.errors import UsageError
from hpcrun.specs.provenance import recorded_attempts
from hpcrun.specs.records import read_json, write_json
from hpcrun.specs.rundir import RunDir


@dataclass(frozen=True)
class Predecessors:
    """The runs themselves, and how far the waiting run had come when it was submitted behind them."""

    runs: tuple[RunDir, ...]
    attempts: dict[str, int] = field(default_factory=dict)
    """As in Submission.attempts."""

    def has_begun(self, run: RunDir) -> bool:
        """Whether the waiting run, or this element of it, has had an attempt since."""
        attempts = run.attempts()
        return bool(attempts) and attempts[-1].number > recorded_attempts(self.attempts, run)


def write_predecessors(run: RunDir, runs: Sequence[RunDir], attempts: dict[str, int]) -> None:
    """Put the record in its place, or take an older one away where there is nothing to wait for."""
    if runs:
        predecessors = Predecessors((), attempts)
        write_json(
            run.after, asdict(predecessors) | {"runs": [str(run_dir.path.absolute()) for run_dir in runs]}
        )
    else:
        run.after.unlink(missing_ok=True)


def read_predecessors(run: RunDir) -> Predecessors:
    """What a run waits for; UsageError where the record is damaged."""
    record = read_json(run.after)
    if record is None:
        return Predecessors(())
    try:
        return Predecessors(tuple(RunDir(Path(path)) for path in record["runs"]), dict(record["attempts"]))
    except (TypeError, KeyError, ValueError):
        raise UsageError(f"{run.after}: is damaged; submit the run again with --after") from None
