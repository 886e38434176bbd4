"""What the verbs of `hpcrun ckpt` share: which save is meant, and how amounts and progress are shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.cli.terminal import escape_control_characters, unescaped_stream
from hpcrun.units import render_bytes

if TYPE_CHECKING:
    from hpcrun.specs.run_lookup import RunUse
    from hpcrun.specs.rundir import RunDir
    from hpcrun.specs.saves import SavedCheckpoint

SCHEMA_VERSION = 1


def checkpoint_directory(run: str) -> Path:
    """Where a run, or a script's directory, has its saves."""
    return find_run_or_directory(run).checkpoints


def find_run_or_directory(word: str, *, use: RunUse = "read") -> RunDir:
    """RUN of these verbs: a run as all verbs know it, or a directory that a script has given to Checkpointer.

    Such a directory is known by its path, or by that of its `checkpoints`. UsageError for anything else.
    """
    from pathlib import Path

    from hpcrun.errors import UsageError
    from hpcrun.specs.branch import make_copy_independent
    from hpcrun.specs.owner import require_own_run
    from hpcrun.specs.run_lookup import find_run
    from hpcrun.specs.rundir import RunDir

    try:
        place = Path(word).expanduser().resolve() if word.strip() else Path("/dev/null")
        if place.name == "checkpoints" and place.is_dir():
            place = place.parent
            word = str(place)
        is_run, is_place = (place / "spec.yaml").exists(), place.exists()
        is_saves = not is_run and (place / "checkpoints").is_dir()
    except OSError as error:
        raise UsageError(f"{word}: cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError):  # no path can be called so; it is for the others to say what is wrong
        return find_run(word, use=use)
    if not is_saves:
        try:
            return find_run(word, use=use)
        except UsageError:
            if is_run or not is_place:
                raise
            what = "holds no saves" if place.is_dir() else "is a file"
            raise UsageError(
                f"{word}: {what}, and no run is called so; give a run, the directory that a script has given"
                " to hpcrun.Checkpointer, or the `checkpoints` in it"
            ) from None
    saves = RunDir(place)
    if use != "read":
        require_own_run(saves, is_named_by_path=True)
    if use == "act" and saves.job.exists():
        make_copy_independent(saves)
    return saves


def choose_saved_step(run: str, step: int | None) -> SavedCheckpoint:
    """A saved step of a run, or the newest: of what it may go on from, if there is any."""
    from hpcrun.errors import UsageError
    from hpcrun.specs.saves import read_saved_checkpoints, sort_checkpoints

    place = checkpoint_directory(run)
    sorted_saves = sort_checkpoints(place, read_saved_checkpoints(place)[0])
    found = [*sorted_saves.strangers, *sorted_saves.left, *sorted_saves.line]
    chosen = [saved for saved in found if step is None or saved.step == step]
    if not chosen:
        known = ", ".join(str(saved.step) for saved in sorted(found, key=lambda one: one.step)) or "none"
        raise UsageError(
            f"{run}: has no saved step {step if step is not None else 'at all'} (saved: {known})"
        )
    return chosen[-1]


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """How far it has come, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _size: None
        return
    done, drawn = 0, 0.0

    def show(size: int) -> None:
        nonlocal done, drawn
        done += size
        if time.monotonic() - drawn > 0.2:
            drawn = time.monotonic()
            unescaped_stream(sys.stderr).write(
                f"\r\x1b[K{escape_control_characters(what)}: {render_bytes(done)} of {render_bytes(total)}"
            )
            sys.stderr.flush()

    try:
        yield show
    finally:
        unescaped_stream(sys.stderr).write("\r\x1b[K")
        sys.stderr.flush()


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, with the version of its schema."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}))


def refuse_while_running(run: RunDir, what: str, *, believe: bool = False) -> None:
    """UsageError for a run that goes on, or of which nobody knows: it writes and deletes saves itself.

    `believe` takes the person's word for it that an unknown run is over.
    """
    from hpcrun.checkpoint.writer_lease import find_live_writer
    from hpcrun.errors import UsageError
    from hpcrun.runs.run_state import read_run_states
    from hpcrun.specs.provenance import read_provenance

    if not run.spec.exists():  # a script's saves
        if (writer := find_live_writer(run.checkpoints)) and not believe:
            raise UsageError(
                f"{run.checkpoints}: {writer} saves there; {what} when it has ended, or with"
                " --is-over if it has"
            )
        return
    if not run.attempts() and read_provenance(run) is None:
        return  # it was never started
    (state,) = read_run_states([run])
    if state.is_over or (believe and state.state == "unknown"):
        return
    if state.state == "unknown":
        why = state.message or "nobody knows whether it still runs"
        raise UsageError(f"{run.id}: is unknown: {why}; if it is over, {what} with --is-over")
    raise UsageError(
        f"{run.id}: is {state.state}, and looks after its saves itself; {what} when it is over"
        f" (`hpcrun wait {run.id}`)"
    )
