"""A world of real ranks, started once for all tests of a file: it runs every scenario and tells of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def told_by(program: str, folder: Path, ranks: int, *words: str, timeout_s: float = 250) -> Any:
    """What a program beside this file prints at the end, run by so many ranks under mpiexec."""
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-launcher", "fork", "-n", str(ranks)]
    done = subprocess.run(
        [*mpiexec, sys.executable, str(Path(__file__).with_name(program)), str(folder), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
