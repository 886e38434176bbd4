"""Hydra, the process manager of the MPICH wheel: how it is found, and what it prints."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

from hpcrun.errors import SiteError

_REMEDY = "pip install 'hpcrun-slurm[train]'"


def find_mpiexec() -> Path:
    """The mpiexec that came with this Python environment's MPI library; SiteError when there is none."""
    folders = [
        Path(sys.executable).parent,
        Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))),
    ]
    for folder in folders:
        if (folder / "mpiexec.hydra").is_file() and os.access(folder / "mpiexec", os.X_OK):
            return folder / "mpiexec"
    first = folders[0] / "mpiexec"
    problem = "is not MPICH's" if first.exists() else "does not exist"
    raise SiteError(f"{first} {problem}, and it starts the ranks; {_REMEDY}")


def read_wait_statuses(log: Path) -> list[int]:
    """The wait status of every rank, in rank order, as Hydra printed them at its end; empty if it did not."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return []
    codes = re.findall(r"^\[mpiexec@[^\]]*\] Exit codes: \[[^\]]*\] ([\d,]+)$", text, re.MULTILINE)
    return [int(status) for status in codes[-1].split(",")] if codes else []
