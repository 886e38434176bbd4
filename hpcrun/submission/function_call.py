"""A Python function as a run's program: the call as a private file, the rank that makes it, its result."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hpcrun.errors import EXIT_DONE, EXIT_SAVED, FunctionError, UsageError
from hpcrun.files import OwnedDirectory, open_regular, require_private
from hpcrun.specs.io_retry import log_line
from hpcrun.specs.rank_error import exit_code_of, report_error
from hpcrun.specs.run_variables import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from hpcrun.specs.rundir import Attempt, RunDir

_REQUEST_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_INSTALL_FOLDERS = {"site-packages", "dist-packages"}
_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError)


@dataclass(frozen=True)
class FunctionCall:
    """A function, its arguments, and where Python finds the modules that they need."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    paths: Sequence[str]
    """Put at the front of sys.path, so that modules next to the submitting script are found."""

    @property
    def can_save(self) -> bool:
        """Whether the function has a `checkpoint` method, which returns the call to continue with."""
        return callable(getattr(self.function, "checkpoint", None))

    def write(self, path: Path) -> None:
        """Write the call to a file that only the user can read; UsageError for what cannot be pickled."""
        try:
            body = _pickle_by_value((self.function, tuple(self.args), dict(self.kwargs)))
        except _PICKLE_ERRORS as error:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise UsageError(
                f"{name}: function and arguments must be picklable, to be sent to the job: {error}; leave"
                " out what lives in this process only, such as locks, open files and connections"
            ) from None
        # In two layers: where modules are found has to be known before anything of the user's is loaded.
        _write_private(path, pickle.dumps((list(self.paths), body)))

    def saved(self) -> FunctionCall:
        """Return the call to continue with, from the function's `checkpoint`."""
        after = self.function.checkpoint(*self.args, **self.kwargs)  # type: ignore[attr-defined]
        try:
            return FunctionCall(after.function, after.args, after.kwargs, self.paths)
        except AttributeError:
            raise UsageError(
                f"checkpoint: gave a {type(after).__name__}; return"
                " submitit.helpers.DelayedSubmission(function, *args)"
            ) from None


def load_call(path: Path) -> FunctionCall:
    """Load a call, and have Python find its modules; UsageError where others could have written it."""
    paths, body = pickle.loads(_read_private(path))
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    function, args, kwargs = pickle.loads(body)
    return FunctionCall(function, args, kwargs, paths)


def find_import_paths() -> list[str]:
    """Return where this process finds modules that its interpreter alone does not.

    Packages installed for this interpreter are left out: the job's may be another one.
    """
    own = tuple(f"{place}{os.sep}lib" for place in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    places = []
    for place in [*sys.path[:1], *filter(None, sys.path[1:])]:
        with suppress(FileNotFoundError):  # a relative path whose working directory is gone
            places.append(os.path.abspath(place))  # noqa: PTH100 - an empty one is the working directory
    return list(
        dict.fromkeys(
            path
            for path in places
            if not path.startswith(own) and not _INSTALL_FOLDERS.intersection(Path(path).parts)
        )
    )


def load_call_result(attempt: Attempt, rank: int) -> Any:
    """Return the function's result on a rank; FunctionError if it raised, OSError if there is none."""
    value, error = pickle.loads(_read_private(attempt.call_result(rank)))
    if error is not None:
        run = attempt.run.id
        raise FunctionError(f"{run}: the function raised on rank {rank}:\n{error.rstrip()}")
    return value


class _SignalRequests:
    """Signals that ask the function to save or to stop, answered between two lines of it."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.call: FunctionCall | None = None
        self._run, self._rank, self._owner = run, rank, os.getpid()
        for number in _REQUEST_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # in a process that the function has forked
            if number != signal.SIGUSR1:
                os._exit(128 + number)
            return
        can_save = self.call is not None and self.call.can_save
        if number != signal.SIGUSR1:
            # The first request is the one that is answered.
            self.ignore()
        if can_save:
            self._save()
        elif number == signal.SIGUSR1:
            log_line("asked to save, but this function has no checkpoint method")
        if number != signal.SIGUSR1:
            # Not os._exit: what the function holds open is closed on the way out.
            raise SystemExit(EXIT_SAVED if can_save else 128 + number)

    def _save(self) -> None:
        assert self.call is not None
        # As in submitit: rank 0's is the call of all.
        if self._rank == 0:
            self.call.saved().write(self._run.saved_call)

    def ignore(self) -> None:
        """Ignore further requests."""
        for number in _REQUEST_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def main() -> int:
    """The internal verb `_call`: a rank of a run of a function."""
    try:
        run, number = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
        rank = int(os.environ["RANK"])
    except (KeyError, ValueError):
        raise UsageError("_call: is started by hpcrun, as a rank of a function's run; not by hand") from None
    attempt = run.attempt(number)
    requests = _SignalRequests(run, rank)
    try:
        call = load_call(run.saved_call if run.saved_call.exists() else run.call)
        requests.call = call
        value = _call_function(call)
        requests.ignore()
        _write_private(attempt.call_result(rank), _pickle_by_value((value, None)))
        return EXIT_DONE
    except SystemExit as leave:
        return _system_exit_code(leave)
    except BaseException as error:  # noqa: BLE001 - the outermost frame of the user's function
        requests.ignore()
        return _record_exception(attempt, rank, error)


def _call_function(call: FunctionCall) -> Any:
    try:
        return call.function(*call.args, **call.kwargs)
    except SystemExit as leave:
        # A program's way to say that all is well.
        if leave.code in (None, EXIT_DONE):
            return None
        raise


def _system_exit_code(leave: SystemExit) -> int:
    if isinstance(leave.code, int):
        return leave.code
    log_line(str(leave.code))
    return 1


def _record_exception(attempt: Attempt, rank: int, error: BaseException) -> int:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # our own lines are of no interest
    text = "".join(traceback.format_exception(type(error), error, trace))
    with suppress(OSError):
        sys.stderr.write(text)
    code = exit_code_of(error)
    try:
        _write_private(attempt.call_result(rank), pickle.dumps((None, text)))
    finally:
        report_error(attempt, rank, error)
    return code


def _pickle_by_value(value: object) -> bytes:
    body: bytes = importlib.import_module("cloudpickle").dumps(value)
    return body


def _write_private(path: Path, data: bytes) -> None:
    with OwnedDirectory.below(path.parent) as folder:
        folder.write_whole(path.name, data)


def _read_private(path: Path) -> bytes:
    """Read a private file: loading a pickle runs code of its writer."""
    with os.fdopen(open_regular(path), "rb") as file:
        for place, status in ((path.parent, path.parent.lstat()), (path, os.fstat(file.fileno()))):
            require_private(place, status)
        return file.read()
