"""Which checkpoints a word on the command line means, and whether they may be changed now."""

from __future__ import annotations

from pathlib import Path

from hpcrun.checkpoint.writer_lease import find_live_writer
from hpcrun.errors import UsageError
from hpcrun.runs.run_state import read_run_states
from hpcrun.specs.branch import make_copy_independent
from hpcrun.specs.owner import require_own_run
from hpcrun.specs.provenance import read_provenance
from hpcrun.specs.run_lookup import RunUse, find_run
from hpcrun.specs.rundir import RunDir
from hpcrun.specs.saves import SavedCheckpoint, read_saved_checkpoints, sort_checkpoints


def find_run_or_directory(word: str, *, use: RunUse = "read") -> RunDir:
    """A run as all verbs know it, or a directory that a script has given to Checkpointer.

    Such a directory is known by its path, or by that of its `checkpoints`. UsageError for anything else.
    """
    try:
        place = Path(word).expanduser().resolve() if word.strip() else Path("/dev/null")
        if place.name == "checkpoints" and place.is_dir():
            place = place.parent
            word = str(place)
        is_run, exists = (place / "spec.yaml").exists(), place.exists()
        holds_checkpoints = not is_run and (place / "checkpoints").is_dir()
    except OSError as error:
        raise UsageError(f"{word}: cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError):  # no path can have this name; find_run says what is wrong
        return find_run(word, use=use)
    if not holds_checkpoints:
        try:
            return find_run(word, use=use)
        except UsageError:
            if is_run or not exists:
                raise
            problem = "holds no saves" if place.is_dir() else "is a file"
            raise UsageError(
                f"{word}: {problem}, and no run has this name; give a run, the directory that a script has"
                " given to hpcrun.Checkpointer, or the `checkpoints` in it"
            ) from None
    directory = RunDir(place)
    if use != "read":
        require_own_run(directory, is_named_by_path=True)
    if use == "act" and directory.job.exists():
        make_copy_independent(directory)
    return directory


def choose_checkpoint(run: RunDir, step: int | None) -> SavedCheckpoint:
    """A checkpoint of a run, default the newest that it may resume from, if there is one."""
    checkpoints = sort_checkpoints(run.checkpoints, read_saved_checkpoints(run.checkpoints)[0])
    every = [*checkpoints.strangers, *checkpoints.left, *checkpoints.line]
    chosen = [saved for saved in every if step is None or saved.step == step]
    if not chosen:
        steps = ", ".join(str(step) for step in sorted(saved.step for saved in every)) or "none"
        raise UsageError(
            f"{run.id}: has no saved step {step if step is not None else 'at all'} (saved: {steps})"
        )
    return chosen[-1]


def is_writing_checkpoints(run: RunDir) -> bool:
    """Whether the run, or a script in its directory, may be writing checkpoints now."""
    if run.spec.exists():
        return not read_run_states([run])[0].is_over
    return find_live_writer(run.checkpoints) is not None


def require_finished(run: RunDir, action: str, *, assume_over: bool = False) -> None:
    """UsageError for a run that is active, or of unknown state: it writes and deletes checkpoints itself.

    `assume_over` takes a run of unknown state as finished.
    """
    if not run.spec.exists():  # a script's directory
        if (writer := find_live_writer(run.checkpoints)) and not assume_over:
            raise UsageError(
                f"{run.checkpoints}: {writer} saves there; {action} when it has ended, or with"
                " --is-over if it has"
            )
        return
    if not run.attempts() and read_provenance(run) is None:
        return  # it was never started
    (state,) = read_run_states([run])
    if state.is_over or (assume_over and state.state == "unknown"):
        return
    if state.state == "unknown":
        why = state.message or "its state cannot be determined"
        raise UsageError(f"{run.id}: is unknown: {why}; if it is over, {action} with --is-over")
    raise UsageError(
        f"{run.id}: is {state.state}, and manages its checkpoints itself; {action} when it is over"
        f" (`hpcrun wait {run.id}`)"
    )
