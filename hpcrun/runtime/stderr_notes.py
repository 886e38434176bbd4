"""Notes on stderr of a script or a rank."""

from __future__ import annotations

import sys


def write_stderr_line(text: str) -> None:
    """Write one line and flush."""
    sys.stderr.write(f"hpcrun: {text}\n")
    sys.stderr.flush()
