"""Branches: a copy of a run directory becomes a run of its own, which shares nothing with the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.errors import EXIT_INTERRUPTED, UsageError, warn_once
from hpcrun.files import open_regular, temporary_name
from hpcrun.specs.identity import IDENTITY_KEYS, RunIdentity, locate_directory, read_run_identity
from hpcrun.specs.records import read_json, write_json

if TYPE_CHECKING:
    from hpcrun.specs.rundir import RunDir


def require_run_identity(run: RunDir) -> RunIdentity:
    """The identity of a run, or of the sweep that it is an element of; UsageError where it has none."""
    owner = run.sweep_of_element or run
    identity = read_run_identity(owner.path)
    if identity is None:
        raise UsageError(
            f"{owner.path}: has no run_id in job.json (it is of an older hpcrun, or a part of a run), so it"
            " can only be read; for a new run with its state: hpcrun ckpt export --format hpcrun, and import"
        )
    return identity


def make_copy_independent(run: RunDir, run_id: str | None = None) -> None:
    """Give a copy of a run an identity of its own, with one line; note where a moved run is now.

    The copy goes on from the saves that were copied. What it says of processes and jobs is said of those of
    the other run, and goes. UsageError where both would write the same saves. `run_id`: chosen before.
    """
    owner, identity = run.sweep_of_element or run, require_run_identity(run)
    if identity.is_at(owner.path):
        here = locate_directory(owner.path)
        if here.path != identity.made_at.path:
            owner.identify(replace(identity, made_at=here), **_read_job_record(owner))
        return
    parts = [owner, *_element_runs(owner)]
    for part in parts:
        if part.checkpoints.is_symlink():
            raise UsageError(
                f"{part.checkpoints}: is a link, so this copy and {identity.made_at.path} would share their"
                " saves; copy the run with cp -rL"
            )
    text = f"a copy of {identity.made_at.path}, made while that run went on"
    for part in parts:
        _remove_process_files(part)
        for path in (part.events, part.metrics, part.chaos):
            _break_hard_link(path)
    for part in parts[1:] or parts:
        if part.spec.exists():  # a script's saves are no run that ends
            _record_end(part, text)
    record = _read_job_record(owner)
    if "submissions" in record:
        record["submissions"] = []
    # Last: until it is written this is a copy, and whoever acts on it next begins again.
    owner.identify(identity.branched(owner.path, run_id), **record)
    warn_once(
        f"{owner.path}: is a copy of {identity.made_at.path}; from here on it is a run of its own, with"
        f" run_id {owner.run_id}"
    )


def _read_job_record(owner: RunDir) -> dict[str, object]:
    """What job.json says besides the identity."""
    record = read_json(owner.job)
    return {name: value for name, value in record.items() if name not in IDENTITY_KEYS}


def _element_runs(owner: RunDir) -> Iterator[RunDir]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(owner.elements)):  # noqa: PTH208 - names alone
            if name.isdecimal() and name.isascii():
                yield owner.element(int(name))


def _remove_process_files(part: RunDir) -> None:
    """Remove what leads to the processes, sockets and secrets of the other run."""
    paths = [part.leader, part.lease, part.lock, part.wish, part.submission_lock]
    paths += part.telemetry.glob("*.json")
    for attempt in part.attempts():
        paths += [attempt.supervisor, attempt.peers, attempt.restore]
        paths += attempt.rank_record(0).parent.glob("*")
    for path in paths:
        path.unlink(missing_ok=True)
    if part.epochs.is_dir():
        shutil.rmtree(part.epochs)


def _break_hard_link(path: Path) -> None:
    """A file that grows must be the copy's own: cp -l has made another name of the same one."""
    try:
        if path.lstat().st_nlink == 1:
            return
        source = open_regular(path)
    except FileNotFoundError:
        return
    aside = path.with_name(temporary_name(path.name))
    target = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(source, "rb") as old, os.fdopen(target, "wb") as new:
        shutil.copyfileobj(old, new)
    aside.replace(path)


def _record_end(part: RunDir, text: str) -> None:
    """Nothing of the copy runs, whatever became of the other run after it was copied."""
    ended, attempts = part.read_exit(), part.attempts()
    number = attempts[-1].number if attempts else None
    if ended is None or ended.get("attempt") not in (None, number):
        end = {"status": "interrupted", "exit_code": EXIT_INTERRUPTED, "message": text}
        write_json(part.exit, end | {"attempt": number, "step": None, "ended": time.time()})
