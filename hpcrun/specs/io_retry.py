"""What must not end a run: a run directory that is full for a moment, and a log that takes no more lines."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

PATIENCE_S = 30.0
"""Quotas are raised and file servers come back; ranks that cannot save have ended long before."""
_EVERY_S = 0.5
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)

T = TypeVar("T")


def patiently(do: Callable[[], T]) -> T:
    """Do what writes to the run directory, again and again while it is full or not to be written for now."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() > deadline:
                raise
        time.sleep(_EVERY_S)


def say(text: str) -> None:
    """A line of talk on standard error, which may be a file that takes no more.

    Unbuffered: what Python keeps back for such a file fails again at the exit, and is the exit code then.
    """
    with suppress(OSError):
        os.write(2, f"hpcrun: {text}\n".encode())
