"""Where run directories lie, how one is made, and how it is found again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from hpcrun.errors import UsageError
from hpcrun.files import make_directories
from hpcrun.local_identity import absolute_path
from hpcrun.specs.branch import make_copy_independent, require_run_identity
from hpcrun.specs.identity import (
    RunIdentity,
    check_run_schema,
    parse_run_identity,
)
from hpcrun.specs.owner import is_private_directory, require_own_run, warn_if_root_is_writable
from hpcrun.specs.profiles import profile_roots
from hpcrun.specs.records import read_json
from hpcrun.specs.rundir import NUMBER, RunDir

RunUse = Literal["read", "plan", "act"]
"""What a verb does with a run: reads it, says what it would do, or changes it, its jobs or its processes."""


_JOB = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,9})|\+[0-9]{1,6})?")
"""A job, an element of an array, or a component of a heterogeneous job."""


_STAMP = re.compile(r"-[0-9]{4}-[0-9]{6}-[0-9a-f]{6}")
"""What create_run puts behind a run's name."""


def runs_roots() -> list[Path]:
    """Where run directories live: HPCRUN_ROOT alone, where it is set; else the roots of all profiles.

    First the default profile's, which is ./runs where it names none.
    """
    if root := os.environ.get("HPCRUN_ROOT"):
        return [absolute_path(root)]
    first, *others = profile_roots()
    return list(dict.fromkeys([first or absolute_path("runs"), *filter(None, others)]))


def runs_root() -> Path:
    """Where a new run's directory is made: the first of runs_roots."""
    return runs_roots()[0]


def create_run(name: str, root: Path | None = None) -> RunDir:
    """Make a new run directory with an id of its own; UsageError when the place cannot be written."""
    root = root or runs_root()
    stamp = time.strftime("%m%d-%H%M%S")
    path = root / f"{name}-{stamp}-{os.urandom(3).hex()}"
    is_whole = False
    try:
        make_directories(root, 0o755)
        warn_if_root_is_writable(root)
        path.mkdir(mode=0o700)
        run = RunDir(path)
        run.checkpoints.mkdir(mode=0o700)
        run.identify(RunIdentity.new(path))
        is_whole = True
    except OSError as error:
        raise UsageError(
            f"{root}: cannot make a run directory here: {error.strerror}; set HPCRUN_ROOT to a directory"
            " that you may write"
        ) from None
    finally:
        if not is_whole:
            shutil.rmtree(path, ignore_errors=True)
    return run


@contextlib.contextmanager
def new_run(name: str, root: Path | None = None) -> Iterator[RunDir]:
    """A new run directory for a body that fills it: where that fails, or is interrupted, it is gone again."""
    run = create_run(name, root)
    is_whole = False
    try:
        yield run
        is_whole = True
    finally:
        if not is_whole:
            shutil.rmtree(run.path, ignore_errors=True)


def all_runs(root: Path | None = None) -> Iterator[RunDir]:
    """The user's own run directories under the root (default: under all roots), oldest first.

    What other people keep under a shared root is none of ours, and a link is no run.
    """
    roots = []
    for place in [root] if root else runs_roots():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            warn_if_root_is_writable(place)
            with os.scandir(place) as entries:
                roots += [(time, place / name) for time, name in filter(None, map(_own_run, entries))]
    for _, path in sorted(roots):
        yield RunDir(path)


def _own_run(entry: os.DirEntry[str]) -> tuple[float, str] | None:
    """When a run of the user's own was made, and its name; None for anything else."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        return os.lstat(f"{entry.path}/spec.yaml").st_mtime, entry.name
    except PermissionError:  # of our own: whoever looks at it says what is wrong
        return status.st_mtime, entry.name
    except OSError:
        return None


def find_runs(words: Iterable[str], *, use: RunUse = "read") -> list[RunDir]:
    """The same as find_run for several words, with one look at the root."""
    among = list(all_runs())
    return [find_run(word, among=among, use=use) for word in words]


def find_run(
    word: str, root: Path | None = None, *, among: Sequence[RunDir] | None = None, use: RunUse = "read"
) -> RunDir:
    """RUN on the command line: a run directory, a run's id, its name or its beginning, or a Slurm job's id.

    RUN/NUMBER and JOBNUMBER are elements of a sweep. Only a path leads to a run that is not the user's own,
    and only to read it. A copy of a run gets an identity of its own with `use="act"`. UsageError where this
    is no run, or several, or none that may be used so, or a run of another version. `among`: all runs under
    the root, where they are known already.
    """
    if not word.strip():
        raise UsageError("empty run name; see `hpcrun list`")
    run, is_named_by_path = _look_up(word, root, among)
    check_run_schema((run.sweep_of_element or run).path)
    if use != "read":
        require_own_run(run, is_named_by_path=is_named_by_path)
        require_run_identity(run)
    if use == "act":
        make_copy_independent(run)
    return run


def _look_up(word: str, root: Path | None, among: Sequence[RunDir] | None) -> tuple[RunDir, bool]:
    """The run, and whether the word is a path, so that it may be anybody's."""
    name, slash, number = word.rpartition("/")
    if not slash:
        return _find_by_name(word, root, among), False
    if NUMBER.fullmatch(number) and name.strip("./"):
        try:
            sweep, is_path = _look_up(name, root, among)
            return _find_element(sweep, int(number)), is_path
        except UsageError:
            if not _is_run(word):
                raise
    if not _is_run(word):
        raise _no_such_run_error(word, root, all_runs(root) if among is None else among)
    return RunDir(Path(word).resolve()), True


