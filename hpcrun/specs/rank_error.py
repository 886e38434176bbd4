"""Why a rank gave up: its record in the attempt's directory, and the exit code of an error."""

from __future__ import annotations

import os
import time

from hpcrun.errors import EXIT_INTERRUPTED, EXIT_RANKS_DIED, HpcrunError
from hpcrun.specs.records import write_json
from hpcrun.specs.rundir import Attempt


def report_error(attempt: Attempt, rank: int, error: BaseException) -> None:
    """Write down why this rank gives up; the supervisor makes its message of it."""
    import traceback

    write_json(
        attempt.error_record(rank),
        {
            "rank": rank,
            "node": os.uname().nodename,
            "kind": type(error).__name__,
            "expected": isinstance(error, HpcrunError),
            "message": str(error),
            "exit_code": exit_code_of(error),
            "traceback": "".join(traceback.format_exception(error)),
            "time": time.time(),
        },
    )


def exit_code_of(error: BaseException) -> int:
    """The exit code that belongs to an error."""
    if isinstance(error, HpcrunError):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_RANKS_DIED
