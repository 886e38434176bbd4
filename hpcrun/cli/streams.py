"""Standard output and error of the command: lost output does not change what the command does.

A verb that acts, or whose exit code is its answer, continues if its output is not read, and its exit code is
that of what it did. Lost output is reported on standard error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO

from hpcrun.local_identity import open_missing_descriptors

_PERMANENT_ERRORS = (errno.EPIPE, errno.EBADF)


class _LenientFile(io.FileIO):
    """A descriptor whose writes never fail; it remembers the last error."""

    failure: OSError | None = None
    ends_with_reader = False
    """Whether a closed pipe is an error, so that a command that follows a run ends."""

    def write(self, data: object) -> int:
        """Write, or drop what cannot be written."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        # A full disk may have room again.
        if self.failure is None or self.failure.errno not in _PERMANENT_ERRORS:
            try:
                return super().write(view) or 0
            except OSError as error:
                self.failure = error
        if self.ends_with_reader and self.failure.errno == errno.EPIPE:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return len(view)


class OutputStreams:
    """Replaces Python's standard streams, unless they were replaced already."""

    def __init__(self) -> None:
        open_missing_descriptors()
        self._output = self._error = None
        if sys.stdin is None:
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        if sys.stdout is sys.__stdout__:
            self._output, sys.stdout = _open_stream(1, sys.stdout)
        if sys.stderr is sys.__stderr__:
            self._error, sys.stderr = _open_stream(2, sys.stderr)

    def end_with_reader(self) -> None:
        """End the command with BrokenPipeError as soon as its output pipe is closed."""
        if self._output is not None:
            self._output.ends_with_reader = True

    def lost(self) -> str | None:
        """Why output was lost; None if none was, or if the reader closed the pipe."""
        if self._output is not None:
            self._output.ends_with_reader = False
        sys.stdout.flush()
        failure = self._output.failure if self._output is not None else None
        if failure is None or failure.errno in _PERMANENT_ERRORS:
            return None
        return f"standard output: {failure.strerror}"


def _open_stream(number: int, stream: TextIO | None) -> tuple[_LenientFile, TextIO]:
    raw = _LenientFile(number, "wb", closefd=False)
    encoding, errors = "utf-8", "strict"
    if stream is not None:
        stream.flush()
        encoding, errors = stream.encoding, stream.errors or errors
    # Characters that cannot be encoded are no reason to fail.
    errors = "backslashreplace" if errors == "strict" else errors
    is_by_line = number == 2 or raw.isatty()
    return raw, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_by_line)
