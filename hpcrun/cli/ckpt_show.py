"""What the verbs of `hpcrun ckpt` share: which save is meant, and how amounts and progress are shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.cli.terminal import plain, raw
from hpcrun.units import amount

if TYPE_CHECKING:
    from hpcrun.specs.rundir import RunDir
    from hpcrun.specs.saves import Saved

SCHEMA_VERSION = 1


def checkpoints(run: str) -> Path:
    """Where a run has its saves."""
    from hpcrun.specs.rundir import find_run

    return find_run(run).checkpoints


def choose(run: str, step: int | None) -> Saved:
    """A saved step of a run, or the newest."""
    from hpcrun.errors import UsageError
    from hpcrun.specs.saves import saved_steps

    found = saved_steps(checkpoints(run))
    chosen = [saved for saved in found if step is None or saved.step == step]
    if not chosen:
        known = ", ".join(str(saved.step) for saved in found) or "none"
        raise UsageError(
            f"{run}: has no saved step {step if step is not None else 'at all'} (saved: {known})"
        )
    return chosen[-1]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
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
            raw(sys.stderr).write(f"\r\x1b[K{plain(what)}: {amount(done)} of {amount(total)}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        raw(sys.stderr).write("\r\x1b[K")
        sys.stderr.flush()


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, with the version of its schema."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}))


def refuse_while_running(run: RunDir, what: str, *, believe: bool = False) -> None:
    """UsageError for a run that goes on, or of which nobody knows: it writes and deletes saves itself.

    `believe` takes the person's word for it that an unknown run is over.
    """
    from hpcrun.errors import UsageError
    from hpcrun.launch.record.runs import look_at_all
    from hpcrun.specs.provenance import read_provenance

    if not run.attempts() and read_provenance(run) is None:
        return  # it was never started
    (state,) = look_at_all([run])
    if state.is_over or (believe and state.state == "unknown"):
        return
    if state.state == "unknown":
        why = state.message or "nobody knows whether it still runs"
        raise UsageError(f"{run.id}: is unknown: {why}; if it is over, {what} with --is-over")
    raise UsageError(
        f"{run.id}: is {state.state}, and looks after its saves itself; {what} when it is over"
        f" (`hpcrun wait {run.id}`)"
    )
