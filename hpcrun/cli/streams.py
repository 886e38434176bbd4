"""Standard output and error of the command: what they do not take must not change what the command says.

A verb that acts, or whose exit code is its answer, goes on when nobody reads what it prints, and its exit
code is that of what it has done. Output that is lost is told on standard error.
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
    """A descriptor that takes everything, and remembers what has become of it."""

    failure: OSError | None = None
    ends_with_reader = False
    """Whether a reader that goes away is an error, so that what follows a run does not do so for ever."""

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
    """The two streams, in place of Python's own from now on; what stands in their place already is left."""

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
        """The command is over as soon as nobody reads its output: BrokenPipeError."""
        if self._output is not None:
            self._output.ends_with_reader = True

    def lost(self) -> str | None:
        """Why output was lost, but for a reader that has seen enough; None where all of it was taken."""
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
    # No letter of a name is a reason to fail.
    errors = "backslashreplace" if errors == "strict" else errors
    is_by_line = number == 2 or raw.isatty()
    return raw, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_by_line)