def _is_run(word: str) -> bool:
    """Whether a path is a run directory."""
    try:
        os.lstat(f"{word}/spec.yaml")
    except PermissionError as error:
        raise UsageError(f"{word}: cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # also a name that is too long, or no name at all
        return False
    return True


def _find_by_name(word: str, root: Path | None, among: Sequence[RunDir] | None) -> RunDir:
    runs = list(all_runs(root)) if among is None else among
    # Others may have changed what others can write: it is what was meant only where nothing else is.
    mine = [run for run in runs if is_private_directory(run.path)]
    for candidates in (mine, runs):
        if named := _find_named(word, candidates):
            return named
    raise _no_such_run_error(word, root, runs)


def _find_named(word: str, runs: Sequence[RunDir]) -> RunDir | None:
    exact = [run for run in runs if run.id == word]
    if exact:
        return exact[0]
    if (job := _JOB.fullmatch(word)) and (run_of_job := _find_run_of_job(runs, int(job[1]), job[2])):
        return run_of_job
    if is_private_directory(Path(word)) and _is_run(word):
        return RunDir(Path(word).resolve())
    # A name that is whole comes before longer ones that begin like it.
    named = [run for run in runs if _STAMP.fullmatch(run.id.removeprefix(word)) and run.id.startswith(word)]
    matches = named or [run for run in runs if run.id.startswith(word)]
    if len(matches) > 1:
        raise UsageError(
            f"{word}: names {len(matches)} runs: {', '.join(run.id for run in matches[-5:])}; say which"
        )
    return matches[0] if matches else None


def _no_such_run_error(word: str, root: Path | None, runs: Iterable[RunDir]) -> UsageError:
    where = root or ", ".join(map(str, runs_roots()))
    recent = ", ".join(run.id for run in list(runs)[-3:]) or "none"
    path = f"; to read the directory of that name write ./{word}" if "/" not in word and _is_run(word) else ""
    return UsageError(f"{word}: no such run under {where} (newest: {recent}); see `hpcrun list`{path}")


def _find_element(sweep: RunDir, number: int) -> RunDir:
    element = sweep.element(number)
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(element.path.lstat().st_mode):
            return element
    if not sweep.sweep.is_file():
        raise UsageError(f"{sweep.id}/{number}: {sweep.id} is not a sweep, so it has no elements")
    listed = read_json(sweep.sweep)
    count = len(listed) if isinstance(listed, list) else 0
    if number < count:
        raise UsageError(f"{element.path}: this element's directory is gone; start the sweep again")
    raise UsageError(f"{sweep.id}/{number}: there is no such element; there are 0 to {count - 1}")


def _find_run_of_job(runs: Sequence[RunDir], job: int, index: str | None) -> RunDir | None:
    """The newest run that was submitted as this job, or the element that runs under this index of it."""
    for run in reversed(runs):
        offset = _offset_of_job(run, job)
        if offset is not None:
            return run if index is None else _find_element(run, int(index) + offset)
    return None


def _offset_of_job(run: RunDir, job: int) -> int | None:
    """Element of the sweep less index of the array, where the run was submitted as this job; else None."""
    # A damaged record is a matter of the run that it belongs to.
    with contextlib.suppress(UsageError, OSError, AttributeError, TypeError, ValueError):
        record = read_json(run.job) or {}
        for submission in reversed(record.get("submissions", [])):
            if submission.get("job") == job:
                identity = parse_run_identity(record)
                # A copy tells of the jobs of the run that it was copied from.
                return (
                    int(submission.get("offset", 0)) if identity is None or identity.is_at(run.path) else None
                )
    return None
