"""What must not end a run: a run directory that is full for a moment, and a log that takes no more lines."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

RETRY_WHILE_FULL_S = 30.0
"""Quotas are raised and file servers come back; ranks that cannot save have ended long before."""
_RETRY_INTERVAL_S = 0.5
_TRANSIENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)

T = TypeVar("T")


def retry_while_full(do: Callable[[], T]) -> T:
    """Do what writes to the run directory, again and again while it is full or not to be written for now."""
    deadline = time.monotonic() + RETRY_WHILE_FULL_S
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in _TRANSIENT_ERRNOS or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_INTERVAL_S)


def log_line(text: str) -> None:
    """A line of talk on standard error, which may be a file that takes no more.

    Unbuffered: what Python keeps back for such a file fails again at the exit, and is the exit code then.
    """
    with suppress(OSError):
        os.write(2, f"hpcrun: {text}\n".encode())
