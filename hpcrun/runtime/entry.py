"""The first thing of a rank that is ours: MPI before torch, and only then what trains."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

from hpcrun.launch.rank_shim import RankRequests, exit_at_stop
from hpcrun.specs.rundir import RunDir


def load_mpi() -> None:
    """Start MPI, where it is installed, before torch is loaded.

    MPICH sends its addresses in blocks that it does not clear. Slurm's pmi2 takes 1,024 bytes a request, and
    zeros count next to nothing there; but in a heap that torch's import has filled with text the blocks get
    longer than that, and the ranks do not meet: one start in fifteen of four ranks was seen to fail.
    """
    # What is missing is told where MPI is needed.
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module("mpi4py.MPI")


def main(run_dir: str, number: int, requests: RankRequests) -> int:
    """Be a rank of an attempt that our supervisor started; gives the exit code."""
    exit_at_stop(RunDir(Path(run_dir)).attempt(number), requests)
    load_mpi()
    return int(importlib.import_module("hpcrun.runtime.rank").main(run_dir, number, requests))
