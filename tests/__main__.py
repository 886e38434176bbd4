"""All tests, those of the lab beside the others: a lab waits more than it computes (python -m tests).

The others print as they go; what the lab's tests have printed follows as a whole. Further words are pytest's.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType
from typing import IO

LAB = "tests/lab"


def start(words: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """A pytest of its own; a signal to our group, such as a terminal's, reaches it too."""
    return subprocess.Popen([sys.executable, "-m", "pytest", *words], stdout=output, stderr=output)


def main(words: Sequence[str]) -> int:
    """Run both halves to their ends; the exit code of the first that has not passed."""
    with tempfile.TemporaryFile() as log:
        halves = [
            start(["--ignore", LAB, *words]),
            start([LAB, "-p", "no:cacheprovider", *words], log),
        ]

        def pass_on(number: int, frame: FrameType | None) -> None:
            # pytest ends in order at an interrupt alone: the lab would stay.
            for half in halves:
                if half.poll() is None:
                    half.send_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, pass_on)
        codes: list[int] = []
        for half in halves:
            while len(codes) <= halves.index(half):
                with contextlib.suppress(KeyboardInterrupt):  # both have got it as well, and end
                    codes.append(half.wait())
        log.seek(0)
        print(f"\n== the tests of the lab, run beside those above: exit code {codes[1]}", flush=True)
        show(log)
    return next((code for code in codes if code), 0)


def show(log: IO[bytes]) -> None:
    """Print it as it is, whatever bytes a test has printed."""
    while piece := log.read(1 << 20):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
